"""Child processes: long work of our own, and programs of callers, with limits."""
