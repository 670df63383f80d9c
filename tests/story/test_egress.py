"""Connectors made over the API lead nowhere but to the public internet and what the operator listed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fakes.running_server import RunningServer
from fakes.webhook_receiver import WebhookReceiver

PLUGIN = "/_plugins/_ml"
ANYWHERE = '[ml_commons]\ntrusted_connector_endpoints = [".*"]\n'  # so that the guard alone stands in the way
INSIDE = (
    "http://127.0.0.1:PORT/x", "https://127.0.0.1:PORT/x", "http://localhost:PORT/x", "https://localhost:PORT/x",
    "https://127.1:PORT/x", "https://2130706433:PORT/x", "https://0x7f.1:PORT/x", "https://0177.0.0.1:PORT/x",
    "https://[::1]:PORT/x", "https://[::ffff:127.0.0.1]:PORT/x",
    "https://[::ffff:0:127.0.0.1]:PORT/x", "https://[64:ff9b::7f00:1]:PORT/x",
    "https://0.0.0.0:PORT/x", "https://[::]:PORT/x", "https://user@127.0.0.1:PORT/x", "https://localhost.:PORT/x",
    "https://127.0.0.1:PORT\\@example.com/x", "https://10.0.0.1/x", "https://172.16.0.1/x", "https://192.168.0.1/x",
    "https://100.64.0.1/x", "https://169.254.169.254/latest/meta-data/", "http://169.254.169.254/latest/meta-data/",
    "https://[fd00:ec2::254]/latest", "https://[fe80::1]/x", "https://[fc00::1]/x", "https://100.100.100.200/x",
    "https://168.63.129.16/x", "https://metadata.google.internal:22/x", "file:///etc/passwd", "gopher://127.0.0.1:PORT/x",
)  # fmt: skip
NEVER = ("http://169.254.169.254/x", "https://[fd00:ec2::254]/x", "http://100.100.100.200/x", "https://[fe80::1]/x")


@pytest.fixture
async def inside() -> AsyncIterator[WebhookReceiver]:
    """What nobody may reach."""
    async with WebhookReceiver() as running:
        yield running


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose operator listed no private host."""
    server = RunningServer(tmp_path_factory.mktemp("closed"), ANYWHERE).start()
    yield server
    server.close()


class Door:
    """Makes connectors, and models of them, over the API."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self.client = httpx2.AsyncClient(base_url=server.url, timeout=60.0, trust_env=False)

    async def model(self, url: str, host: str = "nowhere.invalid") -> httpx2.Response | str:
        """The id of a model that calls `url`; the refusal of the connector, where that comes first.

        `host`: the connector's own parameter of that name.
        """
        action = {
            "action_type": "predict", "method": "POST", "url": url, "request_body": '{"x": "${parameters.x:-1}"}',
            "headers": {"Authorization": "Bearer ${credential.key}"},
        }  # fmt: skip
        connector = {
            "name": "c", "version": "1", "protocol": "http", "credential": {"key": "a-key-of-the-caller"},
            "parameters": {"host": host}, "actions": [action],
        }  # fmt: skip
        made = await self.client.post(f"{PLUGIN}/connectors/_create", json=connector)
        if made.status_code != 200:
            return made
        model = {"name": "m", "function_name": "remote", "connector_id": made.json()["connector_id"]}
        registered = await self.client.post(f"{PLUGIN}/models/_register?deploy=true", json=model)
        assert registered.status_code == 200, registered.text
        return registered.json()["model_id"]

    async def call(
        self, url: str, parameters: dict[str, Any] | None = None, host: str = "nowhere.invalid"
    ) -> httpx2.Response:
        """What became of a call of that URL."""
        model = await self.model(url, host)
        if isinstance(model, httpx2.Response):
            return model
        body = {"parameters": parameters or {"x": "1"}}
        return await self.client.post(f"{PLUGIN}/models/{model}/_predict", json=body)


@pytest.fixture
async def frontend(closed: RunningServer) -> AsyncIterator[Door]:
    made = Door(closed)
    yield made
    await made.client.aclose()


def is_refusal(reply: httpx2.Response) -> bool:
    """It says that the place is not allowed, and repeats nothing that was found there."""
    return 400 <= reply.status_code < 500 and "error" in reply.json()


@pytest.mark.parametrize("url", INSIDE)
async def test_no_connector_leads_inside(frontend: Door, inside: WebhookReceiver, url: str) -> None:
    """However an address inside is written, a connector for it is refused, or its call is; nothing is ever sent."""
    reply = await frontend.call(url.replace("PORT", str(inside.port)))
    assert is_refusal(reply), reply.text
    assert inside.deliveries == []


@pytest.mark.parametrize(
    "host", ["127.0.0.1:PORT", "localhost:PORT", "user@127.0.0.1:PORT", "127.0.0.1:PORT/#", "[::1]:PORT", "10.0.0.1",
             "169.254.169.254", "127.0.0.1:PORT\\", "%31%32%37.0.0.1:PORT"],
)  # fmt: skip
async def test_no_parameter_leads_inside(frontend: Door, inside: WebhookReceiver, host: str) -> None:
    """A parameter that is the host is judged as a host, and no caller's parameter can take its place."""
    host = host.replace("PORT", str(inside.port))
    reply = await frontend.call("https://${parameters.host}/x", host=host)
    assert is_refusal(reply)
    reply = await frontend.call("https://${parameters.host}/x", {"host": host})
    assert reply.status_code >= 400 and host not in reply.text
    reply = await frontend.call("https://${parameters.other}/x", {"other": host})
    assert is_refusal(reply)
    assert inside.deliveries == []


