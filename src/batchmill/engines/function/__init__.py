"""Engines that run Python functions."""
