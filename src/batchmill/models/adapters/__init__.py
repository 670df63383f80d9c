"""Adapters of language models: LoRA weights, read and checked without running any of their code."""
