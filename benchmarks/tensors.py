"""tritonclient sends a binary FP32 [64, 1024] to a deployed numpy function and takes it back, as often as it can.

Beside it, with the same client: a bare server that copies the same bytes and does nothing else. Keys on, one worker.
Aim: at least 0.7 of the bare server's rate over HTTP. The rate over gRPC is told too.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import deployed
import harness

AIM = 0.7
MIB = 64 * 1024 * 4 * 2 / 2**20  # of one request, both ways
PACKAGES = ("tritonclient[http,grpc]==2.73.0",)
START_S = 120.0
CODE = """
from typing import Annotated

import numpy as np
from batchmill import tensor


def identity(INPUT0: Annotated[np.ndarray, tensor("FP32", [-1, 1024])]):
    return {"OUTPUT0": INPUT0}
"""


@contextmanager
def bare_server() -> Iterator[str]:
    """Its address."""
    command = [sys.executable, str(harness.FOLDER / "peers" / "bare_tensors.py")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()


def measure(python: Path, kind: str, address: str, key: str, *, clients: int, seconds: float) -> float:
    """Requests a second of so many clients together. Raises CommandFailed."""
    script = harness.FOLDER / "peers" / "tensor_client.py"
    command = [str(python), str(script), kind, address, key, str(seconds)]
    started = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(clients)
    ]  # fmt: skip
    try:
        for each in started:
            assert each.stdout is not None
            each.stdout.readline()
        received = [each.communicate("\n", timeout=seconds + START_S) for each in _all_at_once(started)]
    finally:
        for each in started:
            each.kill()
            each.wait()
    if any(each.returncode for each in started):
        raise harness.CommandFailed("".join(errors for _, errors in received)[-2000:])
    return sum(float(printed) for printed, _ in received)


def _all_at_once(started: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    """Every client begins now, not when the one before has been heard."""
    for each in started:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    return started


def main() -> None:
    """Measure each number of clients in pairs and print the ratios."""
    arguments = harness.parse_arguments(__doc__, clients=4, seconds=4.0)
    python = harness.peer_python("tritonclient", *PACKAGES)
    with deployed.serving(grpc=True) as server, bare_server() as bare:
        server.deploy("identity", CODE)
        http = f"{server.host}:{server.port}"
        for clients in dict.fromkeys((1, arguments.clients)):
            received = partial(measure, python, clients=clients, seconds=arguments.seconds)
            received("http", http, server.key, seconds=1.0)
            sides = {
                "batchmill": partial(received, "http", http, server.key),
                "bare": partial(received, "http", bare, "none"),
                "batchmill grpc": partial(received, "grpc", server.grpc, server.key),
            }
            print(f"{clients} client{'s' if clients > 1 else ''}:")
            figures = harness.alternate(arguments.pairs, sides)
            for name, rates in figures.items():
                harness.print_side(name, rates, "requests/s")
                print(f"    {sorted(rates)[len(rates) // 2] * MIB:,.0f} MiB/s")
            harness.print_ratio(figures["batchmill"], figures["bare"], AIM, "the bare server")


if __name__ == "__main__":
    main()
