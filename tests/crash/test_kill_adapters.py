"""A process that is killed while it registers an adapter: nothing half is left, and the next one has it."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from fakes.lora_files import CONFIG as LORA_CONFIG
from fakes.lora_files import WEIGHTS, lora_files, write_base, write_lora
from fakes.model_hub import ModelHub
from fakes.running_server import RunningServer

from batchmill.faults import ADAPTER_POINTS

CONFIG = """
[models.tiny]
engine = "vllm"
source = "tiny"

[deployments]
adapter_patterns = ["org/*"]
"""
WAIT_S = 60


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_base(tmp_path / "tiny")
    write_lora(tmp_path / "upper")
    (tmp_path / "batchmill.toml").write_text(CONFIG)
    return tmp_path


def command(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHMILL_")}
    line = [sys.executable, "-m", "batchmill", "--data-dir", str(folder / "data"), *words]
    return subprocess.run(line, cwd=folder, env={**kept, **env}, capture_output=True, text=True, timeout=WAIT_S)


def left_of(folder: Path) -> list[str]:
    """Files of adapters, and what was on its way."""
    home = folder / "data" / "adapters"
    return sorted(path.name for path in home.rglob("*") if path.is_file())


def stored(folder: Path) -> list[tuple[str, int, str]]:
    """The adapters as the database has them, without an owner that goes on with them."""
    with contextlib.closing(sqlite3.connect(folder / "data" / "batchmill.db")) as database:
        return database.execute("SELECT name, version, state FROM adapters").fetchall()


def adapters(url: str) -> list[dict]:
    return httpx2.get(f"{url}/batchmill/v1/adapters", timeout=WAIT_S, trust_env=False).json()["adapters"]


def ready(url: str) -> dict:
    """The one adapter of a server, once it is ready."""
    until = time.monotonic() + WAIT_S
    while True:
        [found] = adapters(url)
        if found["state"] != "fetching":
            return found
        assert time.monotonic() < until, found
        time.sleep(0.05)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("point", ADAPTER_POINTS)
def test_a_command_that_is_killed(place: Path, point: str) -> None:
    """SIGKILL after either step: the version is there, fetching; the next server brings it to its end, once."""
    fault = f"{point}:1:{place / 'killed'}"
    done = command(place, "adapters", "add", "shout", "upper", "--base", "tiny", BATCHMILL_FAULT=fault)
    assert (done.returncode, (place / "killed").exists()) == (-signal.SIGKILL, True), done.stderr
    assert stored(place) == [("shout", 1, "fetching")]
    assert "shout/1  tiny  " in command(place, "adapters", "list").stdout  # which may have gone on with it
    server = RunningServer(place, CONFIG).start()
    try:
        assert ready(server.url)["state"] == "ready"
        assert left_of(place) == [LORA_CONFIG, WEIGHTS]
    finally:
        server.stop()


@pytest.mark.timeout(240)
def test_a_server_that_is_killed_in_the_midst(place: Path) -> None:
    """SIGKILL of a server while files arrive: the child that fetches ends with it, and the next server fetches anew."""
    with ModelHub() as hub:
        hub.repositories = {"org/one": lora_files()}
        hub.held.clear()
        server = RunningServer(place, CONFIG, env={**hub.environment(), "HF_HOME": str(place / "hf")}).start()
        try:
            body = {"name": "shout", "base": "tiny", "source": "org/one"}
            reply = httpx2.post(f"{server.url}/batchmill/v1/adapters", json=body, timeout=WAIT_S, trust_env=False)
            assert reply.status_code == 202, reply.text
            until = time.monotonic() + WAIT_S
            while not any("GET /org/one/resolve/" in line for line in hub.asked):
                assert time.monotonic() < until, hub.asked
                time.sleep(0.05)
            server.kill()
            assert [path for path in left_of(place) if path in (LORA_CONFIG, WEIGHTS)] == []
            hub.held.set()
            server.start()
            found = ready(server.url)
            assert (found["state"], found["version"]) == ("ready", 1)
            assert left_of(place) == [LORA_CONFIG, WEIGHTS]
        finally:
            server.close()
