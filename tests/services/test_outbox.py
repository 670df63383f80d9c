"""Events reach those who asked for them: each of them, whatever ends in between."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.webhook_receiver import WebhookReceiver
from standardwebhooks import Webhook
from webhook_support import FILE_SECRET, EndedJobs

from batchmill.config import WebhookEntry
from batchmill.services.webhooks import outbox as sending
from batchmill.services.webhooks.endpoints import EndedJob
from batchmill.services.webhooks.outbox import DELAYS_S, SENDING_EACH_MAX, SENDING_PROJECT_MAX, SPREAD, delay_s
from batchmill.states import JobState
from batchmill.store.sql.tables import outbox


@pytest.fixture
async def receiver() -> AsyncIterator[WebhookReceiver]:
    async with WebhookReceiver() as running:
        yield running


@pytest.fixture
async def jobs(tmp_path: Path) -> AsyncIterator[EndedJobs]:
    async with EndedJobs(tmp_path) as opened:
        yield opened


def settled(db: sa.Connection) -> list[tuple[int, bool, str | None]]:
    """(attempts, is delivered, failure) of every event that is no longer on its way."""
    columns = outbox.c.attempts, outbox.c.delivered.is_not(None), outbox.c.failure
    return [tuple(row) for row in db.execute(sa.select(*columns).where(outbox.c.due.is_(None)))]


async def until_settled(jobs: EndedJobs, n: int) -> list[tuple[int, bool, str | None]]:
    while len(found := await jobs.database.read(settled)) < n:
        await asyncio.sleep(0)
    return found


ENDINGS = [
    (JobState.FAILED, "batch.failed"),
    (JobState.CANCELLED, "batch.cancelled"),
    (JobState.EXPIRED, "batch.expired"),
]


@pytest.mark.parametrize(("state", "type_"), ENDINGS)
async def test_an_end_is_told(jobs: EndedJobs, receiver: WebhookReceiver, state: JobState, type_: str):
    """The event of an end has the form that OpenAI's has, with the batch's id and the time of its end."""
    await jobs.register(receiver.url())
    ended_at = int(jobs.clock.now())
    await jobs.end(0xA, state=state)
    async with jobs.running():
        (delivery,) = await receiver.wait_for(1)
    event = json.loads(delivery.body)
    assert event.pop("id").startswith("evt_")
    assert event == {
        "object": "event", "created_at": ended_at, "type": type_, "data": {"id": "batch_0000000000000000000a"},
    }  # fmt: skip
    assert delivery.headers["content-type"] == "application/json"
    assert delivery.headers["user-agent"].startswith("batchmill/")


async def test_an_event_is_told_once(jobs: EndedJobs, receiver: WebhookReceiver):
    """What an endpoint has taken is not sent again, not after a restart either."""
    await jobs.register(receiver.url())
    await jobs.end(1)
    for _ in range(2):
        async with jobs.running():
            assert await until_settled(jobs, 1) == [(1, True, "")]
    async with jobs.running():
        await jobs.end(2)
        await until_settled(jobs, 2)
    assert len(receiver.deliveries) == 2


async def test_an_event_survives_a_kill_in_the_middle_of_its_delivery(jobs: EndedJobs, receiver: WebhookReceiver):
    """An owner that dies while an endpoint answers sends the same event again, under the same id."""
    await jobs.register(receiver.url())
    await jobs.end(1)
    receiver.held.add("/hook")
    async with jobs.running():
        (first,) = await receiver.wait_for(1)
    receiver.held.clear()
    async with jobs.running():
        _, second = await receiver.wait_for(2)
        await until_settled(jobs, 1)
    assert (first.id, first.body) == (second.id, second.body)


async def test_a_failing_endpoint_is_tried_again_later(jobs: EndedJobs, receiver: WebhookReceiver):
    """Whatever is not a 2xx is tried again, with the same id and a new signature, after the delays of the table."""
    receiver.answers["/hook"] = [500, (302, {"location": receiver.url("/elsewhere")}), 404, 200]
    jobs.clock.stride = 60.0
    await jobs.register(receiver.url())
    await jobs.end(1)
    began = jobs.clock.now()
    async with jobs.running():
        tries = await receiver.wait_for(4)
        assert await until_settled(jobs, 1) == [(4, True, "")]
    assert len({each.id for each in tries}) == 1
    times = [int(each.headers["webhook-timestamp"]) - int(began) for each in tries]
    assert [later - earlier >= least for earlier, later, least in zip(times, times[1:], DELAYS_S, strict=False)]
    assert receiver.at("/elsewhere") == []


async def test_an_endpoint_that_never_takes_an_event_is_given_up(
    jobs: EndedJobs, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
):
    """After the last attempt, about three days later, an event is given up and the reason is kept."""
    monkeypatch.setattr(sending, "SWEEP_S", float("inf"))  # it is old by then, and swept within an hour of this clock
    receiver.answers["/hook"] = [503] * 20
    jobs.clock.stride = 600.0
    await jobs.register(receiver.url())
    await jobs.end(1)
    async with jobs.running() as sender:
        assert await until_settled(jobs, 1) == [(len(DELAYS_S) + 1, False, "it answered 503")]
    assert 0 < len(receiver.deliveries) <= len(DELAYS_S) + 1  # an attempt may fail before it arrives
    assert sender.counts == {"delivered": 0, "failed": len(DELAYS_S) + 1, "given_up": 1}


async def test_an_endpoint_that_is_gone_hears_no_more_of_an_event(jobs: EndedJobs, receiver: WebhookReceiver):
    """410 ends an event at once."""
    receiver.answers["/hook"] = [410]
    await jobs.register(receiver.url())
    await jobs.end(1)
    async with jobs.running():
        assert await until_settled(jobs, 1) == [(1, False, "it answered 410")]


async def test_a_dead_endpoint_holds_up_nobody(jobs: EndedJobs, receiver: WebhookReceiver):
    """While one endpoint never answers, all events of another arrive, and the dead one holds a few calls only."""
    receiver.held.add("/dead")
    for path in ("/dead", "/hook"):
        await jobs.register(receiver.url(path))
    for number in range(20):
        await jobs.end(number)
    async with jobs.running():
        await receiver.wait_for(20)
        assert len(receiver.at("/dead")) == SENDING_EACH_MAX


async def test_a_project_of_dead_endpoints_holds_up_no_other(jobs: EndedJobs, receiver: WebhookReceiver):
    """Endpoints of one project that never answer hold its own share of deliveries, and the other project's arrive."""
    receiver.held.add("/dead")
    for _ in range(SENDING_PROJECT_MAX):
        await jobs.register(receiver.url("/dead"), project="slow")
    await jobs.register(receiver.url(), project="other")
    for number in range(SENDING_EACH_MAX):
        await jobs.end(number, project="slow")
    await jobs.end(99, project="other")
    async with jobs.running():
        await receiver.wait_for(1)
        await receiver.wait_for(SENDING_PROJECT_MAX, "/dead")
        assert len(receiver.at("/dead")) == SENDING_PROJECT_MAX


