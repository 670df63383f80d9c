"""Live calls that wait for the pacer: each goes before any row does."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

from batchmill.engines.pacing import Pacer
from batchmill.errors import RateLimited, Unavailable
from batchmill.ports import Clock

WAIT_MAX_S = 30.0  # a live call waits so long for a service that rests or is down


class Ahead:
    """The queue before that of the rows. `resume` is called when rows may go on.

    Args:
        pool_wait_s: how long a live call waits while as many calls are in flight as there may be: then it is refused
            as one too many. None: as long as for anything else, and it is the service that cannot be called.
    """

    def __init__(self, pacer: Pacer, clock: Clock, *, pool_wait_s: float | None = None) -> None:
        self._pacer = pacer
        self._clock = clock
        self._pool_wait_s = pool_wait_s
        self._waiting: deque[tuple[int, bool, asyncio.Future[float]]] = deque()
        self._alarm: asyncio.Task[None] | None = None
        self.in_flight = 0
        self.resume: Callable[[], None] = nothing

    def is_wanted(self) -> bool:
        """Let live calls go as far as the pacer allows; whether one still waits."""
        if not self._waiting:
            return False
        now = self._clock.monotonic()
        while self._waiting:
            size, is_admitted, turn = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
                continue
            wait_s = self._pacer.wait_s(size, now, is_admitted=is_admitted)
            if wait_s != math.inf and wait_s > WAIT_MAX_S:
                self._waiting.popleft()
                turn.set_exception(Unavailable(self._pacer.note(now) or f"its rate allows no call for {wait_s:.0f} s"))
                continue
            if wait_s > 0:
                if wait_s != math.inf and self._alarm is None:
                    self._alarm = asyncio.create_task(self._look_after(wait_s))
                return True
            self._waiting.popleft()
            self.in_flight += 1
            turn.set_result(self._pacer.sent(size))
        return False

    async def go(self, size_bytes: int, *, is_admitted: bool = False) -> float:
        """Return once a call of this size may go: it counts as sent, until `ended`. What it is charged, in tokens.

        Args:
            is_admitted: the rate that is set was kept where the call came in: it waits for none.

        Raises: Unavailable where it may not for too long, RateLimited where too many others are in flight.
        """
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, is_admitted, turn))
        self.is_wanted()
        try:
            return await self._turn_of(turn)
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pacer.window.failed()  # its turn came as it was given up
                self.ended()
            turn.cancel()
            raise

    async def _turn_of(self, turn: asyncio.Future[float]) -> float:
        if turn.done():
            return turn.result()
        waited_s = min(WAIT_MAX_S if self._pool_wait_s is None else self._pool_wait_s, WAIT_MAX_S)
        await asyncio.wait((turn,), timeout=waited_s)
        if not turn.done() and self._pool_wait_s is not None and self._pacer.is_full:
            raise RateLimited(
                f"Error communicating with remote model: Acquire operation took longer than {waited_s:g} s: "
                f"{self._pacer.window.in_flight} calls of it are in flight, as many as there may be",
                code="connection_pool_exhausted",
                retry_after_s=1.0,
            )
        if not turn.done() and waited_s < WAIT_MAX_S:
            await asyncio.wait((turn,), timeout=WAIT_MAX_S - waited_s)
        if not turn.done():
            note = self._pacer.note(self._clock.monotonic()) or "as many calls as it bears are in flight"
            raise Unavailable(f"the service could not be called for {WAIT_MAX_S:g} s: {note}")
        return turn.result()

    def ended(self) -> None:
        """A call that went has ended, and the pacer knows how."""
        self.in_flight -= 1
        if not self.is_wanted():
            self.resume()

    async def stop(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            await asyncio.gather(self._alarm, return_exceptions=True)
            self._alarm = None

    async def _look_after(self, wait_s: float) -> None:
        await self._clock.sleep(wait_s)
        self._alarm = None
        if not self.is_wanted():
            self.resume()


def nothing() -> None: ...
