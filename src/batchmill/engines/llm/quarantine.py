"""Tracks which requests were in flight when a server died, and blames them. It sends and starts nothing."""

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
from batchmill.ports.clock import Clock
from batchmill.types.models import ALONE_DEATHS_MAX, BUDGET_WINDOW_S, Charge, Poison, Suspect
from batchmill.wire.fields import NO_EFFECT
from batchmill.wire.messages import Charged, EngineDied, Suspected

WITHDRAWN_S = 5.0  # a request that was withdrawn this short a time before a death is as suspect as those in flight
WITHDRAWN_MAX = 1_024
REMEMBERED_MAX = 4_096  # digests of live requests that were in flight at a death, which only callers can retry
RETRY_DELAY_S, RETRY_DELAY_MAX_S = 60.0, 900.0  # after a death beyond the budget, twice that after the next, ...
OTHERS_S = 600.0  # a project that had work this short a time ago counts as another that deaths can delay
COMPLAINT_CHARS_MAX = 2_000
# Fields that do not change an engine's answer, or only how it is sent.
_IGNORED_FIELDS = NO_EFFECT | {
    "cache_salt",
    "model",
    "priority",
    "request_id",
    "session_id",
    "stream",
    "stream_options",
}


class Tracked:
    """One request with all its attempts: its project, and the deaths that it may have caused."""

    __slots__ = ("_adapter", "_body", "_digest", "_source", "alone", "deaths", "project", "url")

    def __init__(self, project: str, source: str, url: str, body: bytes, adapter: Adapter | None) -> None:
        self.project, self.url = project, url
        self._source, self._body, self._adapter = source, body, adapter
        self._digest = ""
        self.alone = 0  # deaths with no other request in flight
        self.deaths: list[_Death] = []

    @property
    def digest(self) -> str:
        """A digest of the input for the engine; equal inputs of rows and live requests have equal digests."""
        if not self._digest:
            members = _members(self._body)
            adapter = "" if self._adapter is None else self._adapter.name
            identity = msgspec.json.encode([self._source, self.url, adapter, members], order="sorted")
            self._digest = hashlib.sha256(identity).hexdigest()
        return self._digest


class _Death(Struct, eq=False):
    """A death, with the number of possible causes by project."""

    at: float  # Unix time in seconds
    open: Counter[str]
    charge: Charge | None = None


