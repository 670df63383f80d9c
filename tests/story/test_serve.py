"""`batchmill serve` as a process: it starts, drains, is killed, and goes on; its keys are made beside it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from fakes.running_server import RunningServer, running_server

from batchmill.store import prefix_owner
from batchmill.store.sql.database import Database

ROWS = 300
MODELS = """
[models.echo]
engine = "function"
source = "app.py:echo"

[models.slow]
engine = "function"
source = "app.py:slow"
"""
CODE = """
import time

def echo(n=0, **rest):
    return {"n": n}

def slow(n=0, **rest):
    time.sleep(0.02)
    return {"n": n}
"""
TIMEOUT_S = 60


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "app.py").write_text(CODE)
    return tmp_path


def batchmill(folder: Path, *words: str) -> tuple[int, str, str]:
    """A command beside the server: its exit code, and what it said."""
    line = [sys.executable, "-m", "batchmill", "--data-dir", str(folder / "data"), *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith("BATCHMILL_")}
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    return done.returncode, done.stdout, done.stderr


def begin_batch(server: RunningServer, model: str) -> str:
    rows = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": {"model": model, "n": n + 1,
         "messages": [{"role": "user", "content": "x"}]}}
        for n in range(ROWS)
    ]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with httpx2.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        files = {"file": ("in.jsonl", text)}
        sent = client.post("/v1/files", data={"purpose": "batch"}, files=files).raise_for_status().json()
        order = {"input_file_id": sent["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return client.post("/v1/batches", json=order).raise_for_status().json()["id"]


def wait_for(server: RunningServer, batch: str, is_so) -> dict:
    with httpx2.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        while True:
            view = client.get(f"/v1/batches/{batch}").raise_for_status().json()
            if is_so(view):
                return view


def results(server: RunningServer, view: dict) -> list[str]:
    text = httpx2.get(f"{server.url}/v1/files/{view['output_file_id']}/content", timeout=TIMEOUT_S).text
    return [json.loads(line)["custom_id"] for line in text.splitlines()]


def has_ended(view: dict) -> bool:
    return view["status"] in ("completed", "failed", "cancelled", "expired")


def test_it_starts_answers_and_drains(folder):
    """A server answers on the address it told, ends with 0 after SIGTERM, and its log is lines of JSON."""
    with running_server(folder, MODELS) as server:
        health = httpx2.get(f"{server.url}/health").json()
        assert (health["status"], {part["name"] for part in health["parts"]}) == (
            "ok", {"database", "disk", "dispatcher", "ledger"},
        )  # fmt: skip
        assert server.stop() == 0
    requests = [line for line in server.logged() if line["from"] == "batchmill.access"]
    assert [(line["route"], line["status"]) for line in requests] == [("/health", 200)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_batch_goes_on_after_the_server_ended(folder, number):
    """However a server ends, its batch goes on by itself with the next start, and each row is there once."""
    with running_server(folder, MODELS) as server:
        batch = begin_batch(server, "slow")
        wait_for(server, batch, lambda view: view["request_counts"]["completed"] > 20)
        server.signal(number)
        assert server.wait() == (0 if number == signal.SIGTERM else -number)
        server.start()
        view = wait_for(server, batch, has_ended)
        assert (view["status"], view["request_counts"]["completed"]) == ("completed", ROWS)
        assert results(server, view) == [f"r{n}" for n in range(ROWS)]


def test_it_ends_while_its_start_waits(folder):
    """A signal ends a start that waits for a server on another copy of its database, which may take minutes."""
    data, keys, store = folder / "data", folder / "keys", f"file://{folder}/store"
    data.mkdir(0o700)
    database = Database(data / "batchmill.db")
    asyncio.run(prefix_owner.claim(database, store, "", "another copy"))
    database.close()
    (folder / "batchmill.toml").write_text(f'[storage]\nobjects = "{store}"\n[secrets]\nkey_file = "{keys}"\n')
    words = [sys.executable, "-m", "batchmill", "serve", "--port", "0", "--data-dir", str(data)]
    with subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "is waited for" in process.stderr.readline() or "is waited for" in process.stderr.readline()
        process.terminate()
        said = process.stderr.read()
    assert process.returncode == 0 and "stopped before it served" in said and "is killed" not in said


def test_requests_under_way_end_before_the_server(folder):
    """A live request that is being answered when the server is told to end gets its answer."""
    with running_server(folder, MODELS + '[models.late]\nengine = "function"\nsource = "app.py:late"\n') as server:
        pass
    (folder / "app.py").write_text(
        CODE + "import os\ndef late(**rest):\n    open('reached', 'w').close()\n"
        "    while not os.path.exists('go'): time.sleep(0.01)\n    return {'late': True}\n"
    )
    server.start()
    try:
        request = {"model": "late", "messages": [{"role": "user", "content": "x"}]}
        answering = subprocess.Popen(
            [sys.executable, "-c", _POST, f"{server.url}/v1/chat/completions", json.dumps(request)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        while not (folder / "reached").exists():
            time.sleep(0.001)
        server.signal(signal.SIGTERM)
        (folder / "go").touch()
        assert json.loads(answering.communicate(timeout=TIMEOUT_S)[0]) == {"late": True}
        assert server.wait() == 0
    finally:
        server.close()


_POST = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request).read().decode())
"""


