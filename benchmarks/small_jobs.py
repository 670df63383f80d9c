"""Five-row batches through the API of a server, for a function that does nothing: jobs a second, and what one costs.

16 clients, each on one connection: upload a file, create a batch, poll it until it has ended, begin the next. The
uploads alone come first: the same requests without a job. Then the lists with 100,000 ended jobs in the database.
Aims: 200 jobs/s, submit p50 20 ms, every list 50 ms.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sqlite3
import statistics
import threading
import time
from pathlib import Path

import harness
import live_server
import processor_time

CLIENTS, ROWS = 16, 5
JOBS_AIM, SUBMIT_AIM_MS, LIST_AIM_MS = 200.0, 20.0, 50.0
POLL_S = 0.02
LISTED_JOBS = 100_000
STATES = ("completed", "completed", "completed", "paused", "failed", "cancelled")  # of the copies, in turn
LISTS = (
    *(f"/batchmill/v1/jobs?state={state}" for state in ("running", *dict.fromkeys(STATES))),
    "/batchmill/v1/jobs", "/batchmill/v1/jobs?model=nothing", "/v1/batches", "/v1/batches?limit=100",
)  # fmt: skip
ROW = '{"custom_id":"r%d","method":"POST","url":"/v1/chat/completions","body":{"model":"nothing","n":%d}}\n'
BOUNDARY = "boundary-of-a-benchmark"
MEDIA = f"multipart/form-data; boundary={BOUNDARY}"


def upload_body() -> bytes:
    """The body of an upload of five rows."""
    part = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n'
    lines = "".join(ROW % (n, n) for n in range(ROWS))
    text = part % ("purpose", "") + "batch\r\n" + part % ("file", '; filename="in.jsonl"') + lines
    return f"{text}\r\n--{BOUNDARY}--\r\n".encode()


class Client(threading.Thread):
    """One client; `error` is what ended it early."""

    def __init__(self, server: live_server.Server, until: float, *, creates: bool) -> None:
        super().__init__()
        self._connection, self._until, self._creates = server.connect(), until, creates
        self.submit_ms: list[float] = []
        self.ended = 0
        self.error: Exception | None = None

    def run(self) -> None:
        body = upload_body()
        try:
            while time.perf_counter() < self._until:
                file_id = self._ask("POST", "/v1/files", body, MEDIA)["id"]
                if self._creates:
                    self._run_batch(file_id)
                self.ended += 1
        except (OSError, http.client.HTTPException, harness.CommandFailed) as error:
            self.error = error
        finally:
            self._connection.close()

    def _run_batch(self, file_id: str) -> None:
        order = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        began = time.perf_counter()
        batch = self._ask("POST", "/v1/batches", json.dumps(order).encode(), "application/json")
        self.submit_ms.append((time.perf_counter() - began) * 1000)
        while batch["status"] not in ("completed", "failed", "cancelled", "expired"):
            time.sleep(POLL_S)
            batch = self._ask("GET", f"/v1/batches/{batch['id']}")
        if batch["request_counts"]["completed"] != ROWS:
            raise harness.CommandFailed(f"rows are missing: {batch}")

    def _ask(self, method: str, path: str, body: bytes | None = None, media: str = "") -> dict:
        self._connection.request(method, path, body, {"Content-Type": media} if media else {})
        reply = self._connection.getresponse()
        data = reply.read()
        if reply.status != 200:
            raise harness.CommandFailed(f"{method} {path}: {reply.status} {data[:500]!r}")
        return json.loads(data)


def run_clients(server: live_server.Server, seconds: float, *, creates: bool) -> tuple[float, list[float]]:
    """(jobs a second, milliseconds of each submit)."""
    began = time.perf_counter()
    clients = [Client(server, began + seconds, creates=creates) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    for client in clients:
        if client.error is not None:
            raise client.error
    rate = sum(client.ended for client in clients) / (time.perf_counter() - began)
    return rate, [each for client in clients for each in client.submit_ms]


def usage_of(data_dir: Path) -> tuple[int, int]:
    """(bytes allocated, inodes) of a data directory."""
    found = [path.lstat() for path in data_dir.rglob("*")]
    return sum(info.st_blocks * 512 for info in found), len(found)


def cpu_by_process(root: int) -> dict[int, tuple[str, float]]:
    """Process -> (its name, seconds of processor time, those of ended children included)."""
    return {pid: (harness.name_of(pid), processor_time.own_cpu_s(pid)) for pid in harness.tree_of(root)}


def print_cpu(before: dict[int, tuple[str, float]], after: dict[int, tuple[str, float]], jobs: int) -> None:
    for pid, (name, seconds) in after.items():
        if (spent := seconds - before.get(pid, (name, 0.0))[1]) > 0:
            print(f"    {name or 'owner'} {pid}: {1000 * spent / jobs:.2f} ms of processor time a job")


def print_jobs(server: live_server.Server, data_dir: Path, seconds: float) -> None:
    """Uploads alone, then jobs."""
    run_clients(server, 1.0, creates=True)
    uploads, _ = run_clients(server, seconds / 2, creates=False)
    print(f"uploads alone: {uploads:,.0f} a second", flush=True)
    size_bytes, inodes = usage_of(data_dir)
    before, clients_s = cpu_by_process(server.process.pid), time.process_time()
    rate, submit_ms = run_clients(server, seconds, creates=True)
    clients_s = time.process_time() - clients_s
    after, jobs = cpu_by_process(server.process.pid), len(submit_ms)
    more_bytes, more_inodes = usage_of(data_dir)
    points = statistics.quantiles(submit_ms, n=100)
    print(f"{jobs} jobs of {ROWS} rows, {CLIENTS} clients, {os.cpu_count()} cores: {rate:,.1f} jobs/s", end="; ")
    print(harness.verdict(rate >= JOBS_AIM))
    print(f"submit: p50 {points[49]:.1f} ms, p99 {points[98]:.1f} ms; {harness.verdict(points[49] <= SUBMIT_AIM_MS)}")
    print(f"a job: {(more_bytes - size_bytes) / jobs:,.0f} bytes and {(more_inodes - inodes) / jobs:.1f} inodes")
    print_cpu(before, after, jobs)
    print(f"    clients: {1000 * clients_s / jobs:.2f} ms of processor time a job")


def multiply_jobs(database: Path, count: int) -> None:
    """Copy the record of one ended job, in several states, until there are so many."""
    with sqlite3.connect(database) as db:
        db.execute("PRAGMA synchronous=OFF")
        columns = [row[1] for row in db.execute("PRAGMA table_info(jobs)")]
        record = dict(zip(columns, db.execute("SELECT * FROM jobs WHERE state='completed'").fetchone(), strict=True))
        names, places = ",".join(f'"{name}"' for name in columns), ",".join("?" * len(columns))
        copies = [f"job_{n:020x}" for n in range(count)]
        rows = (
            list(
                (
                    record
                    | {"id": copy, "state": STATES[n % len(STATES)], "created": record["created"] - n, "identity": copy}
                ).values()
            )
            for n, copy in enumerate(copies)
        )
        db.executemany(f"INSERT INTO jobs ({names}) VALUES ({places})", rows)
        db.executemany("INSERT INTO job_models (job, model) VALUES (?, 'nothing')", [(copy,) for copy in copies])


def print_lists(server: live_server.Server) -> None:
    connection = server.connect()
    for path in LISTS:
        times = []
        for _ in range(10):
            began = time.perf_counter()
            live_server.ask(connection, "GET", path)
            times.append((time.perf_counter() - began) * 1000)
        median = statistics.median(times)
        print(f"    GET {path}: median {median:.1f} ms, first {times[0]:.1f} ms", end="; ")
        print(harness.verdict(median <= LIST_AIM_MS))
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--listed-jobs", type=int, default=LISTED_JOBS)
    arguments = parser.parse_args()
    with live_server.serving(live_server.function_config("nothing", 1)) as server:
        data_dir = server.log.parent / "data"
        print_jobs(server, data_dir, arguments.seconds)
        if arguments.listed_jobs:
            multiply_jobs(data_dir / "batchmill.db", arguments.listed_jobs)
            print(f"lists with {arguments.listed_jobs:,} jobs")
            print_lists(server)


if __name__ == "__main__":
    main()
