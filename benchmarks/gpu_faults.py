"""What goes wrong on a real GPU, as whole commands: rows that fail an assertion of a kernel, batches that do not fit in
its memory, and a SIGKILL of everything in the middle of a job.

Needs a CUDA GPU and torch beside batchmill. Prints what became of the rows; a lost or wrong row is an error.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import harness
from gpu_functions import KNOWN

ROWS = 20_000
BAD = {777: KNOWN, 12_345: -KNOWN - 1, 12_346: 10 * KNOWN}  # row -> a number that the table does not have


def write_numbers(path: Path, bad: dict[int, int]) -> None:
    """A row for each number."""
    numbers = [bad.get(row, row % KNOWN) for row in range(ROWS)]
    path.write_text("".join(json.dumps({"number": number}) + "\n" for number in numbers))


def command_of(folder: Path, name: str) -> list[str | Path]:
    model = f"function:{harness.FOLDER / 'gpu_functions.py'}:{name}"
    where = ["-o", folder / "out.jsonl", "--data-dir", folder / "data"]
    return [harness.BATCHMILL, "run", folder / "in.jsonl", "--model", model, *where]


def results_of(folder: Path) -> list[dict]:
    lines = (folder / "out.jsonl").read_text().splitlines()
    if len(lines) != ROWS:
        raise harness.CommandFailed(f"{len(lines):,} results, not {ROWS:,}")
    return [json.loads(line) for line in lines]


def check(results: list[dict], expected: Callable[[int], int | None]) -> None:
    """Make sure that every row has its own result; None: an error."""
    for row, result in enumerate(results):
        wanted = expected(row)
        if result["output"] != wanted or (result["error"] is None) != (wanted is not None):
            raise harness.CommandFailed(f"row {row} has {json.dumps(result)[:300]}, not {wanted}")


def called(calls: Path) -> int:
    """The rows that the function was called with."""
    return sum(map(int, calls.read_text().split())) if calls.exists() else 0


def lost_gpu() -> None:
    """Three rows of 20,000 fail an assertion, which ends the CUDA context of their process."""
    with harness.work_folder() as folder:
        write_numbers(folder / "in.jsonl", BAD)
        with (folder / "log").open("wb") as log:
            began = time.perf_counter()
            code = subprocess.run(command_of(folder, "Lookup"), stdout=log, stderr=log, check=False).returncode
        results = results_of(folder)
        check(results, lambda row: None if row in BAD else row % KNOWN * 3)
        messages = [results[row]["error"] for row in BAD]
        print(f"assertions of a kernel: {ROWS - len(BAD):,} right, {len(BAD)} errors, exit code {code}, ", end="")
        print(f"{time.perf_counter() - began:.1f} s; {messages[0][:200]}", flush=True)


def too_large() -> None:
    """Calls of 8,192 rows take 192 GiB: more than any GPU has."""
    with harness.work_folder() as folder:
        write_numbers(folder / "in.jsonl", {})
        environment = {"CALLS": str(folder / "calls")}
        finished = harness.run_whole(command_of(folder, "Hungry"), log=folder / "log", env=environment)
        check(results_of(folder), lambda row: row % KNOWN % 100)
        calls = [int(size) for size in (folder / "calls").read_text().split()]
        print(f"out of memory: {ROWS:,} right in {finished.wall_s:.1f} s, calls of {calls} rows", flush=True)


def killed() -> None:
    """SIGKILL of the command's whole group when a third of the rows is done; the same command goes on."""
    with harness.work_folder() as folder:
        write_numbers(folder / "in.jsonl", {})
        calls, command = folder / "calls", command_of(folder, "SlowLookup")
        with (folder / "log").open("wb") as log:
            environment = {**os.environ, "CALLS": str(calls)}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            harness.wait_until(lambda: called(calls) > ROWS / 3 or process.poll() is not None, 120, "rows")
            if process.poll() is not None:
                raise harness.CommandFailed("the command had ended before it could be killed")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        before = called(calls)
        harness.run_whole(command, log=folder / "log", env={"CALLS": str(calls)})
        check(results_of(folder), lambda row: row % KNOWN * 3)
        print(f"killed after {before:,} rows: {ROWS:,} right, {called(calls) - ROWS:,} run again", flush=True)


def main() -> None:
    """One fault after the other."""
    lost_gpu()
    too_large()
    killed()


if __name__ == "__main__":
    main()
