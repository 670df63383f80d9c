"""What the figures of Modelbit bodies share: a server with deployed functions, and connections that send bodies."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import harness

START_S = 120.0
READ_BYTES = 1 << 18


@dataclass(frozen=True)
class Server:
    """A running `batchmill serve`, and how to deploy to it."""

    folder: Path
    host: str
    port: int
    key: str
    grpc: str = ""  # "HOST:PORT", of one that was asked for
    pid: int = 0
    program: Path = harness.BATCHMILL

    def deploy(self, name: str, code: str, *flags: str) -> None:
        """The function `name` of `code`. Raises CommandFailed."""
        (self.folder / f"{name}.py").write_text(code)
        command = [self.program, "deploy", f"{name}.py:{name}", "--name", name, *flags]
        run(self.folder, *command)

    def request(self, name: str, body: bytes) -> bytes:
        """A whole HTTP request that calls a function."""
        head = (
            f"POST /v1/{name}/latest HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nAuthorization: {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def run(folder: Path, *command: str | Path) -> str:
    """What a command prints. Raises CommandFailed."""
    words = [str(word) for word in command] + ["--data-dir", str(folder / "data")]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=START_S)
    if done.returncode != 0:
        raise harness.CommandFailed(f"`{' '.join(words)}` ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


@contextmanager
def serving(config: str = "", *, grpc: bool = False, program: Path = harness.BATCHMILL) -> Iterator[Server]:
    """A server with keys in a folder of its own; `program`: the `batchmill` that serves."""
    with harness.work_folder() as folder:
        (folder / "batchmill.toml").write_text(config)
        key = run(folder, program, "keys", "create", "--name", "benchmark").split()[-1]
        command = [program, "serve", "--json", "--port", "0", "--data-dir", folder / "data"]
        command += ["--grpc-port", "0"] if grpc else []
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [str(word) for word in command], cwd=folder, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                env={**os.environ, "BATCHMILL_API_KEY": key},
            )  # fmt: skip
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            if not first:
                raise harness.CommandFailed((folder / "log").read_text()[-2000:])
            received = json.loads(first)
            host, _, port = received["url"].removeprefix("http://").rpartition(":")
            yield Server(folder, host, int(port), key, received.get("grpc", ""), process.pid, program)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(harness.STOP_GRACE_S * 3)
            except subprocess.TimeoutExpired:
                harness.end_group(process)


@dataclass
class _Line:
    """One connection: what it waits for, and what has come."""

    sock: socket.socket
    number: int = 0  # of the request that it waits for
    data: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True)
class Load:
    """Requests that are sent in turn, and the body that each is to be answered with."""

    requests: list[bytes]
    answers: list[bytes]
    rows: int  # of each


def measure(server: Server, load: Load, *, connections: int, seconds: float) -> float:
    """Rows a second that are answered as they should be, each connection sending a body after the other.

    Raises CommandFailed for any other answer.
    """
    selector = selectors.DefaultSelector()
    lines = [_Line(socket.create_connection((server.host, server.port)), each) for each in range(connections)]
    done, began = 0, time.perf_counter()
    try:
        for line in lines:
            line.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(line.sock, selectors.EVENT_READ, line)
            line.sock.sendall(load.requests[line.number % len(load.requests)])
        while (took := time.perf_counter() - began) < seconds:
            for key, _ in selector.select(1.0):
                done += _heard(key.data, load, connections)
    finally:
        selector.close()
        for line in lines:
            line.sock.close()
    return done * load.rows / took


def _heard(line: _Line, load: Load, step: int) -> bool:
    """Read what has come; a whole answer is looked at, and the next body sent."""
    piece = line.sock.recv(READ_BYTES)
    if not piece:
        raise harness.CommandFailed("the server closed a connection")
    line.data += piece
    head, found, body = bytes(line.data).partition(b"\r\n\r\n")
    if not found:
        return False
    length = next(int(each[15:]) for each in head.lower().split(b"\r\n") if each.startswith(b"content-length:"))
    if len(body) < length:
        return False
    if body != load.answers[line.number % len(load.answers)]:
        raise harness.CommandFailed(f"a wrong answer: {head[:200]!r} {body[:300]!r}")
    line.data.clear()
    line.number += step
    line.sock.sendall(load.requests[line.number % len(load.requests)])
    return True
