"""Work that callers can make as long as they like: filters, queries, large bodies. Each piece runs in a child process
that is killed at its bounds, and no project's pieces block another's.

Slots are shared by project. A project that used much lately waits behind the others, and one slot is always left to
the latter. A program that was stopped again and again is refused for a while before it costs anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import OrderedDict
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from batchmill.children.bounds import ResourceLimits
from batchmill.children.offload import CHILD_DIED, Child, Warm
from batchmill.errors import BatchmillError, RateLimited, TooComplex
from batchmill.ports.clock import Clock

PLACES = max(2, min(4, os.cpu_count() or 2))  # children at work at once
WAITING_MAX = 1000  # pieces of one project that wait
PATIENCE_S = 10.0  # of a piece of work that a caller waits for
HALF_LIFE_S = 60.0  # of what is remembered of the time that a caller took
HEAVY_S = 1.0  # who took more than this shares all places but one with others like him
WASTED_MAX_S = 10.0  # of what was stopped; beyond it a project's programs have a part of their time
CUT = 0.1
STRIKES_MAX = 3  # times that one program is stopped before it is refused
STRUCK_S = 300.0  # for so long
STRUCK_MAX = 10_000  # programs that are remembered
ACCOUNTS_MAX = 10_000
KEPT_BYTES = 128 * 1024 * 1024  # a child that holds more is not kept
# Of this process's environment; nothing else of it is a program's business.
ENVIRON = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")


class _Account(Struct, eq=False):
    """The recent use of one caller."""

    at: float = 0.0  # when the sums were last brought up to date
    spent_s: float = 0.0
    wasted_s: float = 0.0
    running: int = 0
    waiting: list[asyncio.Future[None]] = msgspec.field(default_factory=list)


class Programs:
    """Runs programs of callers. Its owner closes it."""

    def __init__(self, clock: Clock, *, places: int = PLACES, environ: Mapping[str, str] = os.environ) -> None:
        assert places > 1, "one place is left to those who take little"
        self._clock, self._places = clock, places
        kept = {name: environ[name] for name in ENVIRON if name in environ}
        self._warm = Warm(idle_max=places, environ=lambda: kept)
        self._accounts: OrderedDict[str, _Account] = OrderedDict()  # the most recent one is last
        self._struck: OrderedDict[tuple[str, bytes], tuple[int, float]] = OrderedDict()  # times, and when it was last
        self._running = 0

    async def run(
        self, target: str, order: bytes, *, who: str, work: str, program: bytes = b"",
        bounds: ResourceLimits | None = None,
        patience_s: float = PATIENCE_S,
    ) -> bytes:  # fmt: skip
        """Run `target`, which takes and returns bytes as for `offload`.

        Args:
            who: whose it is: a project.
            work: its name in messages: "the search".
            program: what it can be known again by; empty: nothing.

        Raises: TooComplex at a bound, or for a program that was stopped often; RateLimited where too much of theirs
        waits already; what `target` raises.
        """
        key = (who, hashlib.blake2b(program, key=target.encode()[:64]).digest()) if program else None
        self._refuse_struck(key, work)
        account = self._account(who)
        await self._place(account, work, patience_s)
        try:
            self._refuse_struck(key, work)  # others like it may have been stopped meanwhile
        except TooComplex:
            self._leave(account, 0.0, wasted=False)
            raise
        began = self._clock.monotonic()
        wasted = False
        try:
            return await self._run(target, order, self._bounds(account, bounds or ResourceLimits()), work)
        except TooComplex:
            wasted = True
            if key is not None:
                self._strike(key)
            raise
        finally:
            self._leave(account, self._clock.monotonic() - began, wasted)

    async def _run(self, target: str, order: bytes, bounds: ResourceLimits, work: str) -> bytes:
        try:
            return await self._run_in(await self._warm.take(KEPT_BYTES), target, order, bounds, work)
        except BatchmillError as error:
            if error.code != CHILD_DIED:
                raise
        return await self._run_in(await self._warm.start(), target, order, bounds, work)

    async def _run_in(self, child: Child, target: str, order: bytes, bounds: ResourceLimits, work: str) -> bytes:
        is_sound = False
        try:
            answer = await child.run_within(target, order, bounds, work)
            is_sound = True
            return answer
        except BatchmillError as error:
            is_sound = error.code != CHILD_DIED and not isinstance(error, TooComplex)
            raise
        finally:
            if is_sound:
                self._warm.keep(child, KEPT_BYTES)
            else:
                await child.end()

    # -- places -------------------------------------------------------------------------------------------------------

    async def _place(self, account: _Account, work: str, patience_s: float) -> None:
        if not account.waiting and self._may_run(account):
            self._take_place(account)
            return
        if len(account.waiting) >= WAITING_MAX:
            raise RateLimited(f"{work} was not begun: {WAITING_MAX:,} others of yours wait", retry_after_s=patience_s)
        turn = asyncio.get_running_loop().create_future()
        account.waiting.append(turn)
        try:
            async with asyncio.timeout(patience_s):
                await turn
        except BaseException as error:
            if turn in account.waiting:
                account.waiting.remove(turn)
            elif not turn.cancelled():  # it has just been given a place
                self._leave(account, 0.0, wasted=False)
            if isinstance(error, TimeoutError):
                raise RateLimited(
                    f"{work} was not begun in {patience_s:g} s: others of yours take all the time there is",
                    retry_after_s=patience_s,
                ) from None
            raise

    def _may_run(self, account: _Account) -> bool:
        """Whether a caller may run now: one slot is reserved for callers with little use."""
        if self._running >= self._places or account.running >= self._places - 1:
            return False
        heavy = sum(each.running for each in self._accounts.values() if each.running and self._is_heavy(each))
        return not self._is_heavy(account) or heavy < self._places - 1

    def _take_place(self, account: _Account) -> None:
        account.running += 1
        self._running += 1

    def _leave(self, account: _Account, seconds: float, wasted: bool) -> None:
        self._decay(account)
        account.spent_s += seconds
        account.wasted_s += seconds if wasted else 0.0
        account.running -= 1
        self._running -= 1
        self._hand_on()

    def _hand_on(self) -> None:
        """Give slots to the callers with the least use."""
        waiting = [each for each in self._accounts.values() if each.waiting]
        for account in sorted(waiting, key=self._spent):
            while account.waiting and self._may_run(account):
                turn = account.waiting.pop(0)
                if not turn.done():
                    self._take_place(account)
                    turn.set_result(None)

    # -- what is remembered -------------------------------------------------------------------------------------------

    def _account(self, who: str) -> _Account:
        account = self._accounts.pop(who, None) or _Account(self._clock.monotonic())
        self._accounts[who] = account
        if len(self._accounts) > ACCOUNTS_MAX:
            idle = [name for name, each in self._accounts.items() if not each.running and not each.waiting]
            for name in idle[: len(self._accounts) - ACCOUNTS_MAX]:
                if name != who:
                    del self._accounts[name]
        return account

    def _decay(self, account: _Account) -> None:
        now = self._clock.monotonic()
        share = 0.5 ** ((now - account.at) / HALF_LIFE_S)
        account.at, account.spent_s, account.wasted_s = now, account.spent_s * share, account.wasted_s * share

    def _spent(self, account: _Account) -> float:
        self._decay(account)
        return account.spent_s

    def _is_heavy(self, account: _Account) -> bool:
        return self._spent(account) > HEAVY_S

    def _bounds(self, account: _Account, bounds: ResourceLimits) -> ResourceLimits:
        """The limits; shorter for a caller whose programs were stopped again and again."""
        if account.wasted_s <= WASTED_MAX_S:
            return bounds
        return msgspec.structs.replace(bounds, cpu_s=bounds.cpu_s * CUT, wall_s=bounds.wall_s * CUT)

    def _strike(self, key: tuple[str, bytes]) -> None:
        times, _ = self._struck.pop(key, (0, 0.0))
        self._struck[key] = (times + 1, self._clock.monotonic())
        if len(self._struck) > STRUCK_MAX:
            self._struck.popitem(last=False)

    def _refuse_struck(self, key: tuple[str, bytes] | None, work: str) -> None:
        if key is None:
            return
        times, last = self._struck.get(key, (0, 0.0))
        if times < STRIKES_MAX:
            return
        left_s = last + STRUCK_S - self._clock.monotonic()
        if left_s <= 0:
            del self._struck[key]
            return
        raise TooComplex(
            f"{work} was stopped {times} times for what it took, and is not run for {left_s:.0f} s: make it simpler"
        )

    async def close(self) -> None:
        """End idle children; busy ones end with their work."""
        await self._warm.close()
