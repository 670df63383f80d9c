"""A server whose machine is lost: another one with its configuration and key file has its files, functions and jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fakes.lost_machine import lose
from fakes.running_server import RunningServer
from fakes.s3_server import bucket_client, s3_environment, s3_server

BUCKET = "lost-servers"
SECRET = "secret-of-the-store-77"
ROWS = 40
TIMEOUT_S = 60
CODE = """
import os

def doubler(foo: int):
    return 2 * foo

def echo(n=0, **rest):
    return {"n": n, "names": sorted(os.environ)}
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    (tmp_path / "app.py").write_text(CODE)
    config = (
        '[models.echo]\nengine = "function"\nsource = "app.py:echo"\n'
        f'[storage]\nobjects = "s3://{BUCKET}/server"\n[secrets]\nkey_file = "{tmp_path / "keys"}"\n'
    )
    with s3_server() as url, bucket_client(url, BUCKET):
        server = RunningServer(tmp_path, config, env={**s3_environment(url), "AWS_SECRET_ACCESS_KEY": SECRET})
        try:
            yield server.start()
        finally:
            server.close()


def row(n: int) -> str:
    body = {"model": "echo", "n": n, "messages": [{"role": "user", "content": "x"}]}
    return json.dumps({"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"


def upload(client: httpx2.Client, rows: range) -> str:
    files = {"file": ("in.jsonl", "".join(map(row, rows)))}
    return client.post("/v1/files", data={"purpose": "batch"}, files=files).raise_for_status().json()["id"]


def run(client: httpx2.Client, file: str) -> dict[str, Any]:
    """Run a batch to its end."""
    order = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=order).raise_for_status().json()
    while batch["status"] not in ("completed", "failed"):
        time.sleep(0.01)
        batch = client.get(f"/v1/batches/{batch['id']}").raise_for_status().json()
    assert batch["status"] == "completed", batch
    return batch


def content(client: httpx2.Client, file: str) -> str:
    return client.get(f"/v1/files/{file}/content").raise_for_status().text


def deploy(folder: Path) -> None:
    words = [sys.executable, "-m", "batchmill", "--data-dir", str(folder / "data"), "deploy", "app.py:doubler"]
    done = subprocess.run(words, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(180)
def test_what_a_lost_server_had(server: RunningServer) -> None:
    """Uploads, parts of uploads, results and functions are there on an empty data directory, and can be deleted."""
    deploy(server.folder)
    with httpx2.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        file = upload(client, range(ROWS))
        batch = run(client, file)
        results = content(client, batch["output_file_id"])
        new = {"purpose": "batch", "filename": "parts.jsonl", "bytes": len(row(7)), "mime_type": "application/jsonl"}
        begun = client.post("/v1/uploads", json=new).raise_for_status().json()["id"]
        part = client.post(f"/v1/uploads/{begun}/parts", files={"data": ("part", row(7))}).raise_for_status().json()
    server.kill()
    lose(server.data_dir)
    server.start()
    with httpx2.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        assert content(client, file) == "".join(map(row, range(ROWS)))
        assert content(client, batch["output_file_id"]) == results
        assert len(results.splitlines()) == ROWS
        assert "PATH" in results and "AWS_" not in results, "functions get no credentials"
        call = client.post("/v1/doubler/latest", json={"data": [[1, 21]]})
        assert call.raise_for_status().json() == {"data": [[1, 42]]}
        done = client.post(f"/v1/uploads/{begun}/complete", json={"part_ids": [part["id"]]}).raise_for_status().json()
        assert content(client, done["file"]["id"]) == row(7)
        assert run(client, file)["request_counts"]["completed"] == ROWS
        client.delete(f"/v1/files/{batch['output_file_id']}").raise_for_status()
        assert client.get(f"/v1/files/{batch['output_file_id']}/content").status_code == 410
    written = [path for path in server.folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert written == [], "the secret is in no job.json, log or database"


def test_a_key_file_that_would_be_lost(tmp_path: Path) -> None:
    """With a key file in the data directory, nothing starts, and the sentence names the way out."""
    (tmp_path / "batchmill.toml").write_text('[storage]\nobjects = "s3://bucket/batchmill"\n')
    words = [sys.executable, "-m", "batchmill", "--data-dir", str(tmp_path / "data"), "serve", "--port", "0"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert "set secrets.key_file to a path outside of it" in done.stderr
