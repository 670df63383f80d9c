"""20,000 rows through a connector with templates and post-processing to a local endpoint that answers in 20 ms.

256 in flight, from the first request to the last commit, against a bare aiohttp loop on the same file, in turn.
"""

from __future__ import annotations

import importlib.metadata
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import harness
import rows
from commit_watch import watched_commits
from endpoint_rows import count_lines
from local_endpoint import running_endpoint

AIM = 0.75
ROW_BYTES = 600


def write_connector(path: Path, base_url: str) -> Path:
    """A connector in the shape of OpenAI's embeddings, as ML Commons' blueprints write it."""
    predict = {
        "action_type": "predict",
        "method": "POST",
        "url": "${parameters.base_url}/embeddings",
        "headers": {"Authorization": "Bearer ${credential.key}"},
        "request_body": '{ "input": ${parameters.input}, "model": "${parameters.model}" }',
        "pre_process_function": "connector.pre_process.openai.embedding",
        "post_process_function": "connector.post_process.openai.embedding",
    }
    connector = {
        "name": "embeddings",
        "version": "1",
        "protocol": "http",
        "parameters": {"base_url": base_url, "model": "bench"},
        "credential": {"key": "env:BENCHMARK_KEY"},
        "actions": [predict],
    }
    path.write_text(json.dumps(connector))
    return path


def time_batchmill(source: Path, expected: int, arguments: Namespace) -> float:
    """Rows a second of `batchmill run`, with a fresh data directory."""
    with harness.work_folder() as folder, running_endpoint(folder, arguments.delay_ms) as endpoint:
        output = folder / "out.jsonl"
        connector = write_connector(folder / "connector.json", endpoint.base_url)
        command = ["env", "BENCHMARK_KEY=secret-of-the-benchmark", harness.BATCHMILL, "run", source]
        command += ["--model", f"connector:{connector}", "--in-flight", arguments.in_flight]
        command += ["-o", output, "--data-dir", folder / "data"]
        with watched_commits(folder / "data", expected) as watch:
            harness.run_whole(command, log=folder / "log")
        calls = endpoint.calls()
        if (len(calls), count_lines(output)) != (expected, expected):
            raise harness.CommandFailed(f"{len(calls)} calls, {count_lines(output)} results for {expected} rows")
        assert watch.last_commit is not None, "a finished run has committed every row"
        return expected / (watch.last_commit - min(call.arrival for call in calls))


def time_bare(python: Path, source: Path, expected: int, arguments: Namespace) -> float:
    """Rows a second of the loop, which prints the seconds it took."""
    with harness.work_folder() as folder, running_endpoint(folder, arguments.delay_ms) as endpoint:
        output = folder / "out.jsonl"
        script = harness.FOLDER / "peers" / "bare_aiohttp.py"
        command = [python, script, source, output, endpoint.base_url, arguments.in_flight, "/embeddings"]
        finished = harness.run_whole(command, log=folder / "log")
        if count_lines(output) != expected:
            raise harness.CommandFailed(f"{count_lines(output)} results for {expected} rows")
        return expected / float(finished.log.splitlines()[-1])


def main() -> None:
    """Run the pairs and print their ratio."""
    arguments = harness.parse_arguments(__doc__, rows=20_000, delay_ms=20.0, in_flight=256)
    source = rows.short_rows(arguments.rows, ROW_BYTES)
    aiohttp = f"aiohttp=={importlib.metadata.version('aiohttp')}"  # the one that batchmill runs on
    bare_python = harness.peer_python("bare-http", "orjson", aiohttp)
    sides: dict[str, Callable[[], float]] = {
        "batchmill": lambda: time_batchmill(source, arguments.rows, arguments),
        "bare aiohttp": lambda: time_bare(bare_python, source, arguments.rows, arguments),
    }
    print(f"{arguments.rows:,} rows, {arguments.delay_ms:g} ms a reply, {arguments.in_flight} in flight")
    figures = harness.alternate(arguments.pairs, sides)
    for name, values in figures.items():
        harness.print_side(name, values, "rows/s")
    harness.print_ratio(figures["batchmill"], figures["bare aiohttp"], AIM, "the bare aiohttp loop")


if __name__ == "__main__":
    main()
