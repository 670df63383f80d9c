"""Dispatcher: gives shards to workers and their commits to the ledger. One for all jobs of a data directory."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Struct

from batchmill.errors import BatchmillError, JobPaused
from batchmill.jobs.ledger import outcome_map
from batchmill.jobs.ledger.commits import CommitLog
from batchmill.jobs.ledger.core_task import CoreTask
from batchmill.jobs.ledger.ledger import ShardNote, Verdict
from batchmill.jobs.ledger.sampled_rows import bitmaps
from batchmill.jobs.pools import scheduler
from batchmill.jobs.pools.job_run import JobRun
from batchmill.jobs.pools.leasing import Match, lease
from batchmill.jobs.pools.live import LivePath
from batchmill.jobs.pools.pool import Death, Pool
from batchmill.jobs.pools.pool_worker import Claim, Claims, PoolWorker
from batchmill.jobs.pools.pools import Pools
from batchmill.jobs.pools.quarantine import Quarantine
from batchmill.jobs.pools.replicas import Load
from batchmill.jobs.pools.resources import Resources
from batchmill.jobs.pools.tallies import ModelGauge, Tallies
from batchmill.models.secrets import NoSecrets
from batchmill.ports.clock import Clock
from batchmill.ports.executors import Executor, Provisions
from batchmill.states import PauseReason
from batchmill.types import Commit, Lease, ModelSpec
from batchmill.wire.messages import (
    Ack,
    Failed,
    FailRows,
    LeaseReleased,
    Note,
    Noted,
    Ready,
    Record,
    Released,
    RequestRows,
    Revoke,
    SetShare,
    Spending,
)

RELEASE_S = 30.0  # rows in flight may take so long to finish when their job is paused
COLLECT_S = 900.0  # and so long to collect the results that a provider has when their job ends
GRANTS_AT_ONCE = 64  # leased in one transaction
SHARD_REASONS = frozenset({PauseReason.SUBMIT_UNKNOWN, PauseReason.ROUTE_FAILED})  # of one shard alone


class _RemovedJob(Struct, frozen=True):
    """Rows that were in flight when a job was removed."""

    project: str
    shards: dict[int, str]  # shard -> the worker that has it


class Sharing(Struct, frozen=True):
    """The weights of projects, and the resources that all models share."""

    weights: Mapping[str, float] = {}  # by project; 1 for projects without an entry
    machine: Resources | None = None  # the resources of all replicas; None: no limits


class Dispatcher:
    """
    Args:
        idle_timeout_s: how long unused workers are kept.
        provisions: the secrets of workers; `provide` sends changed ones.
    """

    def __init__(
        self,
        data_dir: Path,
        commit_log: CommitLog,
        executor: Executor,
        clock: Clock,
        *,
        sharing: Sharing = Sharing(),
        idle_timeout_s: float = 0.0,
        provisions: Provisions = NoSecrets(),
        quarantine: Quarantine | None = None,
    ) -> None:
        self.quarantine = quarantine = quarantine or Quarantine(clock)
        self._commit_log, self._clock, self._weights = commit_log, clock, sharing.weights
        self.term = commit_log.ledger.database.term
        self.tallies = Tallies()
        self.listen = commit_log.listen
        pools = Pools(
            data_dir,
            executor,
            clock,
            dispatcher=self,
            idle_timeout_s=idle_timeout_s,
            provisions=provisions,
            quarantine=quarantine,
            machine=sharing.machine,
        )
        self._pools, self.provide = pools, pools.provide
        self.engine_of, self.pin, self.unpin = pools.view, pools.pin, pools.unpin
        self.tallies.adapters = pools.adapters
        self.live = LivePath(self._pools, self.tallies, clock)
        self._claims: WeakKeyDictionary[Pool, Claims] = WeakKeyDictionary()
        self._runs: dict[str, JobRun] = {}
        self._keys: dict[str, list[str]] = {}  # job -> pool key of each of its models
        self._removing: set[str] = set()  # jobs that are being removed
        self._removed: dict[str, _RemovedJob] = {}  # jobs that were removed with rows in flight
        self._catching_up: dict[str, JobRun] = {}  # runs that may miss rows that the ledger counted
        self._returned: list[tuple[JobRun, PoolWorker]] = []  # a resumed run, and a worker that has released its job
        self._work = asyncio.Event()
        self._released = asyncio.Event()
        self._recovering = asyncio.Lock()
        self._ended: JobPaused | None = None  # why no more rows are given out
        self.dispatching = CoreTask("the dispatcher", self._dispatch(), self._stopped)

    def _stopped(self, error: JobPaused) -> None:
        """Pause every job, so that none waits forever."""
        self._ended = error
        for run in self._runs.values():
            run.pause(error)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def reserve(self, job_id: str, models: Sequence[ModelSpec], code: Mapping[str, str] | None = None) -> None:
        """Start the workers that a job will need while its rows are read.

        If earlier workers of a model are still ending, the new ones start after them.
        """
        for model in models:
            self._pools.use(job_id, model, self._pools.key_of(model, code))

    async def unreserve(self, job_id: str, *, at_once: bool = False) -> None:
        """Release the workers of a job; unused ones end now or after their idle timeout."""
        await self._pools.release(job_id, at_once=at_once)

    def add(self, run: JobRun) -> None:
        """Give a run's shards to workers."""
        job_id, spec = run.spec.id, run.spec
        if self._ended is not None:
            run.pause(self._ended)
            return
        self._runs[job_id] = run
        keys = self._keys[job_id] = [self._pools.key_of(model, spec.code) for model in spec.models]
        for number in run.models_left:
            pool = self._pools.get(keys[number])
            if pool is not None and pool.failure is not None:
                run.pause(JobPaused(pool.failure.message, reason=PauseReason(pool.failure.reason)))
            else:
                pool = self._pools.use(job_id, spec.models[number], keys[number])
            self._claims_of(pool).forget()
            self._pools.rescale(keys[number])
        if job_id in self._removed:
            run.take_over(self._removed.pop(job_id).shards)
            self._catching_up[job_id] = run
        self._work.set()

    def fail_rows(self, run: JobRun) -> None:
        """Give up rows of a job that failed and wait, at workers that have some now or get some later."""
        run.fails_rows = True
        for worker in self._workers_with(run):
            worker.handle.send(FailRows(run.spec.id))

    def bound(self, run: JobRun) -> None:
        """Apply a new or changed budget of a job."""
        is_new = run.job_budget is None
        run.check_budget()
        if is_new and run.job_budget is not None:
            for worker in self._workers_with(run):
                run.job_budget.open(worker.name, worker.handle.send)

    def _workers_with(self, run: JobRun) -> list[PoolWorker]:
        return [worker for worker in self._pools.workers() if run.spec.id in worker.opened]

    async def remove(self, run: JobRun, *, at_once: bool = False, is_over: bool = False) -> None:
        """Remove a run: no more grants. Rows in flight get `RELEASE_S` seconds to finish, and are counted.

        `is_over`: the job ends for good, for example when cancelled: rows at a provider are collected or cancelled now.

        After that, or `at_once`, kill the workers that only this job needs, and count the rows that they finished.
        Workers that other jobs need continue. Their later outcomes count while the job is paused and after it is
        resumed; those of a cancelled job are refused.
        """
        job_id, is_over = run.spec.id, is_over or run.is_over or run.is_cancelled
        self._removing.add(job_id)
        try:
            for worker in self._workers_with(run):
                worker.close(job_id)
                worker.revoked.add(job_id)
                worker.handle.send(Revoke(job_id, is_over, run.over))
            is_all = not (run.rows_left or run.is_sample)
            if run.spec.is_small and is_all and not any(model.is_handed_over for model in run.spec.models):
                return  # every row is counted: nothing is in flight
            if not at_once:
                await self._wait_released(job_id, RELEASE_S)
                await self._wait_released(job_id, COLLECT_S if is_over else 0.0, handed_over=True)
            await self._kill_late_workers(job_id, at_once=at_once)
            async with self._recovering:
                await self._commit_log.settle()
                await self._settle_in_flight(run, is_over=is_over)
        finally:
            self._removing.discard(job_id)
            self._catching_up.pop(job_id, None)
            self._runs.pop(job_id, None)
            self._keys.pop(job_id, None)
            self._pools.forget(job_id)
            for claims in self._claims.values():
                claims.forget()
            self._work.set()  # other jobs may use its slot

    async def _kill_late_workers(self, job_id: str, *, at_once: bool) -> None:
        """Kill the workers that still run rows of a job and that no other job needs; count what they finished."""
        late: set[asyncio.Task[None]] = set()
        for key in self._keys.get(job_id, ()):
            pool = self._pools.get(key)
            if pool is not None and pool.is_running(job_id) and not self._is_needed(key, job_id, at_once=at_once):
                self._pools.retire(key, at_once=True)
                late.add(self._pools.end_tasks[key])
        for pool in [pool for pool in self._pools.ending_pools if pool.is_running(job_id)]:
            pool.kill()
            late.add(self._pools.end_tasks[pool.key])
        if late:
            await asyncio.wait(late)

    def _is_needed(self, key: str, job_id: str, *, at_once: bool) -> bool:
        """Whether another job uses these workers. A job that is over counts only while it may still release rows."""
        others = [self._runs.get(other) for other in self._pools.users(key) if other != job_id]
        return any(run is None or not at_once or not run.ended.done() for run in others)

    async def _settle_in_flight(self, run: JobRun, *, is_over: bool) -> None:
        """Refuse later outcomes of rows in flight if the job is over; otherwise remember the rows for its return."""
        running = {worker.name for worker in self._pools.workers() if run.spec.id in worker.revoked}
        if is_over:
            for number in run.held:
                await self._commit_log.write(
                    self._commit_log.ledger.lease, run.spec.id, run.generation, run.shard(number)
                )
        elif in_flight := {number: worker for number, worker in run.held.items() if worker in running}:
            self._removed[run.spec.id] = _RemovedJob(run.spec.project, in_flight)

    async def _wait_released(self, job_id: str, patience_s: float, *, handed_over: bool = False) -> None:
        """Wait until no worker runs the job, or none that holds rows of a provider; or until time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self._pools.is_running(job_id, handed_over=handed_over):
                    self._released.clear()
                    await self._released.wait()

    # -- views --------------------------------------------------------------------------------------------------------

    def workers_of(self, models: Sequence[ModelSpec], code: Mapping[str, str] | None = None) -> list[PoolWorker]:
        """The workers that serve these models now."""
        pools = [self._pools.get(self._pools.key_of(model, code)) for model in models]
        return [worker for pool in pools if pool is not None for worker in pool.workers.values()]

    def ahead_of(self, job_id: str) -> int:
        """How many jobs are served before this one; once it has rows at a worker, only those of higher priority."""
        run = self._runs.get(job_id)
        if run is None:
            return 0
        keys = {self._keys[job_id][number] for number in run.models_left}
        queues = [[claim.candidate for claim in self._update_claims(key)] for key in keys]
        return max((scheduler.ahead_of(job_id, run.is_waiting, each) for each in queues), default=0)

    def gauges(self) -> list[ModelGauge]:
        """The current state of the workers of every model."""
        gauges = []
        for key, pool in self._pools.items():
            runs = self._runs_of(key)
            waiting = sum(run.is_waiting for run, _ in runs)
            gauges.append(pool.gauge(rows_left=[run.rows_left_of(model) for run, model in runs], waiting=waiting))
        return gauges

    # -- grants -------------------------------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            for job_id, run in list(self._catching_up.items()):
                await self._catch_up(run)
                self._catching_up.pop(job_id, None)
            if self._returned:
                await self._take_returned()
            for key, pool in self._pools.items():
                while matches := self._match(key, pool):
                    await self._grant(pool, matches)

    async def _catch_up(self, run: JobRun) -> None:
        """Count rows in flight that were committed after their job had been removed."""
        read, ledger, key = self._commit_log.call_reader, self._commit_log.ledger, (run.spec.id, run.generation)
        try:
            if run.is_sample:
                run.catch_up_sample(await read(bitmaps, ledger, *key, run.sampled_shards))
            else:
                run.catch_up(await read(ledger.progress, *key))
        except BatchmillError as error:
            run.pause(error)

    async def _take_returned(self) -> None:
        """Make released shards ready again, once the outcomes that their worker finished are counted."""
        returned, self._returned = self._returned, []
        await self._commit_log.settle()
        for run, worker in returned:
            for shard in run.held_by(worker.name):
                run.put_back(shard, died=False)
            worker.revoked.discard(run.spec.id)
        self._released.set()

    def _match(self, key: str, pool: Pool) -> list[Match]:
        """Match shards with workers that have room: jobs in serving order, one shard a worker.

        A job's first grant does not wait for a worker's request: a worker takes turns between the rows of several jobs.
        """
        claims = self._claims_of(pool)
        order = claims.last if claims.is_fresh else self._update_claims(key)
        workers = pool.ready()
        matches: list[Match] = []
        for claim in order:
            run, job_id = claim.run, claim.run.spec.id
            if len(matches) >= GRANTS_AT_ONCE:
                break
            if not run.has_ready(claim.model):
                continue
            free = [worker for worker in workers if worker.has_room(run.spec) and self._may_grant(run, worker)]
            for worker in sorted(free, key=lambda each: (run.is_held_by(each.name), len(each.opened))):
                if not run.has_ready(claim.model):
                    break
                worker.requested -= Counter([job_id])
                _open_job(run, worker, claim.model)
                matches.append(Match(worker, claim, run.pop(claim.model, worker.name)))
        return matches

    async def _grant(self, pool: Pool, matches: Sequence[Match]) -> None:
        """Lease the shards and send their grants."""
        for match, leased in zip(matches, await lease(self._commit_log, matches), strict=True):
            worker, run, job_id = match.worker, match.claim.run, match.claim.run.spec.id
            can_send = worker.name in pool.workers and not worker.is_leaving
            if run.holder(match.shard) != worker.name:
                continue  # while this waited, its last rows were counted, or its worker died
            if leased is None or not can_send or not self._may_grant(run, worker):
                run.put_back(match.shard, died=False)
                if job_id in worker.opened:
                    worker.request(job_id, 1)
                continue
            weight = worker.weights[job_id] = match.claim.weight
            grant = msgspec.structs.replace(
                run.grant(match.shard, leased),
                priority=weight.priority, share=weight.share, row_cost=weight.row_cost,
            )  # fmt: skip
            worker.handle.send(grant)

    def _may_grant(self, run: JobRun, worker: PoolWorker) -> bool:
        """Whether a worker may get shards of a job: not before it has released the job's earlier run."""
        job_id = run.spec.id
        is_blocked = job_id in self._removing or job_id in self._catching_up or job_id in worker.revoked
        return not (run.ended.done() or is_blocked)

    # -- claims -------------------------------------------------------------------------------------------------------

    def _claims_of(self, pool: Pool) -> Claims:
        claims = self._claims.get(pool)
        if claims is None:
            claims = self._claims[pool] = Claims(self._weights, self._clock)
        return claims

    def _runs_of(self, key: str) -> list[tuple[JobRun, int]]:
        """The jobs with rows left for a pool, and the number of its model in each."""
        runs = []
        for job_id, run in self._runs.items():
            if not run.ended.done() and job_id not in self._removing:
                runs += [(run, n) for n, each in enumerate(self._keys[job_id]) if each == key and run.rows_left_of(n)]
        return runs

    def _update_claims(self, key: str) -> list[Claim]:
        """Recompute the share of every job of a pool, and send changes to workers."""
        pool = self._pools.get(key)
        if pool is None:
            return []
        order = self._claims_of(pool).compute(self._runs_of(key))
        for worker in pool.workers.values():
            for claim in order:
                job_id, weight = claim.run.spec.id, claim.weight
                if job_id in worker.weights and not weight.is_like(worker.weights[job_id]):
                    worker.weights[job_id] = weight
                    worker.handle.send(SetShare(job_id, weight.priority, weight.share, weight.row_cost))
        return order

    # -- messages of workers ------------------------------------------------------------------------------------------

    async def receive(self, pool: Pool, worker: PoolWorker, message: object) -> None:
        match message:
            case Ready():
                self._work.set()
            case RequestRows(job, grants):
                worker.request(job, grants)
                self._work.set()
            case Record(commit):
                await self._record(pool, worker, commit)
            case Note():
                await self._note(worker, message)
            case LeaseReleased(lease):
                self._release_shard(lease)
            case Spending():
                self._spending(worker, message)
            case Released(job):
                self._release_job(worker, job)
            case Failed():
                self.failed(pool, message)

    def load(self, key: str) -> Load:
        open_ = [(run.rows_left_of(model), run.shards_left_of(model)) for run, model in self._runs_of(key)]
        return Load(rows=sum(rows for rows, _ in open_), shards=sum(shards for _, shards in open_))

    async def _record(self, pool: Pool, worker: PoolWorker, commit: Commit) -> None:
        price = pool.model.price
        cost = None if price is None else price.cost(commit.usage)
        run = self._runs.get(commit.lease.job)
        end = None if run is None else run.end_with(commit)

        def callback(verdict: Verdict | BatchmillError) -> None:
            if run is not None and end is not None and end.is_stored and verdict is Verdict.COUNTED:
                run.is_finished = True  # else the transaction that stored it may have been rolled back
            is_counted = verdict in (Verdict.COUNTED, Verdict.REPEATED)
            if commit.blocks or not is_counted:
                worker.handle.send(Ack(commit.lease, commit.seq, is_counted, commit.ref))
            self._recorded(pool, commit, cost, verdict, worker)

        await self._commit_log.commit(commit, cost, callback, end)

    def _recorded(
        self, pool: Pool, commit: Commit, cost: float | None, verdict: Verdict | BatchmillError, worker: PoolWorker
    ) -> None:
        job_id = commit.lease.job
        run, removed = self._runs.get(job_id), self._removed.get(job_id)
        if verdict is Verdict.COUNTED:
            project = run.spec.project if run is not None else removed.project if removed is not None else ""
            self.tallies.count(project, pool.model.name, commit, cost)
            claims = self._claims_of(pool)
            claims.charge(project, commit)
            if not claims.is_fresh:
                self._work.set()
        if run is None:
            return
        if isinstance(verdict, BatchmillError):
            run.pause(verdict)
        elif verdict is Verdict.COUNTED:
            run.charge(worker.name, cost or 0.0, commit.rows_ok + commit.rows_failed)
            run.apply_commit(commit)
            run.check_budget()
            if len(run.spec.models) > 1 and job_id in self._keys:
                self._release_finished_model(job_id, pool.key)

    def _release_finished_model(self, job_id: str, key: str) -> None:
        """Release the models of a job whose rows have all run: other models may need the resources."""
        run = self._runs[job_id]
        if not any(run.rows_left_of(number) for number, each in enumerate(self._keys[job_id]) if each == key):
            self._pools.leave(key, job_id)

    def _release_job(self, worker: PoolWorker, job_id: str) -> None:
        self._forget_holder(worker.name, [job_id])
        run = self._runs.get(job_id)
        if run is None or job_id in self._removing:
            worker.revoked.discard(job_id)
            self._released.set()
        else:  # it was resumed while these rows were in flight
            self._returned.append((run, worker))
            self._work.set()

    async def _note(self, worker: PoolWorker, note: Note) -> None:
        def callback(result: bool | BatchmillError) -> None:
            if isinstance(result, BatchmillError):
                reason = result.reason if isinstance(result, JobPaused) else PauseReason.ENGINE_FAILED
                worker.handle.send(Noted(note.id, False, reason, result.message))
            else:
                worker.handle.send(Noted(note.id, result))

        await self._commit_log.note(ShardNote(note.lease, note.key, note.data, self._clock.now()), callback)

    def _spending(self, worker: PoolWorker, message: Spending) -> None:
        if (run := self._runs.get(message.job)) is not None and run.job_budget is not None:
            run.job_budget.report(worker.name, message)
            run.check_budget()

    def _release_shard(self, lease: Lease) -> None:
        run = self._runs.get(lease.job)
        if run is not None and run.generation == lease.generation:
            run.release_lease(lease)
            self._work.set()

    def _forget_holder(self, worker: str, job_ids: Sequence[str]) -> None:
        """Note that a worker no longer runs anything of these removed jobs."""
        for job_id in job_ids:
            removed = self._removed.get(job_id)
            if removed is not None:
                shards = {number: holder for number, holder in removed.shards.items() if holder != worker}
                self._removed[job_id] = _RemovedJob(removed.project, shards)

    def failed(self, pool: Pool, failure: Failed) -> None:
        users = {failure.job} if failure.job is not None else self._pools.users(pool.key)
        if failure.job is None and (not self._pools.is_current(pool) or self._pools.restart_after_eviction(pool)):
            return  # of workers that are no longer needed or are being replaced
        error = JobPaused(failure.message, code=failure.code, reason=PauseReason(failure.reason))
        for job_id in users:
            run = self._runs.get(job_id)
            if run is None:
                continue
            if error.reason is PauseReason.ROUTE_FAILED:
                run.failing |= {number for number, key in enumerate(self._keys[job_id]) if key == pool.key}
            is_about_shard = failure.job is not None and error.reason in SHARD_REASONS
            if not (run.is_over and is_about_shard):  # the other results of providers are collected all the same
                run.pause(error)

    async def recover_worker(self, pool: Pool, worker: PoolWorker, code: int) -> Death:
        async with self._recovering:
            worker.opened.clear()
            worker.revoked.clear()
            worker.requested.clear()
            self._forget_holder(worker.name, list(self._removed))
            self._released.set()
            await self._commit_log.settle()
            adopted: list[Commit] = []
            by_row = False
            for run in [run for run in self._runs.values() if run.is_held_by(worker.name)]:
                suspects = run.suspects
                died = code != 0 and not (worker.is_ended or worker.storage_error)
                adopted += await self._adopt(pool, worker, run, died=died)
                by_row = by_row or run.suspects > suspects
            for run in self._runs.values():
                run.forget_worker(worker.name)
            self._work.set()
            return Death(adopted, by_row)

    async def _adopt(self, pool: Pool, worker: PoolWorker, run: JobRun, *, died: bool) -> list[Commit]:
        """Count the rows of one job that a worker had finished. `died`: one of its shards may be the cause."""
        if died:
            run.note_suspect(worker.home / f"{worker.name}.suspect")
        adopted: outcome_map.Counted = []  # also by calls whose connection was lost
        try:
            await self._commit_log.call(
                outcome_map.adopt, self._commit_log.ledger, run.spec, run.generation, run.plan, run.files, worker.name,
                counted=adopted,
            )  # fmt: skip
        except BatchmillError as error:
            run.pause(error)
            return []
        for commit, cost in adopted:
            self._recorded(pool, commit, cost, Verdict.COUNTED, worker)
        for shard in run.held_by(worker.name):  # others may hold what was put back while this waited
            run.put_back(shard, died=died)
        return [commit for commit, _ in adopted]

    async def close(self, *, at_once: bool = False) -> None:
        """End every worker; return when all have ended."""
        self.dispatching.cancel()
        await self._pools.close(at_once=at_once)
        await self.live.close()
        await self.quarantine.close()


def _open_job(run: JobRun, worker: PoolWorker, model: int) -> None:
    """Send a job to a worker before its rows, unless the worker has it."""
    spec = run.spec
    if spec.id in worker.opened:
        return
    worker.opened[spec.id] = spec.project
    worker.handle.send(run.opening(model))
    if run.fails_rows:
        worker.handle.send(FailRows(spec.id))
    if run.job_budget is not None:
        run.job_budget.open(worker.name, worker.handle.send)
