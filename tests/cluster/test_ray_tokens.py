"""Whether a head demands a token, found out on real heads."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_support import free_port, ray_python

TOKEN = "ab" * 32
HEAD = """
import os, sys
from pathlib import Path
import ray
port, folder = sys.argv[1:]
server = Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server"
os.execv(server, [
    str(server), f"--gcs_server_port={port}", "--node-ip-address=127.0.0.1", "--config_list=e30=",
    "--session-name=s", f"--log_dir={folder}", f"--session-dir={folder}",
])
"""
ASK = "import sys; from batchmill.executors.ray.driver import _demands_token; print(_demands_token(sys.argv[1]))"


@contextlib.contextmanager
def head(mode: str, folder: Path) -> Iterator[str]:
    """The control service of a cluster, without a node."""
    port = free_port()
    environ = {**os.environ, "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": TOKEN}
    with subprocess.Popen(
        [ray_python(), "-P", "-c", HEAD, str(port), str(folder)], env=environ,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
            assert process.poll() is None, "the head has ended"
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def demands_token(address: str) -> str:
    environ = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    call = [ray_python(), "-P", "-c", ASK, address]
    return subprocess.run(call, env=environ, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(("mode", "expected"), [("token", "True"), ("disabled", "False")])
def test_only_a_head_that_refuses_demands_a_token(mode, expected, tmp_path):
    with head(mode, tmp_path) as address:
        assert demands_token(address) == expected
