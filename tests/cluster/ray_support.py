"""The environment with Ray (BATCHMILL_RAY_PYTHON), and clusters in it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

SCRIPT = Path(__file__).parent.parent / "fakes" / "ray_nodes.py"
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",
}


def ray_python() -> str:
    python = os.environ.get("BATCHMILL_RAY_PYTHON")
    if not python:
        pytest.fail("BATCHMILL_RAY_PYTHON names no interpreter with batchmill[ray]: `make ray` makes .venv-ray")
    return python


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Nodes:
    """A cluster on this machine."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.address = process.stdout.readline().strip()
        self.pid = process.pid

    def does(self, command: str) -> None:
        """Return once it is done."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == "done"


@contextlib.contextmanager
def ray_nodes(*cpus: int, port: int = 0, environ: Mapping[str, str] = MappingProxyType({})) -> Iterator[Nodes]:
    """One node for each number of CPUs, the head first. `environ`: more variables of theirs."""
    with subprocess.Popen(
        [ray_python(), "-P", str(SCRIPT), str(port), *map(str, cpus)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env={**os.environ, **ENVIRONMENT, **environ},
    ) as process:  # fmt: skip
        try:
            yield Nodes(process)
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.communicate("end\n", timeout=60)
            process.kill()
