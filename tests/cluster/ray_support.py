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
    "RAY_health_check_period_ms": "500",  # a lost node is one whose port has refused five checks: 3 s, not 15 s
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

    def __init__(self, process: subprocess.Popen[str], count: int) -> None:
        """Args: count: nodes that it begins with, besides the head."""
        self._process = process
        assert process.stdout is not None
        self.address = process.stdout.readline().strip()
        self.pid = process.pid
        self._count = count

    def add(self, cpus: int, **variables: str) -> int:
        """Add a node with these environment variables. Returns its number."""
        self.does(" ".join(["add", str(cpus), *(f"{name}={value}" for name, value in variables.items())]))
        self._count += 1
        return self._count

    def does(self, command: str) -> None:
        """Return once it is done."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == "done"


def _without(folder: Path) -> list[str]:
    """What a command begins with that sees another, empty folder in the place of this one."""
    may_mount = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
    return ["unshare", *may_mount, "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(folder)]


@contextlib.contextmanager
def ray_nodes(
    *cpus: int, port: int = 0, environ: Mapping[str, str] = MappingProxyType({}), hidden: Path | None = None
) -> Iterator[Nodes]:
    """One node for each number of CPUs, the head first.

    Args:
        environ: more variables of theirs.
        hidden: a folder that they do not see.
    """
    prefix = [] if hidden is None else _without(hidden)
    with subprocess.Popen(
        [*prefix, ray_python(), "-P", str(SCRIPT), str(port), *map(str, cpus)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **ENVIRONMENT, **environ},
    ) as process:  # fmt: skip
        try:
            yield Nodes(process, len(cpus) - 1)
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.communicate("end\n", timeout=60)
            process.kill()
