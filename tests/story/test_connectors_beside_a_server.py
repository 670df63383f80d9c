"""Connectors made by a command while a server runs: it offers their models at once, and calls with the newest key."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from fakes.running_server import RunningServer, running_server
from story.openai_story import ended, result_lines, submit

END_S = 60.0
FIRST, SECOND = "sk-first-0123456789abcdef", "sk-second-0123456789abcdef"
Command = Callable[..., list[dict[str, Any]]]


class Embeddings:
    """A service in a thread of its own that embeds a text as its length. `seen`: key and model of each call."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(END_S)

    async def _open(self) -> int:
        app = web.Application()
        app.router.add_post("/v1/embeddings", self._embed)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self._runner.addresses[0][1]

    async def _embed(self, request: web.Request) -> web.Response:
        request_body = await request.json()
        self.seen.append((request.headers["Authorization"].removeprefix("Bearer "), request_body["model"]))
        data = [{"object": "embedding", "index": 0, "embedding": [float(len(str(request_body["input"])))]}]
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        return web.json_response({"object": "list", "data": data, "model": request_body["model"], "usage": usage})

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        self._loop.close()

    def connector(self, **changes: Any) -> dict[str, Any]:
        action = {
            "action_type": "predict",
            "method": "POST",
            "url": f"http://127.0.0.1:{self.port}/v1/embeddings",
            "headers": {"Authorization": "Bearer ${credential.key}"},
            "request_body": '{"input": ${parameters.input}, "model": "${parameters.model}"}',
        }
        fields: dict[str, Any] = {"name": "Lengths", "version": 1, "protocol": "http", "actions": [action]}
        return fields | {"parameters": {"model": "lengths-1"}, "credential": {"key": FIRST}} | changes


@pytest.fixture(scope="module")
def service() -> Iterator[Embeddings]:
    service = Embeddings()
    yield service
    service.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server"), "") as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
        yield client


@pytest.fixture
def batchmill(server: RunningServer, tmp_path: Path) -> Command:
    """Run a command over the server's data directory; what it says."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHMILL_")}

    def run(*words: str, code: int = 0) -> list[dict[str, Any]]:
        line = [sys.executable, "-m", "batchmill", "--json", "--data-dir", str(server.data_dir), *words]
        done = subprocess.run(line, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=END_S, check=False)
        assert done.returncode == code, done.stderr
        return [json.loads(each) for each in done.stdout.splitlines()]

    return run


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Any], str]:
    def write(name: str, data: Any) -> str:
        (tmp_path / name).write_text(json.dumps(data))
        return name

    return write


def test_a_connector_is_a_model_at_once(server, service, client, batchmill, write) -> None:
    """What a command made, the server's clients call by its id and its name, live and in batches, until it is gone."""
    made = batchmill("connectors", "create", write("c.json", service.connector()), "--model", "lengths")[0]
    connector_id, model_id = made["connector"]["id"], made["model"]["id"]
    for name in (model_id, "lengths"):
        reply = client.embeddings.create(model=name, input="four", encoding_format="float")
        assert reply.data[0].embedding == [4.0]
    assert set(service.seen) == {(FIRST, "lengths-1")}  # batchmill's own names go no further
    assert model_id in [each.id for each in client.models.list()]

    batchmill("connectors", "update", connector_id, write("u.json", {"credential": {"key": SECOND}}))
    service.seen.clear()
    client.embeddings.create(model="lengths", input="four", encoding_format="float")
    assert service.seen == [(SECOND, "lengths-1")]

    assert batch(client, ["a", "bb", "ccc"], "lengths") == {"0": [1.0], "1": [2.0], "2": [3.0]}

    server.kill()
    server.start()
    client.base_url = f"{server.url}/v1"
    assert client.embeddings.create(model="lengths", input="five!", encoding_format="float").data[0].embedding == [5.0]

    result = batchmill("connectors", "delete", connector_id, code=2)[0]
    assert result["code"] == "connector_in_use"
    batchmill("connectors", "delete", connector_id, "--models")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="lengths", input="four")
    assert batchmill("secrets", "list") == []


def batch(client: openai.OpenAI, texts: list[str], model: str) -> dict[str, list[float]]:
    """Each text's vector, by its number, through a batch."""
    url = "/v1/embeddings"
    rows = [
        {"custom_id": str(n), "method": "POST", "url": url, "body": {"model": model, "input": text}}
        for n, text in enumerate(texts)
    ]
    job = ended(client, submit(client, rows, endpoint=url))
    assert (job.status, job.request_counts and job.request_counts.failed) == ("completed", 0), job
    answers = result_lines(client, job.output_file_id)
    return {each["custom_id"]: each["response"]["body"]["data"][0]["embedding"] for each in answers}


def test_no_secret_is_shown(server, service, batchmill, write) -> None:
    """No command, log or file of the data directory shows a credential."""
    made = batchmill("connectors", "create", write("c.json", service.connector(credential={"key": "canary" * 5})))[0]
    shown = [made, *batchmill("connectors", "show", made["connector"]["id"]), *batchmill("connectors", "list")]
    files = [path.read_bytes() for path in server.data_dir.rglob("*") if path.is_file()]
    for each in (json.dumps(shown).encode(), server.log.read_bytes(), *files):
        assert b"canary" * 5 not in each
