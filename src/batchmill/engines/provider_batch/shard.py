"""Runs the rows of one lease at a provider.

It continues the batches that earlier workers began, submits the other rows, and submits rows without an answer again.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from uuid import uuid4

import msgspec
from msgspec import Struct, field

from batchmill.datasets.media.loading import request_of
from batchmill.engines.provider_batch.following import (
    OVER,
    PAUSE,
    Course,
    LeaseAbandoned,
    Patience,
    ProviderJob,
    Stuck,
    doubt,
    is_fatal,
)
from batchmill.engines.provider_batch.provider import JobGone, JobRefused, ProviderApi, ProviderRow, RowReply, TryAgain
from batchmill.engines.provider_batch.settings import ProviderSettings
from batchmill.engines.provider_batch.spool import WINDOW, Draft, Drafts, Spool
from batchmill.engines.row_media import RowMedia
from batchmill.errors import AuthRefused, BatchmillError, InvalidRow, JobPaused, ModelFailed, RouteFailed, SubmitUnknown
from batchmill.ports import Clock, LeaseHandle, Sink
from batchmill.types import Outcome, RemoteJob, Row, RowError


class CollectedRows(Struct):
    """Statistics of the results of one batch."""

    answered: int = 0
    repeated: int = 0  # answers to rows that already had one
    strange: int = 0  # answers to rows that are not in the job
    unread: int = 0  # unreadable lines
    undone: dict[int, RowReply] = field(default_factory=dict)  # replies to rows that may be sent again
    refused: JobRefused | None = None  # the provider ended the job without running the remaining rows

    def summary(self) -> str:
        """Unusual events, for users; empty if there were none."""
        odd = ((self.repeated, "rows twice"), (self.strange, "unknown rows"), (self.unread, "unreadable lines"))
        return ", ".join(f"{count} {what}" for count, what in odd if count)


class Collector:
    """Collects the results of one lease."""

    def __init__(self, api: ProviderApi, spool: Spool, sink: Sink, course: Course) -> None:
        self._api, self._spool, self._sink, self._course = api, spool, sink, course

    async def collect(self, job: RemoteJob, mine: set[int]) -> CollectedRows:
        """Put the outcomes of an ended batch; rows without one stay in `mine`.

        Raises: LeaseAbandoned if the lease is paused meanwhile; JobGone; RouteFailed if the results cannot be read.
        """
        patience, is_second = Patience(self._course), False
        while True:
            collected, garbled = CollectedRows(), dict[int, RowReply]()
            try:
                await self._read(job, mine, collected, garbled)
            except TryAgain as error:
                await patience.rest(error)
                continue
            self._course.trouble = ""
            if not is_second and (garbled or collected.unread):
                is_second = True  # the download may be damaged, and the results at the provider are paid for
                continue
            self._put(list(garbled.items()), mine)
            return collected

    async def _read(
        self, job: RemoteJob, mine: set[int], collected: CollectedRows, garbled: dict[int, RowReply]
    ) -> None:
        runs = Runs(job.runs)
        before = set(mine)
        results = self._api.results(job)
        try:
            async for replies in results:
                answered: dict[int, RowReply] = {}
                for number, reply in replies:
                    if number in mine and number not in answered:
                        if reply.is_garbled:
                            garbled[number] = reply
                        elif reply.is_undone:
                            collected.undone[number] = reply
                        else:
                            answered[number] = reply
                    elif reply.is_garbled:
                        collected.unread += number == -1
                    elif number in before:
                        collected.repeated += 1
                    elif number in runs:
                        collected.answered += 1  # an earlier worker or try has put its outcome
                    else:
                        collected.strange += 1
                self._put(list(answered.items()), mine)
                collected.answered += len(answered)
                for number in garbled.keys() & answered.keys():
                    del garbled[number]
                if self._course.ending == PAUSE:
                    raise LeaseAbandoned
        except JobRefused as error:
            collected.refused = error

    def give_up(self, mine: set[int], collected: CollectedRows, lost: RowError) -> None:
        """Put errors for rows that are not sent again: the provider's last reply, or `lost`."""
        numbers = sorted(mine)
        for first in range(0, len(numbers), WINDOW):
            replies = []
            for number in numbers[first : first + WINDOW]:
                reply = collected.undone.get(number)
                if reply is None or reply.status < 400:
                    detail = "" if reply is None or reply.error is None else f": {reply.error.message}"
                    reply = RowReply(0, None, RowError(lost.code, lost.message + detail))
                replies.append((number, reply))
            self._put(replies, mine)

    def _put(self, replies: list[tuple[int, RowReply]], mine: set[int]) -> None:
        numbers = [number for number, _ in replies]
        rows = self._spool.take(numbers)
        mine.difference_update(numbers)
        self._sink.put(
            [
                Outcome(row, reply.body, reply.error, reply.status, reply.usage, reply.request_id)
                for row, (_, reply) in zip(rows, replies, strict=True)
            ]
        )


