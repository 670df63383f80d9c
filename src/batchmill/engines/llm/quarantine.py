"""Tracks which requests were in flight when a server died, and blames them. Sends and starts nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol
from weakref import WeakSet

import msgspec
from msgspec import Struct

from batchmill.engines.llm.adapters import Adapter
from batchmill.errors import Unavailable
from batchmill.ports import Clock
from batchmill.types.models import ALONE_DEATHS_MAX, BUDGET_WINDOW_S, Charge, Poison, Suspect
from batchmill.wire.fields import NO_EFFECT
from batchmill.wire.messages import Charged, EngineDied, Suspected

LEFT_S = 5.0  # a request whose caller went so short a time before a death is as suspect as those in flight
LEFT_MAX = 1_024
REMEMBERED_MAX = 4_096  # digests of live requests that were in flight at a death, which only callers can retry
REST_S, REST_MAX_S = 60.0, 900.0  # after a death beyond the budget, twice that after the next, ...
BESIDE_S = 600.0  # a project that was served so short a time ago is another one that could be stopped
COMPLAINT_CHARS_MAX = 2_000
# They change no answer of an engine, or only how it is sent.
_UNTOLD = NO_EFFECT | {"cache_salt", "model", "priority", "request_id", "session_id", "stream", "stream_options"}


class Tracked:
    """One request with all its attempts: its project, and the deaths that it may have caused."""

    __slots__ = ("_adapter", "_body", "_digest", "_source", "alone", "deaths", "project", "url")

    def __init__(self, project: str, source: str, url: str, body: bytes, adapter: Adapter | None) -> None:
        self.project, self.url = project, url
        self._source, self._body, self._adapter = source, body, adapter
        self._digest = ""
        self.alone = 0  # deaths with nothing beside it
        self.deaths: list[_Death] = []

    @property
    def digest(self) -> str:
        """A digest that is equal for rows and live requests with the same input for the engine."""
        if not self._digest:
            members = _members(self._body)
            adapter = "" if self._adapter is None else self._adapter.name
            identity = msgspec.json.encode([self._source, self.url, adapter, members], order="sorted")
            self._digest = hashlib.sha256(identity).hexdigest()
        return self._digest


class _Death(Struct, eq=False):
    """A death, and the possible causes by project."""

    at: float
    open: Counter[str]
    charge: Charge | None = None


class Deaths:
    """
    Args:
        report: hears what the owner is to know: `EngineDied`, `Suspected`, `Charged`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.report: Callable[[Struct], None] = lambda _: None
        self._in_flight: dict[Any, set[Tracked]] = {}  # server -> what it was given and has not answered
        self._left: deque[tuple[float, Any, Tracked]] = deque(maxlen=LEFT_MAX)
        self._dead: WeakSet[Any] = WeakSet()
        self._poison = Poison()
        self._known: dict[str, int] = {}  # digest -> deaths alone
        self._remembered: OrderedDict[str, Tracked] = OrderedDict()
        self._served: dict[str, float] = {}  # project -> when, on the monotonic clock
        self._rest_until: dict[str, float] = {}

    def learn(self, poison: Poison) -> None:
        """Apply what the owner knows, from other engines of this model too."""
        self._poison = poison
        self._known = {each.digest: each.deaths for each in poison.suspects}

    # -- what may run -------------------------------------------------------------------------------------------------

    def is_refused(self, request: Tracked) -> bool:
        """Whether the request was alone in flight at two deaths."""
        return bool(self._known) and self._known.get(request.digest, 0) >= ALONE_DEATHS_MAX

    def is_suspect(self, request: Tracked) -> bool:
        """Whether the request must run alone."""
        if self.is_over_budget(request.project) or request.deaths:
            return True
        if not (self._known or self._remembered):
            return False
        return request.digest in self._known or request.digest in self._remembered

    def is_over_budget(self, project: str) -> bool:
        """Whether the project had its maximum of deaths in an hour, while others have work."""
        if not self._poison.charges or self._count(project) < self._poison.deaths_per_hour:
            return False
        now = self._clock.monotonic()
        return any(now - at < BESIDE_S for other, at in self._served.items() if other != project)

    def _count(self, project: str) -> int:
        since = self._clock.now() - BUDGET_WINDOW_S
        return sum(each.project == project and each.at > since for each in self._poison.charges)

    def over_budget(self) -> frozenset[str]:
        """The projects beyond their budget of deaths."""
        return frozenset(each.project for each in self._poison.charges if self.is_over_budget(each.project))

    def rests(self, project: str) -> bool:
        """Whether the project must wait after a recent death beyond its budget."""
        return self._clock.monotonic() < self._rest_until.get(project, 0.0)

    # -- what runs ----------------------------------------------------------------------------------------------------

    def here(self, project: str) -> None:
        """Note that a project has work for this engine."""
        self._served[project] = self._clock.monotonic()

    def began(self, server: Any, request: Tracked) -> None:
        self._in_flight.setdefault(server, set()).add(request)
        self.here(request.project)

    def answered(self, server: Any, request: Tracked) -> None:
        """Clear a request that the server survived."""
        self._in_flight.get(server, set()).discard(request)
        if self._remembered and (known := self._remembered.pop(request.digest, None)) is not None:
            self._clear(known)
        if self._known and self._known.get(request.digest, ALONE_DEATHS_MAX) < ALONE_DEATHS_MAX:
            del self._known[request.digest]
            self.report(Suspected(Suspect(request.digest, request.project, request.url, 0, self._clock.now())))
        self._clear(request)

    def gone(self, server: Any, request: Tracked) -> None:
        """Forget a request that was cancelled, or is repeated while the server lives."""
        in_flight = self._in_flight.get(server, set())
        if request in in_flight:
            in_flight.discard(request)
            self._left.append((self._clock.monotonic(), server, request))

    def _clear(self, request: Tracked) -> None:
        deaths, request.deaths = request.deaths, []
        for death in deaths:
            death.open[request.project] -= 1
            death.open += Counter()  # drops what is zero
            self._settle(death)

    # -- deaths -------------------------------------------------------------------------------------------------------

    def died(self, server: Any, how: str) -> set[Tracked]:
        """Mark what was in flight as suspect. Called once for each death."""
        if server in self._dead:
            return set()
        self._dead.add(server)
        since = self._clock.monotonic() - LEFT_S
        left = {request for at, of, request in self._left if of is server and at > since}
        found = self._in_flight.pop(server, set()) | left
        death = _Death(self._clock.now(), Counter(request.project for request in found))
        for request in found:
            request.deaths.append(death)
        if len(found) == 1:
            self._strike(next(iter(found)))
        self.report(EngineDied(death.at, how[:COMPLAINT_CHARS_MAX], dict(death.open)))
        self._settle(death)
        return found

    def remember(self, request: Tracked) -> None:
        """Remember a request that only its caller can repeat: it will run alone."""
        self._remembered[request.digest] = request
        while len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)

    def _strike(self, request: Tracked) -> None:
        request.alone = max(request.alone, self._known.get(request.digest, 0)) + 1
        self._known[request.digest] = request.alone
        self.report(Suspected(Suspect(request.digest, request.project, request.url, request.alone, self._clock.now())))

    def _settle(self, death: _Death) -> None:
        """Charge a death to the one project that is left as its cause; to none if none is left."""
        if len(death.open) == 1 and death.charge is None:
            death.charge = Charge(next(iter(death.open)), death.at)
            self._charge(death.charge, is_taken_back=False)
        elif not death.open and death.charge is not None:
            charge, death.charge = death.charge, None
            self._charge(charge, is_taken_back=True)

    def _charge(self, charge: Charge, *, is_taken_back: bool) -> None:
        charges = [each for each in self._poison.charges if each != charge]
        if not is_taken_back:
            beyond = self._count(charge.project) - self._poison.deaths_per_hour
            if beyond >= 0:
                rest_s = min(REST_MAX_S, REST_S * 2 ** min(beyond, 10))
                self._rest_until[charge.project] = self._clock.monotonic() + rest_s
            charges.append(charge)
        self._poison = msgspec.structs.replace(self._poison, charges=charges)
        self.report(Charged(charge, is_taken_back))


