"""A server with the dialect of ML Commons, beside a service that its connectors may reach, and a client of both."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
from dialects.open_server import open_server
from fakes.remote_service import RemoteService

from batchmill.serving import Running

PREFIX = "/_plugins/_ml"
CONFIG = """
[server]
private_hosts = ["127.0.0.0/8"]
"""


class Commons:
    """`ask` sends a request and gives the status with the body; the rest are walks that many tests begin with."""

    def __init__(self, running: Running, service: RemoteService, http: httpx2.AsyncClient) -> None:
        self.running, self.service, self.http = running, service, http

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        if body is not None:
            options["json"] = body
        reply = await self.http.request(method, path if path.startswith("/_plug") else PREFIX + path, **options)
        return reply.status_code, reply.json()

    async def done(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """The body of a reply that must be a success."""
        status, result = await self.ask(method, path, body, **options)
        assert status == 200, result
        return result

    async def reason(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, str, str]:
        """Status, type and reason of a reply that must be an error."""
        status, result = await self.ask(method, path, body, **options)
        assert status >= 400 and result["status"] == status, result
        assert result["error"]["root_cause"] == [{name: result["error"][name] for name in ("type", "reason")}]
        return status, result["error"]["type"], result["error"]["reason"]

    async def connector(self, **fields: Any) -> str:
        reply = await self.done("POST", "/connectors/_create", self.service.connector(**fields))
        return reply["connector_id"]

    async def model(self, connector_id: str | None = None, **fields: Any) -> str:
        body = {"name": "m", "function_name": "remote", "connector_id": connector_id or await self.connector()}
        reply = await self.done("POST", "/models/_register?deploy=true", body | fields)
        return reply["model_id"]


@contextlib.asynccontextmanager
async def commons(folder: Path, config: str = "") -> AsyncIterator[Commons]:
    async with (
        RemoteService() as service,
        open_server(folder, CONFIG + config) as running,
        httpx2.AsyncClient(base_url=running.url, timeout=60) as http,
    ):
        yield Commons(running, service, http)
