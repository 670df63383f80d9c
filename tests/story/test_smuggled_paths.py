"""Paths that callers choose, joined to an address that is called with the operator's key: only the list counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from fakes.openai_service import OpenAIService
from fakes.running_server import RunningServer

CONFIG = """
[models.mini]
engine = "openai"
source = "remote"
base_url = "URL"
paths = ["/v1/own/path"]
"""
TAKEN = ("/v1/chat/completions", "/v1/own/path")
OTHERS = (
    "/v1/%2e%2e/admin", "/v1/.%2e/admin", "/v1/%2e./admin", "/v1/%252e%252e/admin", "/v1/%25252e%25252e/admin",
    "/v1/../admin", "/v1/chat/completions/../../../admin", "/v1/chat/../chat/completions", "/v1/./chat/completions",
    "/v1/..%2fadmin", "/v1/..%252fadmin", "/v1/..%5cadmin", "/v1/..\\admin", "/v1\\chat\\completions",
    "/v1//chat/completions", "//v1/chat/completions", "//evil.example/v1/chat/completions", "/v1/chat/completions/",
    "/v1/chat/completions;x=1", "/v1/..;/admin", "/v1/chat/completions%3fx=1", "/v1/chat/completions%23x",
    "/v1/chat/completions%00", "/v1/chat/completions%0d%0aX-A:%20b", "/v1/chat/completions%20",
    "/v1/chat%2fcompletions%2f..", "/v1/%c0%ae%c0%ae/admin", "/v1/%e0%80%ae%e0%80%ae/admin", "/v1/%u002e%u002e/admin",
    "/v1/%ef%bc%8e%ef%bc%8e/admin", "/v1/%e2%80%a5/admin", "/V1/chat/completions", "/v1/Chat/Completions",
    "/v1/chat/completions.", "/v1/@evil.example/x", "/v1@evil.example/v1/chat/completions", "/v1/fine_tuning/jobs",
    "/v1/batches/x", "/v1/files/x/content", "/v1/assistants", "/v1/responses/resp_1", "/v1/responses/resp_1/cancel",
    "/v1/chat/completions/chatcmpl-1", "/v1/organization/admin_api_keys", "/v1/images/generations",
    "/v1/audio/speech", "/v1/own", "/v1/own/path/more", "/v1/load_lora_adapter", "/v1/", "/v1",
)  # fmt: skip
ONLY_ROWS = (
    "/v1/chat/completions?x=1", "/v1/chat/completions#x", "/v1/chat/%63ompletions", "/v1/\u2025/admin",
    "/v1/\uff0e\uff0e/x", "http://evil.example/v1/chat/completions", "https:/v1/chat/completions",
    "v1/chat/completions", "", " /v1/chat/completions", "/v1/chat/completions\n", "/v1/chat/completions\r\nX-A: b",
    "/v1/chat/completions\0", "/v1/\u200bchat/completions",
)  # fmt: skip


@pytest.fixture
async def service() -> AsyncIterator[OpenAIService]:
    async with OpenAIService() as service:
        yield service


@pytest.fixture
def server(tmp_path: Path, service: OpenAIService) -> RunningServer:
    return RunningServer(tmp_path, CONFIG.replace("URL", service.base_url))


def body(text: str) -> dict[str, object]:
    return {"model": "mini", "messages": [{"role": "user", "content": text}]}


async def post(server: RunningServer, path: str, text: str, **more: object) -> int:
    """The status of one call, whose request line goes out as it is written here."""
    data = json.dumps(body(text) | more).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    reply = await reader.read()
    writer.close()
    return int(reply.split(b" ", 2)[1])


async def errors_of(client: httpx2.AsyncClient, rows: list[dict[str, object]]) -> list[str]:
    """The errors of a job of these rows, once it has ended: those that cannot be run have one too."""
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    made = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("rows.jsonl", data)})
    order = {"files": [made.json()["id"]], "models": ["mini"], "on_invalid": "skip"}
    job = f"/batchmill/v1/jobs/{(await client.post('/batchmill/v1/jobs', json=order)).json()['job']['id']}"
    await client.get(f"{job}/events")  # which end with the job
    return (await client.get(f"{job}/errors")).text.splitlines()


async def test_nothing_but_the_list_arrives(server: RunningServer, service: OpenAIService) -> None:
    """Of all paths of calls and rows the service sees those of the model's list, each as it stands there."""
    await asyncio.to_thread(server.start)
    try:
        for path in TAKEN:
            assert await post(server, path, path) == 200
        for path in OTHERS:
            assert await post(server, path, path) in (400, 404, 405), path
        assert [call.path for call in service.calls] == list(TAKEN)
        async with httpx2.AsyncClient(base_url=server.url, timeout=60.0, trust_env=False) as client:
            paths = (*TAKEN, *OTHERS, *ONLY_ROWS)
            rows = [
                {"custom_id": f"{n}", "method": "POST", "url": path, "body": body(path)} for n, path in enumerate(paths)
            ]
            refused = [json.loads(line)["error"]["code"] for line in await errors_of(client, rows)]
        assert refused == ["invalid_url"] * (len(OTHERS) + len(ONLY_ROWS))
        assert sorted(call.path for call in service.calls[len(TAKEN) :]) == sorted(TAKEN)
        assert all(call.headers.get("X-A") is None for call in service.calls)
    finally:
        await asyncio.to_thread(server.kill)


async def test_nobody_asks_for_more_than_an_answer(server: RunningServer, service: OpenAIService) -> None:
    """What would spend more, reach elsewhere or read the operator's account is refused and not sent."""
    asking = ({"service_tier": "priority"}, {"tools": [{"type": "web_search"}]}, {"models": ["dearer"]})
    await asyncio.to_thread(server.start)
    try:
        for more in asking:
            assert await post(server, TAKEN[0], "live", **more) == 400
        async with httpx2.AsyncClient(base_url=server.url, timeout=60.0, trust_env=False) as client:
            rows = [
                {"custom_id": f"{n}", "method": "POST", "url": TAKEN[0], "body": body("row") | more}
                for n, more in enumerate((*asking, {}))
            ]
            refused = [json.loads(line)["error"]["code"] for line in await errors_of(client, rows)]
        assert refused == ["parameter_not_allowed"] * len(asking)
        assert [call.text for call in service.calls] == ["row"]
    finally:
        await asyncio.to_thread(server.kill)
