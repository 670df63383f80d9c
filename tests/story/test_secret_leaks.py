"""Secrets that a server uses show up nowhere: every file, reply, log and command is searched for them, in any form."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import httpx2
import pytest
from fakes.echoing_service import WAYS, EchoingService
from fakes.running_server import RunningServer
from fakes.webhook_receiver import WebhookReceiver

KEPT = "canary-kept/4711+abcdefghijk"  # in the vault
EXTRA = "canary-extra=0815+lmnopqrstuv"  # in the vault, for a header
CHANGED = "canary-changed/2342+wxyzabcdef"  # in the place of KEPT
FILED = "canary-filed/1234+ghijklmnop"  # in a file that is the operator's own
VARIABLE = "canary-variable/5678+qrstuvwx"  # in the environment of the server
TOKEN = "canary-token/9012+yzabcdefgh"  # of a deployed function
PASSWORD = "canary-password/3456+ijklmnop"  # of a connector
HOOK = "whsec_" + base64.b64encode(b"canary-hook-7890-qrstuvwxyz-0123").decode()
CANARIES = (KEPT, EXTRA, CHANGED, FILED, VARIABLE, TOKEN, PASSWORD, HOOK)

FUNCTION = '''
import os
def leaky(how):
    """Does with its token what it should not."""
    token = os.environ["TOKEN"]
    if how == "raise":
        raise ValueError("the token " + token)
    if how == "exit":
        raise SystemExit("with " + token)
    return {"told": token} if how == "return" else how
'''
CONFIG = """
[server]
private_hosts = ["127.0.0.1"]

[models.kept]
engine = "openai"
source = "remote"
base_url = "SERVICE/v1"
api_key = "secret:kept"
engine_args = {{ "header.X-Extra" = "secret:extra" }}
limits = {{ attempts_max = 3 }}

[models.filed]
engine = "openai"
source = "remote"
base_url = "SERVICE/v1"
api_key = "file:operators.key"
limits = {{ attempts_max = 2 }}

[models.variable]
engine = "openai"
source = "remote"
base_url = "SERVICE/v1"
api_key = "env:CANARY_VARIABLE"
limits = {{ attempts_max = 2 }}

[[webhooks]]
url = "RECEIVER"
secret = "env:CANARY_HOOK"

