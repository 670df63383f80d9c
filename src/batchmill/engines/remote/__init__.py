"""Engines for services that answer over HTTP: one call a row."""
