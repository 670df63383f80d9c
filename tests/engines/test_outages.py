"""Rows that fail are told apart from a service that is down: neither pays for the other."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from contract.engine_suite import ListSink, OpenFeed, chat_row
from fakes.held_clock import HeldClock

from batchmill.engines.remote.dispatch import LAST_WAIT_S, Dispatch
from batchmill.engines.remote.outgoing import Composer, RemoteRow
from batchmill.engines.remote.pacing import OUTAGE_MAX_S, LiveQueue, Pacer
from batchmill.engines.retry import Fault, FaultKind, Reply, Retries
from batchmill.errors import JobPaused
from batchmill.types import Limits, ModelSpec, Outcome, RowError, Usage

FAILED = Fault(FaultKind.TRANSIENT, RowError("server_error", "oops"), Reply(500))
UNREACHABLE = Fault(FaultKind.UNREACHABLE, RowError("connection_failed", "refused"))
LEASE = SimpleNamespace(job_id="job", key="job/0")
OTHER = SimpleNamespace(job_id="other", key="other/0")


class Service:
    """Answers a row unless it is bad, or the service is down: then it says `fault`."""

    def __init__(self, bad: range = range(0), *, retries: Retries = Retries(5), in_flight: int = 64) -> None:
        self.bad, self.fault, self.is_down = bad, FAILED, False
        self.calls: Counter[int] = Counter()
        self.in_a_row: list[int] = []  # calls since the last answer
        self.clock, self.sink = HeldClock(), ListSink()
        composer = Composer(ModelSpec(name="m", engine="http", source="m", base_url="http://x"), None)
        pacer = Pacer(Limits(), self.clock.monotonic(), jitter=lambda: 0.5, ceiling=in_flight)
        ahead = LiveQueue(pacer, self.clock)
        self.dispatch = Dispatch(composer.call, self.send, pacer, live_queue=ahead, retries=retries, clock=self.clock)

    async def send(self, call: RemoteRow) -> Outcome | Fault:
        self.calls[call.row.number] += 1
        await asyncio.sleep(0)
        if self.is_down or call.row.number in self.bad:
            self.in_a_row.append(call.row.number)
            return self.fault if self.is_down else FAILED
        self.in_a_row.clear()
        return Reply(200, b"{}").ok(call.row)

    async def until(self, calls: int, running: asyncio.Task[None]) -> None:
        while self.calls.total() < calls and not running.done():
            await asyncio.sleep(0)

    async def run(self, rows: int) -> None:
        feed = OpenFeed(self.sink, [chat_row(n, "a", lease=LEASE) for n in range(rows)], ended=True)
        await self.dispatch.run(feed, self.sink)

    def failed(self) -> list[int]:
        return sorted(outcome.row.number for outcome in self.sink.outcomes if outcome.error)


async def test_rows_that_fail_in_a_row_are_to_blame() -> None:
    """However many rows in a row always fail, each is called as often as allowed, and the others are answered."""
    for count, attempts_max in ((60, 5), (60, 1), (60, 2), (400, 5)):
        service = Service(range(100, 100 + count), retries=Retries(attempts_max))
        await service.run(1500)
        assert service.sink.numbers() == list(range(1500))
        assert service.failed() == list(service.bad)
        assert {service.calls[n] for n in service.bad} == {attempts_max}
        assert {service.calls[n] for n in range(1500) if n not in service.bad} == {1}


async def test_outages_cost_no_row_its_attempts() -> None:
    """One outage after another, replies or refused connections: all rows are answered, with two attempts each."""
    for fault in (FAILED, UNREACHABLE):
        service = Service(retries=Retries(3))
        service.fault = fault
        running = asyncio.create_task(service.run(1000))
        await service.until(50, running)
        for _ in range(6):
            service.is_down = True
            await service.until(service.calls.total() + 60, running)
            service.is_down = False
            await service.until(service.calls.total() + 40, running)
        await running
        assert service.failed() == []
        assert service.sink.numbers() == list(range(1000))


async def test_outage_is_tested_with_other_rows() -> None:
    """A row that has failed in an outage is not called again in it while there are others."""
    service = Service()
    running = asyncio.create_task(service.run(3000))
    await service.until(50, running)
    service.is_down = True
    await service.until(140, running)
    assert set(service.calls.values()) == {1}
    service.is_down = False
    await running
    assert service.failed() == []


async def test_nothing_left_to_tell_by_pauses() -> None:
    """Where only rows are left that have failed, their last attempts wait, and in the end the job pauses."""
    service = Service(range(100, 160))
    with pytest.raises(JobPaused, match=r"has not answered for .* 60 rows failed .* `batchmill fail JOB`"):
        await service.run(160)
    assert service.sink.numbers() == list(range(100))
    assert max(service.calls.values()) <= 4
    assert service.clock.at - 1000 >= OUTAGE_MAX_S


async def test_failing_rows_are_given_up_when_asked() -> None:
    """Asked to, rows that fail become errors at once, those too that come after them; others go on."""
    service = Service(range(100, 160))
    running = asyncio.create_task(service.run(160))
    await service.until(170, running)
    service.dispatch.fail_rows("another")
    assert service.failed() == []
    service.dispatch.fail_rows("job")
    await running
    assert service.sink.numbers() == list(range(160))
    assert service.failed() == list(service.bad)
    assert max(service.calls.values()) <= 5


async def test_rows_of_other_jobs_are_not_given_up() -> None:
    """Whoever gives up the rows of a job that fails says nothing of another's, which waits out the outage."""
    service = Service()
    rows = [chat_row(n, "a", lease=OTHER if n % 10 == 0 else LEASE) for n in range(1000)]
    running = asyncio.create_task(service.dispatch.run(OpenFeed(service.sink, rows, ended=True), service.sink))
    await service.until(50, running)
    service.is_down = True
    await service.until(service.calls.total() + 30, running)
    answered = service.sink.numbers()
    service.dispatch.fail_rows("job")
    ours = [n for n in range(1000) if n % 10 and n not in answered]
    while not set(ours) <= set(service.sink.numbers()) and not running.done():
        await asyncio.sleep(0)
    assert service.failed() == ours
    service.is_down = False
    await running
    assert service.failed() == ours
    assert service.sink.numbers() == list(range(1000))


