"""Reuse over batchmill's own API: what callers may ask for, and what a project says for all of its jobs."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from dialects.open_server import open_server
from fakes.answering_service import AnsweringService, choice

from batchmill.client.asynchronous import AsyncClient

CONFIG = """
[projects.default]
reuse = true

[models.m]
engine = "openai"
source = "m"
base_url = "{url}"
"""


@pytest.fixture
async def service() -> AsyncIterator[AnsweringService]:
    async with AnsweringService(lambda body: choice(body["messages"][-1]["content"])) as service:
        yield service


@pytest.fixture
async def client(tmp_path: Path, service: AnsweringService, monkeypatch) -> AsyncIterator[AsyncClient]:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    async with open_server(tmp_path, CONFIG.format(url=service.url)) as running, AsyncClient(running.url) as client:
        client.running = running
        yield client


def rows(path: Path, texts: list[str], **body) -> Path:
    asked = [{"model": "m", "messages": [{"role": "user", "content": text}], **body} for text in texts]
    about = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [json.dumps({"custom_id": f"r{at}", **about, "body": each}) + "\n" for at, each in enumerate(asked)]
    path.write_text("".join(lines))
    return path


async def test_callers_and_projects_say_what_is_reused(client, service, tmp_path):
    """By the project deterministic rows alone, by the caller all or none; plans count them; metrics do, too."""
    certain = rows(tmp_path / "certain.jsonl", ["a", "b"], temperature=0)
    first = await (await client.submit(certain)).wait()
    assert (first.rows_ok, first.rows_reused) == (2, 0)
    grown = rows(tmp_path / "grown.jsonl", ["a", "b", "c"], temperature=0)
    planned = (await client.plan([grown])).plan
    assert (planned.run, planned.reused) == (3, 2)
    second = await (await client.submit(grown)).wait()
    assert (second.rows_ok, second.rows_reused, second.usage.input_tokens) == (3, 2, 10)
    assert len(service.bodies) == 3
    none = await (await client.submit(grown, reuse=False)).wait()
    assert (none.rows_reused, len(service.bodies)) == (0, 6)
    bold = rows(tmp_path / "bold.jsonl", ["x"], temperature=1)
    for reuse, reused in ((True, 0), (None, 0), (True, 1)):
        view = await (await client.submit(bold, reuse=reuse)).wait()
        assert view.rows_reused == reused, reuse
    text = (await asyncio.to_thread(httpx2.get, f"{client.running.url}/metrics")).text
    assert 'batchmill_rows_reused_total{model="m",project="default"} 3.0' in text
