"""Resources: memory and GPUs of the machine, allocated to replicas of all models.

Requests are served in order. A later request may go first only if the earlier ones would still fit once all
allocations older than them have been freed. So small replicas do not starve a large one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec import Struct

from batchmill.types import ModelSpec, Needs
from batchmill.types.machines import gpus_by_flags, size_text

MEMORY, GPUS = "memory_bytes", "gpus"
ANOTHER = "another model"
_QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
_OTHERS = re.compile(
    rf"""(?:{_QUOTED.pattern})(?= \([a-z0-9 ]+\) holds )|(?<=comes after )[^:;]+(?=, which waited first)"""
)


class ReplicaId(Struct, frozen=True):
    """One replica of one pool."""

    key: str  # of the pool
    number: int


class AllocationRequest(Struct, frozen=True):
    """A replica's request for resources."""

    replica: ReplicaId
    name: str  # of its model
    needs: Needs
    is_extra: bool = False  # its model runs without it


class Capacity(Struct, frozen=True):
    """The resources that a replica holds."""

    gpus: list[str] | None = None  # its own devices; None: devices are not allocated


class Leaver(Struct, frozen=True):
    """Replicas that may be evicted, all or none."""

    replicas: Sequence[ReplicaId]
    is_idle: bool  # they are unused; if not, their model has other replicas


class _Held(Struct, frozen=True):
    request: AllocationRequest
    number: int
    gpus: list[str]


class _Waiting(Struct, frozen=True):
    request: AllocationRequest
    number: int


