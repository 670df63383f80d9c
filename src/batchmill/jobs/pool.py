"""The workers of one model: started, watched, replaced when they die, drained when nobody needs them."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from pathlib import Path
from typing import Protocol

from batchmill.ports import Clock, Executor, WorkerHandle
from batchmill.states import PauseReason
from batchmill.types import Commit, EngineStats, ModelSpec
from batchmill.wire.messages import Drain, Failed, Heartbeat, Ready, Record, Released, Start, Want

DEATHS_MAX = 5  # in a row without a commit between: then the model is given up
FROZEN_S = 60.0  # a worker that says nothing for so long and is stopped by a signal is ended
DRAIN_S = 10.0


class PoolWorker:
    """A worker and what it holds."""

    def __init__(self, name: str, home: Path, handle: WorkerHandle) -> None:
        self.name, self.home, self.handle = name, home, handle
        self.is_ready = False
        self.wants = 0  # grants it has room for
        self.opened: set[str] = set()  # jobs it was told of
        self.stats = EngineStats()
        self.heard = 0.0


class PoolListener(Protocol):
    """Who is told what the workers of a pool say."""

    def wanted(self, pool: Pool) -> None: ...
    async def record(self, pool: Pool, worker: PoolWorker, commit: Commit) -> None: ...
    def released(self, worker: PoolWorker, job_id: str) -> None: ...
    def failed(self, pool: Pool, failure: Failed) -> None: ...
    async def died(self, pool: Pool, worker: PoolWorker, code: int) -> None: ...


class Pool:
    def __init__(self, model: ModelSpec, home: Path, executor: Executor, listener: PoolListener, clock: Clock) -> None:
        self.model, self._home = model, home
        self._executor, self._listener, self._clock = executor, listener, clock
        self.workers: dict[str, PoolWorker] = {}
        self._tending = [asyncio.create_task(self._tend(replica)) for replica in range(max(1, model.workers))]
        for task in self._tending:
            task.add_done_callback(self._tended)
        self._watching = asyncio.create_task(self._watch())
        self._stopping = False
        self._deaths = 0
        self.failure: Failed | None = None

    async def _tend(self, replica: int) -> None:
        """Keep one worker alive until the pool stops."""
        while not self._stopping and self.failure is None:
            name = uuid.uuid4().hex
            home = self._home / f"worker-{replica}"
            try:
                handle = await self._executor.start(Start(name, self.model, str(home)))
            except OSError as error:
                self._fail(Failed("worker_failed", f"a worker cannot be started: {error}", PauseReason.ENGINE_FAILED))
                return
            worker = PoolWorker(name, home, handle)
            worker.heard = self._clock.monotonic()
            self.workers[name] = worker
            failed = False
            async for message in handle.messages():
                worker.heard = self._clock.monotonic()
                failed = await self._hear(worker, message) or failed
            code = await handle.wait()
            del self.workers[name]
            await self._listener.died(self, worker, code)
            if failed or self._stopping:
                return
            self._deaths += 1
            if self._deaths >= DEATHS_MAX:
                text = f"{DEATHS_MAX} workers of {self.model.name!r} died one after another (exit code {code})"
                text += f"; see {home / name}.log"
                self._fail(Failed("worker_crashed", text, PauseReason.ENGINE_FAILED))

    def _tended(self, task: asyncio.Task[None]) -> None:
        """A worker that nobody tends any more is heard of, not waited for."""
        if not task.cancelled() and (error := task.exception()) is not None:
            text = f"a worker of {self.model.name!r} was lost: {type(error).__name__}: {error}"
            self._fail(Failed("worker_lost", text, PauseReason.ENGINE_FAILED))

    async def _hear(self, worker: PoolWorker, message: object) -> bool:
        """Pass on what a worker said; True when it said that it has failed."""
        match message:
            case Ready():
                worker.is_ready = True
                worker.wants = 1
                self._listener.wanted(self)
            case Want():
                worker.wants += 1
                self._listener.wanted(self)
            case Record(commit):
                self._deaths = 0
                await self._listener.record(self, worker, commit)
            case Heartbeat(stats):
                worker.stats = stats
            case Released(job):
                worker.opened.discard(job)
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

    async def _watch(self) -> None:
        """End workers that are stopped by a signal: their leases must go on elsewhere."""
        while True:
            await self._clock.sleep(FROZEN_S / 10)
            for worker in list(self.workers.values()):
                if self._clock.monotonic() - worker.heard > FROZEN_S and worker.handle.is_frozen():
                    worker.handle.kill()

    def hungry(self) -> list[PoolWorker]:
        """Workers with room for a grant."""
        return [worker for worker in self.workers.values() if worker.is_ready and worker.wants > 0]

    async def stop(self, *, at_once: bool = False) -> None:
        """Let the workers record what they have and end; `at_once`: end them now."""
        self._stopping = True
        self._watching.cancel()
        for worker in list(self.workers.values()):
            worker.handle.kill() if at_once else worker.handle.send(Drain())
        _, late = await asyncio.wait(self._tending, timeout=DRAIN_S)
        for worker in list(self.workers.values()):
            worker.handle.kill()
        for task in late:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task}, timeout=5.0)
                task.cancel()
