"""batchmill: batch inference with every row accounted for."""

__version__ = "0.1.0"