class Resources:
    def __init__(self, memory_bytes: int | None = None, gpus: Sequence[str] | None = None) -> None:
        """None: no limit. Without a limit, GPUs are not allocated one by one."""
        self._total = {MEMORY: memory_bytes, GPUS: None if gpus is None else len(gpus)}
        self.gpus = None if gpus is None else list(gpus)
        self._held: dict[ReplicaId, _Held] = {}
        self._waiting: dict[ReplicaId, _Waiting] = {}  # in the order of arrival
        self._count = 0

    def needs_of(self, model: ModelSpec) -> Needs:
        """The needs of one replica. A language model needs as many GPUs as its flags say, if there are GPUs."""
        needs = model.needs
        if model.function is not None:
            return Needs(needs.memory_bytes, max(needs.gpus, model.function.gpus))
        if model.traits.takes_gpus and not needs.gpus and self.gpus:
            return Needs(needs.memory_bytes, gpus_by_flags(model.engine_args))
        return needs

    def find_excess(self, model: ModelSpec) -> str:
        """Why the minimum replicas can never fit together; empty: they can."""
        needs, count = self.needs_of(model), minimum_replicas(model)
        for what in (MEMORY, GPUS):
            total, each = self._total[what], getattr(needs, what)
            if total is not None and each * count > total:
                subject = f"{model.name!r}" if count == 1 else f"{count} replicas of {model.name!r}"
                return (
                    f"{subject} {'needs' if count == 1 else 'need'} {_text(what, each * count)} and the machine has "
                    f"{_text(what, total)} for models: give the model less, or the machine more ([machine])"
                )
        return ""

    # -- allocation ---------------------------------------------------------------------------------------------------

    def request(self, request: AllocationRequest) -> None:
        """Enter the queue; `allot` returns the request once it fits."""
        assert request.replica not in self._held and request.replica not in self._waiting, "a replica requests once"
        self._count += 1
        self._waiting[request.replica] = _Waiting(request, self._count)

    def withdraw(self, replica: ReplicaId) -> None:
        """Leave the queue."""
        self._waiting.pop(replica, None)

    def allot(self) -> list[tuple[ReplicaId, Capacity]]:
        """Allocate to waiting replicas that fit, in serving order."""
        fitting = (each.request for each in self._queue() if self._fits(each, self._free()))
        return [(request.replica, self._take(request)) for request in fitting]

    def _take(self, request: AllocationRequest) -> Capacity:
        del self._waiting[request.replica]
        self._count += 1
        if self.gpus is None:
            self._held[request.replica] = _Held(request, self._count, [])
            return Capacity()
        allocated = {gpu for held in self._held.values() for gpu in held.gpus}
        gpus = [gpu for gpu in self.gpus if gpu not in allocated][: request.needs.gpus]
        self._held[request.replica] = _Held(request, self._count, gpus)
        return Capacity(gpus if request.needs.gpus else None)

    def give_back(self, replica: ReplicaId) -> None:
        """Free the resources of a replica that has ended."""
        del self._held[replica]

    def holds(self, replica: ReplicaId) -> bool:
        return replica in self._held

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    # -- order and eviction -------------------------------------------------------------------------------------------

    def _queue(self) -> list[_Waiting]:
        """Waiting replicas: first those without which a model cannot run, then additional ones."""
        return sorted(self._waiting.values(), key=lambda each: (each.request.is_extra, each.number))

    def _free(self) -> dict[str, int]:
        return _less(
            {what: total or 0 for what, total in self._total.items()}, (held.request for held in self._held.values())
        )

    def _fits(self, waiting: _Waiting, free: dict[str, int]) -> bool:
        request = waiting.request
        return all(
            self._fits_in(waiting, what, free[what])
            for what in (MEMORY, GPUS)
            if self._total[what] is not None and getattr(request.needs, what)
        )

    def _fits_in(self, waiting: _Waiting, what: str, free: int) -> bool:
        need = getattr(waiting.request.needs, what)
        if need > free:
            return False
        ahead = [each for each in self._ahead(waiting) if getattr(each.request.needs, what)]
        if not ahead:
            return True
        if waiting.request.is_extra:
            return False
        since = min(each.number for each in ahead)
        later = sum(getattr(held.request.needs, what) for held in self._held.values() if held.number > since)
        return later + need + sum(getattr(each.request.needs, what) for each in ahead) <= (self._total[what] or 0)

    def _ahead(self, waiting: _Waiting) -> list[_Waiting]:
        """Waiting replicas that are served before this one."""
        queue = self._queue()
        return [each for each in queue[: queue.index(waiting)] if not each.request.is_extra]

    def clearances(self, leaving: Collection[ReplicaId], leavers: Sequence[Leaver]) -> list[Leaver]:
        """Which replicas to evict so that waiting ones fit: as few as possible, the first candidates first.

        `leaving`: replicas that are already ending.
        """
        free = _more(self._free(), [self._held[replica].request for replica in leaving if replica in self._held])
        chosen: list[Leaver] = []
        for waiting in self._queue():
            picked = []
            if not self._fits(waiting, free):
                rest = [each for each in leavers if each not in chosen and self._may_leave_for(each, waiting.request)]
                picked = self._pick(waiting, free, rest)
                chosen += picked
                free = _more(free, self._of(picked))
            if self._fits(waiting, free):
                free = _less(free, [waiting.request])
        return chosen

    @staticmethod
    def _may_leave_for(leaver: Leaver, request: AllocationRequest) -> bool:
        """Whether a replica may be evicted: one of a model in use, only for a model that cannot run otherwise."""
        is_own = any(replica.key == request.replica.key for replica in leaver.replicas)
        return not is_own and (leaver.is_idle or not request.is_extra)

    def _pick(self, waiting: _Waiting, free: dict[str, int], leavers: Sequence[Leaver]) -> list[Leaver]:
        picked: list[Leaver] = []
        for each in leavers:
            if self._fits(waiting, _more(free, self._of(picked))):
                break
            picked.append(each)
        if not self._fits(waiting, _more(free, self._of(picked))):
            return []
        for each in list(picked):
            fewer = [other for other in picked if other is not each]
            if self._fits(waiting, _more(free, self._of(fewer))):
                picked = fewer
        return picked

    def _of(self, leavers: Iterable[Leaver]) -> list[AllocationRequest]:
        replicas = [replica for leaver in leavers for replica in leaver.replicas]
        return [self._held[replica].request for replica in replicas if replica in self._held]

    # -- explanation --------------------------------------------------------------------------------------------------

    def why(self, replica: ReplicaId, use_of: Callable[[str], str]) -> str:
        """What a replica waits for, as a sentence; empty if it does not wait. `use_of`: key -> what uses the pool.

        As "'big' needs 12 GiB and 4 of 24 GiB are free: 'other' (a job runs on it) holds 20 GiB".
        """
        waiting = self._waiting.get(replica)
        if waiting is None:
            return ""
        free = self._free()
        short = [what for what in (MEMORY, GPUS) if self._is_short(waiting, what, free)]
        parts = []
        holders = dict.fromkeys(
            held.request.replica.key
            for held in self._held.values()
            if any(getattr(held.request.needs, what) for what in short)
        )
        for what in short:
            have = "is" if what == GPUS and free[what] == 1 else "are"
            need, total = _text(what, getattr(waiting.request.needs, what)), self._total[what] or 0
            parts.append(f"needs {need} and {_of_total(what, free[what], total)} {have} free")
        before = [f"{each.request.name!r}" for each in self._ahead(waiting)] if not parts else []
        if before:
            parts.append(f"comes after {', '.join(dict.fromkeys(before))}, which waited first")
        if not parts:
            return ""
        holders_text = "; ".join(
            f"{self._name(key)} ({use_of(key)}) holds {self._holding(key, short)}" for key in holders
        )
        return f"{waiting.request.name!r} " + ", and ".join(parts) + (f": {holders_text}" if holders_text else "")

    def _is_short(self, waiting: _Waiting, what: str, free: dict[str, int]) -> bool:
        return self._total[what] is not None and getattr(waiting.request.needs, what) > free[what]

    def _name(self, key: str) -> str:
        return next(f"{held.request.name!r}" for replica, held in self._held.items() if replica.key == key)

    def _holding(self, key: str, whats: Sequence[str]) -> str:
        needs_of_pool = [held.request.needs for replica, held in self._held.items() if replica.key == key]
        sums = [(what, sum(getattr(needs, what) for needs in needs_of_pool)) for what in whats]
        return " and ".join(_text(what, amount) for what, amount in sums if amount)