class Runs:
    """A set of numbers, given as runs (first, count)."""

    def __init__(self, runs: list[tuple[int, int]]) -> None:
        self._runs = runs

    def __contains__(self, number: int) -> bool:
        return any(first <= number < first + count for first, count in self._runs)


GATHER_S = 30.0  # how long to wait for the rows of a lease that has ended
NO_KEY = frozenset({"missing_secret", "invalid_secret"})
FAILED_MAX = 2  # jobs that a provider may end without running any row
_ROW_ERRORS = (InvalidRow, msgspec.MsgspecError, RecursionError, UnicodeDecodeError)

_note = msgspec.json.Decoder(RemoteJob)


class Tools(Struct, frozen=True):
    """What all shards of an engine share."""

    api: ProviderApi
    provider: str
    settings: ProviderSettings
    sink: Sink
    clock: Clock
    jitter: Callable[[], float]
    folder: Path
    slots: asyncio.Semaphore  # limits shards that submit rows at once
    moved: asyncio.Event  # set when the room for rows changes
    media: RowMedia


class ProviderShard:
    """The rows of one lease at a provider. `run` is called once."""

    def __init__(self, lease: LeaseHandle, tools: Tools) -> None:
        self.lease = lease
        self.rows = 0  # added so far
        self.waits = False  # for room at the provider
        self.followings: list[ProviderJob] = []
        self._tools = tools
        self._folder = Path(tempfile.mkdtemp(dir=tools.folder))
        self._spool = Spool(self._folder)
        self.course = Course(lease, tools.settings, tools.clock, tools.jitter)
        self._collector = Collector(tools.api, self._spool, tools.sink, self.course)
        self._complete = asyncio.Event()
        self._refused_since: float | None = None  # monotonic: since when the provider's queue is full
        self._drafts = count()

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows of the lease."""
        self._spool.add(rows)
        self.rows += len(rows)
        if self.rows >= self.lease.rows:
            self._complete.set()

    @property
    def left(self) -> int:
        """The rows without an outcome."""
        return len(self._spool)

    async def run(self) -> None:
        """Run until every row has its outcome, or leave the lease. Raises: AuthRefused, QuotaExhausted."""
        watching = asyncio.create_task(self.course.watch())
        try:
            await self._wait_for_rows()
            await self._all([*self._continue_noted(), self._begin_fresh()])
            self._conclude()
        finally:
            watching.cancel()
            self._spool.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _wait_for_rows(self) -> None:
        """Wait until every row of the lease has arrived, or the lease has ended and no more rows arrive."""
        waiting = asyncio.create_task(self._complete.wait())
        try:
            while not self._complete.is_set():
                was_ending = bool(self.course.ending)
                await self._wait_for(waiting, GATHER_S)
                if was_ending or self.course.ending:
                    return
        finally:
            waiting.cancel()

    async def _wait_for(self, waiting: asyncio.Task[bool], seconds: float) -> None:
        """Wait until it is done, time is up, or the course changes."""
        sleeping = asyncio.create_task(self.course.sleep(seconds))
        await asyncio.wait({waiting, sleeping}, return_when=asyncio.FIRST_COMPLETED)
        sleeping.cancel()

    def _conclude(self) -> None:
        failure = self.course.failure
        if failure is not None and is_fatal(failure):
            raise failure
        if not self.left:
            return
        if self.lease.ending:
            self.lease.leave()
        elif isinstance(failure, JobPaused):
            self.lease.fail(failure)
        else:
            assert self.course.ending, "rows without an outcome need a failure or an end of the lease"

    async def _all(self, works: Sequence[Coroutine[None, None, None]]) -> None:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(self._watched(work))

    async def _watched(self, work: Coroutine[None, None, None]) -> None:
        """Process some of the rows; if that fails, end the others too."""
        try:
            await work
        except LeaseAbandoned:
            return
        except JobPaused as error:
            self.course.fail(error)
        except ModelFailed as error:
            is_keyless = error.code in NO_KEY
            message = f"{self._tools.provider}: {error.message}"
            self.course.fail(AuthRefused(error.message) if is_keyless else RouteFailed(message))
        except BatchmillError as error:
            self.course.fail(RouteFailed(f"{self._tools.provider}: {error.message}"))

    # -- batches of earlier workers -----------------------------------------------------------------------------------

    def _continue_noted(self) -> list[Coroutine[None, None, None]]:
        """Continue the noted batches. A row belongs to the newest batch that contains it."""
        jobs = sorted(map(_note.decode, self.lease.notes.values()), key=lambda job: (_tries(job), job.created))
        self._claimed: set[int] = set()
        works = []
        for job in reversed(jobs):
            if job.state == "forgotten":
                continue
            mine = {number for number in _numbers(job.runs) if number in self._spool} - self._claimed
            self._claimed |= mine
            if mine:
                works.append(self._continue(self._follow(job), mine))
            elif job.state in ("submitted", "cancelling", "ended"):
                works.append(self._end(self._follow(job)))
        return works

    async def _end(self, following: ProviderJob) -> None:
        """Finish a batch whose rows all have their outcomes."""
        await following.wind_up()
        if following.job.state == "ended":
            await following.collected(await following.settle())

    async def _continue(self, following: ProviderJob, mine: set[int]) -> None:
        """Continue a batch that an earlier worker noted."""
        is_sure = following.job.state not in ("intent", "unknown")
        if is_sure or self.course.ending == OVER or await following.find_again():
            await self._carry(following, mine)
            return
        self.course.check()
        job = following.job
        drafts = await self._draft(sorted(mine))
        if len(drafts) != 1:
            await following.forget("its rows were submitted in other jobs")
            await self._all([self._submit(draft, _tries(job)) for draft in drafts])
            return
        if job.input and job.runs != drafts[0].runs:
            await self.course.persist(lambda: self._tools.api.clean_up(job))
            following.job = msgspec.structs.replace(job, input="")
        await following.note(runs=drafts[0].runs, rows=drafts[0].upload.rows)
        await self._carry(following, _numbers(drafts[0].runs), drafts[0])

    # -- new batches --------------------------------------------------------------------------------------------------

    async def _begin_fresh(self) -> None:
        """Submit the rows that are in no batch, once there is room at the provider."""
        fresh = [position for position in self._spool.positions() if position not in self._claimed]
        if not fresh or self.course.ending:
            return
        self.waits = True
        self._tools.moved.set()
        waiting = asyncio.create_task(self._tools.slots.acquire())
        try:
            while not waiting.done():
                await self._wait_for(waiting, GATHER_S)
                self.course.check()
            self._has_room()
            await self._begin(fresh, 1)
        finally:
            self._has_room()
            if not waiting.cancel() and not waiting.cancelled():
                self._tools.slots.release()

    def _has_room(self) -> None:
        self.waits = False
        self._tools.moved.set()

    async def _begin(self, positions: list[int], tries: int) -> None:
        """Submit rows for the `tries`-th time."""
        self.course.check()
        drafts = await self._draft(positions)
        await self._all([self._submit(draft, tries) for draft in drafts])

    async def _draft(self, positions: list[int]) -> list[Draft]:
        """Write the files to upload; rows that the provider cannot take get their errors."""
        api = self._tools.api
        drafts = Drafts(self._folder, f"{next(self._drafts)}", api.limits)
        for some in self._spool.windows(positions):
            unfit: dict[int, RowError] = {}

            def add(row: Row, encoded: Callable[[], ProviderRow], unfit: dict[int, RowError] = unfit) -> None:
                try:
                    drafts.add(row.position, encoded())
                except _ROW_ERRORS as error:
                    unfit[row.position] = _unfit(error)

            rows = self._spool.read(some)
            await self._tools.media.make_all(rows, partial(_encoded, api), add)
            self._spool.release(rows)
            self._fail_rows(unfit)
            await asyncio.sleep(0)
        return await asyncio.to_thread(drafts.finish)

    async def _submit(self, draft: Draft, tries: int) -> None:
        """Note the intent to create a batch, and create it."""
        self.course.check()
        job = RemoteJob(
            f"batchmill-{uuid4().hex[:24]}-{tries}",
            self._tools.provider,
            "intent",
            runs=draft.runs,
            rows=draft.upload.rows,
            created=self._tools.clock.now(),
        )
        following = self._follow(job)
        await following.note()
        await self._carry(following, _numbers(draft.runs), draft)

    async def _carry(self, following: ProviderJob, mine: set[int], draft: Draft | None = None) -> None:
        """Follow one batch to its end, and submit its rows without a reply again."""
        try:
            if draft is not None:
                await following.hand_over(draft.upload)
                draft.upload.path.unlink(missing_ok=True)
            await following.until_ended()
        except LeaseAbandoned:
            if self.course.ending != OVER:
                raise
        except Stuck as error:
            self.course.fail(error)
        except JobRefused as error:
            await following.forget(error.message)
            await self._refused(following, mine, error)
            return
        if following.job.state not in ("ended", "collected") and self.course.ending == OVER:
            await following.wind_up()
        if following.job.state not in ("ended", "collected"):
            return
        twice = await following.settle()
        try:
            collected = await self._collector.collect(following.job, mine)
        except JobGone as error:
            if following.job.state != "collected":
                await following.note(state="unknown", message=error.message)
                raise SubmitUnknown(doubt(following.job, error.message)) from None
            collected = CollectedRows()  # the results were read and deleted; rows without an outcome must run again
        await following.collected(collected.summary() or _message(collected.refused), twice)
        if mine and not self.course.ending:
            await self._again(following, mine, collected)

    async def _again(self, following: ProviderJob, mine: set[int], collected: CollectedRows) -> None:
        """Submit the remaining rows of a batch again."""
        refused, tries = collected.refused, _tries(following.job)
        if refused is not None and refused.retry_after_s is not None:
            await self._refused(following, mine, refused)
            return
        tries_max = self._tools.settings.tries_max
        if tries < (tries_max if collected.answered else min(tries_max, FAILED_MAX)):
            await self._begin(sorted(mine), tries + 1)
        elif refused is not None:
            raise RouteFailed(f"{self._tools.provider} did not run {len(mine):,} rows: {refused.message}")
        elif tries < tries_max:
            await self._begin(sorted(mine), tries + 1)
        else:
            text = f"{self._tools.provider} has not answered this row, in {tries} jobs"
            self._collector.give_up(mine, collected, RowError("provider_lost_row", text))

    async def _refused(self, following: ProviderJob, mine: set[int], refused: JobRefused) -> None:
        """Submit refused rows again later, or fail. Raises: RouteFailed."""
        now = self._tools.clock.monotonic()
        since = self._refused_since = now if self._refused_since is None else self._refused_since
        if refused.retry_after_s is None or now - since > self.course.limit_s():
            raise RouteFailed(f"{self._tools.provider} refuses the job: {refused.message}")
        await self.course.sleep(refused.retry_after_s)
        await self._begin(sorted(mine), _tries(following.job))

    def _follow(self, job: RemoteJob) -> ProviderJob:
        tools = self._tools
        following = ProviderJob(
            job, tools.api, self.course, lease=self.lease, settings=tools.settings, clock=tools.clock
        )
        self.followings.append(following)
        return following

    def _fail_rows(self, errors: dict[int, RowError]) -> None:
        """Put errors for rows that cannot be submitted."""
        positions = list(errors)
        for first in range(0, len(positions), WINDOW):
            rows = self._spool.take(positions[first : first + WINDOW])
            self._tools.sink.put([Outcome(row, error=errors[row.position], status=0) for row in rows])


def _encoded(api: ProviderApi, row: Row) -> ProviderRow:
    return api.encode(row.position, request_of(row))


def _tries(job: RemoteJob) -> int:
    """How many times these rows have been submitted. The number is in the tag."""
    tail = job.tag.rpartition("-")[2]
    return int(tail) if tail.isdecimal() and len(tail) < 4 else 1


def _numbers(runs: list[tuple[int, int]]) -> set[int]:
    return {number for first, rows in runs for number in range(first, first + rows)}


def _message(refused: JobRefused | None) -> str:
    return "" if refused is None else refused.message


def _unfit(error: Exception) -> RowError:
    if isinstance(error, InvalidRow):
        return RowError(error.code, error.message)
    return RowError("invalid_row", f"the row cannot be read: {error}")
