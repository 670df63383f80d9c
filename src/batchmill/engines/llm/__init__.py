"""The engine for language models that batchmill serves itself with vLLM."""