[ml_commons]
trusted_connector_endpoints = ["^http://127\\\\.0\\\\.0\\\\.1:.*$"]
"""
OURS = ("operators.key", "secrets.key", "old-secrets.key")  # what may hold a secret, or what opens them


def forms_of(secret: str) -> set[str]:
    """The texts that would give a secret away, made without what batchmill finds them with."""
    found = {secret, quote(secret, safe=""), quote(secret), quote_plus(secret), secret.encode().hex()}
    for before in range(3):  # base64 of what surrounds it: the middle is the same whatever stands around
        for pack in (base64.b64encode, base64.urlsafe_b64encode):
            found.add(pack(b"x" * before + secret.encode()).decode()[4:-4])
    return {secret[:20], secret[-16:], *found}


class Ears:
    """Collects everything that anybody could see."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.heard: dict[str, str] = {}
        self.client = httpx2.AsyncClient(base_url=server.url, timeout=60.0, trust_env=False)

    async def call(self, method: str, path: str, body: Any = None, **more: Any) -> httpx2.Response:
        reply = await self.client.request(method, path, json=body, **more)
        head = "".join(f"{name}: {value}\n" for name, value in reply.headers.items())
        self.heard[f"{len(self.heard)} {method} {path} {str(body)[:60]}"] = f"{head}\n{reply.text}"
        return reply

    async def command(self, *words: str, stdin: str = "") -> tuple[int, str]:
        """A command on the server's data directory: it is told through the control socket."""
        line = [sys.executable, "-m", "batchmill", "--data-dir", str(self.server.data_dir), *words]
        done = await asyncio.to_thread(
            subprocess.run, line, cwd=self.server.folder, input=stdin, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=60,
        )  # fmt: skip
        self.heard[f"{len(self.heard)} $ batchmill {' '.join(words)}"] = done.stdout
        return done.returncode, done.stdout

    def read_files(self) -> None:
        """Every file in the server's folder, and what its database says."""
        for path in self.server.folder.rglob("*"):
            if path.is_file() and path.name not in OURS:
                self.heard[str(path)] = path.read_bytes().decode("latin-1")
        with contextlib.closing(sqlite3.connect(self.server.data_dir / "batchmill.db")) as db:
            self.heard["database"] = "\n".join(db.iterdump())

    def read_processes(self) -> None:
        """The command lines of everything that the server has started, and the environments of its workers."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes()
                if str(self.server.folder).encode() in words or b"batchmill" in words:
                    self.heard[f"{process} cmdline"] = words.decode("latin-1")
            except OSError:  # it has ended
                continue

    def check(self) -> None:
        """Fail for each canary that is found anywhere."""
        found = []
        for canary in CANARIES:
            for form in forms_of(canary):
                found += [f"{canary[:14]} as {form!r} in {place}" for place, text in self.heard.items() if form in text]
        assert not found, "\n".join(sorted(found)[:40])


@pytest.fixture
async def service() -> AsyncIterator[EchoingService]:
    async with EchoingService() as running:
        yield running


@pytest.fixture
async def receiver() -> AsyncIterator[WebhookReceiver]:
    async with WebhookReceiver() as running:
        yield running


@pytest.fixture
async def ears(tmp_path: Path, service: EchoingService, receiver: WebhookReceiver) -> AsyncIterator[Ears]:
    (tmp_path / "operators.key").write_text(FILED)
    (tmp_path / "app.py").write_text(FUNCTION)
    config = CONFIG.format().replace("SERVICE", service.url).replace("RECEIVER", receiver.url())
    environment = {"CANARY_VARIABLE": VARIABLE, "CANARY_HOOK": HOOK}
    server = RunningServer(tmp_path, config, env=environment)
    await asyncio.to_thread(server.start, "--log-level", "debug")
    ears = Ears(server)
    try:
        for name, value in (("kept", KEPT), ("extra", EXTRA), ("token", TOKEN)):
            assert (await ears.command("secrets", "set", name, stdin=value + "\n"))[0] == 0
        yield ears
    finally:
        await ears.client.aclose()
        await asyncio.to_thread(server.close)


def chat(model: str, text: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


async def end_of(ears: Ears, batch_id: str) -> dict[str, Any]:
    for _ in range(600):
        batch = (await ears.call("GET", f"/v1/batches/{batch_id}")).json()
        if batch["status"] in ("completed", "failed", "expired", "cancelled"):
            return batch
        await asyncio.sleep(0.05)
    raise AssertionError(f"the batch does not end: {batch}")


async def run_batch(ears: Ears, bodies: list[dict[str, Any]]) -> None:
    rows = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n, body in enumerate(bodies)
    ]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = (await ears.call("POST", "/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"})).json()
    request_body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    made = await ears.call("POST", "/v1/batches", request_body)
    batch = await end_of(ears, made.json()["id"])
    assert batch["request_counts"]["completed"] and batch["request_counts"]["failed"], batch
    for file_id in (batch["output_file_id"], batch["error_file_id"]):
        await ears.call("GET", f"/v1/files/{file_id}/content")


async def test_a_service_that_repeats_its_key(ears: Ears, service: EchoingService, receiver: WebhookReceiver) -> None:
    """However a service repeats the keys it was given, live and in batches, nobody can read them afterwards."""
    receiver.answers["/hook"] = [500]
    for model in ("kept", "filed", "variable"):
        for way in WAYS:
            await ears.call("POST", "/v1/chat/completions", chat(model, way))
        await ears.call("POST", "/v1/chat/completions", chat(model, "answer", stream=True))
    rows = [way for way in WAYS if way not in ("unauthorized", "reset", "limited", "break")]
    await run_batch(ears, [chat(model, way) for model in ("kept", "filed", "variable") for way in rows])
    sent = {value for headers in service.seen for value in headers.values()}
    assert {f"Bearer {each}" for each in (KEPT, FILED, VARIABLE)} | {EXTRA} <= sent
    await receiver.wait_for(1)
    await look_around(ears)
    await asyncio.to_thread(ears.server.close)
    ears.read_files()
    ears.check()


async def test_a_job_that_pauses_for_a_refused_key(ears: Ears, service: EchoingService) -> None:
    """The reason of a job that its service refused holds the service's words, without the key."""
    (ears.server.folder / "in.jsonl").write_text(
        json.dumps(
            {"custom_id": "r", "method": "POST", "url": "/v1/chat/completions", "body": chat("", "unauthorized")}
        )
    )
    code, result = await ears.command("run", "in.jsonl", "--model", "kept", "-o", "out.jsonl")
    assert code == 4 and "***" in result
    code, result = await ears.command("run", "in.jsonl", "--json", "--model", "filed", "-o", "out2.jsonl")
    assert code == 4
    await look_around(ears)
    await asyncio.to_thread(ears.server.kill)
    ears.read_files()
    ears.check()


