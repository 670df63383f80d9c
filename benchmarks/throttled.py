"""An endpoint that takes 100 requests a second (token bucket, burst 10), for a minute, through a connector.

How many a second are used, by what the endpoint wrote down, and how many of those after the first ten seconds it
refused. With `--retry-after-s 1` every refusal asks for so much rest.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import harness
import rows
from connector_rows import write_connector
from endpoint import Connection, Endpoint, encode_reply
from local_endpoint import START_TIMEOUT_S, free_port, is_listening

AIM_USED, AIM_REFUSED = 95.0, 0.03
MEASURED_S, SETTLED_S = 60.0, 10.0
DELAY_S = 0.02
ROW_BYTES = 600


class Throttled(Endpoint):
    """Refuses what its bucket does not hold, and writes down every request: when it came, and whether it was taken."""

    def __init__(self, arguments: Namespace, log: int) -> None:
        super().__init__(DELAY_S, None)
        self._rate, self._burst, self._rest_s = arguments.rate, arguments.burst, arguments.retry_after_s
        self._level, self._at, self._log = float(arguments.burst), self._loop.time(), log

    def arrived(self, connection: Connection, path: str, data: bytes) -> None:
        now = self._loop.time()
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        taken = self._level >= 1
        os.write(self._log, b"%.6f %d\n" % (now, taken))
        if taken:
            self._level -= 1
            super().arrived(connection, path, data)
            return
        reply = encode_reply(
            b"429 Too Many Requests", {"error": {"message": "slow down", "code": "rate_limit_exceeded"}}
        )
        if self._rest_s:
            reply = reply.replace(b"\r\n", b"\r\nRetry-After: %g\r\n" % self._rest_s, 1)
        connection.reply(reply)


async def serve(arguments: Namespace) -> None:
    """Be the endpoint, until the process is ended."""
    endpoint = Throttled(arguments, os.open(arguments.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644))
    server = await asyncio.get_running_loop().create_server(lambda: Connection(endpoint), "127.0.0.1", arguments.serve)
    async with server:
        await server.serve_forever()


@contextmanager
def running(log: Path, arguments: Namespace) -> Iterator[str]:
    """The endpoint in a process of its own; its base URL."""
    port = free_port()
    command = [sys.executable, __file__, "--serve", port, "--log", log, "--rate", arguments.rate]
    command += ["--burst", arguments.burst, "--retry-after-s", arguments.retry_after_s]
    process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        harness.wait_until(lambda: is_listening(port), START_TIMEOUT_S, "the endpoint to listen")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        harness.end_group(process)


def measure(arguments: Namespace) -> tuple[float, float]:
    """Requests used per second of the first minute, and the share refused once it had settled."""
    count = int(arguments.rate * (MEASURED_S + 5) + arguments.burst)
    with harness.work_folder() as folder:
        log = folder / "requests"
        with running(log, arguments) as base_url:
            connector = write_connector(folder / "connector.json", base_url)
            command = ["env", "BENCHMARK_KEY=secret-of-the-benchmark", harness.BATCHMILL, "run"]
            command += [rows.short_rows(count, ROW_BYTES), "--model", f"connector:{connector}"]
            command += ["--in-flight", arguments.in_flight, "-o", folder / "out.jsonl", "--data-dir", folder / "data"]
            harness.run_whole(command, log=folder / "log")
        seen = [line.split() for line in log.read_text().splitlines()]
    began = float(seen[0][0])
    requests = [(float(at) - began, taken == "1") for at, taken in seen]
    used = sum(taken for at, taken in requests if at < MEASURED_S) / MEASURED_S
    settled = [taken for at, taken in requests if SETTLED_S <= at < MEASURED_S]
    return used, settled.count(False) / len(settled)


def main() -> None:
    """Measure once, or be the endpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--burst", type=int, default=10)
    parser.add_argument("--retry-after-s", type=float, default=0.0)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--log", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments))
        return
    used, refused = measure(arguments)
    verdict = "reached" if used >= AIM_USED * arguments.rate / 100 and refused < AIM_REFUSED else "missed"
    print(f"{arguments.rate:g} requests/s allowed, burst {arguments.burst}, {arguments.in_flight} in flight")
    print(f"used {used:.1f}/s over {MEASURED_S:g} s; after {SETTLED_S:g} s {refused:.1%} refused: {verdict}")
    print(f"=> aim: {AIM_USED:g} % of the rate, fewer than {AIM_REFUSED:.0%} refused")


if __name__ == "__main__":
    main()
