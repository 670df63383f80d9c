"""The workers of one model: started, watched, replaced when they die, drained when nobody needs them."""

from __future__ import annotations

import asyncio
import errno
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from batchmill.errors import BatchmillError, ModelFailed, Unavailable
from batchmill.jobs.call_sums import CallSums
from batchmill.jobs.claims import Weight
from batchmill.models.provisions import NothingProvided
from batchmill.ports import Clock, Executor, Provisions, WorkerHandle
from batchmill.states import PauseReason
from batchmill.types import Ask, Commit, EngineStats, Lease, LiveHead, ModelSpec, Provision
from batchmill.wire.messages import (
    LIVE_ASKS_BYTES,
    Abandon,
    Answer,
    Answered,
    Answers,
    Asks,
    Chunk,
    Drain,
    Failed,
    Head,
    Heartbeat,
    Left,
    Note,
    Provide,
    Ready,
    Record,
    Released,
    Start,
    Want,
)

DEATHS_MAX = 5  # in a row without a commit between: then the model is given up
# As many where a row that ran alone was to blame, and no row got through between: it is not the rows. And as many where
# live requests were being answered, and none got through between.
ROW_DEATHS_MAX = 30
FROZEN_S = 60.0  # a worker that says nothing for so long and is stopped by a signal is ended
GIVEN_UP = "worker_crashed"  # the error of a row that killed its workers
DRAIN_S = 10.0  # workers may take so long to record what they have and end
END_S = 10.0  # and so long to be gone once they are killed


# None: the answer is complete. An Ask has one Answer, or an error.
Hear = Callable[[Answer | LiveHead | bytes | Exception | None], None]


