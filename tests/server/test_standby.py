"""A server that stands by: it answers everything with 503, and tells only callers with a key where the owner is."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from fakes.databases import open_database

from batchmill.engines.clock import SystemClock
from batchmill.server.connection import bind, url_of
from batchmill.server.standby import HEAD_BYTES_MAX, Standby
from batchmill.services.keys import KeyService
from batchmill.types import Scope


@pytest.fixture
async def standing_by(tmp_path: Path):
    """(the URL, the standby, a valid key)."""
    database, sock = open_database(tmp_path / "batchmill.db"), bind("127.0.0.1", 0)
    made = await KeyService(database, SystemClock()).create(name="k", project="p", scope=Scope.READ)
    standby = Standby(sock, database, SystemClock())
    standby.owner = "http://owner:8000"
    await standby.open()
    yield url_of(sock), standby, made.key
    await standby.close()
    sock.close()
    database.close()


async def test_every_request_is_refused_for_now(standing_by):
    """Any path and method gets 503 with a time to retry; only a valid key is told where the owner is."""
    url, _, key = standing_by
    async with httpx2.AsyncClient(base_url=url) as http:
        for method, path in (("GET", "/ready"), ("POST", "/v1/batches"), ("HEAD", "/health")):
            reply = await http.request(method, path, content=b"{}" if method == "POST" else None)
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
            assert "owner:8000" not in reply.text
        told = await http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert "http://owner:8000" in told.json()["error"]["message"]
        for wrong in (key[:-1], "bm_0000000000000000_x", "x" * 1000):
            reply = await http.get("/v1/models", headers={"Authorization": f"Bearer {wrong}"})
            assert (reply.status_code, "owner:8000" in reply.text) == (503, False)


async def test_a_head_without_end_is_cut_off(standing_by):
    """A request head beyond the limit closes its connection, and others are answered."""
    url, _, _ = standing_by
    async with httpx2.AsyncClient(base_url=url) as http:
        with pytest.raises(httpx2.TransportError):
            await http.get("/", headers={"x": "y" * (HEAD_BYTES_MAX + 1)})
        assert (await http.get("/")).status_code == 503
