"""A job of 10 rows through a Python function that does nothing: the whole command, from a shell's point of view.

Beside it four Pythons that start and end, one after another: owner, sealing child, worker and function's process start
once each, so no arrangement of them can take less on one core.
"""

from __future__ import annotations

import os
import statistics
import sys

import harness
import rows

LIMIT_S = 0.6
ROWS, ROW_BYTES = 10, 600
PROCESSES = 4
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}  # as installed packages are: modules are compiled once, not by every process


def time_job() -> float:
    """Milliseconds of `batchmill run`, with a fresh data directory; its processor time is printed."""
    source = rows.chat_rows(ROWS, ROW_BYTES)
    with harness.work_folder() as folder:
        output = folder / "out.jsonl"
        model = f"function:{harness.FOLDER / 'functions.py'}:nothing"
        command = [harness.BATCHMILL, "run", source, "--model", model, "-o", output, "--data-dir", folder / "data"]
        finished = harness.run_whole(command, log=folder / "log", env=COMPILED)
        if (found := output.read_bytes().count(b"\n")) != ROWS:
            raise harness.CommandFailed(f"{output.name} has {found} lines, not {ROWS}")
        print(f"    {finished.cpu_s:.2f} s of processor time")
        return 1000 * finished.wall_s


def time_pythons() -> float:
    """Milliseconds of as many Pythons as the job has processes."""
    with harness.work_folder() as folder:
        runs = [harness.run_whole([sys.executable, "-c", "pass"], log=folder / "log") for _ in range(PROCESSES)]
        return 1000 * sum(finished.wall_s for finished in runs)


def main() -> None:
    """Run both in turn and print the medians; the first job compiles what is not compiled yet, and does not count."""
    arguments = harness.parse_arguments(__doc__, pairs=15)
    time_job()
    sides = {"batchmill run": time_job, f"python -c pass, {PROCESSES} times": time_pythons}
    print(f"{ROWS} rows of {ROW_BYTES} bytes, one worker, {arguments.pairs} pairs, {os.cpu_count()} cores")
    figures = harness.alternate(arguments.pairs, sides)
    for name, values in figures.items():
        harness.print_side(name, values, "ms")
    harness.print_limit("batchmill run", statistics.median(figures["batchmill run"]) / 1000, LIMIT_S, "s")


if __name__ == "__main__":
    main()
