"""A server that is told to stop while rows run that do not end."""

from __future__ import annotations

import asyncio
import json

import httpx2
from dialects.open_server import open_server

ROW = {"custom_id": "a", "method": "POST", "url": "/v1/gated", "body": {"model": "gated", "n": 7}}


async def test_rows_that_do_not_end_run_again(tmp_path):
    """After its time to drain the server ends all the same, lets go of its data directory, and the next one goes on."""
    async with open_server(tmp_path, rows_drain_s=0.2) as running, httpx2.AsyncClient(base_url=running.url) as http:
        sent = await http.post(
            "/v1/files", files={"file": ("a.jsonl", json.dumps(ROW).encode())}, data={"purpose": "batch"}
        )
        order = {"input_file_id": sent.json()["id"], "endpoint": "/v1/gated", "completion_window": "1h"}
        batch = (await http.post("/v1/batches", json=order)).json()["id"]
        while not _in_flight(running):
            await asyncio.sleep(0.02)
    (tmp_path / "gate").touch()
    async with open_server(tmp_path) as running, httpx2.AsyncClient(base_url=running.url) as http:
        while (found := (await http.get(f"/v1/batches/{batch}")).json())["status"] != "completed":
            await asyncio.sleep(0.05)
        assert found["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        lines = (await http.get(f"/v1/files/{found['output_file_id']}/content")).text.splitlines()
        assert [json.loads(line)["response"]["body"] for line in lines] == [{"n": 7}]


def _in_flight(running) -> int:
    return sum(gauge.in_flight for gauge in running.services.gauges())
