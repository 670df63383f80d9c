"""Processor time of a server for each request: this batchmill against another one, `--other /path/to/bin/batchmill`.

Single-row calls of a deployed function with a key (64 connections), GETs of one file's record, and uploads of 512 MiB.
Seconds of the owner and every process below it, taken in turn, so that a slow moment of the machine meets both sides.
Aim: no more than 1.05 of the other.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import deployed
import hammer
import harness
import upload

RATIO_AIM = 1.05
GETS, UPLOAD_MIB = 4000, 512
CODE = "def double(x: int) -> int:\n    return 2 * x\n"
MICRO = 1e6


def cpu_s(root: int) -> float:
    """Seconds of processor time of a process and all below it, those that have ended included."""
    return sum(map(own_cpu_s, harness.tree_of(root)))


def own_cpu_s(pid: int) -> float:
    """Seconds of processor time of a process, and of its children that have ended."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it ended meanwhile: its parent has its time
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Side:
    """One server, and what a request of each kind costs it."""

    def __init__(self, server: deployed.Server, seconds: float) -> None:
        self._server, self._seconds = server, seconds
        server.deploy("double", CODE)
        self._target = hammer.Target(server.port, "/v1/double/latest", b'{"data": 10}', server.key)
        if hammer.ask(self._target) != {"data": 20}:
            raise harness.CommandFailed("the function does not answer as it should")
        self._file = self._upload(1)

    def calls(self) -> float:
        """Microseconds of a live call."""
        before = cpu_s(self._server.pid)
        shot = hammer.fire(self._target, connections=64, seconds=self._seconds)
        return (cpu_s(self._server.pid) - before) / (shot.rate * self._seconds) * MICRO

    def gets(self) -> float:
        """Microseconds of a GET."""
        connection = self._connect()
        before = cpu_s(self._server.pid)
        for _ in range(GETS):
            connection.request("GET", f"/v1/files/{self._file}", headers=self._key)
            reply = connection.getresponse()
            if reply.read() and reply.status != 200:
                raise harness.CommandFailed(f"a GET was answered with {reply.status}")
        connection.close()
        return (cpu_s(self._server.pid) - before) / GETS * MICRO

    def uploads(self) -> float:
        """Microseconds of an upload, for each MiB."""
        before = cpu_s(self._server.pid)
        file_id = self._upload(UPLOAD_MIB)
        took = (cpu_s(self._server.pid) - before) / UPLOAD_MIB * MICRO
        connection = self._connect()
        connection.request("DELETE", f"/v1/files/{file_id}", headers=self._key)
        connection.getresponse().read()
        connection.close()
        return took

    @property
    def _key(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._server.key}"}

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._server.host, self._server.port, timeout=60)

    def _upload(self, mib: int) -> str:
        head, tail = upload.form_around("in.jsonl")
        body = head + b"x" * (mib * upload.MIB) + tail
        connection = self._connect()
        media = f"multipart/form-data; boundary={upload.BOUNDARY}"
        connection.request("POST", "/v1/files", body, {**self._key, "Content-Type": media})
        reply = connection.getresponse()
        data = reply.read()
        connection.close()
        if reply.status != 200:
            raise harness.CommandFailed(f"an upload was answered with {reply.status}: {data[:300]!r}")
        return json.loads(data)["id"]


def compare(what: str, unit: str, pairs: int, ours: Callable[[], float], theirs: Callable[[], float]) -> None:
    """Print both sides' medians and the median of the pairs' ratios."""
    figures = harness.alternate(pairs, {"this": ours, "other": theirs})
    for name, values in figures.items():
        harness.print_side(f"{what}, {name}", values, unit)
    ratios = [mine / other for mine, other in zip(figures["this"], figures["other"], strict=True)]
    harness.print_limit(f"{what}: this / other", statistics.median(ratios), RATIO_AIM, "x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, default=harness.BATCHMILL, help="the `batchmill` of another version")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of live calls, each time")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        ours, theirs = (
            Side(stack.enter_context(deployed.serving(program=program)), arguments.seconds)
            for program in (harness.BATCHMILL, arguments.other)
        )
        for each in (ours, theirs):
            each.calls()  # warm
        compare("live call", "us", arguments.pairs, ours.calls, theirs.calls)
        compare("GET", "us", arguments.pairs, ours.gets, theirs.gets)
        compare("upload", "us a MiB", arguments.pairs, ours.uploads, theirs.uploads)


if __name__ == "__main__":
    main()
