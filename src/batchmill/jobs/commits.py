"""The one line that commits stand in: drained into the ledger many at a time, in the order they came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import sqlalchemy as sa

from batchmill.errors import BatchmillError, LedgerBroken, StorageFull
from batchmill.jobs.ledger import Ledger, Verdict
from batchmill.types import Commit

BATCH_MAX = 256

P = ParamSpec("P")
T = TypeVar("T")


class Books:
    """The ledger, its one thread, and the queue before it."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._queue: asyncio.Queue[
            tuple[Commit, float | None, Callable[[Verdict | BatchmillError], None]] | asyncio.Future
        ]
        self._queue = asyncio.Queue()
        self._draining = asyncio.create_task(self._drain())

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a method of the ledger in its thread. Raises: StorageFull when the disk is full."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))
        except sa.exc.SQLAlchemyError as error:
            raise _storage_error(error) from error

    def commit(self, commit: Commit, cost: float | None, told: Callable[[Verdict | BatchmillError], None]) -> None:
        """Queue a commit; `told` hears what became of it, on the event loop."""
        self._queue.put_nowait((commit, cost, told))

    async def settle(self) -> None:
        """Wait until everything queued so far has been decided."""
        done = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(done)
        await done

    async def _drain(self) -> None:
        while True:
            batch: list[Any] = [await self._queue.get()]
            while len(batch) < BATCH_MAX and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            entries = [entry for entry in batch if isinstance(entry, tuple)]
            if entries:
                verdicts = await self._decide([(commit, cost) for commit, cost, _ in entries])
                for (_, _, told), verdict in zip(entries, verdicts, strict=True):
                    told(verdict)
            for entry in batch:
                if isinstance(entry, asyncio.Future) and not entry.done():
                    entry.set_result(None)

    async def _decide(self, items: list[tuple[Commit, float | None]]) -> list[Verdict | BatchmillError]:
        """One transaction for all; where that fails, one for each, so that one job's trouble stays its own."""
        try:
            return list(await self.call(self.ledger.commit, items))
        except BatchmillError as error:
            if len(items) == 1:
                return [error]
        return [(await self._decide([item]))[0] for item in items]

    def close(self) -> None:
        self._draining.cancel()
        self._thread.shutdown(wait=True)
        self.ledger.close()


def _storage_error(error: sa.exc.SQLAlchemyError) -> BatchmillError:
    text = str(getattr(error, "orig", None) or error)
    if "full" in text:
        return StorageFull(f"the ledger cannot be written: {text}; make room and resume the job")
    return LedgerBroken(f"the database failed: {text}", code="database_failed")
