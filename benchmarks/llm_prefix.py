"""600 chat rows over 40 shared system prompts of 1,400 tokens in shuffled order, KV cache held to 32k tokens, 16 tokens
out: batchmill, which orders rows by prefix, against vLLM's own run_batch, which takes the file's order."""

from __future__ import annotations

import harness
import llm_speed
import rows

AIM = 3.5
PROMPTS, PROMPT_TOKENS, TOKENS_OUT = 40, 1400, 16
KV_BLOCKS, BLOCK_TOKENS = 256, 128  # 32,768 tokens
FLAGS: llm_speed.Flags = {
    "enforce-eager": None,
    "max-model-len": "2048",
    "block-size": str(BLOCK_TOKENS),
    "num-gpu-blocks-override": str(KV_BLOCKS),
}


def main() -> None:
    """Run the pairs and print the ratio."""
    arguments = harness.parse_arguments(__doc__, rows=600)
    source = rows.llm_prefix_rows(arguments.rows, prompts=PROMPTS, prompt_tokens=PROMPT_TOKENS, tokens_out=TOKENS_OUT)
    llm_speed.compare(source, FLAGS, expected=arguments.rows, tokens_out=TOKENS_OUT, pairs=arguments.pairs, aim=AIM)


if __name__ == "__main__":
    main()
