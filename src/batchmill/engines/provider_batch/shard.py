"""Runs the rows of one lease at a provider.

It continues the batches that earlier workers began, submits the other rows, and submits rows again that got no answer,
or one that does not fit the schema of their job.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import Struct

from batchmill import faults
from batchmill.datasets.media.loading import request_of
from batchmill.engines.provider_batch.answers import Answers
from batchmill.engines.provider_batch.collecting import CollectedRows, Collector
from batchmill.engines.provider_batch.following import (
    OVER,
    Course,
    LeaseAbandoned,
    ProviderJob,
    Stuck,
    doubt,
    is_fatal,
)
from batchmill.engines.provider_batch.provider import JobGone, JobRefused, ProviderApi, ProviderRow
from batchmill.engines.provider_batch.settings import ProviderSettings
from batchmill.engines.provider_batch.spool import WINDOW, Draft, Drafts, Spool
from batchmill.engines.row_media import RowMedia
from batchmill.errors import AuthRefused, BatchmillError, InvalidRow, JobPaused, ModelFailed, RouteFailed, SubmitUnknown
from batchmill.ports.clock import Clock
from batchmill.ports.engines import LeaseHandle, Sink
from batchmill.types import Outcome, RemoteJob, Row, RowError, Usage
from batchmill.types.position_runs import numbers_of

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
        self._answers = Answers(self._folder)
        self._collector = Collector(tools.api, self._spool, tools.sink, self.course, lease, self._answers)
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
            await self._all([self._end_misfits()])
            self._conclude()
        finally:
            watching.cancel()
            self._spool.close()
            self._answers.close()
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

    async def _wait_for(self, waiting: asyncio.Task[Any], seconds: float) -> None:
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
        jobs = sorted(map(_note.decode, self.lease.notes.values()), key=_age)
        self._claimed: set[int] = set()
        works = []
        for job in reversed(jobs):
            if job.state == "forgotten":
                continue
            mine = {number for number in numbers_of(job.runs) if number in self._spool} - self._claimed
            self._claimed |= mine
            if mine:
                works.append(self._continue(self._follow(job), mine))
            elif job.misfits:
                self._follow(job)  # its results have answers of rows that are asked for again
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
        await self._recall(mine, job.attempt)
        drafts = await self._draft(sorted(mine), job.attempt)
        if len(drafts) != 1:
            await following.forget("its rows were submitted in other jobs")
            await self._all([self._submit(draft, _tries(job), job.attempt) for draft in drafts])
            return
        if job.input and job.runs != drafts[0].runs:
            await self.course.persist(lambda: self._tools.api.clean_up(job))
            following.job = msgspec.structs.replace(job, input="")
        await following.note(runs=drafts[0].runs, rows=drafts[0].upload.rows)
        await self._carry(following, numbers_of(drafts[0].runs), drafts[0])

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

    async def _begin(self, positions: list[int], tries: int, attempt: int = 0) -> None:
        """Submit rows for the `tries`-th time, to be asked for the `attempt`-th time again."""
        self.course.check()
        drafts = await self._draft(positions, attempt)
        await self._all([self._submit(draft, tries, attempt) for draft in drafts])

    async def _draft(self, positions: list[int], attempt: int) -> list[Draft]:
        """Write the files to upload; rows that the provider cannot take get their errors."""
        api = self._tools.api
        drafts = Drafts(self._folder, f"{next(self._drafts)}", api.limits)
        for some in self._spool.windows(positions, self._answers.size):
            unfit: dict[int, RowError] = {}

            def add(row: Row, encoded: Callable[[], ProviderRow], unfit: dict[int, RowError] = unfit) -> None:
                try:
                    drafts.add(row.position, encoded())
                except _ROW_ERRORS as error:
                    unfit[row.position] = _unfit(error)

            rows = self._spool.read(some)
            for row in rows:
                row.earlier = self._answers.earlier(row.position, attempt)
            try:
                await self._until_made(self._tools.media.make_all(rows, partial(_encoded, api), add))
            finally:
                for row in rows:
                    row.earlier = ()
                self._spool.release(rows)
            self._fail_rows(unfit)
            await asyncio.sleep(0)
        return await asyncio.to_thread(drafts.finish)

    async def _until_made(self, making: Coroutine[None, None, None]) -> None:
        """Wait until requests are made, whose media may come slowly. Raises: LeaseAbandoned if the lease ends first."""
        work = asyncio.create_task(making)
        try:
            while not work.done():
                await self._wait_for(work, GATHER_S)
                if not work.done():
                    self.course.check()
            work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _submit(self, draft: Draft, tries: int, attempt: int) -> None:
        """Note the intent to create a batch, and create it."""
        self.course.check()
        job = RemoteJob(
            f"batchmill-{uuid4().hex[:24]}-{tries}",
            self._tools.provider,
            "intent",
            runs=draft.runs,
            rows=draft.upload.rows,
            created=self._tools.clock.now(),
            attempt=attempt,
        )
        following = self._follow(job)
        await following.note()
        await self._carry(following, numbers_of(draft.runs), draft)

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
        await self._recall(mine, following.job.attempt)
        try:
            collected, misfits = await self._collect(following, mine)
        except JobGone as error:
            if following.job.state != "collected":
                await following.note(state="unknown", message=error.message)
                raise SubmitUnknown(doubt(following.job, error.message)) from None
            # The results were read and deleted; rows without an outcome must run again.
            collected, misfits = CollectedRows(), set[int]()
        text = collected.summary() or _message(collected.refused)
        if misfits:
            await following.read_results(text, twice)
        else:
            await following.collected(text, twice)
        if not self.course.ending:
            works = [self._again(following, mine, collected)] if mine else []
            await self._all([*works, *([self._ask_again(following.job, misfits)] if misfits else [])])

    async def _collect(self, following: ProviderJob, mine: set[int]) -> tuple[CollectedRows, set[int]]:
        """Put the outcomes of an ended batch; count the answers that do not fit, and return the rows to be asked again.

        They are counted in any case, also where the lease is paused before the last one.
        """
        misfits: dict[int, Usage] = {}
        try:
            collected = await self._collector.collect(following.job, mine, misfits)
        finally:
            if misfits:
                following.count_misfits(misfits)
        return collected, set(misfits)

    async def _again(self, following: ProviderJob, mine: set[int], collected: CollectedRows) -> None:
        """Submit the remaining rows of a batch again."""
        refused, tries = collected.refused, _tries(following.job)
        if refused is not None and refused.retry_after_s is not None:
            await self._refused(following, mine, refused)
            return
        tries_max = self._tools.settings.tries_max
        if tries < (tries_max if collected.answered else min(tries_max, FAILED_MAX)):
            await self._begin(sorted(mine), tries + 1, following.job.attempt)
        elif refused is not None:
            raise RouteFailed(f"{self._tools.provider} did not run {len(mine):,} rows: {refused.message}")
        elif tries < tries_max:
            await self._begin(sorted(mine), tries + 1, following.job.attempt)
        else:
            text = f"{self._tools.provider} has not answered this row, in {tries} jobs"
            mine -= self._end_answered(mine, text)
            self._collector.give_up(mine, collected, RowError("provider_lost_row", text))

    async def _refused(self, following: ProviderJob, mine: set[int], refused: JobRefused) -> None:
        """Submit refused rows again later, or fail. Raises: RouteFailed."""
        now = self._tools.clock.monotonic()
        since = self._refused_since = now if self._refused_since is None else self._refused_since
        if refused.retry_after_s is None or now - since > self.course.limit_s():
            raise RouteFailed(f"{self._tools.provider} refuses the job: {refused.message}")
        await self.course.sleep(refused.retry_after_s)
        await self._begin(sorted(mine), _tries(following.job), following.job.attempt)

    def _follow(self, job: RemoteJob) -> ProviderJob:
        tools = self._tools
        following = ProviderJob(
            job, tools.api, self.course, lease=self.lease, settings=tools.settings, clock=tools.clock
        )
        self.followings.append(following)
        return following

    # -- asking again -------------------------------------------------------------------------------------------------

    async def _ask_again(self, job: RemoteJob, misfits: set[int]) -> None:
        """Submit rows whose answers in this batch do not fit, with these answers. Their budget is reserved first."""
        faults.point("before_asking_again")
        payable = await self._afford(sorted(misfits), job.attempt + 1)
        self._end_answered(misfits.difference(payable), "the budget of the job cannot pay it")
        if payable:
            await self._begin(payable, 1, job.attempt + 1)

    async def _afford(self, positions: list[int], attempt: int) -> list[int]:
        """Those that the budget can pay to ask for again. Raises: LeaseAbandoned if the lease ends meanwhile."""
        payable: list[int] = []
        for some in self._spool.windows(positions, self._answers.size):
            self.course.check()
            rows = self._spool.read(some)
            for row in rows:
                row.earlier = self._answers.earlier(row.position, attempt)
            reserving = asyncio.ensure_future(self.lease.reserve(rows))
            try:
                while not reserving.done():
                    self.course.check()
                    await self._wait_for(reserving, GATHER_S)
                payable += some[: reserving.result()]
            finally:
                reserving.cancel()
                for row in rows:
                    row.earlier = ()
                self._spool.release(rows)
            if reserving.result() < len(some):
                break
        return payable

    async def _recall(self, positions: set[int], attempt: int) -> None:
        """Read answers of rows that are asked for again once more, where it was an earlier worker that read them."""
        wanted = {position for position in positions if attempt and position not in self._answers}
        for following in sorted(self.followings, key=lambda each: _age(each.job)):
            these = wanted & numbers_of(following.job.misfits) if wanted and following.job.attempt < attempt else None
            if these:
                await self._collector.recall(following.job, these)

    async def _end_misfits(self) -> None:
        """The end of batches with answers that did not fit. If the job is over, rows get these as their outcomes."""
        batches = [each for each in self.followings if each.job.misfits and each.job.state == "ended"]
        if self.lease.over:
            left = set(self._spool.positions()) - self._collector.unchecked
            await self._recall(left, max((each.job.attempt for each in batches), default=0) + 1)
            self._end_answered(left, self.lease.over)
        is_elsewhere = self.lease.ending == OVER and not self.lease.over
        for following in batches:
            left = numbers_of(following.job.misfits) - self._collector.unchecked
            if is_elsewhere or not any(number in self._spool for number in left):
                await following.collected(following.job.message)

    def _end_answered(self, positions: Iterable[int], why: str) -> set[int]:
        """Put the last answers of rows as their outcomes, where they have some; return these rows."""
        answered = sorted(position for position in positions if position in self._answers)
        for first in range(0, len(answered), WINDOW):
            some = answered[first : first + WINDOW]
            outcomes = [self._answers.outcome(row, why) for row in self._spool.take(some)]
            self._answers.drop(some)
            self._tools.sink.put(outcomes)
        return set(answered)

    def _fail_rows(self, errors: dict[int, RowError]) -> None:
        """Put errors for rows that cannot be submitted."""
        for position in [position for position in errors if position in self._answers]:
            self._end_answered([position], errors[position].message)
        positions = [position for position in errors if position in self._spool]
        for first in range(0, len(positions), WINDOW):
            rows = self._spool.take(positions[first : first + WINDOW])
            self._tools.sink.put([Outcome(row, error=errors[row.position], status=0) for row in rows])


def _encoded(api: ProviderApi, row: Row) -> ProviderRow:
    return api.encode(row.position, request_of(row))


def _tries(job: RemoteJob) -> int:
    """How many times these rows have been submitted. The number is in the tag."""
    tail = job.tag.rpartition("-")[2]
    return int(tail) if tail.isdecimal() and len(tail) < 4 else 1


def _age(job: RemoteJob) -> tuple[int, int, float]:
    """Of two batches with a row, the newer one has the higher."""
    return job.attempt, _tries(job), job.created


def _message(refused: JobRefused | None) -> str:
    return "" if refused is None else refused.message


def _unfit(error: Exception) -> RowError:
    if isinstance(error, InvalidRow):
        return RowError(error.code, error.message)
    return RowError("invalid_row", f"the row cannot be read: {error}")
