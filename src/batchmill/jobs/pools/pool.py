"""A pool: the workers of one model, started, watched, replaced when they die, drained when unused."""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from batchmill.errors import BatchmillError, ModelFailed, Unavailable, to_storage_error
from batchmill.jobs.pools.pool_worker import PoolWorker
from batchmill.jobs.pools.quarantine import Quarantine
from batchmill.jobs.pools.replicas import EngineLog, Load, ReplicaTarget, last_lines
from batchmill.jobs.pools.resources import AllocationRequest, Allocations, Capacity, ReplicaId, minimum_replicas
from batchmill.jobs.pools.tallies import AdapterSums, CallSums, ModelGauge
from batchmill.models import redaction
from batchmill.models.secrets import NoSecrets
from batchmill.owner_term import Term
from batchmill.ports.clock import Clock
from batchmill.ports.executors import Executor, PlacedHandle, Provisions
from batchmill.states import PauseReason
from batchmill.types import Commit, EngineStats, ModelSpec, Provision
from batchmill.types.models import DIED
from batchmill.wire.messages import (
    Answered,
    Answers,
    Charged,
    Drain,
    EngineDied,
    Failed,
    Head,
    Heartbeat,
    Ready,
    Record,
    Renewed,
    ReplyChunk,
    Start,
    StorageBroken,
    Suspected,
)

FROZEN_S = 60.0  # a worker that a signal has stopped is killed after so long without a message
REPLICA_REASONS = (PauseReason.ENGINE_FAILED, PauseReason.STORAGE_FAILED)  # failures of one replica: others continue
DRAIN_S = 10.0  # for workers to record what they have and end
END_S = 10.0  # for killed workers to end
RETRY_DELAY_S, RETRY_DELAY_MAX_S = 30.0, 600.0  # before a failed replica is started again; doubles with each failure
DEATHS_MAX = 5  # consecutive ones without a commit between them: then the model has failed
# As above, for workers that died while a row ran alone, if no row finished between: the rows are not the cause. The
# same number holds for workers that died during live requests, if no request finished between.
ROW_DEATHS_MAX = 30
GIVEN_UP = "worker_crashed"  # the error of a row that killed its workers


class Death(Struct, frozen=True):
    """The state that a dead worker left behind."""

    adopted: Sequence[Commit] = ()  # outcomes that it had not reported
    by_row: bool = False  # it ran one row alone, which is the cause


class RowDispatcher(Protocol):
    """Gives rows to the workers of pools and handles their messages about rows."""

    term: Term  # see `Database.term`

    def load(self, key: str) -> Load:
        """The rows that wait for the workers of this pool key."""
        ...

    async def receive(self, pool: Pool, worker: PoolWorker, message: object) -> None:
        """Handle a worker's message about readiness or rows. Waits while the ledger is behind."""
        ...

    def failed(self, pool: Pool, failure: Failed) -> None:
        """Handle the failure of a pool, or of one job in it."""
        ...

    async def recover_worker(self, pool: Pool, worker: PoolWorker, code: int) -> Death:
        """After a worker's process has ended: count what it finished and make the rest of its shards ready."""
        ...


class PoolTools(Struct, frozen=True):
    """What all pools of a data directory share."""

    executor: Executor
    dispatcher: RowDispatcher
    clock: Clock
    allocations: Allocations
    log: EngineLog
    quarantine: Quarantine
    provisions: Provisions = NoSecrets()