async def test_a_function_that_gives_its_secret_away(ears: Ears) -> None:
    """What a deployed function raises with its secret in it reaches callers, rows and logs without it."""
    order = ("deploy", "app.py:leaky", "--secret", "TOKEN=secret:token", "--example")
    code, result = await ears.command(*order, '{"how":"return"}')
    assert code == 0, result
    for how in ("raise", "exit", "fine"):  # what it returns to who called it is what its author wrote
        await ears.call("POST", "/v1/leaky/latest", {"data": [[1, how]]})
        await ears.call("POST", "/v2/models/leaky/infer", {"inputs": [
            {"name": "how", "shape": [1], "datatype": "BYTES", "data": [how]}]})  # fmt: skip
    (ears.server.folder / "in.jsonl").write_text(
        "".join(f'{{"how": "{how}"}}\n' for how in ("raise", "fine", "return"))
    )
    code, result = await ears.command("run", "in.jsonl", "--model", "leaky", "-o", "out.jsonl")
    assert code == 3, result
    (ears.server.folder / "app.py").write_text(FUNCTION.replace("else how", "else 'other'"))
    code, result = await ears.command(*order, '{"how":"raise"}')
    assert code == 1 and "the token ***" in result
    await look_around(ears)
    await asyncio.to_thread(ears.server.close)
    ears.read_files()
    ears.check()


async def test_secrets_that_change(ears: Ears, service: EchoingService, tmp_path: Path) -> None:
    """Secrets are changed, rotated, listed and removed beside a running server, and shown by none of it."""
    await ears.call("POST", "/v1/chat/completions", chat("kept", "answer"))
    await ears.command("secrets", "set", "kept", stdin=CHANGED)
    await until(ears, service, f"Bearer {CHANGED}")
    code, result = await ears.command("secrets", "rotate")
    assert code == 0 and "3 secrets" in result
    await ears.call("POST", "/v1/chat/completions", chat("kept", "refuse"))
    _, result = await ears.command("secrets", "list")
    assert "kept" in result and f"…{CHANGED[-4:]}" in result
    await ears.command("--json", "secrets", "list")
    await asyncio.to_thread(ears.server.kill)
    await asyncio.to_thread(ears.server.start)
    ears.client.base_url = httpx2.URL(ears.server.url)
    seen = len(service.seen)
    await ears.call("POST", "/v1/chat/completions", chat("kept", "answer"))
    assert service.seen[seen]["Authorization"] == f"Bearer {CHANGED}"
    assert (await ears.command("secrets", "remove", "kept"))[0] == 0
    while (reply := await ears.call("POST", "/v1/chat/completions", chat("kept", "answer"))).status_code == 200:
        await asyncio.sleep(0.05)
    assert "batchmill secrets set kept" in reply.text
    for words in (("set", "kept", KEPT), ("set", "no/name"), ("set", "kept")):  # never on the command line
        code, result = await ears.command("secrets", *words, stdin="" if len(words) == 2 else KEPT)
        assert code == 2
        ears.heard = {place: text for place, text in ears.heard.items() if KEPT not in place}
    await look_around(ears)
    await asyncio.to_thread(ears.server.close)
    ears.read_files()
    ears.check()


