"""Calls are kept in flight, tried again and given up, whatever they are made of."""

from __future__ import annotations

import asyncio
import threading
from base64 import b64encode
from collections.abc import Iterable

import msgspec
import pytest
from contract.engine_suite import PATIENCE_S, ListSink, OpenFeed, chat_row
from fakes.held_clock import HeldClock
from fakes.web_files import WebFile, web_files

from batchmill.engines.remote import dispatch as dispatch_module
from batchmill.engines.remote.dispatch import DRAIN_S, Dispatch, Send
from batchmill.engines.remote.outgoing import Composer, RemoteRow, text_bytes
from batchmill.engines.remote.pacing import LiveQueue, Pacer
from batchmill.engines.retry import BACKOFF_MAX_S, RETRIES_SPARE, Fault, FaultKind, Reply, Retries
from batchmill.errors import AuthRefused
from batchmill.models import secrets
from batchmill.types import (
    Limits,
    LiveRequest,
    MediaBounds,
    MediaColumn,
    ModelSpec,
    Outcome,
    Provision,
    Row,
    RowError,
    Usage,
)
from batchmill.wire.rows.forms import TableForm
from batchmill.wire.rows.rendered_rows import MediaPart, with_media

REFUSED = Fault(FaultKind.AUTH, RowError("invalid_api_key", "who are you"), Reply(401))
FAILED = Fault(FaultKind.TRANSIENT, RowError("server_error", "oops"), Reply(500))


def dispatch(send: Send, clock: HeldClock, in_flight: int = 64, retries: Retries = Retries(5)) -> Dispatch:
    composer = Composer(ModelSpec(name="m", engine="http", source="m", base_url="http://x"), None)
    pacer = Pacer(Limits(), clock.monotonic(), jitter=lambda: 0.5, ceiling=in_flight)
    return Dispatch(composer.call, send, pacer, live_queue=LiveQueue(pacer, clock), retries=retries, clock=clock)


def answered(call: RemoteRow) -> Outcome:
    return Reply(200, b"{}").ok(call.row)


