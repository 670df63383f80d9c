"""CommitLog: the queue of commits and notes for the ledger, written many at a time in order.

Every entry's caller learns its result, also when the queue itself has failed. A note is written down only once
everything before it has been counted: what could not be counted must not be said to be settled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from msgspec import Struct

from batchmill import faults
from batchmill.errors import BatchmillError, DatabaseUnavailable, JobPaused, LedgerBroken
from batchmill.jobs.ledger.core_task import CoreTask
from batchmill.jobs.ledger.ledger import JobEnd, Ledger, ShardNote, Verdict
from batchmill.models import redaction
from batchmill.states import JobState
from batchmill.types import Commit, Lease

BATCH_MAX = 256
# Workers commit only rows that they were granted, so the line is short unless the disk is slower than they are: then
# the reader of a worker's messages waits here, and so does the worker.
QUEUE_MAX = 1024
SHORT_MAX = 8  # commits, or leases, of a transaction that counts as short
REFUSED_MAX = 10_000  # leases with a commit that could not be counted; their jobs pause, so they are few

P = ParamSpec("P")
T = TypeVar("T")

CommitCallback = Callable[[Verdict | BatchmillError], None]


TransactionCallback = Callable[[int, float], None]  # commits of one transaction, and its seconds
NoteCallback = Callable[[bool | BatchmillError], None]  # False: the lease is another's meanwhile


class _Entry(Struct, frozen=True, eq=False):
    commit: Commit
    cost: float | None
    callback: CommitCallback
    end: JobEnd | None  # of its job, if it counts


class _NoteEntry(Struct, frozen=True, eq=False):
    note: ShardNote
    callback: NoteCallback


_Any = _Entry | _NoteEntry | asyncio.Future[None]


class CommitLog:
    """The ledger, and the queue before it."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._queue: asyncio.Queue[_Any] = asyncio.Queue(QUEUE_MAX)
        self._batch: list[_Any] = []  # taken from the queue and not yet answered
        self._refused: dict[Lease, None] = {}  # with a commit that could not be counted
        self._broken: JobPaused | None = None
        self._listeners: list[TransactionCallback] = []
        self.draining = CoreTask("the commit log", self._drain(), self._stopped)

    @property
    def is_broken(self) -> bool:
        """Whether the ledger has failed and nothing is counted any more."""
        return self._broken is not None

    async def write(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a method of the ledger that is one transaction, which it may share with others that wait.

        Raises: as `call`.
        """
        return await self.ledger.database.write(lambda _: function(*args, **kwargs))

    async def write_short(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `write`, for what `Database.write_short` takes."""
        return await self.ledger.database.write_short(lambda _: function(*args, **kwargs))

    async def move(self, job_id: str, state: JobState, **fields: object) -> None:
        """As `Ledger.move`."""
        await self.write(self.ledger.move, job_id, state, **fields)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a method of the ledger that begins its own transactions.

        Raises: StorageFull when the disk is full, LedgerBroken.
        """
        return await self.ledger.database.call(function, *args, **kwargs)

    async def call_reader(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a method of the ledger that only reads; it waits for no commit."""
        return await self.ledger.database.call_reader(function, *args, **kwargs)

    def listen(self, callback: TransactionCallback) -> None:
        """Call `callback` after each transaction of commits. It must be quick and must not raise."""
        self._listeners.append(callback)

    async def commit(
        self, commit: Commit, cost: float | None, callback: CommitCallback, end: JobEnd | None = None
    ) -> None:
        """Queue a commit, once there is room; `callback` is called with the result on the event loop.

        If `callback` raises, it is called again with LedgerBroken.
        """
        await self._put(_Entry(commit, cost, callback, end))

    async def note(self, note: ShardNote, callback: NoteCallback) -> None:
        """Queue a note, once there is room; `callback` is called on the event loop with whether it is stored.

        If `callback` raises, it is called again with LedgerBroken.
        """
        await self._put(_NoteEntry(note, callback))

    async def settle(self) -> None:
        """Wait until everything queued so far is decided. Raises: JobPaused if that will never be."""
        done = asyncio.get_running_loop().create_future()
        await self._put(done)
        await done

    async def _put(self, entry: _Any) -> None:
        if self._broken is None:
            await self._queue.put(entry)
            if self._broken is None:
                return
            entry = self._queue.get_nowait()  # the queue failed while this waited for space: nothing reads it
        self._fail(entry, self._broken)

    async def _drain(self) -> None:
        while True:
            self._batch = [await self._queue.get()]
            while len(self._batch) < BATCH_MAX and not self._queue.empty():
                self._batch.append(self._queue.get_nowait())
            await self._answer([entry for entry in self._batch if isinstance(entry, _Entry)])
            await self._keep([entry for entry in self._batch if isinstance(entry, _NoteEntry)])
            for entry in self._batch:
                if isinstance(entry, asyncio.Future) and not entry.done():
                    entry.set_result(None)
            self._batch = []

    async def _answer(self, entries: Sequence[_Entry]) -> None:
        """Write all commits in one transaction; if that fails, one by one, so that an error stays with its job.

        Callers learn the results before the next transaction begins, so they are never behind the ledger.
        """
        if not entries:
            return
        began = time.perf_counter()
        try:
            ends = {index: entry.end for index, entry in enumerate(entries) if entry.end is not None}
            write = self.write_short if len(entries) <= SHORT_MAX else self.write
            verdicts = await write(self.ledger.commit, [(entry.commit, entry.cost) for entry in entries], ends)
        except Exception as error:  # a bug over one commit must not end the line for all jobs
            if len(entries) > 1 and not isinstance(error, DatabaseUnavailable):
                for entry in entries:
                    await self._answer([entry])
                return
            if not isinstance(error, BatchmillError):
                error = _bug("a commit could not be counted", error)
            for entry in entries:
                self._resolve(entry, error)
            return
        faults.point("after_commit")
        for listener in self._listeners:
            listener(len(entries), time.perf_counter() - began)
        for entry, verdict in zip(entries, verdicts, strict=True):
            self._resolve(entry, verdict)

    async def _keep(self, entries: Sequence[_NoteEntry]) -> None:
        """Write notes in one transaction, except those of a lease whose outcomes could not be counted.

        If that fails, one by one, so that an error stays with its shard.
        """
        wanted = []
        for entry in entries:
            if entry.note.lease in self._refused:
                self._resolve_note(entry, False)
            else:
                wanted.append(entry)
        if not wanted:
            return
        try:
            answers = await self.write(self.ledger.keep_notes, [entry.note for entry in wanted])
        except Exception as error:  # a bug over one note must not end the line for all jobs
            if len(wanted) > 1 and not isinstance(error, DatabaseUnavailable):
                for entry in wanted:
                    await self._keep([entry])
                return
            if not isinstance(error, BatchmillError):
                error = _bug("a note could not be stored", error)
            answers = [error] * len(wanted)
        else:
            faults.point("after_note")
        for entry, answer in zip(wanted, answers, strict=True):
            self._resolve_note(entry, answer)

    def _resolve_note(self, entry: _NoteEntry, answer: bool | BatchmillError) -> None:
        self._batch.remove(entry)
        try:
            entry.callback(answer)
        except Exception as error:  # as of a commit
            entry.callback(_bug("what a note sets off failed", error))

    def _resolve(self, entry: _Entry, verdict: Verdict | BatchmillError) -> None:
        self._batch.remove(entry)
        if isinstance(verdict, BatchmillError):
            self._refused[entry.commit.lease] = None
            if len(self._refused) > REFUSED_MAX:
                del self._refused[next(iter(self._refused))]
        try:
            entry.callback(verdict)
        except Exception as error:  # the job whose commit this is must hear of it; the others go on
            entry.callback(_bug("what a commit sets off failed", error))

    def _stopped(self, error: JobPaused) -> None:
        """Fail everyone who waits, or comes later."""
        self._broken = error
        waiting, self._batch = self._batch, []
        while not self._queue.empty():
            waiting.append(self._queue.get_nowait())
        for entry in waiting:
            self._fail(entry, self._broken)

    @staticmethod
    def _fail(entry: _Any, error: JobPaused) -> None:
        if isinstance(entry, _Entry):
            asyncio.get_running_loop().call_soon(
                entry.callback, error
            )  # one that raises does not keep it from the next
        elif isinstance(entry, _NoteEntry):
            asyncio.get_running_loop().call_soon(entry.callback, error)
        elif not entry.done():
            entry.set_exception(error)

    def close(self) -> None:
        """Stop, and close the ledger."""
        self.draining.cancel()
        self.ledger.close()


def _bug(what: str, error: Exception) -> LedgerBroken:
    redaction.print_exception(error)
    return LedgerBroken(f"{what}: {type(error).__name__}: {error}")
