"""600 chat rows of 300 tokens with nothing shared, 32 tokens out: batchmill against vLLM's own run_batch."""

from __future__ import annotations

import harness
import llm_speed
import rows

AIM = 1.7
TOKENS_IN, TOKENS_OUT = 300, 32
FLAGS: llm_speed.Flags = {"enforce-eager": None, "max-model-len": "2048", "block-size": "128"}


def main() -> None:
    """Run the pairs and print the ratio."""
    arguments = harness.parse_arguments(__doc__, rows=600)
    source = rows.llm_plain_rows(arguments.rows, TOKENS_IN, TOKENS_OUT)
    llm_speed.compare(source, FLAGS, expected=arguments.rows, tokens_out=TOKENS_OUT, pairs=arguments.pairs, aim=AIM)


if __name__ == "__main__":
    main()