def hide_names(sentence: str, may_know: Callable[[str], bool]) -> str:
    """`why` for a caller who may not see every model: the others are "another model"."""

    def shown(name: re.Match[str]) -> str:
        return name[0] if may_know(name[0][1:-1]) else ANOTHER

    return _OTHERS.sub(lambda part: _QUOTED.sub(shown, part[0]), sentence)


def minimum_replicas(model: ModelSpec) -> int:
    """The minimum replicas of a running model."""
    return max(1, model.workers if model.scaling is None else model.scaling.replicas_min)


def _less(free: dict[str, int], allocated: Iterable[AllocationRequest]) -> dict[str, int]:
    return _sum(free, allocated, -1)


def _more(free: dict[str, int], freed: Iterable[AllocationRequest]) -> dict[str, int]:
    return _sum(free, freed, 1)


def _sum(free: dict[str, int], others: Iterable[AllocationRequest], sign: int) -> dict[str, int]:
    requests = list(others)
    return {what: amount + sign * sum(getattr(each.needs, what) for each in requests) for what, amount in free.items()}


def _text(what: str, amount: int) -> str:
    if what == MEMORY:
        return size_text(amount)
    return f"{amount} GPU" + ("" if amount == 1 else "s")


def _of_total(what: str, free: int, total: int) -> str:
    """ "4 of 24 GiB", "1 of 4 GPUs"; "300 MiB of 24 GiB" where the units differ."""
    free_text, whole = _text(what, max(0, free)), _text(what, total)
    if what == GPUS or free_text.split()[-1] == whole.split()[-1] or free <= 0:
        return f"{free_text.split()[0] if free > 0 else 0} of {whole}"
    return f"{free_text} of {whole}"


class Allocations:
    """Lets replicas wait for resources, and evicts others while some wait."""

    def __init__(self, machine: Resources) -> None:
        self.machine = machine
        self.evict: Callable[[], None] = _nothing  # called after each change while replicas wait
        self.use_of: Callable[[str], str] = _unknown  # pool key -> what uses it, as text
        self._granted: dict[ReplicaId, asyncio.Future[Capacity]] = {}

    async def take(self, request: AllocationRequest, waits: Callable[[str], None]) -> Capacity:
        """Wait for resources and take them. `waits` is called with the reason while there are none."""
        granted = self._granted[request.replica] = asyncio.get_running_loop().create_future()
        self.machine.request(request)
        try:
            self.review()
            if not granted.done():
                waits(self.why(request.replica))
            return await granted
        except asyncio.CancelledError:
            self._granted.pop(request.replica, None)
            if self.machine.holds(request.replica):
                self.machine.give_back(request.replica)
            else:
                self.machine.withdraw(request.replica)
            self.review()
            raise

    def give_back(self, replica: ReplicaId) -> None:
        """Free the resources of a replica that has ended."""
        self.machine.give_back(replica)
        self.review()

    def review(self) -> None:
        """Allocate again after resources or requests changed, or a pool became unused."""
        for replica, capacity in self.machine.allot():
            granted = self._granted.pop(replica)
            if granted.cancelled():  # its replica was cancelled and has yet to notice
                self.machine.give_back(replica)
            else:
                granted.set_result(capacity)
        if self.machine.has_waiting:
            self.evict()

    def why(self, replica: ReplicaId) -> str:
        """What a replica waits for; empty if it does not wait."""
        return self.machine.why(replica, self.use_of)


def _nothing() -> None:
    """Evict nothing."""


def _unknown(key: str) -> str:
    return "in use"