def test_a_stream_without_an_end_does_not_hold_up_the_server(folder):
    """Whoever watches a job when the server drains sees the stream end, and the server does not wait for them."""
    with running_server(folder, MODELS) as server:
        job = begin_batch(server, "slow").replace("batch_", "job_")
        with httpx2.stream("GET", f"{server.url}/batchmill/v1/jobs/{job}/events", timeout=TIMEOUT_S) as events:
            lines = events.iter_lines()
            assert next(lines)
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
            for _ in lines:
                pass
    stopped = [line for line in server.logged() if line["from"].startswith("batchmill") and line["level"] == "warning"]
    assert stopped == []


def test_a_second_signal_stops_at_once(folder):
    """A server that drains for long is ended at once by a second signal, and its batch goes on later."""
    with running_server(folder, MODELS) as server:
        batch = begin_batch(server, "slow")
        wait_for(server, batch, lambda view: view["request_counts"]["completed"] > 0)
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGINT)
        assert server.wait() in (0, 130)
        server.start()
        assert wait_for(server, batch, has_ended)["status"] == "completed"


def test_keys_take_effect_at_once(folder):
    """A key made beside a running server is needed from then on, works at once, and ends at once."""
    with running_server(folder, MODELS) as server, httpx2.Client(base_url=server.url) as client:
        assert client.get("/v1/models").status_code == 200
        code, key, _ = batchmill(folder, "keys", "create", "--name", "mine", "--scope", "admin")
        bearer = {"authorization": f"Bearer {key.strip()}"}
        assert (code, client.get("/v1/models").status_code) == (0, 401)
        assert client.get("/v1/models", headers=bearer).status_code == 200
        assert client.get("/health").json() == {"status": "ok"}
        assert batchmill(folder, "keys", "revoke", key.split("_")[1])[0] == 0
        assert client.get("/v1/models", headers=bearer).status_code == 401
        assert "revoked" in batchmill(folder, "keys", "list")[1]
    assert key.strip() not in server.log.read_text()


def test_keys_without_a_server(folder):
    """Keys made while no server runs count from its start."""
    key = batchmill(folder, "keys", "create", "--name", "a", "--project", "one", "--model", "echo")[1].strip()
    with running_server(folder, MODELS) as server, httpx2.Client(base_url=server.url) as client:
        assert client.get("/v1/models").status_code == 401
        found = client.get("/v1/models", auth=("anybody", key)).json()["data"]
    assert [model["id"] for model in found] == ["echo"]


@pytest.mark.parametrize(
    ("words", "config", "expected"),
    [
        (["--host", "0.0.0.0"], "", "batchmill keys create"),
        ([], '[models.a]\nengine = "function"\nsource = "none.py:f"\n', "models.a"),
        ([], "[server]\nprot = 1\n", "did you mean server.port?"),
        (["--host", "no.such.host.invalid"], "", "cannot be resolved"),
    ],
)
def test_what_cannot_be_served_is_said(folder, words, config, expected):
    """A server that cannot start says why in one line, with the way out."""
    (folder / "batchmill.toml").write_text(config)
    code, _, said = batchmill(folder, "serve", "--port", "0", *words)
    assert code == 2 and expected in said and "Traceback" not in said


def test_a_taken_port_and_a_taken_directory(folder):
    """A second server says that the port is taken, or whose the data directory is."""
    with running_server(folder, MODELS) as server:
        code, _, said = batchmill(folder, "serve", "--port", str(server.port))
        assert code == 2 and "choose another --port" in said
        code, _, said = batchmill(folder, "serve", "--port", "0")
        assert code == 2 and "another process owns the data directory" in said


def test_commands_beside_a_server(folder):
    """A command on the server's data directory speaks to the server."""
    with running_server(folder, MODELS) as server:
        batch = begin_batch(server, "echo")
        wait_for(server, batch, has_ended)
        code, listed, _ = batchmill(folder, "jobs")
    assert code == 0 and batch.replace("batch_", "job_") in listed
