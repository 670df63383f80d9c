"""Pools: the worker pools of a data directory, started when used, kept for an idle timeout, then ended.

A user is a job or a live request. Workers of one model, over one state of its code, are one pool.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from batchmill.errors import BatchmillError
from batchmill.jobs.pools.pool import Pool, PoolTools, RowDispatcher, rest_s
from batchmill.jobs.pools.pool_worker import PoolWorker
from batchmill.jobs.pools.quarantine import Quarantine
from batchmill.jobs.pools.replicas import COOLDOWN_DEFAULT_S, EngineLog, follow, needed
from batchmill.jobs.pools.resources import Allocations, Leaver, Resources
from batchmill.jobs.pools.tallies import AdapterSums, CallSums
from batchmill.models import functions
from batchmill.models.secrets import NoSecrets
from batchmill.ports import Clock, Executor, Provisions
from batchmill.types import EngineState, EngineView, ModelSpec
from batchmill.types.engine_traits import Source
from batchmill.wire.messages import Learn

IDLE_POOLS_MAX = 4  # idle pools; beyond that the one that has been idle longest ends
IDLE_FUNCTIONS_MAX = 16  # as many of deployed functions, which hold no device and no model's weights
SCALE_S = 1.0  # between two looks at what there is to do for models that scale
# The names of users that are not jobs.
LIVE = ("live ", "calls ")
NO_JOBS = (*LIVE, "loaded ", "kept ")
SUMS_MAX = 10_000  # models whose calls are summed; those that were first used longest ago are forgotten


class CodeDigests:
    """The digests of functions' files, read again only when a file has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, int, int], str]] = {}

    def of(self, source: str) -> str:
        """The digest of a file; empty if it does not exist, which the worker then reports."""
        try:
            path = functions.file_of(functions.parse(source))
            stat = os.stat(path)
            seen = stat.st_mtime_ns, stat.st_size, stat.st_ino
            known = self._known.get(source)
            if known is None or known[0] != seen:
                known = self._known[source] = seen, functions.digest(source)
        except (BatchmillError, OSError):
            return ""
        return known[1]


