"""Engines for HTTP services: one call a row."""
