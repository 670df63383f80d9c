"""Who reaches a cluster: tokens and TLS, on real heads and on a whole cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from contract.executor_suite import ExecutorSuite
from ray_certificates import tls_variables
from ray_support import free_port, ray_nodes, ray_python

from batchmill.executors.ray.executor import RayExecutor
from batchmill.types import ModelSpec, Provision
from batchmill.types.cluster import ClusterEntry
from batchmill.wire.messages import Ready, Start

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32}
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
ASK = """
import os, sys
from batchmill.executors.ray.driver import _demands_token, _has_tls
print(_demands_token(sys.argv[1]), _has_tls(sys.argv[1], os.environ))
"""


@contextlib.contextmanager
def head(folder: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """The control service of a cluster, without a node."""
    port = free_port()
    with subprocess.Popen(
        [ray_python(), "-P", "-c", HEAD, str(port), str(folder)], env={**os.environ, **environ},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.01)
            assert process.poll() is None, "the head has ended"
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def found(address: str, environ: Mapping[str, str]) -> str:
    """What a driver finds out: whether the head demands a token, whether it has TLS."""
    call = [ray_python(), "-P", "-c", ASK, address]
    done = subprocess.run(call, env={**os.environ, **environ}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(("mode", "expected"), [("token", "True False"), ("disabled", "False False")])
def test_only_a_head_that_refuses_demands_a_token(mode, expected, tmp_path):
    with head(tmp_path, {**TOKEN, "RAY_AUTH_MODE": mode}) as address:
        assert found(address, TOKEN) == expected


def test_only_a_head_with_our_certificate_has_tls(tmp_path):
    """A head without TLS, or with a certificate of another authority, has none, whatever the variables say."""
    for name in ("ours", "theirs", "logs"):
        (tmp_path / name).mkdir()
    ours, theirs = tls_variables(tmp_path / "ours"), tls_variables(tmp_path / "theirs")
    for used, expected in ((ours, "False True"), (theirs, "False False"), ({}, "False False")):
        with head(tmp_path / "logs", {"RAY_AUTH_MODE": "disabled", **used}) as address:
            assert found(address, {"RAY_AUTH_MODE": "disabled", **ours}) == expected, used


async def has_secrets(folder: Path, address: str) -> None:
    """A worker that is given a secret starts."""
    executor = RayExecutor(ClusterEntry("ray", address, ray_python()), folder / "data", lambda model: {})
    model = ModelSpec("double", "function", f"{folder / 'app.py'}:double")
    worker = await executor.start(Start("w", model, str(folder / "home"), 0, Provision({"secret:key": "value"})))
    await ExecutorSuite.expect(worker, Ready)
    await executor.close()


@pytest.mark.timeout(180)
def test_a_closed_cluster(tmp_path, monkeypatch):
    """A cluster with tokens and TLS runs jobs, gets secrets, and the doctor finds nothing."""
    closed = {**TOKEN, **tls_variables(tmp_path)}
    for name, value in closed.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
    (tmp_path / "in.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(100)))
    with ray_nodes(1, 1) as nodes:
        (tmp_path / "batchmill.toml").write_text(
            f'data_dir = "data"\n[cluster]\nexecutor = "ray"\naddress = "{nodes.address}"\npython = "{ray_python()}"\n'
        )
        run = ["run", "in.jsonl", "--model", "function:app.py:double", "--output", "out.jsonl"]
        for command in (run, ["doctor"]):
            words = [sys.executable, "-P", "-m", "batchmill", *command]
            done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
        assert "token and TLS" in done.stdout
        asyncio.run(has_secrets(tmp_path, nodes.address))
    results = [json.loads(line)["output"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert results == [2 * n for n in range(100)]