class Pools:
    """
    Args:
        idle_timeout_s: how long an unused pool is kept.
        provisions: what its workers are given beside the model.
        quarantine: what engines died of.
        machine: what the replicas of all models share; None: it has no limits.
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
        self._allocations.make_room, self._allocations.use_of = self._make_room, self._use_of
        self._tools = PoolTools(executor, dispatcher, clock, self._allocations, self._log, quarantine, provisions)
        self._scaling: asyncio.Task[None] | None = None
        self._rests: dict[
            str, tuple[Pool, int, float]
        ] = {}  # kept and failed: how often in a row, and when it is tried
        self._providing: asyncio.Task[None] | None = None
        self._is_stale = False  # workers may have secrets that are others now
        self._codes = CodeDigests()
        self._pools: dict[str, Pool] = {}
        self._users: dict[str, set[str]] = {}
        self._idle: dict[str, asyncio.Task[None]] = {}  # idle pools, the one that became idle first comes first
        self.dying: set[Pool] = set()  # on their way to their end
        self.endings: dict[str, asyncio.Task[None]] = {}  # pool key -> the end of those that had it
        self._sums: dict[str, CallSums] = {}  # pool key -> what its workers have counted, whichever pool had them
        self._second_tries: set[str] = set()  # keys of pools that were started again with more room
        self.adapters = AdapterSums()
        self.is_closed = False

    # -- looking ------------------------------------------------------------------------------------------------------

    def key_of(self, model: ModelSpec, code: Mapping[str, str] | None = None) -> str:
        """Models that one set of workers can serve have the same key.

        `code` has the digests of functions by model name; they are read where it has none.
        """
        everybodys = _everybodys(model)
        digest = (code or {}).get(model.name, "")
        if not digest and model.traits.source is Source.CODE:
            digest = self._codes.of(model.source)
        data = msgspec.json.encode([everybodys, digest], order="deterministic")
        return hashlib.sha256(data).hexdigest()

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
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = CallSums()
            if len(self._sums) > SUMS_MAX:
                del self._sums[next(iter(self._sums))]
        return found

    def workers(self) -> Iterator[PoolWorker]:
        """Every worker, including ending ones."""
        for pool in (*self._pools.values(), *self.dying):
            yield from pool.workers.values()

    def _learn(self, source: str, lesson: Learn) -> None:
        """Send what one worker of a base model has learned, or what was cleared, to all others."""
        for pool in self._pools.values():
            if pool.model.traits.learns_poison and pool.model.source == source:
                for worker in pool.workers.values():
                    worker.handle.send(lesson)

    def is_running(self, job_id: str, *, handed_over: bool = False) -> bool:
        """Whether a worker has yet to release a job; `handed_over`: rows that a provider holds."""
        pools = [pool for pool in (*self._pools.values(), *self.dying) if pool.is_running(job_id)]
        return any(pool.model.is_handed_over or not handed_over for pool in pools)

    # -- using --------------------------------------------------------------------------------------------------------

    def use(self, user: str, model: ModelSpec, key: str) -> Pool:
        """The pool of this key, started if there is none, and held until `leave` or `release`.

        It starts once earlier workers of the same model that are still ending have gone.
        """
        pool = self._pools.get(key)
        if pool is not None and pool.failure is not None:
            self.retire(key)
            pool = None
        if pool is None:
            pool = self._start(key, model, self.endings.get(key))
            self._second_tries.discard(key)
        self._users.setdefault(key, set()).add(user)
        lingering = self._idle.pop(key, None)
        if lingering is not None:
            lingering.cancel()
        return pool

    def _start(self, key: str, model: ModelSpec, after: asyncio.Task[None] | None) -> Pool:
        home = self._data_dir / "workers" / key[:16]
        everybodys = msgspec.structs.replace(_everybodys(model), scaling=model.scaling)
        pool = self._pools[key] = Pool(key, everybodys, home, self._tools, after=after)
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
                self._settle(key)

    def forget(self, user: str) -> None:
        """As `leave` for all its pools, which end only after `release`."""
        for users in self._users.values():
            users.discard(user)

    async def release(self, user: str, *, at_once: bool = False) -> None:
        """Release the workers of a user. Unheld ones end; returns when they have ended."""
        self.forget(user)
        for key in [key for key, users in self._users.items() if not users]:
            del self._users[key]
        endings = set()
        for key in list(self._pools):
            if key not in self._users and (at_once or key not in self._idle):
                self._settle(key, at_once=at_once)
                if key in self.endings and key not in self._pools:
                    endings.add(self.endings[key])
        if endings:
            await asyncio.wait(endings)

    def _settle(self, key: str, *, at_once: bool = False) -> None:
        """Start the idle timeout of an unused pool, or end it."""
        pool = self._pools.get(key)
        if pool is None:
            return
        if self._idle_timeout_s <= 0 or at_once or pool.failure is not None or (pool.waits and not pool.replicas):
            self.retire(key, at_once=at_once)
            return
        self._idle[key] = asyncio.create_task(self._linger(key, self._cooldown_of(pool)))
        is_function = pool.model.function is not None
        idle = [each for each in self._idle if (self._pools[each].model.function is not None) is is_function]
        for each in idle[: -IDLE_FUNCTIONS_MAX if is_function else -IDLE_POOLS_MAX]:
            self.retire(each)
        self._allocations.review()

    async def _linger(self, key: str, seconds: float) -> None:
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

        Where that is none, nothing is held. Its pool, if there is one, scales from now on as this says.
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
        self._rests.pop(key, None)

    def rescale(self, key: str) -> None:
        """Scale every pool to its load."""
        pool = self._pools.get(key)
        scaling = None if pool is None else pool.model.scaling
        if pool is None or scaling is None:
            return
        load = self._dispatcher.load(key)
        load = msgspec.structs.replace(load, requests=load.requests + pool.requests)
        need, before = needed(scaling, load), pool.standing.wanted
        pool.scale(follow(pool.standing, need, now=self._clock.monotonic(), cooldown_s=self._cooldown_of(pool)))
        if pool.standing.wanted != before:
            text = f"{pool.standing.wanted} instead of {before}: {load.requests} requests and {load.rows} rows"
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
                    self._revive(key, pool)
            await self._clock.sleep(SCALE_S)

    def _revive(self, key: str, pool: Pool) -> None:
        """Retry a kept model that has failed, with longer and longer pauses."""
        failed, times, due = self._rests.get(key, (None, 0, 0.0))
        if failed is not pool:
            times = 1 if pool.was_ready else times + 1
            due = self._clock.monotonic() + rest_s(times)
            self._rests[key] = pool, times, due
        elif self._clock.monotonic() >= due:
            self.use(_controller(key), pool.model, key)

    def view(self, model: ModelSpec, code: Mapping[str, str] | None = None) -> EngineView:
        """The replicas of a model, and its recent events."""
        key = self.key_of(model, code)
        pool, events = self._pools.get(key), self._log.of(key)
        if pool is None:
            ending = sum(each.replicas for each in self.dying if each.key == key)
            failure = self._log.failure(key)
            state = EngineState.STOPPING if ending else EngineState.FAILED if failure else EngineState.STOPPED
            return EngineView(state, ending, message=failure, events=events)
        if pool.failure is not None:
            return EngineView(EngineState.FAILED, pool.replicas, message=pool.failure.message, events=events)
        ready, waits = sum(worker.is_ready for worker in pool.workers.values()), pool.waits
        state = EngineState.READY if ready else EngineState.STARTING
        if waits and not pool.replicas:
            state = EngineState.WAITING
        return EngineView(state, pool.replicas, ready, pool.standing.wanted, waits, events)

    # -- room ---------------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Free resources for waiting replicas: end unused pools first, then spare replicas."""
        leaving = [place for pool in self.dying for place in pool.places()]
        leaving += [place for pool in self._pools.values() for place in pool.places(leaving=True)]
        idle = [Leaver(self._pools[key].places(), is_idle=True) for key in self._idle]
        used = [pool for key, pool in self._pools.items() if key not in self._idle and pool.model.scaling is not None]
        extras = [Leaver([place], is_idle=False) for pool in used for place in pool.extras()]
        for each in self._allocations.machine.clearances(leaving, [*idle, *extras]):
            if each.is_idle:
                self.retire(each.places[0].key)
            else:
                self._pools[each.places[0].key].shed(each.places[0].replica)

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

    def provide(self) -> None:
        """Send changed secrets to workers."""
        self._is_stale = True
        if self._providing is None and not self.is_closed:
            self._providing = asyncio.create_task(self._provide())

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
        lingering = self._idle.pop(key, None)
        if lingering is not None and lingering is not asyncio.current_task():
            lingering.cancel()
        self.dying.add(pool)
        before = self.endings.get(key)
        self.endings[key] = asyncio.create_task(self._end(key, pool, before=before, at_once=at_once))

    async def _end(self, key: str, pool: Pool, *, before: asyncio.Task[None] | None, at_once: bool) -> None:
        await pool.stop(at_once=at_once)
        self.dying.discard(pool)
        if before is not None:
            await asyncio.wait({before})
        if self.endings[key] is asyncio.current_task():
            del self.endings[key]

    def try_with_more_room(self, pool: Pool) -> bool:
        """Restart a server that failed to start, after unused ones have freed the machine.

        False where that has been tried, or there are none.
        """
        key = pool.key
        if pool.was_ready or not pool.model.traits.takes_gpus or key in self._second_tries or not self.is_current(pool):
            return False
        idle = [other for other in self._idle if self._pools[other].model.traits.takes_gpus and other != key]
        if not idle:
            return False
        for other in idle:
            self.retire(other)
        self.retire(key)
        after = asyncio.create_task(_all([self.endings[each] for each in (*idle, key)]))
        self._second_tries.add(key)
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
            for pool in self.dying:
                pool.kill()
        if self.endings:
            await asyncio.wait(set(self.endings.values()))


def _everybodys(model: ModelSpec) -> ModelSpec:
    """A model whichever of its names a job's rows may use, and whatever other ways and however many replicas there are.

    An engine with adapter slots gets the adapters with each job.
    """
    model = msgspec.structs.replace(model, allowed=None, routes=[], adapter_patterns=[], scaling=None)
    if model.traits.loads_adapters and model.adapter_rank:
        return msgspec.structs.replace(model, adapters={}, adapter_names={}, bad_adapters={})
    return model


def _controller(key: str) -> str:
    """The user of a pool that `pin` registers."""
    return f"kept {key}"


async def _all(tasks: Iterable[asyncio.Task[None]]) -> None:
    await asyncio.wait(set(tasks))
