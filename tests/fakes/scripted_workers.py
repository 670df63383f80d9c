"""An executor whose workers are played by a test: it sees what they are told and says what they say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from msgspec import Struct

from batchmill.store.sql.positions import pack_positions
from batchmill.types import Commit, SegmentRef, Usage
from batchmill.wire.messages import Grant, Ready, Record, Start

M = TypeVar("M", bound=Struct)
KILLED = -9


class ScriptedWorker:
    """A worker that does nothing by itself, except end when it is killed."""

    def __init__(self, start: Start) -> None:
        self.name, self.home, self.pid = start.worker, start.home, 0
        self.gpus, self.replica = start.gpus, start.replica
        self.provision = start.provision  # what it was given beside its model
        self.inbox: list[Struct] = []  # messages of the owner that the test has not asked for yet
        self.was_killed = False
        self.holds_on = False  # a kill takes effect only when the test says so
        self._news = asyncio.Event()
        self._words: asyncio.Queue[Struct | None] = asyncio.Queue()
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def send(self, message: Struct) -> None:
        self.inbox.append(message)
        self._news.set()

    async def messages(self) -> AsyncIterator[Struct]:
        while (word := await self._words.get()) is not None:
            yield word

    def is_frozen(self) -> bool:
        return False

    def kill(self) -> None:
        self.was_killed = True
        if not self.holds_on:
            self.exit(KILLED)

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    # -- for the test -------------------------------------------------------------------------------------------------

    def say(self, message: Struct) -> None:
        self._words.put_nowait(message)

    def exit(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)
            self._words.put_nowait(None)

    async def expect(self, kind: type[M]) -> M:
        """The next message of a kind that the owner sends, or has sent; those before it are passed over."""
        while True:
            while self.inbox:
                message = self.inbox.pop(0)
                if isinstance(message, kind):
                    return message
            self._news.clear()
            await self._news.wait()

    def has_heard(self, kind: type[Struct]) -> bool:
        return any(isinstance(message, kind) for message in self.inbox)

    def finish(
        self, grant: Grant, positions: list[int], *, seq: int = 0, usage: Usage = Usage(), blocks: bytes = b"0123456789"
    ) -> None:
        """Ask for these rows of a grant to be counted. `blocks`: what the commit carries; empty: it lies in a file."""
        ref = SegmentRef(f"{self.name}-0001.seg", 64 + 100 * positions[0], 10)
        done = pack_positions(positions, grant.base)
        self.say(Record(Commit(grant.lease, grant.seq + seq, ref, done, len(positions), 0, usage, blocks=blocks)))


class ScriptedExecutor:
    def __init__(self) -> None:
        self._started: asyncio.Queue[ScriptedWorker] = asyncio.Queue()
        self.gate = asyncio.Event()  # workers start while it is set
        self.gate.set()

    async def start(self, start: Start) -> ScriptedWorker:
        await self.gate.wait()
        worker = ScriptedWorker(start)
        self._started.put_nowait(worker)
        return worker

    def sweep(self) -> None:
        """Nothing outlives a test."""

    async def next(self, *, ready: bool = True) -> ScriptedWorker:
        """The next worker that was started; `ready`: and says that it is."""
        worker = await self._started.get()
        if ready:
            worker.say(Ready(1))
        return worker

    @property
    def is_quiet(self) -> bool:
        """No worker was started that the test has not seen."""
        return self._started.empty()