class PoolWorker:
    """A worker and what it holds."""

    def __init__(self, name: str, home: Path, handle: WorkerHandle, provision: Provision = Provision()) -> None:
        self.name, self.home, self.handle, self.provision = name, home, handle, provision
        self.is_ready = False
        self.is_ended = False  # we have killed it: its end is nobody's fault
        self.wants: set[str] = set()  # jobs of which it has room for one more grant
        self.weights: dict[str, Weight] = {}  # job -> what it was told of it
        self.calls: dict[int, Hear] = {}  # live request -> who hears its answer
        self.opened: set[str] = set()  # jobs it was told of and may get grants of
        self.revoked: set[str] = set()  # jobs of which it may still run what it had begun
        self.stats = EngineStats()
        self.heard = 0.0
        self._asks: list[Ask] = []  # of this turn of the loop: they go in one message

    def end(self) -> None:
        """Kill it because we want it gone."""
        self.is_ended = True
        self.handle.kill()

    def provide(self, provision: Provision) -> None:
        """Give it the secrets of now, if it has others."""
        if provision != self.provision:
            self.provision = provision
            self.handle.send(Provide(provision))

    def close(self, job_id: str) -> None:
        """It gets no more of this job."""
        self.opened.discard(job_id)
        self.wants.discard(job_id)
        self.weights.pop(job_id, None)

    def hear(self, message: Head | Chunk | Answered) -> None:
        """Pass on a piece of an answer; nobody hears one that was abandoned."""
        match message:
            case Head(id_, piece) | Chunk(id_, piece):
                hear = self.calls.get(id_)
            case Answered(id_, raised):
                hear, piece = self.calls.pop(id_, None), None if raised is None else raised.error()
        if hear is not None:
            hear(piece)

    def ask(self, ask: Ask, hear: Hear) -> None:
        """Have it answer a call, with all the others of this turn of the loop."""
        self.calls[ask.id] = hear
        if not self._asks:
            asyncio.get_running_loop().call_soon(self._send_asks)
        self._asks.append(ask)

    def _send_asks(self) -> None:
        asks, self._asks = self._asks, []
        begin = size = 0
        for at, ask in enumerate(asks):
            size += len(ask.body) + len(ask.head)
            if size > LIVE_ASKS_BYTES and at > begin:
                self.handle.send(Asks(asks[begin:at]))
                begin, size = at, len(ask.body) + len(ask.head)
        if asks:
            self.handle.send(Asks(asks[begin:]))

    def abandon(self, ask_id: int) -> None:
        """Nobody waits for this answer any more."""
        if self.calls.pop(ask_id, None) is not None:
            self._send_asks()
            self.handle.send(Abandon(ask_id))

    def answer(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            hear = self.calls.pop(answer.id, None)
            if hear is not None:
                hear(answer)

    def end_calls(self, error: BatchmillError) -> None:
        """It answers nothing any more."""
        calls, self.calls = self.calls, {}
        for hear in calls.values():
            hear(error)


class Death(Struct, frozen=True):
    """What the end of a worker left."""

    adopted: Sequence[Commit] = ()  # outcomes it had not told of
    by_row: bool = False  # it ran one row alone, which is to blame


class PoolListener(Protocol):
    """Who is told what the workers of a pool say."""

    def wanted(self, pool: Pool) -> None: ...
    async def record(self, pool: Pool, worker: PoolWorker, commit: Commit) -> None: ...
    async def note(self, worker: PoolWorker, note: Note) -> None: ...
    def left(self, worker: PoolWorker, lease: Lease) -> None: ...
    def released(self, worker: PoolWorker, job_id: str) -> None: ...
    def failed(self, pool: Pool, failure: Failed) -> None: ...
    async def died(self, pool: Pool, worker: PoolWorker, code: int) -> Death: ...


class Pool:
    def __init__(
        self,
        key: str,
        model: ModelSpec,
        home: Path,
        *,
        executor: Executor,
        listener: PoolListener,
        clock: Clock,
        after: asyncio.Task[None] | None = None,
        provisions: Provisions = NothingProvided(),
    ) -> None:
        """Start the workers; once `after` is done, where one is given."""
        self._provisions = provisions
        self._provided: Provision | None = None  # since secrets have changed
        self.key, self.model, self._home = key, model, home
        self._executor, self._listener, self._clock, self._after = executor, listener, clock, after
        self.workers: dict[str, PoolWorker] = {}
        self._stopping = False
        self._deaths = self._row_deaths = self._call_deaths = 0
        self.failure: Failed | None = None
        self.was_ready = False  # a worker of it has been ready
        self.sums = CallSums()
        self._waiters: set[asyncio.Future[None]] = set()  # live requests that no worker is ready for
        self._tending = [asyncio.create_task(self._tend(replica)) for replica in range(max(1, model.workers))]
        for task in self._tending:
            task.add_done_callback(self._tended)
        self._watching = asyncio.create_task(self._watch())

    async def _tend(self, replica: int) -> None:
        """Keep one worker alive until the pool stops."""
        if self._after is not None:
            await asyncio.wait({self._after})
        while not self._stopping and self.failure is None:
            name = uuid.uuid4().hex
            home = self._home / f"worker-{replica}"
            provision = await self._provision()
            if provision is None:
                return
            try:
                handle = await self._executor.start(Start(name, self.model, str(home), replica, provision))
            except OSError as error:
                self._fail(_not_started(error))
                return
            worker = PoolWorker(name, home, handle, provision)
            try:
                failed = await self._listen(worker)
            finally:  # nobody hears it any more: whoever waits for an answer of it is told
                worker.is_ready = False
                is_answering = bool(worker.calls)
                worker.end_calls(self._lost())
            code = await handle.wait()
            del self.workers[name]
            death = await self._listener.died(self, worker, code)
            if failed or self._stopping:
                return
            self._count_death(worker, death, code, is_answering=is_answering)

    async def _provision(self) -> Provision | None:
        """What the workers are given; None where a secret is missing, and the model has failed for that."""
        try:
            return await self._provisions.of(self.model)
        except BatchmillError as error:
            self._fail(Failed(error.code, error.message, PauseReason.ENGINE_FAILED))
            return None

    async def provide(self) -> None:
        """Secrets have changed: give the workers those of now. Without one that it needs the model has failed."""
        provision = None if self._stopping or self.failure is not None else await self._provision()
        if provision is not None:
            self._provided = provision
            for worker in self.workers.values():
                worker.provide(provision)

    async def _listen(self, worker: PoolWorker) -> bool:
        """Hear a worker out until it has gone; True when it said that it has failed."""
        worker.heard = self._clock.monotonic()
        self.workers[worker.name] = worker
        if self._provided is not None:
            worker.provide(self._provided)
        if self._stopping:  # since it was asked for
            worker.end()
        failed = False
        async for message in worker.handle.messages():
            worker.heard = self._clock.monotonic()
            failed = await self._hear(worker, message) or failed
        return failed

    def _lost(self) -> BatchmillError:
        """What live requests hear that a worker has left without an answer."""
        if self.failure is not None:
            return ModelFailed(self.failure.message)
        return Unavailable(f"the worker of {self.model.name!r} ended before it had answered; try again")

    def _count_death(self, worker: PoolWorker, death: Death, code: int, *, is_answering: bool) -> None:
        """Give the model up when its workers die one after another; a row that is to blame is given up instead.

        A live request that kills a worker must not fail the jobs there.
        """
        for commit in death.adopted:
            self._got_through(commit)
        if worker.is_ended:
            return
        if death.by_row:
            self._deaths = 0
            self._row_deaths += 1
        elif is_answering:
            self._call_deaths += 1
        else:
            self._deaths += 1
        deaths = max(self._deaths, self._row_deaths, self._call_deaths)
        if self._deaths >= DEATHS_MAX or max(self._row_deaths, self._call_deaths) >= ROW_DEATHS_MAX:
            text = f"{deaths} workers of {self.model.name!r} died one after another (exit code {code})"
            text += f"; see {worker.home / worker.name}.log"
            self._fail(Failed("worker_crashed", text, PauseReason.ENGINE_FAILED))

    def _got_through(self, commit: Commit) -> None:
        """Rows were finished: the deaths before them were not the model's. That a row was given up proves nothing."""
        self._deaths = self._call_deaths = 0
        if commit.rows_ok or commit.errors.keys() - {GIVEN_UP}:
            self._row_deaths = 0

    def _tended(self, task: asyncio.Task[None]) -> None:
        """A worker that nobody tends any more is heard of, not waited for."""
        if not task.cancelled() and (error := task.exception()) is not None:
            text = f"a worker of {self.model.name!r} was lost: {type(error).__name__}: {error}"
            self._fail(Failed("worker_lost", text, PauseReason.ENGINE_FAILED))

    async def _hear(self, worker: PoolWorker, message: object) -> bool:
        """Pass on what a worker said; True when it said that it has failed."""
        match message:
            case Answers(answers, stats):
                worker.answer(answers)
                if answers:
                    self._call_deaths = 0
                if stats is not None:
                    self.sums.add(stats)
            case Chunk() | Head() | Answered():
                worker.hear(message)
                if isinstance(message, Answered):
                    self._call_deaths = 0
            case Ready():
                worker.is_ready = self.was_ready = True
                self._change()
                self._listener.wanted(self)
            case Want(job):
                worker.wants.add(job)
                self._listener.wanted(self)
            case Record(commit):
                self._got_through(commit)
                await self._listener.record(self, worker, commit)
            case Heartbeat(stats):
                worker.stats = stats
            case Note():
                await self._listener.note(worker, message)
            case Left(lease):
                self._listener.left(worker, lease)
            case Released(job):
                self._listener.released(worker, job)
            case Failed(job=None):
                self._fail(message)
                return True
            case Failed():
                self._listener.failed(self, message)
        return False

    def _fail(self, failure: Failed) -> None:
        if self.failure is None:
            self.failure = failure
            self._listener.failed(self, failure)
            self._change()

    async def _watch(self) -> None:
        """End workers that are stopped by a signal: their leases must go on elsewhere."""
        while True:
            await self._clock.sleep(FROZEN_S / 10)
            for worker in list(self.workers.values()):
                if self._clock.monotonic() - worker.heard > FROZEN_S and worker.handle.is_frozen():
                    worker.handle.kill()

    def is_running(self, job_id: str) -> bool:
        """Whether a worker was told to let go of this job and has not."""
        return any(job_id in worker.revoked for worker in self.workers.values())

    def kill(self) -> None:
        """End the workers now; `stop` tells when they have gone."""
        self._stopping = True
        for worker in self.workers.values():
            worker.end()

    def ready(self) -> list[PoolWorker]:
        """Workers that may be given something."""
        return [worker for worker in self.workers.values() if worker.is_ready and not worker.is_ended]

    # -- for live requests --------------------------------------------------------------------------------------------

    def least_live(self) -> PoolWorker | None:
        """The ready worker with the fewest live requests."""
        found = None
        for worker in () if self._stopping else self.workers.values():  # for every call: no list, no key
            is_free = worker.is_ready and not worker.is_ended
            if is_free and (found is None or len(worker.calls) < len(found.calls)):
                found = worker
        return found

    @property
    def waiting(self) -> int:
        """Live requests that no worker is ready for."""
        return len(self._waiters)

    async def change(self) -> None:
        """Return when a worker is ready, or none will ever be."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _change(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- ending -------------------------------------------------------------------------------------------------------

    async def stop(self, *, at_once: bool = False) -> None:
        """Let the workers record what they have and end; `at_once`: end them now. Returns when they have gone.

        Concurrency: may be called again, with `at_once`, while it waits.
        """
        self._stopping = True
        self._change()
        self._watching.cancel()
        if at_once:
            self.kill()
        for worker in self.workers.values():
            worker.handle.send(Drain())
        _, late = await asyncio.wait(self._tending, timeout=END_S if at_once else DRAIN_S)
        self.kill()
        if late:
            _, late = await asyncio.wait(late, timeout=END_S)
        for task in late:
            task.cancel()


def _not_started(error: OSError) -> Failed:
    """A full disk is no fault of the model's: its jobs go on when there is room."""
    text = f"a worker cannot be started: {error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Failed("storage_full", text, PauseReason.STORAGE_FULL)
    return Failed("worker_failed", text, PauseReason.ENGINE_FAILED)
