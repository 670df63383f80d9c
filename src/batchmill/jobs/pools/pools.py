"""Pools: the worker pools of a data directory, started when used, kept for an idle timeout, then ended.

A user is a job or a live request. Workers of one model, over one state of its code, are one pool.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from batchmill.errors import BatchmillError
from batchmill.jobs.pools.pool import Pool, PoolTools, RowDispatcher, retry_delay_s
from batchmill.jobs.pools.pool_worker import PoolWorker
from batchmill.jobs.pools.quarantine import Quarantine
from batchmill.jobs.pools.replicas import COOLDOWN_DEFAULT_S, EngineLog, follow, needed
from batchmill.jobs.pools.resources import Allocations, Leaver, Resources
from batchmill.jobs.pools.tallies import AdapterSums, CallSums
from batchmill.models import functions
from batchmill.models.secrets import NoSecrets
from batchmill.ports.clock import Clock
from batchmill.ports.executors import Executor, Provisions
from batchmill.types import EngineState, EngineView, ModelSpec
from batchmill.types.engine_traits import Source
from batchmill.wire.messages import Learn

IDLE_POOLS_MAX = 4  # idle pools; beyond that the one that has been idle longest ends
IDLE_FUNCTIONS_MAX = 16  # as many of deployed functions, which hold no device and no model's weights
SCALE_S = 1.0  # between two checks of the load of models that scale
# The names of users that are not jobs.
LIVE = ("live ", "calls ")
NO_JOBS = (*LIVE, "loaded ", "kept ")
KEYS_MAX = 2000  # models whose keys are remembered: jobs and requests ask for them again and again
SUMS_MAX = 10_000  # models with call counters; the oldest counters are dropped


def digest_of(source: str) -> str:
    """The digest of a function's file; empty if it does not exist, which the worker then reports."""
    try:
        return functions.digest(source)
    except BatchmillError:
        return ""


