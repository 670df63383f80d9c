"""What a job may spend, and what its service may do to it, seen from outside: real workers, a service that we play."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from fakes.batch_provider import BatchProvider
from fakes.child_processes import children_of
from fakes.job_service import end_of
from fakes.openai_service import Answer, OpenAIService, refusal
from msgspec.structs import replace

from batchmill.errors import InvalidTransition
from batchmill.types import Amendment, DatasetSpec, JobOrder, Limits, ModelSpec, Policy, Price

ROWS, TOKENS = 40, 50
ROW_USD = 0.05  # for so many tokens
PRICE = Price(0.0, output=1e6 * ROW_USD / TOKENS)


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.fixture
async def service():
    async with OpenAIService() as running:
        running.every = written(TOKENS)
        yield running


def written(tokens: int) -> Answer:
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": tokens + 5}
    message = {"role": "assistant", "content": "so"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return Answer(200, {"id": "1", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage})


def order(folder, far: OpenAIService | BatchProvider, budget: float | None, *, workers: int = 1, **body) -> JobOrder:
    rows = [
        {
            "custom_id": f"c{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"{n}"}], **body},
        }
        for n in range(ROWS)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = Limits(in_flight_max=16)
    model = ModelSpec("m", "http", "m", base_url=far.base_url, price=PRICE, workers=workers, limits=limits)
    return JobOrder(
        DatasetSpec([str(folder / "in.jsonl")]), [model], output=str(folder / "out.jsonl"), policy=Policy(budget=budget)
    )


async def test_a_budget_is_never_passed(folder, opened, service):
    """Rows that say how much they may write go only while the budget bears their most; the pause says what helps."""
    jobs = await opened()
    job = (await jobs.submit(order(folder, service, 0.32, workers=2, max_tokens=TOKENS))).id
    view = await end_of(jobs, job)
    assert (view.state, view.reason, view.rows_ok) == ("paused", "budget", 6)
    assert view.cost == pytest.approx(0.30)
    assert len(service.calls) == 6
    assert "the 34 rows left would cost about 1.7000 USD more" in view.message
    assert f"`batchmill amend {job} --budget 2.2`" in view.message
    await jobs.amend(job, Amendment(budget=2.0))
    await jobs.resume(job)
    view = await end_of(jobs, job)
    assert (view.state, view.rows_ok, len(service.calls)) == ("completed", ROWS, ROWS)


async def test_what_rows_do_not_use_is_used_by_others(folder, opened, service):
    """A row is reckoned at its most until it is answered: what it did not need goes to those after it."""
    service.every = written(TOKENS // 10)
    jobs = await opened()
    job = (await jobs.submit(order(folder, service, 0.26, max_tokens=TOKENS))).id
    view = await end_of(jobs, job)
    assert view.rows_ok == ROWS
    assert view.cost == pytest.approx(ROWS * ROW_USD / 10)


async def test_rows_without_a_bound(folder, opened, service):
    """Rows that say nothing are reckoned at what those before them wrote."""
    jobs = await opened()
    first = 4096 * PRICE.output / 1e6 + ROWS * ROW_USD
    job = (await jobs.submit(order(folder, service, first))).id
    view = await end_of(jobs, job)
    assert view.state == "completed", view.message
    assert view.cost == pytest.approx(ROWS * ROW_USD)


@pytest.mark.parametrize("is_paused", [False, True], ids=["running", "paused"])
async def test_failing_rows_end_when_asked(folder, opened, service, is_paused):
    """A job that waits for its service, or was paused meanwhile, goes on without the rows that fail, once somebody says
    so."""
    service.every = refusal(500)
    jobs = await opened()
    job_order = order(folder, service, None)
    job = (await jobs.submit(job_order)).id
    async for _ in jobs.watch(job, 0.02):
        if len(service.calls) >= 20:
            break
    if is_paused:
        assert (await jobs.pause(job)).state == "paused"
    await jobs.fail_rows(job)
    view = await end_of(jobs, job)
    assert (view.state, view.rows_failed, view.errors) == ("completed", ROWS, {"some_error": ROWS})
    with pytest.raises(InvalidTransition, match="is completed"):
        await jobs.fail_rows(job)


def batch_order(folder, provider: BatchProvider, budget: float) -> JobOrder:
    """Rows that bound their tokens, for a provider of batches that are looked at often."""
    job_order = order(folder, provider, budget, max_tokens=TOKENS)
    quick = {"poll_s": 0.01, "poll_max_s": 0.02, "rows_max": 10}
    model = ModelSpec(
        "m", "provider_batch", "gpt", base_url=provider.base_url, api_key="env:FAR_KEY", provider="openai",
        engine_args=quick, price=Price(0.0, output=PRICE.output),
    )  # fmt: skip
    return replace(job_order, models=[model])


async def test_batches_are_cut_to_the_budget(folder, opened, monkeypatch):
    """A provider is handed no row whose most the budget does not bear; with a larger one the rest is handed over."""
    monkeypatch.setenv("FAR_KEY", "k")
    async with BatchProvider(looks=2) as provider:
        jobs = await opened()
        too_small, budget = 0.5 * ROW_USD, 7.5 * ROW_USD
        job = (await jobs.submit(batch_order(folder, provider, too_small))).id
        view = await end_of(jobs, job)
        assert (view.state, view.reason, len(provider.batches)) == ("paused", "budget", 0), view.message
        await jobs.amend(job, Amendment(budget=budget))
        await jobs.resume(job)
        view = await end_of(jobs, job)
        assert (view.state, view.rows_ok) == ("completed", ROWS), view.message
        assert view.cost is not None and view.cost <= budget
        assert max(each.rows for each in await jobs.remote(job)) == 7
        assert set(provider.billed.values()) == {1}


async def test_a_worker_that_dies_with_a_cut_batch(folder, opened, monkeypatch):
    """What a killed worker had handed over is found again and paid once, and no row more than the budget bears."""
    monkeypatch.setenv("FAR_KEY", "k")
    async with BatchProvider(looks=1_000_000) as provider:
        jobs = await opened()
        budget = 7.5 * ROW_USD
        job = (await jobs.submit(batch_order(folder, provider, budget))).id
        for name in ("first", "second"):
            while not provider.running:
                await asyncio.sleep(0)
            (pid,) = worker_pids()
            os.kill(pid, signal.SIGKILL)
            while worker_pids() in ([], [pid]):
                await asyncio.sleep(0)
            assert len(provider.batches) == 1, name
        provider._looks = provider.batches[provider.running[0]].looks = 1  # the provider is through with it
        view = await end_of(jobs, job)
        assert (view.state, view.rows_ok) == ("completed", ROWS), view.message
        assert view.cost is not None and view.cost <= budget
        assert max(each.rows for each in await jobs.remote(job)) == 7
        assert set(provider.billed.values()) == {1}


def worker_pids() -> list[int]:
    """The workers that this process has started, and that live."""
    found = []
    for pid in children_of(os.getpid()):
        with contextlib.suppress(OSError):
            if b"batchmill.executors.worker" in Path("/proc", str(pid), "cmdline").read_bytes():
                found.append(pid)
    return found