def _members(body: bytes) -> Any:
    """The input for the engine without ids; raw bytes if it nests too deep to be sorted."""
    try:
        members = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return body
    return {name: value for name, value in members.items() if name not in _UNTOLD}


HOLD_S = 15.0  # a live request waits so long for what runs alone; then it goes beside it
DRAIN_S = 30.0  # what is in flight may take so long to end before a suspect live request runs
OTHERS_FIRST_S = 10.0  # after a death nothing runs alone for so long, as long as others have work
REST_FACTOR = 3.0  # and after anything ran alone, so many times what it took
TURN_S = 20.0  # a live request of a project beyond its budget waits so long until others have nothing to do
POLL_S = 0.05


class Rows(Protocol):
    """What the turnstile needs to know about rows."""

    @property
    def rows_in_flight(self) -> int: ...

    def wake_rows(self) -> None: ...

    def has_others(self, project: str) -> bool:
        """Rows of other projects run, or wait to."""


class SuspectIsolation:
    def __init__(self, rows: Rows, deaths: Deaths, clock: Clock) -> None:
        self._rows, self.clock = rows, clock
        self.deaths = deaths
        self._holder: Any = None  # that runs alone, or waits until what is in flight has ended
        self._began = 0.0
        self._live: dict[Any, str] = {}  # live requests in flight -> their projects
        self._not_before = 0.0

    def is_closed(self, other_than: Any = None) -> bool:
        """Whether something runs alone, or is about to."""
        return self._holder is not None and self._holder is not other_than

    def may_begin(self, *, has_others: bool) -> bool:
        """Whether a request that runs alone may begin: others have had their share of time."""
        return self._holder is None and (not has_others or self.clock.monotonic() >= self._not_before)

    def hold(self, holder: Any) -> bool:
        """Stop new requests. True once nothing live is in flight."""
        if self._holder is None:
            self._holder, self._began = holder, self.clock.monotonic()
        return self._holder is holder and not self._live

    def release(self, holder: Any) -> None:
        """Let others run first for their share of time."""
        if self._holder is holder:
            self._holder = None
            now = self.clock.monotonic()
            self._not_before = max(self._not_before, now + REST_FACTOR * (now - self._began))
            self._rows.wake_rows()

    def died(self) -> None:
        """Note a restart of the engine: others run first."""
        self._not_before = self.clock.monotonic() + OTHERS_FIRST_S

    def live_of_others(self, project: str) -> bool:
        return any(other != project for other in self._live.values())

    @contextlib.asynccontextmanager
    async def beside(self, request: Any, project: str) -> AsyncIterator[None]:
        """Run a live request beside others; it waits a while for one that runs alone."""
        until = self.clock.monotonic() + HOLD_S
        while self._holder is not None and self.clock.monotonic() < until:
            await self.clock.sleep(POLL_S)
        self._live[request] = project
        try:
            yield
        finally:
            del self._live[request]

    @contextlib.asynccontextmanager
    async def alone(self, request: Any, project: str, *, is_last: bool) -> AsyncIterator[None]:
        """Run a live request with nothing beside it; `is_last`: once no other project has work.

        Raises: Unavailable (`engine_busy`) where that takes too long.
        """
        until = self.clock.monotonic() + (TURN_S if is_last else DRAIN_S)
        while self._is_busy(project, is_last=is_last):
            if self.clock.monotonic() >= until:
                raise busy()
            await self.clock.sleep(POLL_S)
        self._holder, self._began = request, self.clock.monotonic()
        until = self._began + DRAIN_S
        try:
            while self._rows.rows_in_flight or self._live:
                if self.clock.monotonic() >= until:
                    raise busy()
                await asyncio.sleep(0)
                await self.clock.sleep(POLL_S)
            yield
        finally:
            self.release(request)

    def _is_busy(self, project: str, *, is_last: bool) -> bool:
        has_others = self._rows.has_others(project) or self.live_of_others(project)
        return (is_last and has_others) or not self.may_begin(has_others=has_others)


def busy() -> Unavailable:
    return Unavailable(
        "the engine died with this request, or with others of its project, in flight: it runs alone now, and others "
        "go first; try again later",
        code="engine_busy",
    )
