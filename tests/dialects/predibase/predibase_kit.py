"""Predibase's API of a real server, spoken over plain HTTP, with a function in the place of a language model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2

MISSING_ID = "00000000-0000-4000-8000-000000000000"
WAITS, WAIT_S = 1200, 0.05


def row(number: int, **body: Any) -> dict[str, Any]:
    """A batch row as the documentation shows it."""
    body = {"model": "", "messages": [{"role": "user", "content": f"question {number}"}], **body}
    return {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in rows)


class Predibase:
    """What the published client does, step by step."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self.http = http

    async def begin(self, filename: str = "in.jsonl", mime: str = "text/plain") -> dict[str, Any]:
        reply = await self.http.post("/v2/datasets/upload", json={"fileName": filename, "mimeType": mime})
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def put(self, url: str, data: Any, mime: str = "text/plain") -> httpx2.Response:
        return await self.http.put(url, content=data, headers={"content-type": mime})

    async def name(self, token: str, name: str) -> httpx2.Response:
        return await self.http.put("/v2/datasets/upload", json={"name": name, "uploadToken": token})

    async def get(self, name: str, connection: str = "file_uploads") -> httpx2.Response:
        return await self.http.get(f"/v1/datasets/name/{name}?connectionName={connection}")

    async def upload(self, data: bytes, name: str = "rows", filename: str = "in.jsonl") -> dict[str, Any]:
        """A dataset whose check has come to its end."""
        begun = await self.begin(filename)
        assert (await self.put(begun["presignedUrl"], data)).status_code == 200
        named = await self.name(begun["uploadToken"], name)
        assert named.status_code == 200, named.text
        return await self.until_checked(name)

    async def until_checked(self, name: str) -> dict[str, Any]:
        for _ in range(WAITS):
            reply = (await self.get(name)).json()
            if reply["status"] != "pending":
                return reply
            await asyncio.sleep(WAIT_S)
        raise AssertionError(f"the dataset {name} is still pending: {reply}")

    async def create(self, dataset: str, **config: Any) -> httpx2.Response:
        body = {"dataset": dataset, "serverConfig": {**EMPTY, **config}}
        return await self.http.post("/v2/batch-inference", json=body)

    async def until_over(self, job: str) -> dict[str, Any]:
        for _ in range(WAITS):
            reply = (await self.http.get(f"/v2/batch-inference/{job}")).json()
            if reply["status"] not in ("queued", "running"):
                return reply
            await asyncio.sleep(WAIT_S)
        raise AssertionError(f"the job {job} is not over: {reply}")


EMPTY = {
    "customArgs": None, "hfToken": None, "loraxImageTag": None, "baseModel": "double", "quantization": None,
    "backend": None,
}  # fmt: skip
