"""How far the work for one lease may still go: its ending, its failures, and every wait in between."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from batchmill.engines.provider_batch.provider import TryAgain
from batchmill.engines.provider_batch.settings import Settings
from batchmill.errors import AuthRefused, BatchmillError, QuotaExhausted, RouteFailed
from batchmill.ports import Clock, LeaseHandle

PAUSE, OVER = "pause", "over"
ANSWER_S = 60.0  # a provider that does not answer is left alone after so long, by work that is to end
T = TypeVar("T")


class Left(Exception):
    """The work stops here: the lease ends, or other work for it has failed. What is noted says how it goes on."""


class Course:
    """Of one lease. `ending` is empty, "pause": leave everything as it is, or "over": end what runs, collect it."""

    def __init__(self, lease: LeaseHandle, settings: Settings, clock: Clock, jitter: Callable[[], float]) -> None:
        self.ending = lease.ending
        self.failure: BatchmillError | None = None  # why the lease's rows cannot go on
        self.trouble = ""  # why the provider's last call brought nothing
        self._lease, self._settings, self._clock, self._jitter = lease, settings, clock, jitter
        self._turned = asyncio.Event()

    async def watch(self) -> None:
        """Follow what the lease says, until cancelled: it has the last word."""
        self._turn(await self._lease.until_ending())

    def fail(self, error: BatchmillError) -> None:
        """The lease's rows cannot go on. Its other jobs end where the rows are to go elsewhere; else they stay."""
        if self.failure is None:
            self.failure = error
        if not self.ending:
            self._turn(OVER if isinstance(error, RouteFailed) else PAUSE)

    def end(self) -> None:
        """Stop as soon as may be, whatever the lease says."""
        self._turn(PAUSE)

    def check(self) -> None:
        """Raises: Left when no step may be begun any more."""
        if self.ending:
            raise Left

    async def sleep(self, seconds: float) -> None:
        """Wait so long, or until `ending` changes."""
        turned = self._turned
        sleeping = asyncio.ensure_future(self._clock.sleep(seconds))
        turning = asyncio.ensure_future(turned.wait())
        try:
            await asyncio.wait({sleeping, turning}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeping.cancel()
            turning.cancel()

    async def persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """What a call brings that may be made any number of times; it is, until the provider answers.

        Raises: Left when the lease is paused meanwhile; RouteFailed when the provider has not answered for so long
        that it counts as stuck, or refuses.
        """
        patience = Patience(self, ANSWER_S)
        while True:
            try:
                found = await call()
            except TryAgain as error:
                await patience.rest(error)
            else:
                self.trouble = ""
                return found

    def limit_s(self, over_s: float = math.inf) -> float:
        """How long a provider may be without an answer; `over_s`: at most, when the work is to end."""
        return min(self._settings.cancel_wait_s, over_s) if self.ending == OVER else self._settings.stuck_after_s

    def pause_s(self, tries: int) -> float:
        """Seconds before the next try, after so many: they double from `poll_s` to `poll_max_s`."""
        longest = min(self._settings.poll_max_s, self._settings.poll_s * 2 ** min(tries - 1, 16))
        return longest * (0.5 + self._jitter() / 2)

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def _turn(self, ending: str) -> None:
        self.ending = ending
        turned, self._turned = self._turned, asyncio.Event()
        turned.set()


class Patience:
    """With a provider that does not answer one call."""

    def __init__(self, course: Course, over_s: float = math.inf) -> None:
        self._course, self._over_s = course, over_s
        self._since: float | None = None
        self._tries = 0

    async def rest(self, error: TryAgain) -> None:
        """Wait before the next try. Raises: Left, RouteFailed as `Course.persist` says."""
        course = self._course
        course.trouble = error.message
        now = course.monotonic()
        self._since = now if self._since is None else self._since
        self._tries += 1
        waited = now - self._since
        if waited > course.limit_s(self._over_s):
            raise RouteFailed(f"the provider has not answered for {waited:,.0f} s: {error.message}") from None
        if course.ending == PAUSE:
            raise Left
        await course.sleep(max(course.pause_s(self._tries), error.rest_s or 0.0))
        if course.ending == PAUSE:
            raise Left


def is_fatal(error: BatchmillError) -> bool:
    """Whether no job of the engine can go on: its key or its quota."""
    return isinstance(error, AuthRefused | QuotaExhausted)