async def test_what_was_said_of_a_job_ends_with_it() -> None:
    """A job that comes again is not given up for what was said of it before."""
    service = Service()
    service.dispatch.fail_rows("job")
    service.dispatch.forget("job")
    running = asyncio.create_task(service.run(10))
    service.is_down = True
    await service.until(15, running)
    service.is_down = False
    await running
    assert service.failed() == []


async def test_replies_that_cannot_be_kept_are_paid() -> None:
    """What a reply cost that was called for again is part of what its row cost."""
    service = Service()
    garbled = Fault(FaultKind.GARBLED, RowError("bad_response", "twice"), Reply(0, None, Usage(7, 0, 3)))

    async def send(call: RemoteRow) -> Outcome | Fault:
        service.calls[call.row.number] += 1
        await asyncio.sleep(0)
        if call.row.number == 0 or service.calls[call.row.number] == 1:
            return garbled
        return Reply(200, b"{}", Usage(5, 0, 1)).ok(call.row)

    service.dispatch._send = send
    await service.run(2)
    never, once = sorted(service.sink.outcomes, key=lambda outcome: outcome.row.number)
    assert (never.usage, once.usage) == (Usage(14, 0, 6), Usage(12, 0, 4))
    assert (never.status, never.body) == (0, None)


async def test_rows_without_a_reply_are_not_given_up() -> None:
    """What met nothing but refused connections has not failed: it goes on waiting."""
    service = Service()
    running = asyncio.create_task(service.run(50))
    await service.until(50, running)
    service.is_down, service.fault = True, UNREACHABLE
    await service.until(90, running)
    service.dispatch.fail_rows("job")
    service.is_down = False
    await running
    assert service.failed() == []


async def test_last_attempt_waits_for_another_row() -> None:
    """Where no other row was answered since it began to fail, a row's last attempt waits longer than the others."""
    service = Service(range(2), in_flight=1)
    await service.run(2)
    assert service.failed() == [0, 1]
    assert service.clock.slept.count(LAST_WAIT_S) == 2
