"""A live request on its way to a worker and back: the least busy one, in pieces, bounded, and never left waiting."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from fakes.databases import open_ledger
from fakes.held_clock import HeldClock
from fakes.scripted_workers import ScriptedExecutor, ScriptedWorker

from batchmill.errors import BatchmillError, InvalidRow, ModelFailed, TooLarge, Unavailable
from batchmill.jobs.ledger.commits import CommitLog
from batchmill.jobs.pools import live as live_path
from batchmill.jobs.pools.dispatcher import Dispatcher, Sharing
from batchmill.jobs.pools.live import LivePath
from batchmill.jobs.pools.resources import Resources
from batchmill.states import PauseReason
from batchmill.types import LiveHead, LiveRequest, ModelSpec, Needs
from batchmill.wire.error_statuses import Raised
from batchmill.wire.messages import (
    LIVE_AHEAD_BYTES,
    Abandon,
    Answered,
    AnswerLive,
    Drain,
    Failed,
    FlowCredit,
    Head,
    Ready,
    ReplyChunk,
)

MODEL = ModelSpec("m", "http", "m", base_url="http://127.0.0.1:1/v1", workers=2)
ASKED = LiveRequest("/v1/chat/completions", b"{}")


class Stage:
    def __init__(self, folder, machine: Resources | None = None) -> None:
        self.executor, self.clock = ScriptedExecutor(), HeldClock()
        self.commit_log = CommitLog(open_ledger(folder / "batchmill.db"))
        self.dispatcher = Dispatcher(
            folder, self.commit_log, self.executor, self.clock, idle_timeout_s=3600.0, sharing=Sharing(machine=machine)
        )
        self.asked: list[asyncio.Task[list[LiveHead | bytes]]] = []

    def ask(self, request: LiveRequest = ASKED) -> asyncio.Task[list[LiveHead | bytes]]:
        """All that comes back for a request."""

        async def hear() -> list[LiveHead | bytes]:
            return [piece async for piece in self.dispatcher.live.predict(MODEL, request)]

        self.asked.append(asyncio.create_task(hear()))
        return self.asked[-1]

    async def close(self) -> None:
        await self.dispatcher.close(at_once=True)
        await asyncio.gather(*self.asked, return_exceptions=True)
        self.commit_log.close()


@pytest.fixture
async def stage(tmp_path, monkeypatch):
    made = Stage(tmp_path)
    made.clock.sleep = lambda _: asyncio.Event().wait()  # pools linger as long as the test
    yield made
    await made.close()


async def answer(worker: ScriptedWorker, *pieces: bytes, status: int = 200) -> AnswerLive:
    request = await worker.expect(AnswerLive)
    worker.say(Head(request.id, LiveHead(status)))
    for piece in pieces:
        worker.say(ReplyChunk(request.id, piece))
    worker.say(Answered(request.id))
    return request


async def test_an_answer_comes_in_pieces(stage):
    """The head comes first, then the pieces as the worker sent them; it is counted under its status."""
    task = stage.ask()
    worker = await stage.executor.next()
    assert (await answer(worker, b"a", b"b", status=429)).request == ASKED
    assert await task == [LiveHead(429), b"a", b"b"]
    assert stage.dispatcher.tallies.live == {("m", 429): 1} and not worker.has_heard(Abandon)


async def test_the_least_busy_worker_answers(stage):
    """Requests spread over the workers that are ready, by how many each has."""
    tasks = [stage.ask()]
    one, two = await stage.executor.next(), await stage.executor.next(ready=False)
    first = await one.expect(AnswerLive)
    two.say(Ready(2))
    await asyncio.sleep(0.0)
    while stage.dispatcher.gauges()[0].ready < 2:
        await asyncio.sleep(0)
    tasks += [stage.ask()]
    second = await two.expect(AnswerLive)
    for worker, request in ((one, first), (two, second)):
        worker.say(Answered(request.id))
    await asyncio.gather(*tasks)


async def test_whoever_leaves_is_not_answered_on(stage):
    """A caller that closes the iterator ends the work on its answer, and late pieces go nowhere."""
    pieces = stage.dispatcher.live.predict(MODEL, ASKED)
    beginning = asyncio.create_task(anext(pieces))
    worker = await stage.executor.next()
    request = await worker.expect(AnswerLive)
    worker.say(Head(request.id, LiveHead(200)))
    assert await beginning == LiveHead(200)
    await pieces.aclose()
    assert (await worker.expect(Abandon)).id == request.id
    worker.say(ReplyChunk(request.id, b"late"))
    worker.say(Answered(request.id))
    task = stage.ask()
    await answer(worker, b"x")
    assert await task == [LiveHead(200), b"x"]


async def test_a_slow_reader_is_waited_for(stage):
    """The worker hears how much was handed on only as it is handed on."""
    pieces = stage.dispatcher.live.predict(MODEL, ASKED)
    beginning = asyncio.create_task(anext(pieces))
    worker = await stage.executor.next()
    request = await worker.expect(AnswerLive)
    piece = b"x" * (LIVE_AHEAD_BYTES // 4)
    worker.say(Head(request.id, LiveHead(200)))
    for _ in range(3):
        worker.say(ReplyChunk(request.id, piece))
    await beginning
    assert await anext(pieces) == piece and not worker.has_heard(FlowCredit)
    assert await anext(pieces) == piece
    assert await worker.expect(FlowCredit) == FlowCredit(request.id, len(piece))
    await pieces.aclose()


async def test_what_the_engine_raised_is_raised(stage):
    """Without an answer there is the engine's own error, of its kind and with its code."""
    task = stage.ask()
    worker = await stage.executor.next()
    request = await worker.expect(AnswerLive)
    worker.say(Answered(request.id, Raised.of(InvalidRow("no such field", code="invalid_field"))))
    with pytest.raises(InvalidRow, match="no such field") as raised:
        await task
    assert raised.value.code == "invalid_field" and stage.dispatcher.tallies.live == {("m", 0): 1}


