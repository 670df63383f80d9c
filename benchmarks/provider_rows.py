"""200,000 rows of 300 bytes through a provider's batch API: upload, split, download, reconcile, commit.

The provider is a process of its own that answers at once. Timed from the beginning of its first upload to the last
commit; the memory is that of batchmill's largest process.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import harness
import rows
from commit_watch import watched_commits
from local_endpoint import free_port, is_listening

AIM_ROWS, AIM_BYTES = 40_000.0, 500 * 1024**2
ROW_BYTES = 300
START_TIMEOUT_S = 20.0


@contextmanager
def running_provider() -> Iterator[str]:
    """The base URL of a provider, ended afterwards."""
    port = free_port()
    command = [sys.executable, str(harness.FOLDER / "fast_provider.py"), "--port", str(port)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        harness.wait_until(lambda: is_listening(port), START_TIMEOUT_S, "the provider")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


def time_once(source: Path, arguments: Namespace) -> tuple[float, float, int]:
    """(rows a second of the batches, rows a second of the whole command, bytes of the largest process)."""
    peaks = harness.Peaks()
    with harness.work_folder() as folder, running_provider() as base_url:
        output = folder / "out.jsonl"
        command = [harness.BATCHMILL, "run", source, "--model", "openai-batch:bench", "--base-url", base_url]
        command += ["--engine-arg", "poll_s=0.02", "-o", output, "--data-dir", folder / "data"]
        with watched_commits(folder / "data", arguments.rows) as watch:
            finished = harness.run_whole(command, log=folder / "log", peaks=peaks)
        if output.read_bytes().count(b"\n") != arguments.rows:
            raise harness.CommandFailed(f"not every one of {arguments.rows} rows has a result")
        assert watch.last_commit is not None, "a finished run has committed every row"
        with urlopen(f"{base_url}/began") as reply:
            began = float(reply.read())
        return arguments.rows / (watch.last_commit - began), arguments.rows / finished.wall_s, peaks.largest()[0][1]


def main() -> None:
    """Run it some times, and print the figures beside what they are to be."""
    arguments = harness.parse_arguments(__doc__, rows=200_000)
    source = rows.chat_rows(arguments.rows, ROW_BYTES)
    print(f"{arguments.rows:,} rows of {ROW_BYTES} bytes through a provider's batches")
    figures = [time_once(source, arguments) for _ in range(arguments.pairs)]
    harness.print_side("batches", [batches for batches, _, _ in figures], "rows/s")
    harness.print_side("whole command", [whole for _, whole, _ in figures], "rows/s")
    rate, memory = statistics.median(batches for batches, _, _ in figures), max(size for _, _, size in figures)
    print(f"rate {rate:,.0f} rows/s: {'reached' if rate >= AIM_ROWS else 'missed'} ({AIM_ROWS:,.0f})")
    print(f"memory {memory / 2**20:,.0f} MiB: {'reached' if memory <= AIM_BYTES else 'missed'} (500)")


if __name__ == "__main__":
    main()