async def test_a_connector_made_over_the_api(ears: Ears, service: EchoingService) -> None:
    """The credential of a connector is used, and neither its document nor an answer, error or file shows it."""
    plugin = "/_plugins/_ml"
    connector = {
        "name": "echoing", "version": "1", "protocol": "http", "credential": {"key": PASSWORD},
        "parameters": {"endpoint": service.url.removeprefix("http://")},
        "actions": [{
            "action_type": "predict", "method": "POST", "url": "http://${parameters.endpoint}/v1/anything",
            "headers": {"Authorization": "Basic ${credential.key}"}, "request_body": '{"way": "${parameters.way}"}',
        }],
    }  # fmt: skip
    batch = {**connector["actions"][0], "action_type": "batch_predict", "url": "http://${parameters.endpoint}/openai"}
    connector["actions"].append(batch)
    made = await ears.call("POST", f"{plugin}/connectors/_create", connector)
    assert made.status_code == 200, made.text
    connector_id = made.json()["connector_id"]
    model = {"name": "echo", "function_name": "remote", "connector_id": connector_id}
    registered = await ears.call("POST", f"{plugin}/models/_register?deploy=true", model)
    model_id = registered.json()["model_id"]
    for way in WAYS:
        await ears.call("POST", f"{plugin}/models/{model_id}/_predict", {"parameters": {"way": way}})
    for way in WAYS:
        reply = await ears.call("POST", f"{plugin}/models/{model_id}/_batch_predict", {"parameters": {"way": way}})
        if reply.status_code == 200:
            await ears.call("GET", f"{plugin}/tasks/{reply.json()['task_id']}")
            await ears.call("POST", f"{plugin}/tasks/{reply.json()['task_id']}/_cancel")
    assert any(headers.get("Authorization") == f"Basic {PASSWORD}" for headers in service.seen)
    (ears.server.folder / "in.jsonl").write_text(
        "".join(f'{{"way": "{way}"}}\n' for way in ("answer", "refuse", "html"))
    )
    await ears.command("run", "in.jsonl", "--model", model_id, "-o", "out.jsonl")
    changed = {"credential": {"key": CHANGED}}
    assert (await ears.call("PUT", f"{plugin}/connectors/{connector_id}", changed)).status_code in (200, 409)
    await ears.call("POST", f"{plugin}/models/{model_id}/_undeploy")
    assert (await ears.call("PUT", f"{plugin}/connectors/{connector_id}", changed)).status_code == 200
    await ears.call("POST", f"{plugin}/models/{model_id}/_predict", {"parameters": {"way": "answer"}})
    assert service.seen[-1]["Authorization"] == f"Basic {CHANGED}"
    wrong = {**connector, "credential": {"key": KEPT}, "protocol": "carrier pigeon"}
    await ears.call("POST", f"{plugin}/connectors/_create", wrong)
    await ears.call("GET", f"{plugin}/connectors/{connector_id}")
    await ears.call("GET", f"{plugin}/models/{model_id}")
    for index in ("connectors", "models", "tasks", "model_groups"):
        await ears.call("POST", f"{plugin}/{index}/_search", {"query": {"match_all": {}}})
    await ears.call("POST", f"{plugin}/connectors/_search", {"query": {"match": {"credential.key": CHANGED}}})
    del ears.heard[next(reversed(ears.heard))]  # which repeats what was asked
    _, reply = await ears.command("secrets", "list")
    assert f"connector/{connector_id}/key" in reply
    await look_around(ears)
    await asyncio.to_thread(ears.server.close)
    ears.read_files()
    ears.check()


async def until(ears: Ears, service: EchoingService, key: str) -> None:
    """Call until the service is sent this key."""
    for _ in range(200):
        seen = len(service.seen)
        await ears.call("POST", "/v1/chat/completions", chat("kept", "answer"))
        if service.seen[seen]["Authorization"] == key:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the new key never arrived")


async def look_around(ears: Ears) -> None:
    """What people look at."""
    ears.read_processes()
    for path in ("/v1/models", "/metrics", "/readyz", "/openapi.json", "/v1/files", "/v1/batches", "/native/v1/jobs"):
        await ears.call("GET", path)
    _, listed = await ears.command("--json", "jobs")
    await ears.command("models")
    for line in listed.splitlines():
        job = json.loads(line)
        if "job" in job or "id" in job:
            job_id = (job.get("job") or job)["id"]
            for words in (("show", job_id), ("explain", job_id), ("--json", "show", job_id), ("results", job_id)):
                await ears.command(*words)