async def test_a_row_does_not_lead_inside(closed: RunningServer, frontend: Door, inside: WebhookReceiver) -> None:
    """Rows of a batch are held to the same rules as live requests."""
    model = await frontend.model("https://${parameters.host}/x", host=f"localhost:{inside.port}")
    assert isinstance(model, str), model.text
    rows = [{"host": f"127.0.0.1:{inside.port}"}, {"host": f"localhost:{inside.port}"}, {"host": "169.254.169.254"}]
    data = "".join(
        json.dumps({"custom_id": f"r{n}", "method": "POST", "url": "/v1/x", "body": {"model": model, **row}}) + "\n"
        for n, row in enumerate(rows)
    )
    file = await frontend.client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"})
    body = {"input_file_id": file.json()["id"], "endpoint": "/v1/x", "completion_window": "24h"}
    made = await frontend.client.post("/v1/batches", json=body)
    if made.status_code == 200:
        batch = made.json()
        while batch["status"] not in ("completed", "failed", "cancelled", "expired"):
            await asyncio.sleep(0.02)
            batch = (await frontend.client.get(f"/v1/batches/{batch['id']}")).json()
        assert batch["request_counts"]["completed"] == 0
    assert inside.deliveries == []


async def test_what_is_listed_is_called_and_nothing_else(tmp_path: Path, inside: WebhookReceiver) -> None:
    """A listed host is reached, its redirects are not followed, and metadata stays closed whatever is listed."""
    hosts = '[server]\nprivate_hosts = ["127.0.0.1", "169.254.0.0/16", "fd00::/8", "fe80::/10", "100.64.0.0/10"]\n'
    server = RunningServer(tmp_path, hosts + ANYWHERE).start()
    frontend = Door(server)
    try:
        await frontend.call(inside.url("/open"))
        assert [each.path for each in inside.deliveries] == ["/open"]
        inside.answers["/moved"] = [(307, {"location": f"http://localhost:{inside.port}/inside"})] * 9
        reply = await frontend.call(inside.url("/moved"))
        assert reply.status_code >= 400
        assert {each.path for each in inside.deliveries} == {"/open", "/moved"}
        seen = len(inside.deliveries)
        for url in (f"http://localhost:{inside.port}/by-name", f"https://[::1]:{inside.port}/v6", *NEVER):
            assert is_refusal(await frontend.call(url)), url
        assert len(inside.deliveries) == seen
    finally:
        await frontend.client.aclose()
        server.close()


async def test_whoever_runs_the_machine_reaches_it(tmp_path: Path, inside: WebhookReceiver) -> None:
    """A connector of the configuration goes where it says, but not to where a cloud keeps credentials."""
    for name, url in (("near", inside.url("/trusted")), ("metadata", NEVER[0])):
        action = {"action_type": "predict", "method": "POST", "url": url, "request_body": "{}"}
        connector = {"name": name, "version": "1", "protocol": "http", "credential": {"key": "env:HOME"},
                     "actions": [action]}  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(connector))
    entries = [f'[models.{name}]\nengine = "connector"\nsource = "{name}.json"\n' for name in ("near", "metadata")]
    server = RunningServer(tmp_path, "".join(entries)).start()
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n')
    line = [sys.executable, "-m", "batchmill", "--data-dir", str(server.data_dir), "run", "in.jsonl", "--model"]
    try:
        for name in ("near", "metadata"):
            command = [*line, name, "-o", f"{name}.out.jsonl"]
            done = await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, capture_output=True, timeout=60)
            assert done.returncode, done
        assert {each.path for each in inside.deliveries} == {"/trusted"}
    finally:
        server.close()