class Pools:
    """
    Args:
        idle_timeout_s: how long an unused pool is kept.
        provisions: the secrets of workers.
        quarantine: the requests that crashed engines.
        machine: the resources of all replicas; None: no limits.
    """

    def __init__(
        self,
        data_dir: Path,
        executor: Executor,
        clock: Clock,
        *,
        dispatcher: RowDispatcher,
        idle_timeout_s: float,
        provisions: Provisions = NoSecrets(),
        quarantine: Quarantine | None = None,
        machine: Resources | None = None,
    ) -> None:
        quarantine = quarantine or Quarantine(clock)
        quarantine.listen(self._learn)
        self._data_dir, self._clock, self._dispatcher = data_dir, clock, dispatcher
        self._idle_timeout_s = idle_timeout_s
        self._allocations, self._log = Allocations(machine or Resources()), EngineLog(clock)
        self._allocations.evict, self._allocations.use_of = self._evict, self._use_of
        self._tools = PoolTools(executor, dispatcher, clock, self._allocations, self._log, quarantine, provisions)
        self._scaling: asyncio.Task[None] | None = None
        # Pinned pools that have failed: key -> the pool, its consecutive failures, the time of its next start
        self._retries: dict[str, tuple[Pool, int, float]] = {}
        self._providing: asyncio.Task[None] | None = None
        self._is_stale = False  # workers may have outdated secrets
        self._keys: dict[int, tuple[ModelSpec, str, str]] = {}  # id of a model, which is held -> code, key
        self._pools: dict[str, Pool] = {}
        self._users: dict[str, set[str]] = {}
        self._idle: dict[str, asyncio.Task[None]] = {}  # idle pools, the one that has been idle longest first
        self.ending_pools: set[Pool] = set()  # pools whose workers are ending
        self.end_tasks: dict[str, asyncio.Task[None]] = {}  # pool key -> the task that ends its former pools
        self._sums: dict[str, CallSums] = {}  # pool key -> counters of all its workers, former ones included
        self._restarted: set[str] = set()  # keys of pools that were restarted after evictions
        self.adapters = AdapterSums()
        self.is_closed = False

    # -- views --------------------------------------------------------------------------------------------------------

    def key_of(self, model: ModelSpec, code: Mapping[str, str] | None = None) -> str:
        """Models that one set of workers can serve have the same key.

        `code`: model name -> digest of its function. Missing digests are read from the files.
        """
        digest = (code or {}).get(model.name, "")
        if not digest and model.traits.source is Source.CODE:
            digest = digest_of(model.source)
        known = self._keys.get(id(model))
        if known is not None and known[0] is model and known[1] == digest:
            return known[2]
        data = msgspec.json.encode([_shared_spec(model), digest], order="deterministic")
        key = hashlib.sha256(data).hexdigest()
        if len(self._keys) >= KEYS_MAX:
            self._keys.clear()
        self._keys[id(model)] = model, digest, key
        return key

    def get(self, key: str) -> Pool | None:
        return self._pools.get(key)

    def items(self) -> list[tuple[str, Pool]]:
        return list(self._pools.items())

    def is_current(self, pool: Pool) -> bool:
        """Whether the pool is not ending."""
        return self._pools.get(pool.key) is pool

    def users(self, key: str) -> set[str]:
        return self._users.get(key, set())

    def sums(self, key: str) -> CallSums:
        """The counters of all workers of this key, former ones included."""
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = CallSums()
            if len(self._sums) > SUMS_MAX:
                del self._sums[next(iter(self._sums))]
        return sums

    def workers(self) -> Iterator[PoolWorker]:
        """Every worker, including ending ones."""
        for pool in (*self._pools.values(), *self.ending_pools):
            yield from pool.workers.values()

    def _learn(self, source: str, update: Learn) -> None:
        """Send what one worker of a base model has learned, or what was cleared, to all others."""
        for pool in self._pools.values():
            if pool.model.traits.learns_poison and pool.model.source == source:
                for worker in pool.workers.values():
                    worker.handle.send(update)

    def is_running(self, job_id: str, *, handed_over: bool = False) -> bool:
        """Whether a worker has yet to release a job; `handed_over`: rows that a provider holds."""
        pools = [pool for pool in (*self._pools.values(), *self.ending_pools) if pool.is_running(job_id)]
        return any(pool.model.is_handed_over or not handed_over for pool in pools)

    # -- users --------------------------------------------------------------------------------------------------------

    def use(self, user: str, model: ModelSpec, key: str) -> Pool:
        """The pool of this key, started if there is none, and held until `leave` or `release`.

        If earlier workers of the same model are still ending, it starts after them.
        """
        pool = self._pools.get(key)
        if pool is not None and pool.failure is not None:
            self.retire(key)
            pool = None
        if pool is None:
            pool = self._start(key, model, self.end_tasks.get(key))
            self._restarted.discard(key)
        self._users.setdefault(key, set()).add(user)
        idle_timer = self._idle.pop(key, None)
        if idle_timer is not None:
            idle_timer.cancel()
        return pool

    def _start(self, key: str, model: ModelSpec, after: asyncio.Task[None] | None) -> Pool:
        home = self._data_dir / "workers" / key[:16]
        shared_spec = msgspec.structs.replace(_shared_spec(model), scaling=model.scaling)
        pool = self._pools[key] = Pool(key, shared_spec, home, self._tools, after=after)
        pool.sums, pool.adapters = self.sums(key), self.adapters
        self._watch_loads(pool)
        return pool

    def leave(self, key: str, user: str) -> None:
        """Stop holding this pool for a user."""
        users = self._users.get(key)
        if users is not None:
            users.discard(user)
            if not users:
                del self._users[key]
                self._start_idle_timeout(key)

    def forget(self, user: str) -> None:
        """As `leave` for all its pools, which end only after `release`."""
        for users in self._users.values():
            users.discard(user)

    async def release(self, user: str, *, at_once: bool = False) -> None:
        """Release the workers of a user. Unheld ones end; returns when they have ended."""
        self.forget(user)
        for key in [key for key, users in self._users.items() if not users]:
            del self._users[key]
        end_tasks = set()
        for key in list(self._pools):
            if key not in self._users and (at_once or key not in self._idle):
                self._start_idle_timeout(key, at_once=at_once)
                if key in self.end_tasks and key not in self._pools:
                    end_tasks.add(self.end_tasks[key])
        if end_tasks:
            await asyncio.wait(end_tasks)

    def _start_idle_timeout(self, key: str, *, at_once: bool = False) -> None:
        """Start the idle timeout of an unused pool, or end it."""
        pool = self._pools.get(key)
        if pool is None:
            return
        if self._idle_timeout_s <= 0 or at_once or pool.failure is not None or (pool.waits and not pool.replicas):
            self.retire(key, at_once=at_once)
            return
        self._idle[key] = asyncio.create_task(self._end_when_idle(key, self._cooldown_of(pool)))
        is_function = pool.model.function is not None
        idle = [each for each in self._idle if (self._pools[each].model.function is not None) is is_function]
        for each in idle[: -IDLE_FUNCTIONS_MAX if is_function else -IDLE_POOLS_MAX]:
            self.retire(each)
        self._allocations.review()

    async def _end_when_idle(self, key: str, seconds: float) -> None:
        await self._clock.sleep(seconds)
        if self._idle.get(key) is asyncio.current_task():
            self.retire(key)

    def _cooldown_of(self, pool: Pool) -> float:
        scaling = pool.model.scaling
        if scaling is not None and scaling.cooldown_s is not None:
            return scaling.cooldown_s
        return self._idle_timeout_s or COOLDOWN_DEFAULT_S

    # -- replicas -----------------------------------------------------------------------------------------------------

    def pin(self, model: ModelSpec) -> None:
        """Keep the minimum number of replicas of the model, whether used or not.

        If the minimum is 0, the pool is not held. An existing pool scales from now on by these settings.
        """
        key = self.key_of(model)
        least = 0 if model.scaling is None else model.scaling.replicas_min
        pool = self.use(_controller(key), model, key) if least else self._pools.get(key)
        if pool is not None and pool.model.scaling != model.scaling:
            pool.model = msgspec.structs.replace(pool.model, scaling=model.scaling)
            self.rescale(key)
            self._watch_loads(pool)
        if not least:
            self.leave(key, _controller(key))

    def unpin(self, model: ModelSpec) -> None:
        """Stop keeping a model: its replicas end after the idle timeout."""
        key = self.key_of(model)
        self.leave(key, _controller(key))
        self._retries.pop(key, None)

    def rescale(self, key: str) -> None:
        """Scale every pool to its load."""
        pool = self._pools.get(key)
        scaling = None if pool is None else pool.model.scaling
        if pool is None or scaling is None:
            return
        load = self._dispatcher.load(key)
        load = msgspec.structs.replace(load, requests=load.requests + pool.requests)
        need, before = needed(scaling, load), pool.target.wanted
        pool.scale(follow(pool.target, need, now=self._clock.monotonic(), cooldown_s=self._cooldown_of(pool)))
        if pool.target.wanted != before:
            text = f"{pool.target.wanted} instead of {before}: {load.requests} requests and {load.rows} rows"
            self._log.add(key, "scaled", text)

    def _watch_loads(self, pool: Pool) -> None:
        """Start the scaling task of a pool that scales."""
        if pool.model.scaling is not None and (self._scaling is None or self._scaling.done()):
            self._scaling = asyncio.create_task(self._follow_loads())

    async def _follow_loads(self) -> None:
        while any(pool.model.scaling is not None for pool in self._pools.values()):
            for key, pool in list(self._pools.items()):
                self.rescale(key)
                if pool.failure is not None and _controller(key) in self.users(key):
                    self._retry_pinned(key, pool)
            await self._clock.sleep(SCALE_S)

    def _retry_pinned(self, key: str, pool: Pool) -> None:
        """Restart a pinned model that has failed, after longer and longer pauses."""
        failed, failures, due = self._retries.get(key, (None, 0, 0.0))
        if failed is not pool:
            failures = 1 if pool.was_ready else failures + 1
            due = self._clock.monotonic() + retry_delay_s(failures)
            self._retries[key] = pool, failures, due
        elif self._clock.monotonic() >= due:
            self.use(_controller(key), pool.model, key)

    def view(self, model: ModelSpec, code: Mapping[str, str] | None = None) -> EngineView:
        """The replicas of a model, and its recent events."""
        key = self.key_of(model, code)
        pool, events = self._pools.get(key), self._log.of(key)
        if pool is None:
            ending = sum(each.replicas for each in self.ending_pools if each.key == key)
            failure = self._log.failure(key)
            state = EngineState.FAILED if failure else EngineState.STOPPING if ending else EngineState.STOPPED
            return EngineView(state, ending, message=failure, events=events)
        if pool.failure is not None:
            return EngineView(EngineState.FAILED, pool.replicas, message=pool.failure.message, events=events)
        ready, waits = sum(worker.is_ready for worker in pool.workers.values()), pool.waits
        state = EngineState.READY if ready else EngineState.STARTING
        if waits and not pool.replicas:
            state = EngineState.WAITING
        return EngineView(state, pool.replicas, ready, pool.target.wanted, waits, events)

    # -- eviction -----------------------------------------------------------------------------------------------------

    def _evict(self) -> None:
        """Free resources for waiting replicas: end unused pools first, then spare replicas."""
        leaving = [replica for pool in self.ending_pools for replica in pool.allocated()]
        leaving += [replica for pool in self._pools.values() for replica in pool.allocated(leaving=True)]
        idle = [Leaver(self._pools[key].allocated(), is_idle=True) for key in self._idle]
        used = [pool for key, pool in self._pools.items() if key not in self._idle and pool.model.scaling is not None]
        spare_replicas = [Leaver([replica], is_idle=False) for pool in used for replica in pool.spare_replicas()]
        for each in self._allocations.machine.clearances(leaving, [*idle, *spare_replicas]):
            if each.is_idle:
                self.retire(each.replicas[0].key)
            else:
                replica = each.replicas[0]
                self._pools[replica.key].release_spare(replica.number)

    def _use_of(self, key: str) -> str:
        """What uses a pool, as text."""
        if key not in self._pools:
            return "it is ending"
        users = self._users.get(key, set())
        jobs = sum(not user.startswith(NO_JOBS) for user in users)
        if jobs:
            return "a job runs on it" if jobs == 1 else f"{jobs} jobs run on it"
        if any(user.startswith(LIVE) for user in users):
            return "live requests use it"
        return "it is kept ready" if users else "it is unused"

    async def provide(self) -> None:
        """Send changed secrets to the workers, ahead of all that is sent to them afterwards."""
        self._is_stale = True
        if self._providing is None and not self.is_closed:
            self._providing = asyncio.create_task(self._provide())
        if self._providing is not None:
            await asyncio.wait([self._providing])

    async def _provide(self) -> None:
        try:
            while self._is_stale:
                self._is_stale = False
                for pool in list(self._pools.values()):
                    await pool.provide()
        finally:
            self._providing = None

    # -- ending -------------------------------------------------------------------------------------------------------

    def retire(self, key: str, *, at_once: bool = False) -> None:
        """End a pool even if it is used; the next one of its key starts after it."""
        pool = self._pools.pop(key)
        idle_timer = self._idle.pop(key, None)
        if idle_timer is not None and idle_timer is not asyncio.current_task():
            idle_timer.cancel()
        self.ending_pools.add(pool)
        before = self.end_tasks.get(key)
        self.end_tasks[key] = asyncio.create_task(self._end(key, pool, before=before, at_once=at_once))

    async def _end(self, key: str, pool: Pool, *, before: asyncio.Task[None] | None, at_once: bool) -> None:
        await pool.stop(at_once=at_once)
        self.ending_pools.discard(pool)
        if before is not None:
            await asyncio.wait({before})
        if self.end_tasks[key] is asyncio.current_task():
            del self.end_tasks[key]

    def restart_after_eviction(self, pool: Pool) -> bool:
        """Restart a server that failed to start, after evicting unused servers.

        Returns False if that has been tried before, or there are no unused servers.
        """
        key = pool.key
        if pool.was_ready or not pool.model.traits.takes_gpus or key in self._restarted or not self.is_current(pool):
            return False
        idle = [other for other in self._idle if self._pools[other].model.traits.takes_gpus and other != key]
        if not idle:
            return False
        for other in idle:
            self.retire(other)
        self.retire(key)
        after = asyncio.create_task(_all([self.end_tasks[each] for each in (*idle, key)]))
        self._restarted.add(key)
        self._start(key, pool.model, after)
        return True

    async def close(self, *, at_once: bool = False) -> None:
        """End every worker; returns when all have ended."""
        self.is_closed = True
        if self._providing is not None:
            self._providing.cancel()
        if self._scaling is not None:
            self._scaling.cancel()
        for key in list(self._pools):
            self.retire(key, at_once=at_once)
        if at_once:
            for pool in self.ending_pools:
                pool.kill()
        if self.end_tasks:
            await asyncio.wait(set(self.end_tasks.values()))


def _shared_spec(model: ModelSpec) -> ModelSpec:
    """A model without what differs between jobs: allowed names, routes and scaling.

    It has no adapters either if the engine gets them with each job.
    """
    model = msgspec.structs.replace(
        model, allowed=None, routes=[], adapter_patterns=[], scaling=None, is_deterministic=False
    )
    if model.traits.loads_adapters and model.adapter_rank:
        return msgspec.structs.replace(model, adapters={}, adapter_names={}, bad_adapters={})
    return model


def _controller(key: str) -> str:
    """The user of a pool that `pin` registers."""
    return f"kept {key}"


async def _all(tasks: Iterable[asyncio.Task[None]]) -> None:
    await asyncio.wait(set(tasks))
