"""Results in parts, which processes and nodes write side by side."""
