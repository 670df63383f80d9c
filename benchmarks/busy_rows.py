"""OpenAI rows of 600 bytes through a function that takes 50 us of processor time a row, two workers.

Against two bare processes with half of the rows each (orjson, no validation, no fsync), whole commands, in turn.
"""

from __future__ import annotations

from pathlib import Path

import harness
import rows

AIM = 0.95


def check_output(paths: list[Path], expected: int) -> None:
    """Make sure that a side wrote a result for every row."""
    found = sum(line.count(b"\n") for path in paths for line in [path.read_bytes()])
    if found != expected:
        raise harness.CommandFailed(f"{found:,} results, not {expected:,}")


def time_batchmill(source: Path, expected: int) -> float:
    """Rows a second of `batchmill run`, with a fresh data directory."""
    with harness.work_folder() as folder:
        output = folder / "out.jsonl"
        model = f"function:{harness.FOLDER / 'functions.py'}:fifty_us"
        command = [harness.BATCHMILL, "run", source, "--model", model, "--workers", "2", "-o", output]
        finished = harness.run_whole([*command, "--data-dir", folder / "data"], log=folder / "log")
        check_output([output], expected)
        return expected / finished.wall_s


def time_bare(python: Path, source: Path, expected: int) -> float:
    """Rows a second of two bare processes."""
    with harness.work_folder() as folder:
        script, output = harness.FOLDER / "peers" / "two_loops.py", folder / "out"
        finished = harness.run_whole([python, script, source, output], log=folder / "log")
        check_output(sorted(folder.glob("out.*")), expected)
        return expected / finished.wall_s


def main() -> None:
    """Run the pairs and print the ratio."""
    arguments = harness.parse_arguments(__doc__, pairs=3, rows=1_000_000)
    source = rows.chat_rows(arguments.rows, 600)
    python = harness.peer_python("bare", "orjson")
    sides = {
        "batchmill": lambda: time_batchmill(source, arguments.rows),
        "two bare processes": lambda: time_bare(python, source, arguments.rows),
    }
    figures = harness.alternate(arguments.pairs, sides)
    for name, values in figures.items():
        harness.print_side(name, values, "rows/s")
    harness.print_ratio(figures["batchmill"], figures["two bare processes"], AIM, "two bare processes")


if __name__ == "__main__":
    main()
