"""Parses connectors, and renders their calls and replies. Pure: without connections and without secrets of its own."""
