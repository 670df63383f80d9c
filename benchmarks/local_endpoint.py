"""`endpoint.py` as the benchmarks use it: started on a free port, and its log of calls read back."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import harness

START_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Call:
    """One request, in seconds since the epoch; `reply` is None where the caller had gone before it was sent."""

    key: str
    arrival: float
    reply: float | None


@dataclass(frozen=True)
class Endpoint:
    """A running endpoint. `log` grows by a line for each call."""

    base_url: str
    log: Path

    def calls(self) -> list[Call]:
        """Every call so far, in the order of the replies."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        parts = (line.split(" ") for line in lines)
        return [Call(key, float(at), None if reply == "-" else float(reply)) for key, at, reply in parts]


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_listening(port: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def running_endpoint(folder: Path, delay_ms: float) -> Iterator[Endpoint]:
    """An endpoint in a process of its own, ended afterwards."""
    port, log = free_port(), folder / "calls"
    command = [sys.executable, harness.FOLDER / "endpoint.py", "--port", port, "--delay-ms", delay_ms]
    command += ["--count-file", log]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen([str(word) for word in command], **quiet, start_new_session=True)
    try:
        harness.wait_until(lambda: is_listening(port), START_TIMEOUT_S, "the endpoint to listen")
        yield Endpoint(f"http://127.0.0.1:{port}/v1", log)
    finally:
        harness.end_group(process)
