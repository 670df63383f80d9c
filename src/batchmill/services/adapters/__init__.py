"""Adapters that callers register: named, versioned, fetched once, and kept while a job uses them."""
