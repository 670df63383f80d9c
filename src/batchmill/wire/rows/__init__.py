"""Rows of inputs and results: their forms, and their lines as JSON."""
