"""A server killed between two durable steps of an upload: what the client does next ends with one sound dataset."""

from __future__ import annotations

import json
import time

import httpx2
import pytest
from fakes.running_server import RunningServer

from batchmill.faults import DATASET_POINTS
from batchmill.store.file_log import FILE_BYTES_MAX

WAIT_S = 100.0


def line_of(length: int) -> bytes:
    body = {"messages": [{"role": "user", "content": "a" * length}]}
    row = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(row).encode() + b"\n"


def upload(url: str, name: str, line: bytes) -> dict:
    """A dataset as the published client makes one: by steps, of which any may fail."""
    with httpx2.Client(base_url=url, timeout=WAIT_S) as http:
        begun = http.post("/v2/datasets/upload", json={"fileName": "in.jsonl", "mimeType": ""}).json()
        http.put(begun["presignedUrl"], content=line).raise_for_status()
        named = {"name": name, "uploadToken": begun["uploadToken"]}
        http.put("/v2/datasets/upload", json=named).raise_for_status()
        return until_checked(url, name)


def until_checked(url: str, name: str) -> dict:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        reply = httpx2.get(f"{url}/v1/datasets/name/{name}")
        reply.raise_for_status()
        if reply.json()["status"] != "pending":
            return reply.json()
        time.sleep(0.05)
    raise AssertionError(f"{name} is still pending")


@pytest.mark.parametrize("point", [*DATASET_POINTS, "after_settle"])
def test_an_upload_that_a_kill_cut_off(point, tmp_path):
    """The same upload again is a connected dataset; one that had its name is checked without anybody asking."""
    line = line_of(FILE_BYTES_MAX if point == "after_settle" else 1)  # only a long file is settled by itself
    server = RunningServer(tmp_path, env={"BATCHMILL_FAULT": f"{point}:1:{tmp_path / 'fired'}"})
    try:
        server.start()
        with pytest.raises(httpx2.HTTPError):
            upload(server.url, "rows", line)
        server.wait()
        assert (tmp_path / "fired").exists()
        server.start()
        if point in ("after_name", "after_check"):
            assert until_checked(server.url, "rows")["status"] == "connected"
        again = upload(server.url, "rows", line)
        assert (again["status"], again["rows"]) == ("connected", 1)
        [found] = {each["uuid"] for each in (again, until_checked(server.url, "rows"))}
        link = httpx2.get(f"{server.url}/v2/datasets/{found}/download-link").json()["url"]
        assert httpx2.get(link).content == line
    finally:
        server.close()
