"""Adapters of language models: LoRA weights, read and checked without running anything that they bring."""
