"""Adapters that callers register: named, numbered, fetched once, and kept for as long as a job uses them."""
