"""Who runs in an engine with nothing beside it: a few suspect rows, or one suspect live request at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

from batchmill.engines.llm_poison.deaths import Deaths
from batchmill.errors import Unavailable
from batchmill.ports import Clock

HOLD_S = 15.0  # a live request waits so long for what runs alone; then it goes beside it
DRAIN_S = 30.0  # what is in flight may take so long to end before a suspect live request runs
OTHERS_FIRST_S = 10.0  # after a death nothing runs alone for so long, as long as others have work
REST_FACTOR = 3.0  # and after anything ran alone, so many times what it took
TURN_S = 20.0  # a live request of a project beyond its budget waits so long until others have nothing to do
POLL_S = 0.05


class Rows(Protocol):
    """The rows of the engine."""

    @property
    def rows_in_flight(self) -> int: ...

    def wake_rows(self) -> None: ...

    def has_others(self, project: str) -> bool:
        """Rows of other projects run, or wait to."""


class Isolation:
    def __init__(self, rows: Rows, deaths: Deaths, clock: Clock) -> None:
        self._rows, self.clock = rows, clock
        self.deaths = deaths
        self._holder: Any = None  # that runs alone, or waits until what is in flight has ended
        self._began = 0.0
        self._live: dict[Any, str] = {}  # live requests in flight -> their projects
        self._not_before = 0.0

    def is_closed(self, other_than: Any = None) -> bool:
        """Something runs alone, or is about to."""
        return self._holder is not None and self._holder is not other_than

    def may_begin(self, *, has_others: bool) -> bool:
        """Its time has come: others, where there are any, have had theirs."""
        return self._holder is None and (not has_others or self.clock.monotonic() >= self._not_before)

    def hold(self, holder: Any) -> bool:
        """Let nothing new begin. True once nothing live is in flight."""
        if self._holder is None:
            self._holder, self._began = holder, self.clock.monotonic()
        return self._holder is holder and not self._live

    def release(self, holder: Any) -> None:
        """Others first from now on, for as long as their share takes."""
        if self._holder is holder:
            self._holder = None
            now = self.clock.monotonic()
            self._not_before = max(self._not_before, now + REST_FACTOR * (now - self._began))
            self._rows.wake_rows()

    def died(self) -> None:
        """The engine is started again: others go first."""
        self._not_before = self.clock.monotonic() + OTHERS_FIRST_S

    def live_of_others(self, project: str) -> bool:
        return any(other != project for other in self._live.values())

    @contextlib.asynccontextmanager
    async def beside(self, request: Any, project: str) -> AsyncIterator[None]:
        """Run a live request beside others. It waits a while for one that runs alone."""
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
