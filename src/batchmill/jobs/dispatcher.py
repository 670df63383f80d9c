"""Brings shards to workers and commits to the ledger. One for all jobs of a data directory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from pathlib import Path

import msgspec

from batchmill.errors import BatchmillError, JobPaused, LedgerBroken
from batchmill.jobs import recovery, scheduler
from batchmill.jobs.commits import Books
from batchmill.jobs.job_run import JobRun
from batchmill.jobs.ledger import Verdict
from batchmill.jobs.pool import Pool, PoolWorker
from batchmill.ports import Clock, Executor
from batchmill.states import PauseReason
from batchmill.types import Commit, ModelSpec
from batchmill.wire.messages import Ack, Failed, Open, Revoke

RELEASE_S = 30.0  # rows in flight may take so long to end when their job is paused


class Dispatcher:
    def __init__(self, data_dir: Path, books: Books, executor: Executor, clock: Clock) -> None:
        self._data_dir, self._books, self._executor, self._clock = data_dir, books, executor, clock
        self._pools: dict[str, Pool] = {}
        self._users: dict[str, set[str]] = {}  # pool -> ids of the jobs that need it
        self._runs: dict[str, JobRun] = {}
        self._work = asyncio.Event()
        self._released = asyncio.Event()
        self._dispatching = asyncio.create_task(self._dispatch())
        self._dispatching.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Without the dispatcher nothing goes on: should it fail, every job says so instead of waiting."""
        if not task.cancelled() and (error := task.exception()) is not None:
            for run in self._runs.values():
                run.pause(LedgerBroken(f"the dispatcher failed: {type(error).__name__}: {error}"))

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def reserve(self, job_id: str, models: list[ModelSpec]) -> None:
        """Start the workers that a job will need, so that they get ready while its rows are read."""
        for model in models:
            key = _pool_key(model)
            failed = key in self._pools and self._pools[key].failure is not None
            if key not in self._pools or failed:
                home = self._data_dir / "workers" / key[:16]
                self._pools[key] = Pool(model, home, self._executor, self, self._clock)
            self._users.setdefault(key, set()).add(job_id)

    async def unreserve(self, job_id: str, *, at_once: bool = False) -> None:
        """A job needs its workers no more; those that nobody needs end."""
        for key, users in list(self._users.items()):
            users.discard(job_id)
            if not users and key in self._pools:
                del self._users[key]
                await self._pools.pop(key).stop(at_once=at_once)

    def add(self, run: JobRun) -> None:
        """Let a run's shards go to workers."""
        self._runs[run.spec.id] = run
        for model in run.spec.models:
            pool = self._pools.get(_pool_key(model))
            failure = None if pool is None else pool.failure
            if failure is not None:
                run.pause(JobPaused(failure.message, reason=PauseReason(failure.reason)))
        self._work.set()

    async def remove(self, run: JobRun, *, at_once: bool = False) -> None:
        """Take a run back: no more grants. Rows in flight get `RELEASE_S` seconds to end, and are counted."""
        job_id = run.spec.id
        workers = [w for pool in self._pools.values() for w in pool.workers.values() if job_id in w.opened]
        for worker in workers:
            worker.handle.send(Revoke(job_id))
        if not at_once:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wait_released(job_id), RELEASE_S)
        for worker in self._opened(job_id):
            worker.handle.kill()
            worker.opened.discard(job_id)
        await self._books.settle()
        self._runs.pop(job_id, None)

    def _opened(self, job_id: str) -> list[PoolWorker]:
        return [w for pool in self._pools.values() for w in pool.workers.values() if job_id in w.opened]

    async def _wait_released(self, job_id: str) -> None:
        while self._opened(job_id):
            self._released.clear()
            await self._released.wait()

    def run_of(self, job_id: str) -> JobRun | None:
        return self._runs.get(job_id)

    def workers_of(self, models: list[ModelSpec]) -> list[PoolWorker]:
        """The workers that serve these models now."""
        pools = [self._pools[key] for model in models if (key := _pool_key(model)) in self._pools]
        return [worker for pool in pools for worker in pool.workers.values()]

    # -- giving out ---------------------------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            for key, pool in list(self._pools.items()):
                await self._serve(key, pool)

    async def _serve(self, key: str, pool: Pool) -> None:
        """Give every hungry worker of a pool a shard while there is one."""
        while workers := pool.hungry():
            worker = min(workers, key=lambda w: len([r for r in self._runs.values() if r.held_by(w.name)]))
            found = self._choose(key)
            if found is None:
                return
            run, model = found
            worker.wants -= 1
            shard = run.pop(model, worker.name)
            try:
                standing = await self._books.call(self._books.ledger.lease, run.spec.id, run.generation, shard)
            except BatchmillError as error:
                run.put_back(shard, died=False)
                run.pause(error)
                worker.wants += 1
                continue
            if worker.name not in pool.workers or run.ended.done():
                run.put_back(shard, died=False)
                worker.wants += 1
                continue
            self._open(run, worker)
            worker.handle.send(run.grant(shard, standing))

    def _choose(self, key: str) -> tuple[JobRun, int] | None:
        ready: dict[str, tuple[JobRun, int]] = {}
        candidates = []
        for run in self._runs.values():
            for number, model in enumerate(run.spec.models):
                if _pool_key(model) == key and run.has_ready(number) and run.spec.id not in ready:
                    ready[run.spec.id] = run, number
                    held = run.rows_held(number)
                    candidates.append(scheduler.Candidate(run.spec.id, run.spec.created, held))
        chosen = scheduler.choose(candidates)
        return None if chosen is None else ready[chosen]

    @staticmethod
    def _open(run: JobRun, worker: PoolWorker) -> None:
        spec = run.spec
        if spec.id not in worker.opened:
            worker.opened.add(spec.id)
            files = run.files
            worker.handle.send(Open(spec.id, spec.identity, spec.form, str(files.dataset), str(files.segments)))

    # -- what workers say ---------------------------------------------------------------------------------------------

    def wanted(self, pool: Pool) -> None:
        self._work.set()

    async def record(self, pool: Pool, worker: PoolWorker, commit: Commit) -> None:
        price = pool.model.price
        cost = None if price is None else price.cost(commit.usage)

        def told(verdict: Verdict | BatchmillError) -> None:
            worker.handle.send(Ack(commit.lease, commit.seq, verdict in (Verdict.COUNTED, Verdict.REPEATED)))
            self._told(commit, cost, verdict)

        await self._books.commit(commit, cost, told)

    def _told(self, commit: Commit, cost: float | None, verdict: Verdict | BatchmillError) -> None:
        run = self._runs.get(commit.lease.job)
        if run is None:
            return
        if isinstance(verdict, BatchmillError):
            run.pause(verdict)
        elif verdict is Verdict.COUNTED:
            run.cost += cost or 0.0
            run.counted(commit)
            run.check_budget()

    def released(self, worker: PoolWorker, job_id: str) -> None:
        self._released.set()

    def failed(self, pool: Pool, failure: Failed) -> None:
        error = JobPaused(failure.message, reason=PauseReason(failure.reason))
        users = {failure.job} if failure.job is not None else self._users.get(_pool_key(pool.model), set())
        for job_id in users:
            run = self._runs.get(job_id)
            if run is not None:
                run.pause(error)

    async def died(self, pool: Pool, worker: PoolWorker, code: int) -> None:
        """What a dead worker finished is adopted; the rest of its shards goes to others."""
        worker.opened.clear()
        self._released.set()
        await self._books.settle()
        for run in list(self._runs.values()):
            shards = run.held_by(worker.name)
            if not shards:
                continue
            recovery.note_suspect(run, worker.home / f"{worker.name}.suspect")
            try:
                found = await self._books.call(
                    recovery.adopt, self._books.ledger, run.spec, run.generation, run.plan, run.files, worker.name
                )
            except BatchmillError as error:
                run.pause(error)
                continue
            for commit, cost in found:
                self._told(commit, cost, Verdict.COUNTED)
            for shard in shards:
                run.put_back(shard, died=code != 0)
        self._work.set()

    async def close(self, *, at_once: bool = False) -> None:
        self._dispatching.cancel()
        for pool in list(self._pools.values()):
            await pool.stop(at_once=at_once)
        self._pools.clear()


def _pool_key(model: ModelSpec) -> str:
    """Models that one set of workers can serve have the same key."""
    return hashlib.sha256(msgspec.json.encode(model, order="deterministic")).hexdigest()