class Deaths:
    """Blames requests for deaths of servers, and charges them to projects.

    `report` gets what the owner must know: `EngineDied`, `Suspected`, `Charged`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.report: Callable[[Struct], None] = lambda _: None
        self._in_flight: dict[Any, set[Tracked]] = {}  # server -> requests that it has not answered
        self._withdrawn: deque[tuple[float, Any, Tracked]] = deque(maxlen=WITHDRAWN_MAX)
        self._dead: WeakSet[Any] = WeakSet()
        self._poison = Poison()
        self._alone_deaths: dict[str, int] = {}  # digest -> deaths alone
        self._remembered: OrderedDict[str, Tracked] = OrderedDict()
        self._worked_at: dict[str, float] = {}  # project -> when it last had work, on the monotonic clock
        self._wait_until: dict[str, float] = {}  # project -> until when, on the monotonic clock

    def learn(self, poison: Poison) -> None:
        """Apply the owner's record of deaths, which covers other engines of this model too."""
        self._poison = poison
        self._alone_deaths = {each.digest: each.deaths for each in poison.suspects}

    # -- checks --------------------------------------------------------------------------------------------------------

    def is_refused(self, request: Tracked) -> bool:
        """Whether the request was the only one in flight at two deaths."""
        return bool(self._alone_deaths) and self._alone_deaths.get(request.digest, 0) >= ALONE_DEATHS_MAX

    def is_suspect(self, request: Tracked) -> bool:
        """Whether the request must run alone."""
        if self.is_over_budget(request.project) or request.deaths:
            return True
        if not (self._alone_deaths or self._remembered):
            return False
        return request.digest in self._alone_deaths or request.digest in self._remembered

    def is_over_budget(self, project: str) -> bool:
        """Whether the project reached its maximum of deaths in an hour, while others have work."""
        if not self._poison.charges or self._count(project) < self._poison.deaths_per_hour:
            return False
        now = self._clock.monotonic()
        return any(now - at < OTHERS_S for other, at in self._worked_at.items() if other != project)

    def _count(self, project: str) -> int:
        since = self._clock.now() - BUDGET_WINDOW_S
        return sum(each.project == project and each.at > since for each in self._poison.charges)

    def over_budget(self) -> frozenset[str]:
        """The projects beyond their budget of deaths."""
        return frozenset(each.project for each in self._poison.charges if self.is_over_budget(each.project))

    def must_wait(self, project: str) -> bool:
        """Whether the project must wait after a recent death beyond its budget."""
        return self._clock.monotonic() < self._wait_until.get(project, 0.0)

    # -- requests ------------------------------------------------------------------------------------------------------

    def record_work(self, project: str) -> None:
        """Note that a project has work for this engine."""
        self._worked_at[project] = self._clock.monotonic()

    def record_start(self, server: Any, request: Tracked) -> None:
        self._in_flight.setdefault(server, set()).add(request)
        self.record_work(request.project)

    def record_reply(self, server: Any, request: Tracked) -> None:
        """Clear a request that the server survived."""
        self._in_flight.get(server, set()).discard(request)
        if self._remembered and (earlier := self._remembered.pop(request.digest, None)) is not None:
            self._clear(earlier)
        if self._alone_deaths and self._alone_deaths.get(request.digest, ALONE_DEATHS_MAX) < ALONE_DEATHS_MAX:
            del self._alone_deaths[request.digest]
            self.report(Suspected(Suspect(request.digest, request.project, request.url, 0, self._clock.now())))
        self._clear(request)

    def withdraw(self, server: Any, request: Tracked) -> None:
        """Remove a request that was cancelled, or that is retried while the server lives."""
        in_flight = self._in_flight.get(server, set())
        if request in in_flight:
            in_flight.discard(request)
            self._withdrawn.append((self._clock.monotonic(), server, request))

    def _clear(self, request: Tracked) -> None:
        deaths, request.deaths = request.deaths, []
        for death in deaths:
            death.open[request.project] -= 1
            death.open += Counter()  # drops zero counts
            self._update_charge(death)

    # -- deaths --------------------------------------------------------------------------------------------------------

    def record_death(self, server: Any, complaint: str) -> set[Tracked]:
        """Mark the requests in flight as suspect, and return them. A second call for a server has no effect."""
        if server in self._dead:
            return set()
        self._dead.add(server)
        since = self._clock.monotonic() - WITHDRAWN_S
        withdrawn = {request for at, of, request in self._withdrawn if of is server and at > since}
        suspects = self._in_flight.pop(server, set()) | withdrawn
        death = _Death(self._clock.now(), Counter(request.project for request in suspects))
        for request in suspects:
            request.deaths.append(death)
        if len(suspects) == 1:
            self._record_alone_death(next(iter(suspects)))
        self.report(EngineDied(death.at, complaint[:COMPLAINT_CHARS_MAX], dict(death.open)))
        self._update_charge(death)
        return suspects

    def remember(self, request: Tracked) -> None:
        """Remember a request that only its caller can repeat: it will run alone."""
        self._remembered[request.digest] = request
        while len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)

    def _record_alone_death(self, request: Tracked) -> None:
        request.alone = max(request.alone, self._alone_deaths.get(request.digest, 0)) + 1
        self._alone_deaths[request.digest] = request.alone
        self.report(Suspected(Suspect(request.digest, request.project, request.url, request.alone, self._clock.now())))

    def _update_charge(self, death: _Death) -> None:
        """Charge a death to the only project that may have caused it. Withdraw the charge if no project may have."""
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
                delay_s = min(RETRY_DELAY_MAX_S, RETRY_DELAY_S * 2 ** min(beyond, 10))
                self._wait_until[charge.project] = self._clock.monotonic() + delay_s
            charges.append(charge)
        self._poison = msgspec.structs.replace(self._poison, charges=charges)
        self.report(Charged(charge, is_taken_back))


