#!/bin/sh
# One batch through a real LLM: a base model and two LoRA adapters, chosen row by row. `make demo` runs this.
set -eu
cd "$(dirname "$0")/.."
batchmill=${BATCHMILL:-batchmill}
python=${EXAMPLE_PYTHON:-python3}
export HF_HUB_OFFLINE=1 # the model is a folder of this repository

rm -rf demo-output
mkdir demo-output
set -- run examples/prompts.jsonl \
    --model vllm:examples/tiny-llm \
    --adapter upper=examples/tiny-llm/adapters/upper \
    --adapter reverse=examples/tiny-llm/adapters/reverse \
    --data-dir demo-output/data \
    -o demo-output/results.jsonl
echo "--> batchmill $*"
"$batchmill" "$@"
echo
"$python" examples/show_results.py examples/prompts.jsonl demo-output/results.jsonl
