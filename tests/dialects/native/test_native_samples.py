"""Samples over HTTP, through the SDK, at a whole server."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from dialects.open_server import open_server

from batchmill.client.asynchronous import AsyncClient
from batchmill.errors import InvalidInput

ROWS = 12


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(ROWS)))
    async with open_server(tmp_path) as running, AsyncClient(running.url) as client:
        yield client


def twice(lines: str) -> list[int]:
    return [json.loads(line)["output"]["twice"] for line in lines.splitlines()]


async def test_a_sample_over_http(client: AsyncClient, tmp_path: Path):
    """A job pauses after its sample, whose results can be read alone; resumed, it runs the others."""
    job = await client.submit(tmp_path / "in.jsonl", model="double", sample=3, seed=4)
    view = await job.wait()
    assert (view.state, view.reason, view.rows_ok, view.sample.rows, view.sample.seed) == ("paused", "sampled", 3, 3, 4)
    assert view.outlook.rows == ROWS and view.outlook.ran == 3
    assert len([row async for row in job.partial(sampled=True)]) == 3
    await job.resume()
    done = await job.wait()
    assert (done.state, done.rows_ok, done.sample) == ("completed", ROWS, None)
    with pytest.raises(InvalidInput, match="has no sample"):
        await anext(job.partial(sampled=True))
    await job.download(tmp_path / "out.jsonl")
    assert twice((tmp_path / "out.jsonl").read_text()) == [2 * n for n in range(ROWS)]


async def test_a_sample_that_is_cancelled_and_retried(client: AsyncClient, tmp_path: Path):
    """The rows that did not run can run afterwards, each once."""
    job = await client.submit(tmp_path / "in.jsonl", model="double", limit=5)
    assert (await job.wait()).reason == "sampled"
    await job.cancel()
    view = await job.wait()
    assert (view.state, view.rows_ok) == ("cancelled", 5)
    await job.retry()
    view = await job.wait()
    assert (view.state, view.rows_ok, view.rows_failed) == ("completed", ROWS, 0)


async def test_samples_that_a_server_refuses(client: AsyncClient, tmp_path: Path):
    """By name, before there is a job."""
    for words, message in (
        ({"limit": 0}, "limit"), ({"sample": -1}, "sample"), ({"limit": 1, "sample": 1}, "exclude"),
        ({"seed": 1}, "seed"), ({"sample": 1_000_001}, "1,000,000"), ({"limit": 2**32}, "limit"),
        ({"limit": "two"}, "limit"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=message):
            await client.submit(tmp_path / "in.jsonl", model="double", **words)
    assert [view async for view in client.jobs()] == []


async def test_plans_and_estimates_of_a_sample(client: AsyncClient, tmp_path: Path):
    """A sample larger than the dataset is the whole job."""
    planned = await client.plan(tmp_path / "in.jsonl", model="double", limit=2)
    assert (planned.plan.run, planned.plan.sample.run, planned.plan.sample.seed) == (ROWS, 2, None)
    estimated = await client.estimate(tmp_path / "in.jsonl", model="double", sample=4)
    assert (estimated.estimate.rows, estimated.estimate.run) == (4, 4)
    job = await client.submit(tmp_path / "in.jsonl", model="double", limit=100)
    view = await job.wait()
    assert (view.state, view.rows_ok) == ("completed", ROWS)
