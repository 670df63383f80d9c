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


@pytest.fixture
async def plain(tmp_path: Path, service: AnsweringService, monkeypatch) -> AsyncIterator[AsyncClient]:
    """Of a server whose project reuses nothing by itself: its small jobs lie in the database."""
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    config = CONFIG.format(url=service.url).replace("reuse = true", "reuse = false")
    async with open_server(tmp_path, config) as running, AsyncClient(running.url) as client:
        client.data_dir = tmp_path / "data"
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


async def test_small_jobs_are_taken_from(plain, service, tmp_path):
    """Jobs that ran without reuse, with requests and with rows of tables: the first lookup indexes their results, which
    go with their job."""
    asked = rows(tmp_path / "asked.jsonl", ["a", "b"])
    (tmp_path / "t.jsonl").write_text('{"id":1,"text":"x"}\n')
    table = {"model": "m", "prompt": "{text}!"}
    asking = await plain.submit(asked)
    first = await asking.wait()
    tabled = await (await plain.submit(tmp_path / "t.jsonl", **table)).wait()
    assert (first.rows_ok, tabled.rows_ok, len(service.bodies)) == (2, 1, 3)
    homes = [plain.data_dir / "jobs" / view.id for view in (first, tabled)]
    assert not any(home.exists() for home in homes)
    grown = rows(tmp_path / "grown.jsonl", ["a", "b", "c"])
    assert (await plain.plan([grown], reuse=True)).plan.reused == 2
    repeating = await plain.submit(grown, reuse=True)
    again = await repeating.wait()
    assert (again.rows_ok, again.rows_reused, len(service.bodies)) == (3, 2, 4)
    (tmp_path / "t2.jsonl").write_text('{"id":1,"text":"x"}\n{"id":2,"text":"y"}\n')
    more = await (await plain.submit(tmp_path / "t2.jsonl", reuse=True, **table)).wait()
    assert (more.rows_reused, len(service.bodies)) == (1, 5)
    assert [(home / "reuse" / "results").exists() for home in homes] == [True, True]
    for job in (repeating, asking):
        await job.remove()
    assert not homes[0].exists()
    late = await (await plain.submit(grown, reuse=True)).wait()
    assert (late.rows_reused, len(service.bodies)) == (0, 8)
