"""Single-row requests from many connections with wrk, the same for every side, and the servers of the peers."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import harness

START_S = 90.0
PEERS = harness.FOLDER / "peers"
MILLIS = {"us": 0.001, "ms": 1.0, "s": 1000.0}
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Target:
    """Where a side answers, and how it is asked."""

    port: int
    path: str
    body: bytes
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {**JSON, "Authorization": self.key} if self.key else JSON


@dataclass(frozen=True)
class Shot:
    """What a side did under load."""

    rate: float  # requests answered a second
    p50_ms: float
    p99_ms: float


def fire(target: Target, *, connections: int, seconds: float) -> Shot:
    """Have every connection ask, one request after the other. Raises CommandFailed for an answer that is not a 200."""
    wrk = shutil.which("wrk")
    if wrk is None:
        raise SystemExit("the load comes from wrk: install it (Debian: apt-get install wrk)")
    with harness.work_folder() as folder:
        script = folder / "post.lua"
        lines = ['wrk.method = "POST"', f"wrk.body = {json.dumps(target.body.decode())}"]
        lines += [f"wrk.headers[{json.dumps(name)}] = {json.dumps(value)}" for name, value in target.headers.items()]
        script.write_text("\n".join(lines))
        command = [wrk, "-t1", f"-c{connections}", f"-d{seconds:g}s", "--latency", "-s", str(script)]
        url = f"http://127.0.0.1:{target.port}{target.path}"
        received = subprocess.run([*command, url], capture_output=True, text=True, check=True).stdout
    wrong = [line for line in received.splitlines() if "Non-2xx" in line or "Socket errors" in line]
    rate = re.search(r"Requests/sec:\s+([\d.]+)", received)
    p50, p99 = (re.search(rf"\b{share}%\s+([\d.]+)(us|ms|s)\b", received) for share in (50, 99))
    if wrong or rate is None or p50 is None or p99 is None:
        raise harness.CommandFailed(f"{url}: {wrong or received}")
    return Shot(float(rate[1]), *(float(found[1]) * MILLIS[found[2]] for found in (p50, p99)))


def ask(target: Target) -> object:
    """One request, and its answer. Raises OSError where nobody answers yet."""
    connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=START_S)
    try:
        connection.request("POST", target.path, target.body, target.headers)
        reply = connection.getresponse()
        data = reply.read()
        return json.loads(data) if reply.status == 200 else (reply.status, data[:500])
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(str(error)) from None
    finally:
        connection.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def peer(target: Target, command: list[str | Path], wanted: object) -> Iterator[None]:
    """A peer's server, once it answers as it should."""
    with harness.work_folder() as folder:
        log = folder / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [str(word) for word in command], cwd=PEERS, stdout=file, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        try:
            harness.wait_until(lambda: _answers(target, wanted), START_S, f"{command}:\n{log.read_text()[-2000:]}")
            yield
        finally:
            harness.end_group(process)


def _answers(target: Target, wanted: object) -> bool:
    try:
        return ask(target) == wanted
    except OSError:
        return False
