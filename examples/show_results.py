"""Show a results file beside its prompts, a few rows of each model: `show_results.py PROMPTS RESULTS`."""

import json
import sys
from collections import defaultdict
from pathlib import Path

ROWS_SHOWN = 4  # of each model


def read_rows(path: Path) -> dict[str, dict]:
    """Read a JSONL file as `custom_id` -> row."""
    with path.open() as file:
        return {row["custom_id"]: row for row in map(json.loads, file)}


def answer_of(result: dict | None) -> str:
    """The reply's text, or what went wrong."""
    if result is None:
        return "(no result: see the .errors.jsonl file)"
    if result["error"] is not None:
        return f"({result['error']['code']}: {result['error']['message']})"
    return result["response"]["body"]["choices"][0]["message"]["content"]


def main() -> None:
    """Print a table for each model, and how many answers there are."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    prompts, results = read_rows(Path(sys.argv[1])), read_rows(Path(sys.argv[2]))
    pairs: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for custom_id, row in prompts.items():
        asked = row["body"]["messages"][-1]["content"]
        pairs[row["body"]["model"] or "tiny-llm"].append((asked, answer_of(results.get(custom_id))))
    width = max(len(asked) for shown in pairs.values() for asked, _ in shown[:ROWS_SHOWN])
    for model, shown in pairs.items():
        print(f"{model} ({len(shown)} rows)")
        for asked, answer in shown[:ROWS_SHOWN]:
            print(f"  {asked:<{width}}  ->  {answer}")
        print()
    print(f"{len(results)} of {len(prompts)} rows have a result, in {sys.argv[2]}")


if __name__ == "__main__":
    main()
