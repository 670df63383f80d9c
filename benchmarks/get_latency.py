"""How long a GET of a batch takes while its job seals, runs at full speed and gathers: one every 10 ms.

A real server process, a function that does nothing, one keep-alive connection. Aim: p99 under 25 ms in each phase.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import statistics
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import harness
import rows

EVERY_S = 0.010
AIM_MS = 25.0
START_S, END_S = 60.0, 900.0
PHASE_SAMPLES_MIN = 20  # fewer tell no 99th percentile; the phase is then too short to matter
ENDED = ("completed", "failed", "expired", "cancelled")
CONFIG = '[models.{name}]\nengine = "function"\nsource = "{functions}:{name}"\nworkers = {workers}\n'


class Server:
    """`batchmill serve` in a folder of its own, with one of the benchmarks' functions for a model."""

    def __init__(self, folder: Path, workers: int, name: str = "nothing") -> None:
        config = folder / "batchmill.toml"
        config.write_text(CONFIG.format(name=name, functions=harness.FOLDER / "functions.py", workers=workers))
        words = [harness.BATCHMILL, "serve", "--json", "--port", "0", "--config", config, "--data-dir", folder / "data"]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [str(word) for word in words], stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        if not first:
            raise harness.CommandFailed((folder / "log").read_text()[-2000:])
        self.address = json.loads(first)["url"].removeprefix("http://")

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        harness.end_group(self.process)


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: bytes = b"", media: str = "") -> dict:
    """One request, its reply as JSON. Raises CommandFailed for any status but 200."""
    connection.request(method, path, body or None, {"content-type": media} if media else {})
    reply = connection.getresponse()
    data = reply.read()
    if reply.status != 200:
        raise harness.CommandFailed(f"{method} {path}: {reply.status} {data[:500]!r}")
    return json.loads(data)


def upload(connection: http.client.HTTPConnection, source: Path) -> str:
    """The id of the file that `source` has become."""
    boundary = "boundary-of-a-benchmark"
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="{{}}"{{}}\r\n\r\n'
    head = part.format("purpose", "") + "batch\r\n" + part.format("file", '; filename="in.jsonl"')
    data = head.encode() + source.read_bytes() + f"\r\n--{boundary}--\r\n".encode()
    return ask(connection, "POST", "/v1/files", data, f"multipart/form-data; boundary={boundary}")["id"]


def look_until_it_ends(connection: http.client.HTTPConnection, batch_id: str) -> tuple[dict, dict[str, list[float]]]:
    """The batch as it ended, and by phase the milliseconds of each GET."""
    took: dict[str, list[float]] = defaultdict(list)
    due = time.perf_counter()
    deadline = due + END_S
    while time.perf_counter() < deadline:
        time.sleep(max(0.0, due - time.perf_counter()))
        due = max(due + EVERY_S, time.perf_counter())
        began = time.perf_counter()
        batch = ask(connection, "GET", f"/v1/batches/{batch_id}")
        took[batch["batchmill"]["state"]].append((time.perf_counter() - began) * 1000)
        if batch["status"] in ENDED and len(took[batch["batchmill"]["state"]]) >= PHASE_SAMPLES_MIN:
            return batch, took
    raise harness.CommandFailed(f"the batch {batch_id} did not end")


def print_phase(name: str, took: list[float]) -> None:
    """The percentiles of one phase beside the aim."""
    ordered = sorted(took)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    line = f"{name:>12}: {len(took):6,} GETs, median {statistics.median(took):6.2f} ms, max {ordered[-1]:7.2f} ms"
    if len(took) >= PHASE_SAMPLES_MIN:
        print(line, flush=True)
        harness.print_limit(f"p99 while {name}", p99, AIM_MS, "ms")
    else:
        print(line + " (too few for a p99)", flush=True)


def measure(source: Path, count: int, workers: int) -> dict[str, list[float]]:
    """Run the file through a server of its own. Raises CommandFailed when a row is missing."""
    with harness.work_folder() as folder:
        server = Server(folder, workers)
        try:
            connection = http.client.HTTPConnection(server.address, timeout=START_S)
            file_id = upload(connection, source)
            asked = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            batch = ask(connection, "POST", "/v1/batches", json.dumps(asked).encode(), "application/json")
            batch, took = look_until_it_ends(connection, batch["id"])
            connection.close()
        finally:
            server.close()
    if batch["request_counts"] != {"total": count, "completed": count, "failed": 0}:
        raise harness.CommandFailed(f"rows are missing: {batch}")
    seconds = batch["completed_at"] - batch["created_at"]
    print(f"{count:,} rows in {seconds} s, {count / max(seconds, 1):,.0f} rows/s", flush=True)
    return took


def named_rows(count: int, row_bytes: int) -> Path:
    """Chat rows that name their model: a server has no default."""
    source = rows.chat_rows(count, row_bytes - len(b"nothing"))

    def write(path: Path) -> None:
        with source.open("rb") as lines:
            rows.write_lines(path, (line.replace(b'"model":""', b'"model":"nothing"', 1) for line in lines))

    return harness.made_input(f"named-{count}-{row_bytes}.jsonl", write)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--row-bytes", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    took = measure(named_rows(arguments.rows, arguments.row_bytes), arguments.rows, arguments.workers)
    for name, each in took.items():
        print_phase(name, each)


if __name__ == "__main__":
    main()
