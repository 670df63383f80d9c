"""Retries that go to another model, through the SDK, at a whole server."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from dialects.open_server import open_server
from fakes.answering_service import AnsweringService, choice

from batchmill.client.asynchronous import AsyncClient
from batchmill.errors import InvalidInput, InvalidTransition, UnknownName
from batchmill.types import Scope
from batchmill.wire.native import NewKey

CONFIG = """
[models.small]
engine = "openai"
source = "s-small"
base_url = "{url}"
features = ["background"]

[models.large]
engine = "openai"
source = "s-large"
base_url = "{url}"
features = ["background"]
price = {{ input = 1000000.0, output = 1000000.0 }}
adapters = {{ tuned = "tuned" }}

[models.plain]
engine = "openai"
source = "s-plain"
base_url = "{url}"

[models.double]
engine = "function"
source = "app.py:double"
"""


def answer(body):
    return choice("", "stop") if body["model"] == "s-small" else choice(body["model"])


@pytest.fixture
async def service() -> AsyncIterator[AnsweringService]:
    async with AnsweringService(answer) as service:
        yield service


@pytest.fixture
async def client(tmp_path: Path, service: AnsweringService, monkeypatch) -> AsyncIterator[AsyncClient]:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    body = {"model": "small", "messages": [{"role": "user", "content": "a"}]}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    async with open_server(tmp_path, CONFIG.format(url=service.url)) as running, AsyncClient(running.url) as client:
        client.running = running
        yield client


async def failed(client: AsyncClient, tmp_path: Path):
    """A job whose one row failed."""
    job = await client.submit(tmp_path / "in.jsonl", fail_on=["empty"])
    view = await job.wait()
    assert (view.rows_failed, view.errors) == (1, {"reply_empty": 1})
    return job


async def test_another_model_and_then_its_adapter(client: AsyncClient, service: AnsweringService, tmp_path: Path):
    """One request changes model and fields; what it named is part of the job, and the reply says who answered."""
    job = await failed(client, tmp_path)
    view = await job.retry(model="large", params={"max_tokens": 7})
    assert [(each.model, each.params, each.generation) for each in view.retries] == [("large", {"max_tokens": 7}, 1)]
    view = await job.wait()
    assert (view.state, view.rows_ok, view.model) == ("completed", 1, "small, large")
    assert (service.bodies[-1]["model"], service.bodies[-1]["max_tokens"]) == ("s-large", 7)
    assert view.cost == pytest.approx(15.0) and list(view.prices) == ["large"]
    await job.download(tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]["model"] == "s-large"
    with pytest.raises(InvalidTransition, match="no failed rows"):
        await job.retry(model="large")
    job = await failed(client, tmp_path)
    await job.retry(adapter="tuned")
    assert (await job.wait()).rows_ok == 1 and service.bodies[-1]["model"] == "tuned"


async def test_what_a_server_refuses(client: AsyncClient, service: AnsweringService, tmp_path: Path):
    """Models of others are unknown; those of another kind, and those whose callers may ask for less, are named."""
    job = await failed(client, tmp_path)
    calls = len(service.bodies)
    for change, words in (
        ({"model": "double"}, "'double' is a function"),
        ({"model": "plain"}, "plain does not allow background"),
        ({"model": "large", "adapter": "small"}, "large has no adapter 'small'; it has tuned"),
    ):
        with pytest.raises(InvalidInput, match=words):
            await job.retry(**change)
    with pytest.raises(UnknownName):
        await job.retry(model="nobody")
    assert len(service.bodies) == calls and (await job.refresh()).generation == 0
    narrow_key = (await client.create_key(NewKey("n", Scope.SUBMIT, models=["small"]))).key
    async with AsyncClient(client.running.url, narrow_key) as narrow:
        theirs = await failed(narrow, tmp_path)
        with pytest.raises(UnknownName):
            await theirs.retry(model="large")
