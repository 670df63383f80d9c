"""A job that takes half of its results over from an earlier one, beside the same job that runs every row, and beside a
job of the new rows alone. Whole commands, timed one after the other in each round.

The rows are OpenAI batch rows of a function that returns at once: measured is what finding, checking and writing a
result costs, not what it saves. Every result is compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import harness

AIM_S = 5.0
FUNCTION = "def answer(n, text):\n    return {'answer': n, 'usage': {'prompt_tokens': 9, 'completion_tokens': 1}}\n"
SIDES = ("reuse", "all", "new")


def write_rows(path: Path, numbers: range) -> None:
    """OpenAI batch rows of about 200 bytes."""
    text = "the quick brown fox jumps over the lazy dog and comes back to see what it has done there"
    with path.open("w") as file:
        for n in numbers:
            body = {"n": n, "text": f"{n} {text}", "temperature": 0}
            file.write(
                json.dumps({"custom_id": f"row-{n}", "method": "POST", "url": "/v1/answers", "body": body}) + "\n"
            )


def run(folder: Path, source: str, output: str, *flags: str) -> harness.Finished:
    command = [harness.BATCHMILL, "run", folder / source, "--model", f"function:{folder / 'app.py'}:answer"]
    command += ["--data-dir", folder / "data", "-o", folder / output, "--overwrite", "--json", *flags]
    return harness.run_whole([*map(str, command)], log=folder / "log")


def check(folder: Path, output: str, numbers: range, reused: int) -> None:
    """Every row has its result, and so many of them are taken over."""
    taken = 0
    with (folder / output).open() as file:
        for n, line in zip(numbers, file, strict=True):
            row = json.loads(line)
            assert (row["custom_id"], row["response"]["body"]["answer"]) == (f"row-{n}", n), line
            taken += "reused_from" in row
    assert taken == reused, f"{taken} rows were taken over, not {reused}"


def one_round(rows: int) -> dict[str, harness.Finished]:
    half = rows // 2
    with harness.work_folder() as folder:
        (folder / "app.py").write_text(FUNCTION)
        for name, numbers in (("known", range(half)), ("all", range(rows)), ("new", range(half, rows))):
            write_rows(folder / f"{name}.jsonl", numbers)
        run(folder, "known.jsonl", "known.out.jsonl", "--reuse")
        found = {
            "reuse": run(folder, "all.jsonl", "reuse.out.jsonl", "--reuse"),
            "all": run(folder, "all.jsonl", "all.out.jsonl"),
            "new": run(folder, "new.jsonl", "new.out.jsonl"),
        }
        check(folder, "reuse.out.jsonl", range(rows), half)
        check(folder, "all.out.jsonl", range(rows), 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds = [one_round(options.rows) for _ in range(options.rounds)]
    for side in SIDES:
        wall = statistics.median(each[side].wall_s for each in rounds)
        cpu = statistics.median(each[side].cpu_s for each in rounds)
        print(f"{side:<6} {wall:6.1f} s, {cpu:6.1f} s of processor time")
    for other in ("all", "new"):
        wall = statistics.median(each["reuse"].wall_s - each[other].wall_s for each in rounds)
        cpu = statistics.median(each["reuse"].cpu_s - each[other].cpu_s for each in rounds)
        print(f"reuse on top of {other:<4} {wall:6.1f} s, {cpu:6.1f} s of processor time; the aim is {AIM_S:g} s")


if __name__ == "__main__":
    main()