async def test_a_worker_that_dies_leaves_nobody_waiting(stage):
    """A request whose worker died before or within its answer is told at once that it may come again."""
    first, second = stage.ask(), stage.ask()
    worker = await stage.executor.next()
    request = await worker.expect(AnswerLive)
    worker.say(Head(request.id, LiveHead(200)))
    await worker.expect(AnswerLive)
    worker.exit(1)
    for task in (first, second):
        with pytest.raises(Unavailable, match="ended before it replied"):
            await task


async def test_a_model_that_cannot_start_says_why(stage):
    """Every request that waits hears the engine's words; one that comes soon after does not start it again."""
    tasks = [stage.ask(), stage.ask()]
    worker = await stage.executor.next(ready=False)
    other = await stage.executor.next(ready=False)
    worker.say(Failed("model_failed", "no GPU here", PauseReason.ENGINE_FAILED))
    for task in tasks:
        with pytest.raises(ModelFailed, match="no GPU here"):
            await task
    with pytest.raises(ModelFailed, match="no GPU here"):
        await stage.ask()
    assert stage.executor.is_quiet
    stage.clock.at += live_path.TRY_AGAIN_S
    again = stage.ask()
    for each in (worker, other):
        each.exit(1)
    await answer(await stage.executor.next(), b"fine now")
    assert (await again)[1:] == [b"fine now"]


async def test_a_model_without_room_says_why(tmp_path):
    """A request whose model waits for room until its patience is over is told for which."""
    made = Stage(tmp_path, Resources(24, []))
    made.clock.sleep = lambda _: asyncio.Event().wait()
    made.dispatcher.live = LivePath(made.dispatcher._pools, made.dispatcher.tallies, made.clock, loading_s=0.05)
    made.dispatcher.reserve("job_1", [ModelSpec("other", "http", "o", needs=Needs(20))])
    await made.executor.next()
    try:
        result = r"'big' needs 12 bytes .*: another model \(a job runs on it\) holds 20 bytes"
        with pytest.raises(Unavailable, match=result):
            async for _ in made.dispatcher.live.predict(ModelSpec("big", "http", "b", needs=Needs(12)), ASKED):
                raise AssertionError("nobody answers")
        with pytest.raises(ModelFailed, match="'huge' needs 25 bytes and the machine has 24 bytes"):
            async for _ in made.dispatcher.live.predict(ModelSpec("huge", "http", "h", needs=Needs(25)), ASKED):
                raise AssertionError("nobody answers")
    finally:
        await made.close()


async def test_waiting_has_a_limit(stage, monkeypatch):
    """So many requests wait for a model that starts, and no more; so many are answered at once."""
    monkeypatch.setattr(live_path, "WAITING_MAX", 2)
    monkeypatch.setattr(live_path, "IN_FLIGHT_MAX", 2)
    waiting = [stage.ask(), stage.ask()]
    worker = await stage.executor.next(ready=False)
    while stage.dispatcher.gauges()[0].live_waiting < 2:
        await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="2 requests wait"):
        await stage.ask()
    worker.say(Ready(1))
    requests = [await worker.expect(AnswerLive) for _ in waiting]
    with pytest.raises(Unavailable, match="being answered"):
        await stage.ask()
    for each in requests:
        worker.say(Answered(each.id))
    assert await asyncio.gather(*waiting) == [[], []]


async def test_a_body_has_a_limit(stage):
    """A body that does not fit one message is refused by its size; the largest that does is sent."""
    with pytest.raises(TooLarge):
        await stage.ask(LiveRequest("/v1/x", b"x" * (live_path.BODY_BYTES_MAX + 1)))
    task = stage.ask(LiveRequest("/v1/x", b"x" * live_path.BODY_BYTES_MAX))
    await answer(await stage.executor.next())
    assert await task == [LiveHead(200)]


async def test_workers_are_kept_for_the_next_request(stage):
    """A model stays loaded after its request, until the server ends; then nobody is answered any more."""
    task = stage.ask()
    worker = await stage.executor.next()
    await answer(worker)
    await task
    assert not worker.has_heard(Drain) and stage.dispatcher.gauges()[0].workers
    await stage.dispatcher.close(at_once=True)
    with pytest.raises(Unavailable, match="stopping"):
        await stage.ask()
    with contextlib.suppress(BatchmillError):
        await task


async def test_a_model_that_loads_for_long_is_not_waited_for_without_end(stage):
    """A request waits so long for the first worker and no longer; the model goes on loading for who asks again."""
    live = live_path.LivePath(stage.dispatcher._pools, stage.dispatcher.tallies, stage.clock, loading_s=0.0)
    with pytest.raises(Unavailable, match="still being loaded"):
        await anext(live.predict(MODEL, ASKED))
    task = stage.ask()
    worker = await stage.executor.next()
    await answer(worker, b"x")
    assert await task == [LiveHead(200), b"x"]
