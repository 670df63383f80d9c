"""Jobs whose rows a provider is given: settled, cancelled, taken up by another owner, moved to another way."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from fakes.batch_provider import BatchProvider
from fakes.job_service import end_of
from fakes.openai_service import OpenAIService

from batchmill.errors import InvalidTransition, UnknownName
from batchmill.jobs.service import JobService
from batchmill.types import DatasetSpec, JobOrder, ModelSpec, Price

ROWS, ROWS_MAX = 40, 10
QUICK = {"poll_s": 0.01, "poll_max_s": 0.02, "rows_max": ROWS_MAX, "cancel_wait_s": 10}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FAR_KEY", "k")
    message = [{"role": "user", "content": "?"}]
    rows = [
        {
            "custom_id": f"c{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": [message[0] | {"content": f"text {n}"}]},
        }
        for n in range(ROWS)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
async def provider():
    async with BatchProvider(looks=2) as running:
        yield running


def far(provider: BatchProvider, **more) -> ModelSpec:
    return ModelSpec(
        "m", "provider_batch", "gpt", base_url=provider.base_url, api_key="env:FAR_KEY", provider="openai",
        engine_args=QUICK | more, price=Price(1.0, output=1.0),
    )  # fmt: skip


def order(folder, *models: ModelSpec, **more) -> JobOrder:
    return JobOrder(DatasetSpec([str(folder / "in.jsonl")]), list(models), output=str(folder / "out.jsonl"), **more)


async def seen(service: JobService, job_id: str, is_seen: Callable[[], bool]) -> None:
    """Wait, as long as the job runs, until something is true."""
    async for _ in service.watch(job_id, 0.01):
        if is_seen():
            return
    raise AssertionError(f"it never came: {await service.show(job_id)}")


def results(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


async def test_an_unknown_submission_waits_for_a_word(folder, opened, provider):
    """A job whose batch has vanished at the provider pauses and says so; once it is forgotten, its rows go again."""
    provider._looks = 10_000
    service = await opened()
    job_order = order(folder, far(provider, rows_max=1000))
    job = (await service.submit(job_order)).id
    await seen(service, job, lambda: provider.calls["look"] > 1)
    with pytest.raises(InvalidTransition, match="while the job is paused"):
        await service.settle_remote(job, "any", None)
    gone = provider.batches.pop(next(iter(provider.batches)))
    view = await end_of(service, job)
    assert (view.state, view.reason) == ("paused", "submit_unknown") and "batchmill remote forget" in view.message
    (remote,) = await service.remote(job)
    assert (remote.state, remote.id, remote.rows) == ("unknown", gone.id, ROWS)
    assert "submit_unknown" in (await service.explain(job)).reasons[0]
    with pytest.raises(UnknownName, match=remote.tag):
        await service.settle_remote(job, "another", None)
    assert (await service.settle_remote(job, remote.tag, None)).state == "forgotten"
    provider._looks = 2
    await service.resume(job)
    assert (await end_of(service, job)).state == "completed"
    assert [line["custom_id"] for line in results(folder)] == [f"c{n}" for n in range(ROWS)]
    assert [each.state for each in await service.remote(job)] == ["forgotten", "collected"]


async def test_cancelling_collects(folder, opened, provider):
    """Cancelled, a job's batches end at the provider, and what they had answered by then is in the results."""
    provider._looks = 10_000
    service = await opened()
    job = (await service.submit(order(folder, far(provider)))).id
    await seen(service, job, lambda: provider.calls["look"] > 4)
    view = await service.cancel(job)
    assert view.state == "cancelled" and provider.running == []
    assert 0 < view.rows_ok < ROWS and view.rows_ok == sum(provider.billed.values())


async def test_a_cancel_that_nobody_answers_is_not_the_end(folder, opened, provider):
    """A provider that cannot be asked to end its batches holds the job up, which says so; once it answers they end."""
    provider._looks = 10_000
    service = await opened()
    job = (await service.submit(order(folder, far(provider, cancel_wait_s=0.2)))).id
    await seen(service, job, lambda: provider.calls["look"] > 4)
    there = set(provider.running)
    for operation in ("cancel", "look", "list", "files"):
        provider.faults[operation] = ["503"] * 10_000
    view = await service.cancel(job)
    assert (view.state, view.reason, view.cancelling is not None) == ("paused", "route_failed", True)
    assert "did not reply" in view.message and "resume it" in view.message
    assert all(each in view.message for each in provider.running)
    assert set() < there <= set(provider.running)  # another one may just have been submitted
    assert [each.job for each in await service._stalled.poll()] == [job]  # a server tries again by itself
    provider.faults.clear()
    await service.resume(job)
    view = await end_of(service, job)
    assert view.state == "cancelled" and provider.running == [] and view.message == ""
    assert 0 < view.rows_ok == provider.billed.total()