async def test_only_endpoints_of_the_project_hear_of_its_jobs(jobs: EndedJobs, receiver: WebhookReceiver):
    """Another project's endpoint, one that wants other events, and jobs without a frontend: none is told anything."""
    await jobs.register(receiver.url("/other"), project="other")
    await jobs.register(receiver.url("/failed"), events=["batch.failed"])
    await jobs.register(receiver.url())
    await jobs.end(1, frontend=None)
    await jobs.end(2)
    async with jobs.running():
        await until_settled(jobs, 1)
    assert [each.path for each in receiver.deliveries] == ["/hook"]


async def test_an_endpoint_is_not_told_what_was_before_it(jobs: EndedJobs, receiver: WebhookReceiver):
    """A job whose end was announced before an endpoint was registered stays unknown to it."""
    await jobs.end(1)
    async with jobs.running() as sender:
        await sender.run_once()
        await jobs.register(receiver.url())
        await jobs.end(2)
        await until_settled(jobs, 1)
    (delivery,) = receiver.deliveries
    assert json.loads(delivery.body)["data"]["id"] == "batch_00000000000000000002"


async def test_another_end_of_the_same_job_is_another_event(jobs: EndedJobs, receiver: WebhookReceiver):
    """A job that is retried and ends again is told again, under another id."""
    await jobs.register(receiver.url())
    job_id = await jobs.end(1)
    async with jobs.running():
        await receiver.wait_for(1)
        await jobs.database.call(jobs.ledger.open_generation, job_id, 1, {}, 0)
        for state in (JobState.RUNNING, JobState.CANCELLING):
            await jobs.database.call(jobs.ledger.move, job_id, state)
        await jobs.database.call(jobs.ledger.move, job_id, JobState.CANCELLED, finished=jobs.clock.now())
        first, second = await receiver.wait_for(2)
    assert first.id != second.id
    assert json.loads(first.body)["id"] != json.loads(second.body)["id"]


