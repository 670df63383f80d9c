"""Rows through vLLM with a schema, which it decodes guided, beside the same rows without one: output tokens a second.

The model has the shape of 21 M parameters and random weights. Each answer with the schema has about 50 tokens, each
without it exactly so many. Timed from the first request to the commit of the last row.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import harness
from commit_watch import watched_commits
from llm_speed import MODEL, engine_environment

AIM, TOKENS = 0.9, 50
SHAPE = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 12, "head_dim": 32,
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "label": {"enum": ["good", "poor"]},
        "digits": {"type": "array", "items": {"enum": list(range(10))}, "minItems": 12, "maxItems": 12},
    },
    "required": ["label", "digits"],
    "additionalProperties": False,
}
PACKED = '{"backend":"xgrammar","disable_any_whitespace":true}'  # a random model would write spaces for ever


def write_rows(path: Path, rows: int) -> None:
    """A table of texts of about 100 bytes, all different."""
    words = "the quick brown fox jumps over the lazy dog and comes back to see what it has done there "
    path.write_text("".join(json.dumps({"text": f"{row} {words}"}) + "\n" for row in range(rows)))


def tokens_a_second(source: Path, rows: int, *, has_schema: bool) -> float:
    """Output tokens of all rows by the seconds they took."""
    with harness.work_folder() as folder:
        (folder / "schema.json").write_text(json.dumps(SCHEMA))
        command = [harness.BATCHMILL, "run", source, "--model", f"vllm:{MODEL}", "-o", folder / "out.jsonl", "--json"]
        command += ["--data-dir", folder / "data", "--prompt", "{text}", "--param", "temperature=1"]
        engine = {
            "load-format": "dummy", "hf-overrides": json.dumps(SHAPE), "max-model-len": "1024",
            "structured-outputs-config": PACKED, "middleware": "request_times.RequestTimes",
        }  # fmt: skip
        for flag, value in engine.items():
            command += ["--engine-arg", f"{flag}={value}"]
        if has_schema:
            command += ["--schema", folder / "schema.json", "--param", "max_tokens=200"]
        else:
            command += ["--param", f"max_tokens={TOKENS}", "--param", "ignore_eos=true"]
        environment = {**engine_environment(), "REQUEST_TIMES": str(folder / "times")}
        with watched_commits(folder / "data", rows) as watch:
            harness.run_whole(command, log=folder / "log", env=environment)
        summary = json.loads((folder / "log").read_text().splitlines()[-1])["job"]
        assert summary["rows_ok"] == rows, summary["errors"]
        assert watch.last_commit is not None
        first = min(float(line.split()[0]) for line in (folder / "times").read_text().splitlines())
        return summary["usage"]["output_tokens"] / (watch.last_commit - first)


def main() -> None:
    """Run both sides in turn and print the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=3)
    arguments = parser.parse_args()
    source = harness.made_input(f"texts-{arguments.rows}.jsonl", lambda path: write_rows(path, arguments.rows))
    sides = {
        "with a schema": lambda: tokens_a_second(source, arguments.rows, has_schema=True),
        "without": lambda: tokens_a_second(source, arguments.rows, has_schema=False),
    }
    figures = harness.alternate(arguments.pairs, sides)
    for name, values in figures.items():
        harness.print_side(name, values, "tokens/s")
    harness.print_ratio(figures["with a schema"], figures["without"], AIM, "the same rows without a schema")


if __name__ == "__main__":
    main()
