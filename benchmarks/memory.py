"""10 million rows of 100 bytes: validate, plan, run a no-op, write results, under 1 GiB resident in every process.

Then again, with the run killed in its middle: the time from the start of the same command to the first row it runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import harness
import rows

LIMIT_GIB, LIMIT_RESUME_S = 1.0, 5.0
ROW_BYTES = 100
WORKERS = 2
RUN_TIMEOUT_S = 1800.0
GIB = 1 << 30


def run_command(source: Path, folder: Path, function: str) -> list[str]:
    """The command that runs the rows through a function of `functions.py`."""
    model = f"function:{harness.FOLDER / 'functions.py'}:{function}"
    words = [harness.BATCHMILL, "run", source, "--model", model, "--workers", WORKERS]
    words += ["-o", folder / "out.jsonl", "--data-dir", folder / "data", "--json"]
    return [str(word) for word in words]


def count_lines(path: Path) -> int:
    """The lines of a file of any size."""
    with path.open("rb") as file:
        return sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 24), b""))


def check_output(folder: Path, expected: int) -> None:
    """Make sure that every row has a result."""
    found = count_lines(folder / "out.jsonl")
    if found != expected:
        raise harness.CommandFailed(f"{found:,} results for {expected:,} rows")


def measure_memory(source: Path, expected: int) -> None:
    """One whole run, every process watched."""
    peaks = harness.Peaks()
    with harness.work_folder() as folder:
        command = run_command(source, folder, "nothing")
        finished = harness.run_whole(command, log=folder / "log", peaks=peaks)
        check_output(folder, expected)
    print(f"{expected:,} rows in {finished.wall_s:.1f} s ({expected / finished.wall_s:,.0f} rows/s)")
    for name, peak in peaks.largest():
        print(f"  {name or '(ended at once)'}: {peak / 2**20:,.0f} MiB at most")
    harness.print_limit("largest process", peaks.largest()[0][1] / GIB, LIMIT_GIB, "GiB")


def rows_done(log: Path) -> int:
    """The finished rows that the last whole view of a `--json` run speaks of."""
    lines = log.read_text().split("\n")[:-1]
    views = [json.loads(line) for line in lines[-3:] if line.startswith("{")]
    return max((view["job"]["rows_ok"] for view in views if "job" in view), default=0)


def kill_halfway(command: list[str], folder: Path, expected: int) -> int:
    """Start the command, end it with SIGKILL when half of the rows are done, and return how many were."""
    log = folder / "killed.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        harness.wait_until(
            lambda: rows_done(log) >= expected // 2 or process.poll() is not None, RUN_TIMEOUT_S, "half of the rows"
        )
    finally:
        process.kill()
        process.wait()
    if process.returncode >= 0:
        raise harness.CommandFailed(f"the run ended by itself:\n{log.read_text()[-2000:]}")
    return rows_done(log)


def measure_resume(source: Path, expected: int) -> None:
    """Kill a run in its middle, start the same command again, and see when it first calls the function."""
    with harness.work_folder() as folder:
        os.environ["BENCHMARK_FIRST_CALL"] = str(folder / "first")
        command = run_command(source, folder, "nothing_noted")
        done = kill_halfway(command, folder, expected)
        for note in folder.glob("first.*"):
            note.unlink()
        began = time.time()
        harness.run_whole(command, log=folder / "log")
        first_call = min(float(note.read_text()) for note in folder.glob("first.*"))
        check_output(folder, expected)
    print(f"killed when at least {done:,} of {expected:,} rows were done")
    harness.print_limit("from the command to the first row", first_call - began, LIMIT_RESUME_S, "s")


def main() -> None:
    """Measure memory, then the resume."""
    arguments = harness.parse_arguments(__doc__, pairs=1, rows=10_000_000)
    source = rows.short_rows(arguments.rows, ROW_BYTES)
    for _ in range(arguments.pairs):
        measure_memory(source, arguments.rows)
        measure_resume(source, arguments.rows)


if __name__ == "__main__":
    main()