def _members(body: bytes) -> Any:
    """The input for the engine without ids; raw bytes if it nests too deep to be sorted."""
    try:
        members = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return body
    return {name: value for name, value in members.items() if name not in _IGNORED_FIELDS}


HOLD_S = 15.0  # how long a live request waits for a request that runs alone; then it runs beside it
DRAIN_S = 30.0  # how long a suspect live request waits for the requests in flight to end
OTHERS_FIRST_S = 10.0  # after a death nothing runs alone for this long while others have work
REST_FACTOR = 3.0  # after a request ran alone, nothing runs alone for this many times its duration
TURN_S = 20.0  # how long a live request of a project beyond its budget waits until others have no work
POLL_S = 0.05


class Rows(Protocol):
    """What `SuspectIsolation` needs to know about rows."""

    @property
    def rows_in_flight(self) -> int: ...

    def wake_rows(self) -> None: ...

    def has_others(self, project: str) -> bool:
        """Whether rows of other projects run or wait."""


class SuspectIsolation:
    """Decides when a suspect may run alone, and holds other requests back while it does."""

    def __init__(self, rows: Rows, deaths: Deaths, clock: Clock) -> None:
        self._rows, self.clock = rows, clock
        self.deaths = deaths
        self._holder: Any = None  # runs alone, or waits until the requests in flight have ended
        self._began_at = 0.0
        self._live: dict[Any, str] = {}  # live requests in flight -> their projects
        self._not_before = 0.0

    def is_closed(self, other_than: Any = None) -> bool:
        """Whether a request runs alone, or is about to."""
        return self._holder is not None and self._holder is not other_than

    def can_start(self, *, has_others: bool) -> bool:
        """Whether a request that runs alone may begin: others have had their share of time."""
        return self._holder is None and (not has_others or self.clock.monotonic() >= self._not_before)

    def hold(self, holder: Any) -> bool:
        """Stop new requests. True once nothing live is in flight."""
        if self._holder is None:
            self._holder, self._began_at = holder, self.clock.monotonic()
        return self._holder is holder and not self._live

    def release(self, holder: Any) -> None:
        """Let others run first for their share of time."""
        if self._holder is holder:
            self._holder = None
            now = self.clock.monotonic()
            self._not_before = max(self._not_before, now + REST_FACTOR * (now - self._began_at))
            self._rows.wake_rows()

    def record_death(self) -> None:
        """Note a restart of the engine: others run first."""
        self._not_before = self.clock.monotonic() + OTHERS_FIRST_S

    def has_live_of_others(self, project: str) -> bool:
        return any(other != project for other in self._live.values())

    @contextlib.asynccontextmanager
    async def run_beside(self, request: Any, project: str) -> AsyncIterator[None]:
        """Run a live request beside others, after a request that runs alone or `HOLD_S`."""
        until = self.clock.monotonic() + HOLD_S
        while self._holder is not None and self.clock.monotonic() < until:
            await self.clock.sleep(POLL_S)
        self._live[request] = project
        try:
            yield
        finally:
            del self._live[request]

    @contextlib.asynccontextmanager
    async def run_alone(self, request: Any, project: str, *, is_last: bool) -> AsyncIterator[None]:
        """Run a live request with nothing beside it. `is_last`: wait until no other project has work.

        Raises: Unavailable (`engine_busy`) if that takes too long.
        """
        until = self.clock.monotonic() + (TURN_S if is_last else DRAIN_S)
        while self._is_busy(project, is_last=is_last):
            if self.clock.monotonic() >= until:
                raise busy()
            await self.clock.sleep(POLL_S)
        self._holder, self._began_at = request, self.clock.monotonic()
        until = self._began_at + DRAIN_S
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
        has_others = self._rows.has_others(project) or self.has_live_of_others(project)
        return (is_last and has_others) or not self.can_start(has_others=has_others)


def busy() -> Unavailable:
    return Unavailable(
        "the engine died with this request, or with others of its project, in flight: it must run alone, after other "
        "requests; try again later",
        code="engine_busy",
    )