async def test_a_second_cancel_ends_the_job_all_the_same(folder, opened, provider):
    """Whoever cancels again has the job end without what the provider has, and is told of what is left there.

    A retry does not forget it.
    """
    provider._looks = 10_000
    service = await opened()
    job = (await service.submit(order(folder, far(provider, cancel_wait_s=0.2)))).id
    await seen(service, job, lambda: provider.calls["look"] > 4)
    for operation in ("cancel", "look", "list", "files"):
        provider.faults[operation] = ["reset"] * 10_000
    assert (await service.cancel(job)).state == "paused"
    view = await service.cancel(job)
    left = provider.running
    assert view.state == "cancelled" and left != [] and all(each in view.message for each in left)
    provider.faults.clear()
    provider._looks = 1
    await service.retry(job)
    assert (await end_of(service, job)).state == "completed"
    assert set(left) == {each.id for each in await service.remote(job) if each.state == "submitted"}


async def test_another_owner_collects(folder, opened, provider):
    """A job whose owner was gone when it was cancelled still leaves no batch behind, and loses no answer."""
    provider._looks = 10_000
    first = await opened()
    job = (await first.submit(order(folder, far(provider)))).id
    await seen(first, job, lambda: provider.calls["look"] > 4)
    await first.close(at_once=True)
    assert provider.running != []
    second = await opened()
    assert (await second.show(job)).reason == "interrupted"
    view = await second.cancel(job)
    assert view.state == "cancelled" and provider.running == []
    assert view.rows_ok == sum(provider.billed.values()) > 0


async def test_a_pause_leaves_it_there(folder, opened, provider):
    """A paused job's batches go on at the provider, and resuming it finds them: nothing is billed twice."""
    provider._looks = 10_000
    service = await opened()
    job = (await service.submit(order(folder, far(provider)))).id
    await seen(service, job, lambda: provider.calls["look"] > 4)
    assert (await service.pause(job)).state == "paused"
    there = list(provider.batches)
    assert provider.running == there
    for batch in provider.batches.values():
        batch.looks = 1
    await service.resume(job)
    assert (await end_of(service, job)).state == "completed"
    assert set(there) <= set(provider.batches) and set(provider.billed.values()) == {1}
    assert len(provider.billed) == ROWS


async def test_a_way_that_fails_is_left_for_the_next(folder, opened, provider):
    """A provider that refuses the batches loses the job to the next way; what it costs is told for each."""
    provider.fates = ["refused"] * 20
    async with OpenAIService() as online:
        near = ModelSpec(
            "near", "http", "gpt", base_url=online.base_url, api_key="env:FAR_KEY", price=Price(2.0, output=2.0)
        )
        service = await opened()
        routes = ModelSpec("m", "routes", "", routes=[near, far(provider)])
        job = (await service.submit(order(folder, routes))).id
        view = await end_of(service, job)
        assert (view.state, view.rows_ok) == ("completed", ROWS), view.message
        # A batch that is cancelled before it is refused has run a part of its rows.
        assert len(online.calls) + provider.billed.total() == ROWS and provider.running == []
        again = await service.submit(order(folder, routes))
        assert (again.id, again.how) == (job, "finished")


async def test_without_another_way_it_pauses(folder, opened, provider):
    """A provider that refuses the batches of a model with no other route pauses the job with its words."""
    provider.fates = ["refused"] * 20
    service = await opened()
    job = (await service.submit(order(folder, far(provider)))).id
    view = await end_of(service, job)
    assert (view.state, view.reason, view.rows_ok) == ("paused", "route_failed", 0)


async def test_two_ways_are_chosen_between(folder, opened, provider):
    """The cheaper way is taken where nothing is due, and the job can say why: while it runs, and when it has ended."""
    async with OpenAIService() as online:
        dear = ModelSpec("dear", "http", "gpt", base_url=online.base_url, price=Price(9.0))
        service = await opened()
        job = (await service.submit(order(folder, ModelSpec("m", "routes", "", routes=[dear, far(provider)])))).id
        all_results: list[str] = []
        async for view in service.watch(job, 0.01):
            if view.state == "running" and not all_results:
                all_results = (await service.explain(job)).reasons
        assert any("it goes by openai-batch:gpt: the cheapest route" in each for each in all_results)
        view = await service.show(job)
        assert view.state == "completed" and online.calls == []
        assert view.routing == (await service.explain(job)).reasons
        assert any("it goes by openai-batch:gpt: the cheapest route" in each for each in view.routing)