class CrashCounter:
    """Counts consecutive worker deaths of a model, and decides whether to give the model up."""

    def __init__(self) -> None:
        self._plain = self._by_row = self._by_call = 0

    def count(self, *, by_row: bool, by_call: bool) -> None:
        """Count a death by cause: a row that ran alone, live requests in flight, or unknown."""
        if by_row:
            self._plain = 0
            self._by_row += 1
        elif by_call:
            self._by_call += 1
        else:
            self._plain += 1

    @property
    def most(self) -> int:
        return max(self._plain, self._by_row, self._by_call)

    @property
    def are_too_many(self) -> bool:
        return self._plain >= DEATHS_MAX or max(self._by_row, self._by_call) >= ROW_DEATHS_MAX

    @property
    def are_of_rows(self) -> bool:
        """Whether so many deaths by rows show that the rows are not the cause."""
        return self._by_row >= ROW_DEATHS_MAX

    def count_reply(self) -> None:
        """Note a completed live request."""
        self._by_call = 0

    def reset(self) -> None:
        """Reset the counts while the failed replica waits and others continue."""
        self._plain = self._by_call = 0

    def count_progress(self, commit: Commit) -> bool:
        """Reset the counts: rows finished, so earlier deaths were not the model's. False if all rows were given up."""
        self._plain = self._by_call = 0
        if not (commit.rows_ok or commit.errors.keys() - {GIVEN_UP}):
            return False
        self._by_row = 0
        return True


class _Replica:
    """One replica of a model and the workers that run it, one after another."""

    def __init__(self, number: int, *, is_extra: bool) -> None:
        self.number, self.is_extra = number, is_extra
        self.worker: PoolWorker | None = None
        self.is_waiting = False  # for resources, or for a retry: it has no process
        self.is_leaving = False
        self.failures = 0  # in a row
        self.task: asyncio.Task[None] | None = None

    @property
    def restart_cost(self) -> tuple[bool, bool, int, int]:
        """A sort key: the replica that is missed least comes first."""
        worker = self.worker
        busy = 0 if worker is None else len(worker.calls) + len(worker.opened)
        return (not self.is_waiting, worker is not None and worker.is_ready, busy, -self.number)