async def test_a_job_of_the_native_api_has_events_of_its_own(jobs: EndedJobs, receiver: WebhookReceiver):
    """A job that came through batchmill's own API is told as a job, by its own id."""
    await jobs.register(receiver.url(), events=["job.cancelled"])
    await jobs.end(0xB, frontend="native")
    async with jobs.running():
        (delivery,) = await receiver.wait_for(1)
    event = json.loads(delivery.body)
    assert (event["type"], event["data"]["id"]) == ("job.cancelled", "job_0000000000000000000b")


async def test_every_end_is_heard_once(jobs: EndedJobs):
    """Whoever listens in this process hears of each end, told by webhook or not."""
    events: list[EndedJob] = []
    await jobs.end(1, frontend=None)
    await jobs.end(2, traceparent="00-1-2-01")
    async with jobs.running(on_ended=events.append) as sender:
        await sender.run_once()
    assert [(each.job[-1], each.traceparent) for each in events] == [("1", None), ("2", "00-1-2-01")]


async def test_an_endpoint_of_the_file_is_told(tmp_path: Path, receiver: WebhookReceiver, monkeypatch):
    """An endpoint of the configuration hears of its project's jobs, signed with each of its secrets."""
    other = "whsec_" + "QUJD" * 8
    monkeypatch.setenv("HOOK", f"{FILE_SECRET} {other}")
    entry = WebhookEntry(receiver.url(), "env:HOOK", project="team")
    async with EndedJobs(tmp_path, webhooks=[entry]) as jobs:
        await jobs.end(1, project="team")
        async with jobs.running():
            (delivery,) = await receiver.wait_for(1)
    result = delivery.headers["webhook-signature"].split()
    sent = datetime.fromtimestamp(int(delivery.headers["webhook-timestamp"]), UTC)
    assert result == [Webhook(each).sign(delivery.id, sent, delivery.body.decode()) for each in (FILE_SECRET, other)]


async def test_results_can_be_fetched_when_their_event_arrives(jobs: EndedJobs, receiver: WebhookReceiver):
    """The result file of a job is a file of its project before anybody is told that the job has ended."""
    await jobs.register(receiver.url(), events=["batch.completed"])
    job_id = f"job_{1:020x}"
    home = jobs.folder / "jobs" / job_id
    home.mkdir(parents=True)
    (home / "results.jsonl").write_text("{}\n")
    await jobs.end(1)
    done = {"state": "completed", "rows": 1, "rows_ok": 1, "output": str(home / "results.jsonl")}
    await jobs.database.call(jobs.ledger.note, job_id, **done)
    async with jobs.running():
        await receiver.wait_for(1)
        (record,), _ = await jobs.files.list("default")
    assert (record.job, record.bytes) == (job_id, 3)


async def test_its_end_is_heard_at_any_moment(jobs: EndedJobs):
    """Whoever cancels it is heard wherever it is between two turns: a server that stops waits for it."""
    sender = jobs.outbox()
    for steps in range(12):
        resting = asyncio.create_task(sender._wait())
        for _ in range(steps):
            await asyncio.sleep(0)
        was_done = resting.done()
        resting.cancel()
        await asyncio.wait({resting})
        assert was_done or resting.cancelled(), steps
    assert was_done


@pytest.mark.once
def test_delays_grow_and_spread():
    """Delays grow from seconds to a day; one event always waits as long, and an endpoint may ask for more."""
    events = [f"msg_{number:032x}" for number in range(0, 0x10000, 0x1111)]
    assert len(DELAYS_S) >= 7
    for attempts, base in enumerate(DELAYS_S, 1):
        delays = [delay_s(each, attempts) for each in events]
        assert min(delays) == base
        assert max(delays) <= base * (1 + SPREAD)
    assert delay_s(events[0], 1, retry_after_s=60.0) == 60.0
