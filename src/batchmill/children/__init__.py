"""Child processes that do work for this one: long work of our own, and programs of callers, which have bounds."""