class Pool:
    def __init__(
        self, key: str, model: ModelSpec, home: Path, tools: PoolTools, *, after: asyncio.Task[None] | None = None
    ) -> None:
        """Args: after: wait for this event before the workers start."""
        self._provided: Provision | None = None  # set once secrets have changed
        self.key, self.model, self._home = key, model, home
        self._tools, self._dispatcher, self._clock, self._after = tools, tools.dispatcher, tools.clock, after
        self.workers: dict[str, PoolWorker] = {}
        self._stopping = False
        self._deaths = CrashCounter()
        self.failure: Failed | None = None
        self.was_ready = False  # at least one worker has been ready
        self.sums, self.adapters = CallSums(), AdapterSums()
        self._waiters: set[asyncio.Future[None]] = set()  # live requests that no worker is ready for
        self.target = ReplicaTarget(0)
        self._replicas: dict[int, _Replica] = {}
        self.scale(ReplicaTarget(minimum_replicas(model)))
        self._watching = asyncio.create_task(self._watch())

    # -- replicas -----------------------------------------------------------------------------------------------------

    def scale(self, target: ReplicaTarget) -> None:
        """Scale to the target number of replicas. Surplus ones finish what they have."""
        if self._stopping or self.failure is not None:
            return
        self.target = target
        staying = [each for each in self._replicas.values() if not each.is_leaving]
        free = (number for number in itertools.count() if number not in self._replicas)
        for number in itertools.islice(free, max(0, target.wanted - len(staying))):
            is_extra = sum(not each.is_leaving for each in self._replicas.values()) >= minimum_replicas(self.model)
            replica = self._replicas[number] = _Replica(number, is_extra=is_extra)
            replica.task = asyncio.create_task(self._supervise(replica))
            replica.task.add_done_callback(lambda task, replica=replica: self._supervisor_ended(replica, task))
        for replica in sorted(staying, key=lambda each: each.restart_cost)[: max(0, len(staying) - target.wanted)]:
            self._release(replica)

    def release_spare(self, number: int) -> None:
        """Release a replica that the model can run without, for another model."""
        self.target = ReplicaTarget(self.target.wanted - 1)
        self._release(self._replicas[number])

    def _release(self, replica: _Replica) -> None:
        replica.is_leaving = True
        self._tools.log.add(self.key, "stopping", "it is no longer needed", replica.number)
        if replica.is_waiting and replica.task is not None:
            replica.task.cancel()
        elif replica.worker is not None:
            replica.worker.drain()

    def spare_replicas(self) -> list[ReplicaId]:
        """Replicas that the model can run without, the least useful first."""
        staying = sorted(
            (each for each in self._replicas.values() if not each.is_leaving and self._is_allocated(each)),
            key=lambda each: each.restart_cost,
        )
        return [self._id_of(each) for each in staying[: max(0, len(staying) - minimum_replicas(self.model))]]

    def allocated(self, *, leaving: bool = False) -> list[ReplicaId]:
        """The replicas that hold resources; `leaving`: only those that are about to end."""
        return [
            self._id_of(each)
            for each in self._replicas.values()
            if self._is_allocated(each) and (self._stopping or each.is_leaving or not leaving)
        ]

    def _id_of(self, replica: _Replica) -> ReplicaId:
        return ReplicaId(self.key, replica.number)

    def _is_allocated(self, replica: _Replica) -> bool:
        return self._tools.allocations.machine.holds(self._id_of(replica))

    @property
    def replicas(self) -> int:  # that run or start
        return sum(not each.is_waiting and not self._waits_of(each) for each in self._replicas.values())

    @property
    def waits(self) -> str:
        """What the first replica without resources waits for; empty: nothing."""
        return next(filter(None, map(self._waits_of, self._replicas.values())), "")

    def _waits_of(self, replica: _Replica) -> str:
        if replica.is_waiting:
            return self._tools.allocations.why(self._id_of(replica))
        worker = replica.worker
        return worker.placed.waits if worker is not None and worker.placed is not None else ""

    def _must_run(self, replica: _Replica) -> bool:
        return not (self._stopping or replica.is_leaving or self.failure is not None)

    async def _supervise(self, replica: _Replica) -> None:
        """Keep one worker alive until the pool stops, or the replica is not needed."""
        if self._after is not None:
            replica.is_waiting = True
            await asyncio.wait({self._after})
            replica.is_waiting = False
        if flaw := self._tools.allocations.machine.find_excess(self.model):
            self._fail(Failed("machine_too_small", flaw, PauseReason.ENGINE_FAILED))
        while self._must_run(replica):
            capacity = await self._allocate(replica)
            try:
                await self._serve(replica, capacity)
            finally:
                self._tools.allocations.give_back(self._id_of(replica))
            if self._must_run(replica):
                replica.is_waiting = True
                await self._clock.sleep(retry_delay_s(replica.failures))
                replica.is_waiting = False

    async def _allocate(self, replica: _Replica) -> Capacity:
        needs = self._tools.allocations.machine.needs_of(self.model)
        replica.is_waiting = True
        capacity = await self._tools.allocations.take(
            AllocationRequest(self._id_of(replica), self.model.name, needs, replica.is_extra),
            lambda why: self._tools.log.add(self.key, "waiting", why, replica.number),
        )
        replica.is_waiting = False
        return capacity

    async def _serve(self, replica: _Replica, capacity: Capacity) -> None:
        """Start workers, one after another, until the replica is released or fails."""
        log = self._tools.log
        is_first = True
        while self._must_run(replica):
            name = uuid.uuid4().hex
            home = self._home / f"worker-{replica.number}"
            provision = await self._provision()
            if provision is None:
                return
            log.add(self.key, "starting" if is_first else "restarted", replica=replica.number)
            is_first = False
            try:
                poison = self._tools.quarantine.poison(self.model.source)
                is_limited = self._dispatcher.term.left_s() < math.inf
                is_stored = self._tools.provisions.storage_term.until_s < math.inf
                start = Start(
                    name, self.model, str(home), replica.number, provision, capacity.gpus, poison, is_limited, is_stored
                )
                handle = await self._tools.executor.start(start)
            except OSError as error:
                self._fail(_not_started(error))
                return
            worker = replica.worker = PoolWorker(name, home, handle, provision, replica.number)
            try:
                failed = await self._listen(replica, worker)
            finally:  # it sends no more messages: calls that wait for its replies fail
                worker.is_ready = False
                is_answering = bool(worker.calls)
                worker.end_calls(self._worker_ended_error())
            code = await handle.wait()
            if isinstance(handle, PlacedHandle) and handle.is_lost:
                worker.is_ended = True  # with its node: neither the model nor a row is the cause
            replica.worker = None
            del self.workers[name]
            death = await self._dispatcher.recover_worker(self, worker, code)
            if self._stopping or replica.is_leaving:
                log.add(self.key, "stopped", replica=replica.number)
                return
            if failed or self._count_death(worker, death, code, is_answering=is_answering):
                return

    async def _provision(self) -> Provision | None:
        """The secrets of the workers; None if one is missing, in which case the model has failed."""
        try:
            return await self._tools.provisions.of(self.model)
        except BatchmillError as error:
            self._fail(Failed(error.code, error.message, PauseReason.ENGINE_FAILED))
            return None

    async def provide(self) -> None:
        """Send changed secrets to the workers. If a required one is missing, the model fails."""
        provision = None if self._stopping or self.failure is not None else await self._provision()
        if provision is not None:
            self._provided = provision
            for worker in self.workers.values():
                worker.provide(provision)

    async def _listen(self, replica: _Replica, worker: PoolWorker) -> bool:
        """Handle a worker's messages until it has ended; True if it reported a failure."""
        worker.last_message_at = self._clock.monotonic()
        self.workers[worker.name] = worker
        if self._provided is not None:
            worker.provide(self._provided)
        if self._stopping or replica.is_leaving:  # since its start was requested
            worker.end()
        failed = False
        async for message in worker.handle.messages():
            worker.last_message_at = self._clock.monotonic()
            failed = await self._receive(worker, message) or failed
        return failed

    def _worker_ended_error(self) -> BatchmillError:
        """The error for live requests of a worker that ended without a reply."""
        if self.failure is not None:
            return ModelFailed(self.failure.message)
        return Unavailable(f"the worker of {self.model.name!r} ended before it replied; try again")

    def _count_death(self, worker: PoolWorker, death: Death, code: int, *, is_answering: bool) -> bool:
        """Fail the model when its workers die one after another, unless a row is the cause: then only the row fails.

        A live request that kills a worker must not fail jobs. Returns True if this replica stops for now.
        """
        for commit in death.adopted:
            self._count_progress(worker, commit)
        if worker.is_ended:
            return False
        self._deaths.count(by_row=death.by_row, by_call=is_answering and not worker.storage_error)
        log = worker.home / f"{worker.name}.log"
        log_tail = redaction.mask(last_lines(log))
        ending = f"exit code {code}" if worker.placed is None else worker.placed.ending or f"exit code {code}"
        why = f"its disk failed: {worker.storage_error}" if worker.storage_error else ending
        words = f"; the last lines of {log}:\n{log_tail}" if log_tail else f"; see {log}"
        self._tools.log.add(self.key, "failed", f"a worker died ({why}){words}", worker.replica)
        if not self._deaths.are_too_many:
            return False
        if worker.was_ready:  # what it wrote may be of other projects' requests
            words = f"; see {log}"
        text = f"{self._deaths.most} workers of {self.model.name!r} died one after another ({why}){words}"
        if worker.storage_error:
            self._give_up(worker, Failed("storage_failed", text, PauseReason.STORAGE_FAILED))
        else:
            self._give_up(worker, Failed("worker_crashed", text, PauseReason.ENGINE_FAILED))
        return True

    def _give_up(self, worker: PoolWorker, failure: Failed) -> None:
        """Stop one of several ready replicas for a while; if it is the only one, the model fails."""
        others = [each for each in self.ready() if each is not worker]
        if failure.reason not in REPLICA_REASONS or not others or self._deaths.are_of_rows:
            self._fail(failure)
            return
        self._replicas[worker.replica].failures += 1
        self._deaths.reset()
        self._tools.log.add(self.key, "failed", failure.message, worker.replica)

    def _count_progress(self, worker: PoolWorker, commit: Commit) -> None:
        """Note that rows finished: earlier deaths were not the model's fault."""
        if self._deaths.count_progress(commit) and worker.replica in self._replicas:
            self._replicas[worker.replica].failures = 0

    def _supervisor_ended(self, replica: _Replica, task: asyncio.Task[None]) -> None:
        """Report a crashed supervisor task instead of waiting for its worker."""
        self._replicas.pop(replica.number, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            text = f"the supervisor of a worker of {self.model.name!r} failed: {type(error).__name__}: {error}"
            self._fail(Failed("worker_lost", text, PauseReason.ENGINE_FAILED))

    async def _receive(self, worker: PoolWorker, message: object) -> bool:
        """Handle a worker's message, or pass it on if it is about rows; True if it reports a failure."""
        match message:
            case Answers(replies, stats):
                worker.deliver_replies(replies)
                if replies:
                    self._deaths.count_reply()
                if stats is not None:
                    self.sums.add(stats)
            case ReplyChunk() | Head() | Answered():
                worker.deliver(message)
                if isinstance(message, Answered):
                    self._deaths.count_reply()
            case Ready():
                if not worker.is_leaving:
                    worker.is_ready = worker.was_ready = self.was_ready = True
                    self._tools.log.add(self.key, "ready", replica=worker.replica)
                    self._wake_waiters()
                    await self._dispatcher.receive(self, worker, message)
            case Heartbeat(stats, at):
                left_s, storage = self._dispatcher.term.left_s(), self._tools.provisions.storage_term
                if left_s > 0 and min(left_s, storage.until_s) < math.inf:
                    worker.handle.send(Renewed(at, left_s, storage.left_s(), storage.refusal))
                self.adapters.add(self.model.name, worker.stats.adapters, stats.adapters)
                worker.stats = stats
            case EngineDied(_, how, in_flight):
                self._tools.log.add(self.key, DIED, how, worker.replica, in_flight)
            case Suspected() | Charged():
                self._tools.quarantine.record(self.model.source, message)
            case StorageBroken(failure):
                worker.storage_error = failure
            case Failed(job=None):
                self._give_up(worker, message)
                return True
            case _:
                if isinstance(message, Record):
                    self._count_progress(worker, message.commit)
                await self._dispatcher.receive(self, worker, message)
        return False

    def _fail(self, failure: Failed) -> None:
        if self.failure is None:
            self.failure = failure
            self._tools.log.add(self.key, "failed", failure.message)
            for replica in self._replicas.values():
                if replica.is_waiting and replica.task is not None:
                    replica.task.cancel()
            self._dispatcher.failed(self, failure)
            self._wake_waiters()

    async def _watch(self) -> None:
        """End workers that a signal has stopped: their leases must continue elsewhere."""
        while True:
            await self._clock.sleep(FROZEN_S / 10)
            for worker in list(self.workers.values()):
                if self._clock.monotonic() - worker.last_message_at > FROZEN_S and worker.handle.is_frozen():
                    worker.handle.kill()

    def is_running(self, job_id: str) -> bool:
        """Whether a worker has yet to release this job, as requested."""
        return any(job_id in worker.revoked for worker in self.workers.values())

    def kill(self) -> None:
        """Kill the workers now; `stop` returns when they have ended."""
        self._stopping = True
        for worker in self.workers.values():
            worker.end()

    def ready(self) -> list[PoolWorker]:
        """Workers that accept work."""
        return [worker for worker in self.workers.values() if worker.is_ready and not worker.is_ended]

    def gauge(self, *, rows_left: Sequence[int], waiting: int) -> ModelGauge:
        """The current state; `rows_left` has the rows of each of its jobs, of which `waiting` hold no worker."""
        workers = list(self.workers.values())
        stats: list[EngineStats] = [worker.stats for worker in workers]
        cached_shares = [each.cached_share for each in stats if each.cached_share is not None]
        return ModelGauge(
            name=self.model.name,
            workers=len(workers),
            ready=sum(worker.is_ready for worker in workers),
            in_flight=sum(each.in_flight for each in stats),
            limit=sum(each.in_flight_limit for each in stats),
            live=sum(len(worker.calls) for worker in workers),
            live_waiting=self.waiting,
            kv_usage=sum(each.kv_usage for each in stats) / len(stats) if stats else 0.0,
            cached_share=sum(cached_shares) / len(cached_shares) if cached_shares else None,
            note="; ".join(dict.fromkeys(each.note for each in stats if each.note)),
            failure="" if self.failure is None else self.failure.message,
            jobs=len(rows_left),
            jobs_waiting=waiting,
            rows_waiting=sum(rows_left),
            replicas=self.replicas,
            wanted=self.target.wanted,
            waits=self.waits,
            adapters_loaded=sum(each.adapters_loaded for each in stats),
        )

    # -- for live requests --------------------------------------------------------------------------------------------

    def least_loaded_worker(self) -> PoolWorker | None:
        """The ready worker with the fewest live requests."""
        least = None
        for worker in () if self._stopping else self.workers.values():  # for every call: no list, no key
            is_free = worker.is_ready and not worker.is_ended
            if is_free and (least is None or len(worker.calls) < len(least.calls)):
                least = worker
        return least

    @property
    def requests(self) -> int:
        """Live requests in progress or waiting."""
        return self.waiting + sum(len(worker.calls) for worker in self.workers.values())

    @property
    def waiting(self) -> int:  # live requests that no worker is ready for
        return len(self._waiters)

    async def wait_for_change(self) -> None:
        """Wait until a worker is ready, or none will ever be."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- ending -------------------------------------------------------------------------------------------------------

    async def stop(self, *, at_once: bool = False) -> None:
        """Have the workers commit what they have and end; `at_once`: kill them. Returns when they have ended.

        Concurrency: may be called again, with `at_once`, while it waits.
        """
        if not self._stopping:
            self._tools.log.add(self.key, "stopping")
        self._stopping = True
        self._wake_waiters()
        self._watching.cancel()
        if at_once:
            self.kill()
        for replica in self._replicas.values():
            if replica.is_waiting and replica.task is not None:
                replica.task.cancel()
        for worker in self.workers.values():
            worker.handle.send(Drain())
        supervisors = {each.task for each in self._replicas.values() if each.task is not None}
        if not supervisors:
            return
        _, late = await asyncio.wait(supervisors, timeout=END_S if at_once else DRAIN_S)
        self.kill()
        if late:
            _, late = await asyncio.wait(late, timeout=END_S)
        for task in late:
            task.cancel()


def retry_delay_s(failures: int) -> float:
    """Seconds to wait after so many consecutive failures."""
    return min(RETRY_DELAY_MAX_S, RETRY_DELAY_S * 2 ** min(failures - 1, 10))


def _not_started(error: OSError) -> Failed:
    """The error of a worker that did not start. A full disk is not the model's fault: its jobs resume later."""
    text = f"a worker cannot be started: {error}"
    if (system_error := to_storage_error(error)) is not None:
        return Failed(system_error.code, text, system_error.reason)
    return Failed("worker_failed", text, PauseReason.ENGINE_FAILED)
