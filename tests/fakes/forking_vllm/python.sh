#!/bin/sh
# The Python with vLLM (BATCHMILL_VLLM_PYTHON), in which vLLM forks its engine.
PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$(dirname "$0")" exec "$BATCHMILL_VLLM_PYTHON" "$@"
