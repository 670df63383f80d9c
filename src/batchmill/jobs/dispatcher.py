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
from batchmill.jobs.pool import Death, Pool, PoolWorker
from batchmill.ports import Clock, Executor
from batchmill.states import PauseReason
from batchmill.types import Commit, ModelSpec
from batchmill.wire.messages import Ack, Failed, Open, Revoke

RELEASE_S = 30.0  # rows in flight may take so long to end when their job is paused


class Dispatcher:
    def __init__(self, data_dir: Path, books: Books, executor: Executor, clock: Clock) -> None:
        self._data_dir, self._books, self._executor, self._clock = data_dir, books, executor, clock
        self._pools: dict[str, Pool] = {}
        self._dying: set[Pool] = set()  # pools that nobody needs, on their way to their end
        self._endings: dict[str, asyncio.Task[None]] = {}  # pool key -> the end of those that had it
        self._users: dict[str, set[str]] = {}  # pool key -> ids of the jobs that need it
        self._runs: dict[str, JobRun] = {}
        self._keys: dict[str, list[str]] = {}  # job -> pool key of each of its models
        self._leaving: set[str] = set()  # jobs that are being taken back
        self._left: dict[str, dict[int, str]] = {}  # job that was taken back -> shards in flight -> their worker
        self._behind: dict[str, JobRun] = {}  # runs that may not know of every row the ledger counted
        self._returned: list[tuple[JobRun, PoolWorker]] = []  # what a resumed run gets back of what was left
        self._work = asyncio.Event()
        self._released = asyncio.Event()
        self._burying = asyncio.Lock()
        self._dispatching = asyncio.create_task(self._dispatch())
        self._dispatching.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Without the dispatcher nothing goes on: should it fail, every job says so instead of waiting."""
        if not task.cancelled() and (error := task.exception()) is not None:
            for run in self._runs.values():
                run.pause(LedgerBroken(f"the dispatcher failed: {type(error).__name__}: {error}"))

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def reserve(self, job_id: str, models: list[ModelSpec]) -> None:
        """Start the workers that a job will need, so that they get ready while its rows are read.

        Those of a model whose earlier workers are still ending start once these have gone.
        """
        for model in models:
            key = _pool_key(model)
            if key in self._pools and self._pools[key].failure is not None:
                self._retire(key)
            if key not in self._pools:
                home = self._data_dir / "workers" / key[:16]
                self._pools[key] = Pool(
                    model, home, executor=self._executor, listener=self, clock=self._clock, after=self._endings.get(key)
                )
            self._users.setdefault(key, set()).add(job_id)

    async def unreserve(self, job_id: str, *, at_once: bool = False) -> None:
        """A job needs its workers no more; those that nobody needs end."""
        endings = set()
        for key, users in list(self._users.items()):
            users.discard(job_id)
            if not users:
                del self._users[key]
                if key in self._pools:
                    self._retire(key, at_once=at_once)
                    endings.add(self._endings[key])
        if endings:
            await asyncio.wait(endings)

    def _retire(self, key: str, *, at_once: bool = False) -> None:
        """Let a pool end, whoever waits for it; the next one of its key begins after it."""
        pool = self._pools.pop(key)
        self._dying.add(pool)
        before = self._endings.get(key)
        self._endings[key] = asyncio.create_task(self._end(key, pool, before=before, at_once=at_once))

    async def _end(self, key: str, pool: Pool, *, before: asyncio.Task[None] | None, at_once: bool) -> None:
        await pool.stop(at_once=at_once)
        self._dying.discard(pool)
        if before is not None:
            await asyncio.wait({before})
        if self._endings[key] is asyncio.current_task():
            del self._endings[key]

    def add(self, run: JobRun) -> None:
        """Let a run's shards go to workers."""
        job_id = run.spec.id
        if self._dispatching.done():
            run.pause(LedgerBroken("the dispatcher has ended: no row is given out any more"))
        self._runs[job_id] = run
        self._keys[job_id] = [_pool_key(model) for model in run.spec.models]
        for key in self._keys[job_id]:
            pool = self._pools.get(key)
            if pool is not None and pool.failure is not None:
                run.pause(JobPaused(pool.failure.message, reason=PauseReason(pool.failure.reason)))
        if job_id in self._left:
            run.take_over(self._left.pop(job_id))
            self._behind[job_id] = run
        self._work.set()

    async def remove(self, run: JobRun, *, at_once: bool = False) -> None:
        """Take a run back: no more grants. Rows in flight get `RELEASE_S` seconds to end, and are counted.

        After that, or `at_once`, workers that only this job needs are killed, and what they had finished is counted.
        A worker that others need too goes on: what it still finishes counts while the job is paused, and goes on
        counting when it is resumed; of a job that was cancelled it is refused.
        """
        job_id = run.spec.id
        self._leaving.add(job_id)
        try:
            for worker in self._workers():
                if job_id in worker.opened:
                    worker.opened.discard(job_id)
                    worker.revoked.add(job_id)
                    worker.handle.send(Revoke(job_id))
            if not at_once:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wait_released(job_id), RELEASE_S)
            await self._end_late(job_id, at_once=at_once)
            async with self._burying:
                await self._books.settle()
                await self._leave(run)
        finally:
            self._leaving.discard(job_id)
            self._behind.pop(job_id, None)
            self._runs.pop(job_id, None)
            for key in self._keys.pop(job_id, ()):
                self._users.get(key, set()).discard(job_id)

    async def _end_late(self, job_id: str, *, at_once: bool) -> None:
        """Kill the workers that still run rows of a job and that nobody else needs, and wait until they are buried."""
        late: set[asyncio.Task[None]] = set()
        for key in self._keys.get(job_id, ()):
            pool = self._pools.get(key)
            if pool is not None and pool.is_running(job_id) and not self._is_needed(key, job_id, at_once=at_once):
                self._retire(key, at_once=True)
                late.add(self._endings[key])
        for pool in [pool for pool in self._dying if pool.is_running(job_id)]:
            pool.kill()
            late.add(self._endings[_pool_key(pool.model)])
        if late:
            await asyncio.wait(late)

    def _is_needed(self, key: str, job_id: str, *, at_once: bool) -> bool:
        """Whether another job has a claim to these workers; one that is over has none when all ends at once."""
        others = [self._runs.get(other) for other in self._users.get(key, ()) if other != job_id]
        return any(run is None or not at_once or not run.ended.done() for run in others)

    async def _leave(self, run: JobRun) -> None:
        """What is in flight still: refused from now on where the job was cancelled, remembered where it can go on."""
        alive = {worker.name for worker in self._workers()}
        if run.is_cancelled:
            for number in run.held:
                await self._books.call(self._books.ledger.lease, run.spec.id, run.generation, run.shard(number))
        elif left := {number: worker for number, worker in run.held.items() if worker in alive}:
            self._left[run.spec.id] = left

    def _workers(self) -> list[PoolWorker]:
        return [worker for pool in (*self._pools.values(), *self._dying) for worker in pool.workers.values()]

    async def _wait_released(self, job_id: str) -> None:
        while any(job_id in worker.revoked for worker in self._workers()):
            self._released.clear()
            await self._released.wait()

    def workers_of(self, models: list[ModelSpec]) -> list[PoolWorker]:
        """The workers that serve these models now."""
        pools = [self._pools[key] for model in models if (key := _pool_key(model)) in self._pools]
        return [worker for pool in pools for worker in pool.workers.values()]

    # -- giving out ---------------------------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            for job_id, run in list(self._behind.items()):
                await self._catch_up(run)
                self._behind.pop(job_id, None)
            if self._returned:
                await self._take_returned()
            for key, pool in list(self._pools.items()):
                await self._serve(key, pool)

    async def _catch_up(self, run: JobRun) -> None:
        """Rows in flight when a job was taken back may have been counted while nobody listened."""
        try:
            run.catch_up(await self._books.call(self._books.ledger.progress, run.spec.id, run.generation))
        except BatchmillError as error:
            run.pause(error)

    async def _take_returned(self) -> None:
        """Shards that a worker has let go of go out again, once what it had finished of them is counted."""
        returned, self._returned = self._returned, []
        await self._books.settle()
        for run, worker in returned:
            for shard in run.held_by(worker.name):
                run.put_back(shard, died=False)
            worker.revoked.discard(run.spec.id)
        self._released.set()

    async def _serve(self, key: str, pool: Pool) -> None:
        """Give every hungry worker of a pool a shard while there is one."""
        while (found := self._match(key, pool)) is not None:
            worker, run, model = found
            worker.wants -= 1
            shard = run.pop(model, worker.name)
            try:
                standing = await self._books.call(self._books.ledger.lease, run.spec.id, run.generation, shard)
            except BatchmillError as error:
                run.put_back(shard, died=False)
                run.pause(error)
                worker.wants += 1
                continue
            if worker.name not in pool.workers or not self._may_give(run, worker):
                run.put_back(shard, died=False)
                worker.wants += 1
                continue
            self._open(run, worker)
            worker.handle.send(run.grant(shard, standing))

    def _match(self, key: str, pool: Pool) -> tuple[PoolWorker, JobRun, int] | None:
        """A hungry worker, the one that serves the fewest jobs first, and what it gets."""
        for worker in sorted(pool.hungry(), key=lambda w: sum(run.is_held_by(w.name) for run in self._runs.values())):
            found = self._choose(key, worker)
            if found is not None:
                return worker, *found
        return None

    def _may_give(self, run: JobRun, worker: PoolWorker) -> bool:
        """A worker that has yet to let go of a job gets nothing more of it before it has."""
        job_id = run.spec.id
        return not (run.ended.done() or job_id in self._leaving or job_id in self._behind or job_id in worker.revoked)

    def _choose(self, key: str, worker: PoolWorker) -> tuple[JobRun, int] | None:
        ready: dict[str, tuple[JobRun, int]] = {}
        candidates = []
        for job_id, run in self._runs.items():
            if not self._may_give(run, worker):
                continue
            for number, needed in enumerate(self._keys[job_id]):
                if needed == key and run.has_ready(number) and job_id not in ready:
                    ready[job_id] = run, number
                    candidates.append(scheduler.Candidate(job_id, run.spec.created, run.rows_held(number)))
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
        if job_id in self._left:
            self._left[job_id] = _without(self._left[job_id], worker.name)
        run = self._runs.get(job_id)
        if run is None or job_id in self._leaving:
            worker.revoked.discard(job_id)
            self._released.set()
        else:  # it was resumed while these rows were in flight
            self._returned.append((run, worker))
            self._work.set()

    def failed(self, pool: Pool, failure: Failed) -> None:
        key = _pool_key(pool.model)
        users = {failure.job} if failure.job is not None else self._users.get(key, set())
        if failure.job is None and self._pools.get(key) is not pool:
            return  # of workers that nobody needs any more
        error = JobPaused(failure.message, reason=PauseReason(failure.reason))
        for job_id in users:
            run = self._runs.get(job_id)
            if run is not None:
                run.pause(error)

    async def died(self, worker: PoolWorker, code: int) -> Death:
        """What a dead worker finished is adopted; the rest of its shards goes to others."""
        async with self._burying:
            worker.opened.clear()
            worker.revoked.clear()
            for job_id, left in self._left.items():
                self._left[job_id] = _without(left, worker.name)
            self._released.set()
            await self._books.settle()
            adopted: list[Commit] = []
            by_row = False
            for run in [run for run in self._runs.values() if run.is_held_by(worker.name)]:
                suspects = run.suspects
                adopted += await self._bury(worker, run, died=code != 0 and not worker.is_ended)
                by_row = by_row or run.suspects > suspects
            self._work.set()
            return Death(adopted, by_row)

    async def _bury(self, worker: PoolWorker, run: JobRun, *, died: bool) -> list[Commit]:
        """Adopt for one job; returns what was adopted. A worker that did not die by itself is nobody's fault."""
        shards = run.held_by(worker.name)
        if died:
            recovery.note_suspect(run, worker.home / f"{worker.name}.suspect")
        try:
            found = await self._books.call(
                recovery.adopt, self._books.ledger, run.spec, run.generation, run.plan, run.files, worker.name
            )
        except BatchmillError as error:
            run.pause(error)
            return []
        for commit, cost in found:
            self._told(commit, cost, Verdict.COUNTED)
        for shard in shards:
            run.put_back(shard, died=died)
        return [commit for commit, _ in found]

    async def close(self, *, at_once: bool = False) -> None:
        """End every worker; returns when they have gone."""
        self._dispatching.cancel()
        for key in list(self._pools):
            self._retire(key, at_once=at_once)
        if at_once:
            for pool in self._dying:
                pool.kill()
        if self._endings:
            await asyncio.wait(set(self._endings.values()))


def _without(left: dict[int, str], worker: str) -> dict[int, str]:
    return {number: holder for number, holder in left.items() if holder != worker}


def _pool_key(model: ModelSpec) -> str:
    """Models that one set of workers can serve have the same key."""
    return hashlib.sha256(msgspec.json.encode(model, order="deterministic")).hexdigest()
