"""The engine that hands whole shards to a provider's own batch API, and finds them there again after a crash."""
