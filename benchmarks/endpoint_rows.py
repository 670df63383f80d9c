"""20,000 rows to a local endpoint that answers in 20 ms, 256 in flight, from the first request to the last commit.

Against a bare aiohttp loop on the same file, in turn, and against the openai SDK's async client on fewer rows, since it
is slow.
"""

from __future__ import annotations

import importlib.metadata
import statistics
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import harness
import rows
from commit_watch import watched_commits
from local_endpoint import running_endpoint

AIM_BARE, AIM_SDK = 0.85, 15.0
ROW_BYTES = 600


def count_lines(path: Path) -> int:
    """The lines of a file."""
    return path.read_bytes().count(b"\n")


def time_batchmill(source: Path, expected: int, arguments: Namespace) -> float:
    """Rows a second of `batchmill run`, with a fresh data directory."""
    with harness.work_folder() as folder, running_endpoint(folder, arguments.delay_ms) as endpoint:
        output = folder / "out.jsonl"
        command = [harness.BATCHMILL, "run", source, "--model", "openai:bench", "--base-url", endpoint.base_url]
        command += ["--in-flight", arguments.in_flight, "-o", output, "--data-dir", folder / "data"]
        with watched_commits(folder / "data", expected) as watch:
            harness.run_whole(command, log=folder / "log")
        calls = endpoint.calls()
        if (len(calls), count_lines(output)) != (expected, expected):
            raise harness.CommandFailed(f"{len(calls)} calls, {count_lines(output)} results for {expected} rows")
        assert watch.last_commit is not None, "a finished run has committed every row"
        return expected / (watch.last_commit - min(call.arrival for call in calls))


def time_peer(script: str, python: Path, source: Path, expected: int, arguments: Namespace) -> float:
    """Rows a second of a peer, which prints the seconds it took."""
    with harness.work_folder() as folder, running_endpoint(folder, arguments.delay_ms) as endpoint:
        output = folder / "out.jsonl"
        command = [python, harness.FOLDER / "peers" / script, source, output, endpoint.base_url, arguments.in_flight]
        finished = harness.run_whole(command, log=folder / "log")
        if count_lines(output) != expected:
            raise harness.CommandFailed(f"{script} wrote {count_lines(output)} results for {expected} rows")
        return expected / float(finished.log.splitlines()[-1])


def main() -> None:
    """Run the pairs, then the SDK, and print both ratios."""
    arguments = harness.parse_arguments(__doc__, rows=20_000, delay_ms=20.0, in_flight=256, sdk_rows=3_000, sdk_runs=3)
    source = rows.chat_rows(arguments.rows, ROW_BYTES)
    aiohttp = f"aiohttp=={importlib.metadata.version('aiohttp')}"  # the one that batchmill runs on
    bare_python = harness.peer_python("bare-http", "orjson", aiohttp)
    sides: dict[str, Callable[[], float]] = {
        "batchmill": lambda: time_batchmill(source, arguments.rows, arguments),
        "bare aiohttp": lambda: time_peer("bare_aiohttp.py", bare_python, source, arguments.rows, arguments),
    }
    print(f"{arguments.rows:,} rows, {arguments.delay_ms:g} ms a reply, {arguments.in_flight} in flight")
    figures = harness.alternate(arguments.pairs, sides)
    for name, values in figures.items():
        harness.print_side(name, values, "rows/s")
    harness.print_ratio(figures["batchmill"], figures["bare aiohttp"], AIM_BARE, "the bare aiohttp loop")
    if not arguments.sdk_runs:
        return
    sdk_python, sdk_source = harness.peer_python("openai", "openai"), rows.chat_rows(arguments.sdk_rows, ROW_BYTES)
    sdk = [
        time_peer("openai_sdk.py", sdk_python, sdk_source, arguments.sdk_rows, arguments)
        for _ in range(arguments.sdk_runs)
    ]
    harness.print_side(f"openai SDK on {arguments.sdk_rows:,} rows", sdk, "rows/s")
    ours = [statistics.median(figures["batchmill"])] * len(sdk)
    harness.print_ratio(ours, sdk, AIM_SDK, "the openai SDK")


if __name__ == "__main__":
    main()
