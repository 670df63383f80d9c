"""Calls of deployed functions on their way to a worker and back: together, bounded, heard once, never left waiting."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from fakes.databases import open_ledger
from fakes.held_clock import HeldClock
from fakes.scripted_workers import ScriptedExecutor, ScriptedWorker

from batchmill.errors import BatchmillError, InvalidRow, ModelFailed, TooLarge, Unavailable
from batchmill.jobs.ledger.commits import CommitLog
from batchmill.jobs.pools import live
from batchmill.jobs.pools import live as live_path
from batchmill.jobs.pools.dispatcher import Dispatcher
from batchmill.jobs.pools.pool_worker import PoolWorker
from batchmill.states import PauseReason
from batchmill.types import BatchTimes, CallStats, FunctionSpec, ModelSpec
from batchmill.wire.error_statuses import Raised
from batchmill.wire.messages import (
    LIVE_REQUESTS_BYTES,
    Abandon,
    Answers,
    Drain,
    Failed,
    FunctionReply,
    FunctionRequests,
    Ready,
)


def model(*, workers: int = 1, is_idempotent: bool = False) -> ModelSpec:
    function = FunctionSpec("main/1", "/nowhere", "d", is_idempotent=is_idempotent)
    return ModelSpec("f", "function_process", "app.py:f", workers=workers, function=function)


class Stage:
    def __init__(self, folder) -> None:
        self.executor, self.clock = ScriptedExecutor(), HeldClock()
        self.clock.sleep = self._sleep  # type: ignore[method-assign]
        self.held = asyncio.Event()  # nobody's time passes until it is set
        self.commit_log = CommitLog(open_ledger(folder / "batchmill.db"))
        self.dispatcher = Dispatcher(folder, self.commit_log, self.executor, self.clock, idle_timeout_s=3600.0)
        self.live = self.dispatcher.live
        self.tasks: list[asyncio.Task[FunctionReply]] = []

    async def _sleep(self, seconds: float) -> None:
        await self.held.wait()
        await asyncio.sleep(0)  # an event that is set would let nobody else run

    def ask(self, spec: ModelSpec, body: bytes = b"{}", **options) -> asyncio.Task[FunctionReply]:
        self.tasks.append(asyncio.create_task(self.live.call(spec, "arguments", body, **options)))
        return self.tasks[-1]

    async def loaded(self, spec: ModelSpec) -> ScriptedWorker:
        """A worker that is ready, and heard of."""
        loading = asyncio.create_task(self.live.load(spec))
        worker = await self.executor.next()
        await loading
        return worker

    async def close(self) -> None:
        await self.dispatcher.close(at_once=True)
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.commit_log.close()


@pytest.fixture
async def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    await made.close()


def reply(worker: ScriptedWorker, *answers: FunctionReply, stats: CallStats | None = None) -> None:
    worker.say(Answers(list(answers), stats))


async def test_a_call_and_its_answer(stage):
    """A body goes to a worker with its form and head and its time, and the answer comes back as it was given."""
    spec = model()
    task = stage.ask(spec, b"body", head=b"h", timeout_s=2.0)
    worker = await stage.executor.next()
    (ask,) = (await worker.expect(FunctionRequests)).asks
    assert (ask.form, ask.body, ask.head, ask.timeout_s) == ("arguments", b"body", b"h", 2.0)
    reply(worker, FunctionReply(ask.id, b"done", b"h2"))
    assert await task == FunctionReply(ask.id, b"done", b"h2") and not worker.has_heard(Abandon)


async def test_calls_of_one_turn_travel_together(stage):
    """What comes in one turn of the loop is one message; answers may come in any order, many in one."""
    spec = model()
    worker = await stage.loaded(spec)
    tasks = [stage.ask(spec, str(n).encode()) for n in range(50)]
    asks = (await worker.expect(FunctionRequests)).asks
    assert [ask.body for ask in asks] == [str(n).encode() for n in range(50)]
    reply(worker, *[FunctionReply(ask.id, ask.body) for ask in reversed(asks)])
    assert [answer.body for answer in await asyncio.gather(*tasks)] == [str(n).encode() for n in range(50)]


async def test_a_message_has_a_limit():
    """Bodies that are too many for one message go in several; the one that is too long alone goes alone."""
    sent = []
    worker = PoolWorker("w", None, _Handle(sent))
    half = b"x" * (LIVE_REQUESTS_BYTES // 2)
    for number, body in enumerate([half, half, b"a", half + half + b"y", b"b"]):
        worker.send_request(_ask(number, body), lambda _: None)
    await asyncio.sleep(0)
    assert [[ask.id for ask in message.asks] for message in sent] == [[0, 1], [2], [3], [4]]


class _Handle:
    def __init__(self, sent) -> None:
        self.send = sent.append


def _ask(number, body):
    return live.FunctionRequest(number, "arguments", body)


async def test_a_call_without_waiting(stage):
    """`call_nowait` begins where a worker is ready and not before; its answer is heard once, errors included."""
    spec, events = model(), []
    assert stage.live.call_nowait(spec, "rows", b"a", on_reply=events.append) is None and not stage.live.is_ready(spec)
    worker = await stage.loaded(spec)
    assert stage.live.is_ready(spec)
    assert stage.live.call_nowait(spec, "rows", b"a", on_reply=events.append) is not None
    (ask,) = (await worker.expect(FunctionRequests)).asks
    answer = FunctionReply(ask.id, raised=Raised.of(InvalidRow("no", code="x")))
    reply(worker, answer, answer)
    await _until(lambda: events)
    assert events == [answer]


async def test_whoever_leaves_is_not_answered(stage):
    """A call that is cancelled ends at its worker too, one that has not been sent yet as well; nothing is heard."""
    spec, events = model(), []
    worker = await stage.loaded(spec)
    cancel = stage.live.call_nowait(spec, "rows", b"a", on_reply=events.append)
    cancel()
    (ask,) = (await worker.expect(FunctionRequests)).asks
    assert (await worker.expect(Abandon)).id == ask.id
    task = stage.ask(spec)
    (other,) = (await worker.expect(FunctionRequests)).asks
    task.cancel()
    assert (await worker.expect(Abandon)).id == other.id
    reply(worker, FunctionReply(ask.id), FunctionReply(other.id))
    last = stage.ask(spec)
    (ask,) = (await worker.expect(FunctionRequests)).asks
    reply(worker, FunctionReply(ask.id))
    await last
    cancel()
    assert events == [] and not worker.has_heard(Abandon)


async def test_what_was_raised_is_raised(stage):
    """An answer that is an error is raised with its kind and code."""
    spec = model()
    worker = await stage.loaded(spec)
    task = stage.ask(spec)
    (ask,) = (await worker.expect(FunctionRequests)).asks
    reply(worker, FunctionReply(ask.id, raised=Raised.of(ModelFailed("ValueError: no", code="function_error"))))
    with pytest.raises(ModelFailed, match="ValueError: no") as raised:
        await task
    assert raised.value.code == "function_error"


async def test_a_worker_that_dies_is_one_clear_error(stage):
    """Calls whose worker died are told so at once; the next one goes to its successor."""
    spec = model()
    worker = await stage.loaded(spec)
    tasks = [stage.ask(spec), stage.ask(spec)]
    await worker.expect(FunctionRequests)
    worker.exit(-9)
    for task in tasks:
        with pytest.raises(ModelFailed, match="died before it replied") as raised:
            await task
        assert raised.value.code == "worker_crashed"
    again = stage.ask(spec)
    worker = await stage.executor.next()
    (ask,) = (await worker.expect(FunctionRequests)).asks
    reply(worker, FunctionReply(ask.id, b"fine"))
    assert (await again).body == b"fine"


async def test_what_may_be_called_twice_is(stage):
    """A call that is declared idempotent is made once more when its worker dies, and only once."""
    spec = model(is_idempotent=True)
    worker = await stage.loaded(spec)
    first, second = stage.ask(spec, b"first"), stage.ask(spec, b"second")
    await worker.expect(FunctionRequests)
    worker.exit(-9)
    worker = await stage.executor.next()
    asks = {}
    while len(asks) < 2:
        asks |= {ask.body: ask.id for ask in (await worker.expect(FunctionRequests)).asks}
    reply(worker, FunctionReply(asks[b"first"], b"done"))
    assert (await first).body == b"done"
    worker.exit(-9)
    with pytest.raises(ModelFailed, match="died") as raised:
        await second
    assert raised.value.code == "worker_crashed"


async def test_the_least_busy_worker_answers(stage):
    """Calls spread over the workers by how many each has."""
    spec = model(workers=2)
    one = await stage.loaded(spec)
    two = await stage.executor.next()
    await _until(lambda: stage.dispatcher.gauges()[0].ready == 2)
    for _ in range(4):
        assert stage.live.call_nowait(spec, "rows", b"a", on_reply=lambda _: None) is not None
    assert [len((await each.expect(FunctionRequests)).asks) for each in (one, two)] == [2, 2]


async def test_calls_have_limits(stage, monkeypatch):
    """So many calls and bytes are on their way to a model, and no more; a body fits a message or is refused."""
    monkeypatch.setattr(live_path, "IN_FLIGHT_MAX", 2)
    monkeypatch.setattr(live_path, "BYTES_IN_FLIGHT_MAX", 10)
    spec = model()
    worker = await stage.loaded(spec)
    with pytest.raises(TooLarge):
        await stage.ask(spec, b"x" * (live_path.BODY_BYTES_MAX + 1))
    full = stage.ask(spec, b"x" * 10)
    (ask,) = (await worker.expect(FunctionRequests)).asks
    with pytest.raises(Unavailable, match="in flight"):
        await stage.ask(spec, b"y")
    reply(worker, FunctionReply(ask.id))
    await full
    tasks = [stage.ask(spec, b""), stage.ask(spec, b"")]
    asks = (await worker.expect(FunctionRequests)).asks
    with pytest.raises(Unavailable, match="being answered"):
        await stage.ask(spec, b"")
    reply(worker, *[FunctionReply(ask.id) for ask in asks])
    await asyncio.gather(*tasks)


async def test_a_model_that_cannot_start_says_why(stage):
    """A call of a function whose process cannot start hears its words, and the loader too."""
    spec = model()
    loading = asyncio.create_task(stage.live.load(spec))
    task = stage.ask(spec)
    worker = await stage.executor.next(ready=False)
    worker.say(Failed("model_failed", "ImportError: no such thing", PauseReason.ENGINE_FAILED))
    for each in (task, loading):
        with pytest.raises(ModelFailed, match="ImportError"):
            await each
    worker.exit(1)


async def test_workers_stay_while_they_are_called(stage, monkeypatch):
    """A pool is held while calls come, and let go of some time after the last; a loaded one stays until unloaded."""
    spec = model()
    worker = await stage.loaded(spec)
    pools = stage.dispatcher._pools
    (key,) = [key for key, _ in pools.items()]
    task = stage.ask(spec)
    (ask,) = (await worker.expect(FunctionRequests)).asks
    reply(worker, FunctionReply(ask.id))
    await task
    assert len(pools.users(key)) == 2
    stage.held.set()
    await _until(lambda: len(pools.users(key)) == 1)
    stage.held.clear()
    stage.live.unload(spec)
    assert not pools.users(key) and not worker.has_heard(Drain)


async def test_what_was_counted_outlives_the_worker(stage):
    """Sums of a model go on over the deaths of its workers, whatever they ran."""
    spec = model()
    worker = await stage.loaded(spec)
    first = CallStats(rows=3, executions=1, succeeded=3, batches=[BatchTimes(3, 1)], last_at=1.0)
    reply(worker, stats=first)
    await _until(lambda: stage.live.stats(spec).rows == 3)
    worker.exit(-9)
    worker = await stage.executor.next()
    reply(worker, stats=CallStats(rows=2, executions=2, failed=2, batches=[BatchTimes(1, 2)], last_at=2.0))
    await _until(lambda: stage.live.stats(spec).rows == 5)
    result = stage.live.stats(spec)
    assert (result.executions, result.succeeded, result.failed, result.last_at) == (3, 3, 2, 2.0)
    assert result.batches == [BatchTimes(1, 2), BatchTimes(3, 1)]


async def test_the_next_version_is_warm_before_it_is_called(stage):
    """`warm` returns once a worker is up, and keeps it as if it had just been called."""
    spec = model()
    warming = asyncio.create_task(stage.live.warm(spec))
    worker = await stage.executor.next(ready=False)
    assert not warming.done()
    worker.say(Ready(1))
    await warming
    assert stage.live.is_ready(spec)
    with contextlib.suppress(BatchmillError):
        assert stage.live.call_nowait(spec, "rows", b"", on_reply=lambda _: None) is not None


async def _until(is_so) -> None:
    while not is_so():
        await asyncio.sleep(0)