class StoppedClock(HeldClock):
    """No sleep ends."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.Event().wait()


class CountingSink(ListSink):
    """Counts how often it is given something."""

    def __init__(self) -> None:
        super().__init__()
        self.puts = 0

    def put(self, outcomes: Iterable[Outcome]) -> None:
        self.puts += 1
        super().put(outcomes)


def test_media_count_as_their_tokens() -> None:
    """A limit of tokens a minute is not used up by the base64 of an image."""
    data = b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\2\0\0\0\2\0" + b"x" * 900_000).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    row = chat_row(0, [part])
    spec = ModelSpec(name="m", engine="http", source="m", limits=Limits(tokens_per_minute=1000))
    call = Composer(spec, None).call(row)
    assert text_bytes(call) == len(call.body) - len(data) + 4 * (85 + 170)
    live = Composer(spec, None).live(LiveRequest("/v1/chat/completions", call.body))
    assert text_bytes(live) == text_bytes(call)
    unlimited = Composer(msgspec.structs.replace(spec, limits=Limits()), None).call(row)
    assert text_bytes(unlimited) == len(call.body)


async def test_rows_whose_media_are_loaded_are_given_back() -> None:
    """At once, though a server of theirs does not answer; the rows of other jobs go on meanwhile."""
    gate = threading.Event()
    with web_files() as web:
        secrets.take(Provision(private_hosts=[web.host]))
        web.files["/slow.png"] = WebFile(b"\x89PNG\r\n\x1a\n", gate=gate)
        form = TableForm("{q}", media=[MediaColumn("image", "img")])
        raw = with_media(b'{"q":"?"}', [MediaPart("image", url=f"{web.url}/slow.png", column="img")])
        slow = Row(0, 0, raw, form, OfJob("slow"))
        others = [chat_row(number, "hi", lease=OfJob("other")) for number in range(1, 9)]

        async def send(call: RemoteRow) -> Outcome:
            return answered(call)

        running = dispatch(send, HeldClock())
        sink = ListSink()
        feed = OpenFeed(sink, [slow, *others])
        task = asyncio.create_task(running.run(feed, sink))
        async with asyncio.timeout(PATIENCE_S):
            while len(sink.outcomes) < len(others) or not web.requests:
                await asyncio.sleep(0)
            assert running.give_back("slow") == [slow]
            feed.end()
            await task
        gate.set()
        secrets.take(Provision())
    assert sorted(outcome.row.number for outcome in sink.outcomes) == list(range(1, 9)) and slow.media is None


class TwoJobs(OpenFeed):
    """Rows of a job come before all others, unless it is held back."""

    held: frozenset[str] = frozenset()

    def hold_jobs(self, jobs: frozenset[str]) -> None:
        self.held = jobs
        self._changed.set()

    async def take(self, n: int) -> list[Row]:
        while True:
            there = [row for row in self._rows if row.lease.job_id not in self.held]
            if there or self._ended:
                break
            self._changed.clear()
            await self._changed.wait()
        self._rows = [row for row in self._rows if row not in there[:n]]
        return there[:n]


async def test_media_that_do_not_come_hold_up_no_other_job() -> None:
    """However many rows of a job have them; those that come later are taken when others are loaded."""
    gate = threading.Event()
    form = TableForm("{q}", media=[MediaColumn("image", "img")])
    with web_files() as web:
        secrets.take(Provision(private_hosts=[web.host]))
        rows: list[Row] = []
        for number in range(200):
            path = f"/{number}.png"
            web.files[path] = WebFile(b"\x89PNG\r\n\x1a\n", gate=gate)
            raw = with_media(b'{"q":"?"}', [MediaPart("image", url=web.url + path, column="img")])
            rows.append(Row(number, number, raw, form, OfJob("slow")))
        others = [chat_row(number, "hi", lease=OfJob("other")) for number in range(200, 300)]

        async def send(call: RemoteRow) -> Outcome:
            return answered(call)

        sink = ListSink()
        feed = TwoJobs(sink, [*rows, *others])
        task = asyncio.create_task(dispatch(send, HeldClock(), 8).run(feed, sink))
        async with asyncio.timeout(PATIENCE_S):
            while len(sink.outcomes) < len(others):
                await asyncio.sleep(0)
            assert {row.lease.job_id for row in feed._rows} == {"slow"} and feed.held == {"slow"}
            assert len(feed._rows) > 100
            gate.set()
            while feed._rows:
                await asyncio.sleep(0)
            feed.end()
            await task
        secrets.take(Provision())
    assert len(sink.outcomes) == 300 and feed.held == frozenset()


class OfJob:
    """What a dispatch knows of the lease of a row."""

    media = MediaBounds()

    def __init__(self, job_id: str) -> None:
        self.job_id = self.key = job_id


async def test_results_are_put_together() -> None:
    """Calls that end in one turn of the loop are put at once, not one by one."""

    async def send(call: RemoteRow) -> Outcome:
        await asyncio.sleep(0)
        return answered(call)

    sink = CountingSink()
    await dispatch(send, HeldClock(), 32).run(OpenFeed(sink, [chat_row(n, "a") for n in range(320)], ended=True), sink)
    assert sink.numbers() == list(range(320))
    assert sink.puts <= 40


async def test_retries_beyond_the_budget_wait_longest() -> None:
    """Once many more calls fail than succeed, a retry waits as long as any would, so that it adds no load."""
    clock, failed = HeldClock(), set()

    async def send(call: RemoteRow) -> Outcome | Fault:
        number = call.row.number
        if number % 2 == 0 and number not in failed:
            failed.add(number)
            return FAILED
        return answered(call)

    sink = ListSink()
    rows = [chat_row(n, "a") for n in range(200)]
    await dispatch(send, clock, 1).run(OpenFeed(sink, rows, ended=True), sink)
    assert sink.numbers() == list(range(200))
    assert [outcome.error for outcome in sink.outcomes if outcome.error] == []
    normal, longest = (clock.slept.count(seconds) for seconds in (0.25, BACKOFF_MAX_S))
    assert normal + longest == 100
    assert RETRIES_SPARE <= normal <= RETRIES_SPARE + 20  # a tenth of 200 successes


async def test_pause_does_not_wait_for_ever() -> None:
    """Calls in flight have half a minute when the job pauses; those that hang longer stay undone."""
    clock, hanging = HeldClock(), asyncio.Event()

    async def send(call: RemoteRow) -> Outcome | Fault:
        if call.row.number == 0:
            hanging.set()
            await asyncio.Event().wait()
        await hanging.wait()
        return REFUSED

    sink = ListSink()
    feed = OpenFeed(sink, [chat_row(n, "a") for n in range(2)])
    with pytest.raises(AuthRefused, match="who are you"):
        async with asyncio.timeout(PATIENCE_S):
            await dispatch(send, clock).run(feed, sink)
    assert (sink.outcomes, clock.slept) == ([], [DRAIN_S])


async def test_rows_that_wait_are_given_back() -> None:
    """A job that pauses gets the rows back that wait for their retry; not those in flight, nor one whose reply cost."""
    clock, in_flight, answer = StoppedClock(), asyncio.Event(), asyncio.Event()
    garbled = Fault(FaultKind.GARBLED, RowError("garbled", "?"), Reply(200, usage=Usage(1, 1)))

    async def send(call: RemoteRow) -> Outcome | Fault:
        if call.row.number == 3:
            in_flight.set()
            await answer.wait()
            return answered(call)
        return garbled if call.row.number == 2 else FAILED

    sink, running = ListSink(), dispatch(send, clock)
    feed = OpenFeed(sink, [chat_row(n, "a") for n in range(4)])
    run = asyncio.create_task(running.run(feed, sink))
    await in_flight.wait()
    assert running.give_back("another job") == []
    assert sorted(row.number for row in running.give_back("")) == [0, 1]
    assert running.give_back("") == []
    answer.set()
    await sink.wait_for(1)
    assert sink.numbers() == [3]
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


async def test_bug_in_a_call_ends_the_run() -> None:
    """What is not a failure of the service comes out of the run as it is; no row vanishes in silence."""

    async def send(call: RemoteRow) -> Outcome:
        raise ZeroDivisionError

    sink = ListSink()
    with pytest.raises(ZeroDivisionError):
        await dispatch(send, HeldClock()).run(OpenFeed(sink, [chat_row(0, "a")]), sink)


@pytest.mark.parametrize(
    ("retries", "slept"),
    [(Retries(4, lambda n: n * 10.0), [10.0, 20.0, 30.0]), (Retries(9, lambda n: 10.0, 25.0), [10.0] * 3)],
)
async def test_retries_are_made_as_told(retries: Retries, slept: list[float]) -> None:
    """Where it is said how often, when and how long a call is made again, that is what happens."""
    clock = HeldClock()

    async def send(call: RemoteRow) -> Fault:
        return FAILED

    sink = ListSink()
    await dispatch(send, clock, 1, retries).run(OpenFeed(sink, [chat_row(0, "a")], ended=True), sink)
    assert clock.slept == slept
    error = sink.outcomes[0].error
    assert error is not None
    assert error.message.endswith("(after 4 calls)")


async def test_calls_that_are_held_have_few_bytes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows may be in flight: the others wait without their bodies, and can be given back."""
    monkeypatch.setattr(dispatch_module, "HELD_BYTES_MAX", 6000)
    held, most, gate = 0, 0, asyncio.Event()

    async def send(call: RemoteRow) -> Outcome:
        nonlocal held, most
        held += 1
        most = max(most, held)
        await gate.wait()
        held -= 1
        return answered(call)

    sink = ListSink()
    rows = [chat_row(n, "a" * 1000) for n in range(40)]
    work = dispatch(send, HeldClock(), 64)
    running = asyncio.create_task(work.run(OpenFeed(sink, rows, ended=True), sink))
    while held < 3:
        await asyncio.sleep(0)
    returned = work.give_back("")
    assert len(returned) == 40 - held
    gate.set()
    async with asyncio.timeout(PATIENCE_S):
        await running
    assert most <= 3
    assert sorted([*sink.numbers(), *(row.number for row in returned)]) == list(range(40))
    assert work._held_bytes == 0
