"""Submits one provider batch, polls it to its end, and recovers it. Every step is noted before the next."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from batchmill import faults
from batchmill.engines.provider_batch.provider import CleansResults, JobGone, ProviderApi, TryAgain, Upload
from batchmill.engines.provider_batch.settings import ProviderSettings
from batchmill.errors import AuthRefused, BatchmillError, QuotaExhausted, RouteFailed, SubmitUnknown
from batchmill.ports.clock import Clock
from batchmill.ports.engines import LeaseHandle
from batchmill.types import RemoteJob, Usage
from batchmill.types.position_runs import numbers_of, runs_of

PAUSE, OVER = "pause", "over"
ANSWER_S = 60.0  # how long work that must end waits for a provider that does not reply
T = TypeVar("T")


class LeaseAbandoned(Exception):
    """Work on the lease stops, because it ends or other work for it has failed. The notes allow to continue."""


class Course:
    """The state of work on one lease. `ending`: empty, "pause" (leave everything), or "over" (cancel and collect)."""

    def __init__(
        self, lease: LeaseHandle, settings: ProviderSettings, clock: Clock, jitter: Callable[[], float]
    ) -> None:
        self.ending = lease.ending
        self.failure: BatchmillError | None = None  # why the lease's rows cannot continue
        self.trouble = ""  # the error of the last call, if it failed
        self._lease, self._settings, self._clock, self._jitter = lease, settings, clock, jitter
        self._changed = asyncio.Event()

    async def watch(self) -> None:
        """Follow the state of the lease until cancelled."""
        self._turn(await self._lease.until_ending())

    def fail(self, error: BatchmillError) -> None:
        """Fail the lease. Its other batches are cancelled if the rows go elsewhere; otherwise they stay."""
        if self.failure is None:
            self.failure = error
        if not self.ending:
            self._turn(OVER if isinstance(error, RouteFailed) else PAUSE)

    def end(self) -> None:
        """Stop as soon as possible, whatever the state of the lease."""
        self._turn(PAUSE)

    def check(self) -> None:
        """Raises: LeaseAbandoned if no new step may begin."""
        if self.ending:
            raise LeaseAbandoned

    async def sleep(self, seconds: float) -> None:
        """Sleep, or return early when `ending` changes."""
        changed = self._changed
        sleeping = asyncio.ensure_future(self._clock.sleep(seconds))
        changing = asyncio.ensure_future(changed.wait())
        try:
            await asyncio.wait({sleeping, changing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeping.cancel()
            changing.cancel()

    async def turned(self) -> None:
        """Return when `ending` changes."""
        await self._changed.wait()

    async def persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call that may be repeated until the provider replies.

        Raises: LeaseAbandoned if the lease is paused meanwhile; RouteFailed if the provider refuses, or does not reply
        within `limit_s`.
        """
        patience = Patience(self, ANSWER_S)
        while True:
            try:
                result = await call()
            except TryAgain as error:
                await patience.rest(error)
            else:
                self.trouble = ""
                return result

    def limit_s(self, over_s: float = math.inf) -> float:
        """How long a provider may not reply. `over_s`: the maximum when the work must end."""
        return min(self._settings.cancel_wait_s, over_s) if self.ending == OVER else self._settings.stuck_after_s

    def pause_s(self, tries: int) -> float:
        """Seconds before the next attempt: doubles from `poll_s` to `poll_max_s`."""
        longest = min(self._settings.poll_max_s, self._settings.poll_s * 2 ** min(tries - 1, 16))
        return longest * (0.5 + self._jitter() / 2)

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def _turn(self, ending: str) -> None:
        self.ending = ending
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Patience:
    """Limits how long a call is retried while the provider does not reply."""

    def __init__(self, course: Course, over_s: float = math.inf) -> None:
        self._course, self._over_s = course, over_s
        self._since: float | None = None
        self._tries = 0

    async def rest(self, error: TryAgain) -> None:
        """Wait before the next attempt. Raises: LeaseAbandoned, RouteFailed as `Course.persist`."""
        course = self._course
        course.trouble = error.message
        now = course.monotonic()
        self._since = now if self._since is None else self._since
        self._tries += 1
        waited_s = now - self._since
        if waited_s > course.limit_s(self._over_s):
            raise RouteFailed(f"the provider has not answered for {waited_s:,.0f} s: {error.message}") from None
        if course.ending == PAUSE:
            raise LeaseAbandoned
        await course.sleep(max(course.pause_s(self._tries), error.retry_after_s or 0.0))
        if course.ending == PAUSE:
            raise LeaseAbandoned


def is_fatal(error: BatchmillError) -> bool:
    """Whether no batch of the engine can continue: its key or its quota is refused."""
    return isinstance(error, AuthRefused | QuotaExhausted)


GROWTH = 1.5  # of the time between two polls
TIDY_TRIES, TIDY_DELAY_MAX_S = 4, 60.0  # attempts to delete a file, and the longest wait between two


class Stuck(RouteFailed):
    """A batch without progress for too long."""


class ProviderJob:
    """A provider batch. `job` is its known state; changes are noted with the lease."""

    def __init__(
        self,
        job: RemoteJob,
        api: ProviderApi,
        course: Course,
        *,
        lease: LeaseHandle,
        settings: ProviderSettings,
        clock: Clock,
    ) -> None:
        self.job = job
        self._api, self._course, self._lease = api, course, lease
        self._settings, self._clock = settings, clock
        self._noted_at = 0.0

    async def note(self, **changes: object) -> None:
        """Store the known state with these changes, durably."""
        self.job = replace(self.job, **changes)
        self._noted_at = self._clock.monotonic()
        await self._lease.note(self.job.tag, msgspec.json.encode(self.job))

    def count_misfits(self, misfits: Mapping[int, Usage]) -> None:
        """Count what answers have cost that do not fit, by plan position; later notes have their positions."""
        known = numbers_of(self.job.misfits)
        new = {position: usage for position, usage in misfits.items() if position not in known}
        if not new:
            return  # an earlier worker has counted them
        faults.point("before_counting")
        self._lease.count_misfits(self.job.tag, new)
        faults.point("after_counting")
        self.job = replace(self.job, misfits=runs_of(known | misfits.keys()))

    # -- submitting ------------------------------------------------------------------------------------------------

    async def hand_over(self, upload: Upload) -> None:
        """Submit the rows; the intent is noted. Raises: LeaseAbandoned, JobRefused, SubmitUnknown, RouteFailed."""
        faults.point("before_submit")
        if not self.job.input:
            await self._call_once(lambda: self._api.upload(self.job, upload), lambda job: bool(job.input or job.id))
        if not self.job.id:
            await self._call_once(lambda: self._api.create(self.job, upload), lambda job: bool(job.id))

    async def find_again(self) -> bool:
        """Whether the provider has a batch whose intent is noted. Raises: SubmitUnknown, LeaseAbandoned."""
        self.job = replace(self.job, is_doubtful=True)  # an earlier worker's call may still be in flight
        job = await self._find_twice(lambda job: bool(job.id))
        if job is not None and (job.id or job.input):
            await self._record_step(job)
        return bool(self.job.id)

    async def forget(self, message: str) -> None:
        """Note that the batch never existed, and delete its uploads."""
        message = " ".join(filter(None, [message, await self._clean_up()]))
        await self.note(state="forgotten", message=message, changed=self._clock.now())

    async def _call_once(self, call: Callable[[], Awaitable[RemoteJob]], is_done: Callable[[RemoteJob], bool]) -> None:
        """Make a call that must take effect once. After a lost reply, check its effect before a retry."""
        patience = Patience(self._course)
        while True:
            await self._lease.until_owned()
            self._course.check()
            try:
                job = await call()
            except TryAgain as error:
                await patience.rest(error)
                if error.is_unseen:
                    continue
                self.job = replace(self.job, is_doubtful=True)
                existing = await self._find_twice(is_done)
                if existing is None or not is_done(existing):
                    continue
                job = existing
            self._course.trouble = ""
            await self._record_step(job)
            return

    async def _record_step(self, job: RemoteJob) -> None:
        """Note the result of a step."""
        if job == self.job:
            return
        if job.id and not self.job.id:
            faults.point("after_submit")
            now = self._clock.now()
            state = "submitted" if job.state in ("intent", "unknown") else job.state
            # Poll a batch that has ended once more, in the usual way.
            state = "submitted" if state == "ended" else state
            self.job = replace(job, state=state, submitted=job.submitted or now, changed=now, message="")
            await self.note()
            faults.point("after_submit_noted")
        else:
            self.job = replace(job, state="intent", message="")
            await self.note()

    async def _find_twice(self, is_done: Callable[[RemoteJob], bool]) -> RemoteJob | None:
        """Look for the batch, and again if it is not found, because lists may be out of date."""
        job = await self._find()
        if job is not None and is_done(job):
            return job
        await self._course.sleep(self._settings.poll_s)
        return await self._find()

    async def _find(self) -> RemoteJob | None:
        """Look for the batch. Raises: SubmitUnknown, after noting it."""
        try:
            return await self._course.persist(lambda: self._api.find(self.job))
        except SubmitUnknown as error:
            await self._in_doubt(error.message)
            raise SubmitUnknown(doubt(self.job, error.message)) from None

    async def _in_doubt(self, message: str) -> None:
        await self.note(state="unknown", message=message, changed=self._clock.now())

    # -- waiting -----------------------------------------------------------------------------------------------------

    async def until_ended(self) -> None:
        """Poll until the batch has ended. Raises: LeaseAbandoned, Stuck, SubmitUnknown, RouteFailed."""
        delay = self._settings.poll_s
        while self.job.state not in ("ended", "collected"):
            self._course.check()
            before = self.job.remote_state
            await self._look()
            if self.job.state == "ended":
                return
            now = self._clock.now()
            if now < self.job.changed:  # the clock was set back: count the silence from now
                self.job = replace(self.job, changed=now)
            silent_s = now - self.job.changed
            if silent_s > self._settings.stuck_after_s:
                raise Stuck(
                    f"the job {self.job.id} is {self.job.remote_state!r}, without progress for {silent_s / 3600:,.1f} h"
                )
            self._course.check()
            await self._course.sleep(delay)
            self._course.check()
            has_changed = self.job.remote_state != before
            delay = self._settings.poll_s if has_changed else min(delay * GROWTH, self._settings.poll_max_s)

    async def wind_up(self) -> None:
        """Cancel the batch and wait a while for its end. Raises: LeaseAbandoned if the lease is paused."""
        if self.job.state in ("intent", "unknown") and not await self.find_again():
            await self.forget("the job ended before the batch was submitted")
            return
        if self.job.state == "submitted":
            await self._record_poll(await self._call_known(lambda: self._api.cancel(self.job)))
        until = self._clock.monotonic() + self._settings.cancel_wait_s
        while self.job.state not in ("ended", "collected") and self._clock.monotonic() < until:
            await self._course.sleep(self._settings.poll_s)
            if self._course.ending == PAUSE:
                raise LeaseAbandoned
            await self._look()

    async def settle(self) -> str:
        """Cancel the extra batches of a job that was submitted twice; return a warning.

        Call it before the job's rows have outcomes. Afterwards there may be no further lease to do it.
        """
        if not self.job.is_doubtful:
            return ""
        try:
            job = await self._course.persist(lambda: self._api.find(self.job))
        except SubmitUnknown as error:
            return f"the provider may have it twice: {error.message}"
        is_twice = job is not None and job.id not in ("", self.job.id)
        return f"{job.id} is a duplicate of this job" if is_twice else ""

    async def read_results(self, *text: str) -> None:
        """Delete the uploads of an ended batch; its results have answers of rows that are asked for again."""
        warning = await self._clean_up()
        self.job = replace(self.job, message="; ".join(filter(None, [*text, warning])))

    async def collected(self, *text: str) -> None:
        """Note that the results of an ended batch were read, and delete its uploads."""
        warning = await self._clean_up()
        await self.note(state="collected", is_doubtful=False, message="; ".join(filter(None, [*text, warning])))
        # The outcomes that were put before are committed only now: see `ports.engines.LeaseHandle.note`.
        if warning := await self._clean_results():
            await self.note(message="; ".join(filter(None, [self.job.message, warning])))

    async def _look(self) -> None:
        await self._record_poll(await self._call_known(lambda: self._api.refresh(self.job)))

    async def _call_known(self, call: Callable[[], Awaitable[RemoteJob]]) -> RemoteJob:
        """Make a call about a batch with a known id. Raises: SubmitUnknown if the provider denies the batch."""
        try:
            return await self._course.persist(call)
        except JobGone as error:
            await self._in_doubt(error.message)
            raise SubmitUnknown(doubt(self.job, error.message)) from None

    async def _record_poll(self, seen: RemoteJob) -> None:
        """Apply a poll. Pure progress is noted only now and then."""
        job = self.job
        if job.state == "cancelling" and seen.state == "submitted":
            seen = replace(seen, state="cancelling")  # the provider has not started to cancel it
        now = self._clock.now()
        is_new_state = (seen.state, seen.remote_state) != (job.state, job.remote_state)
        is_news = is_new_state or (seen.completed, seen.failed) != (job.completed, job.failed)
        self.job = replace(seen, changed=now if is_news else job.changed)
        if is_new_state or (is_news and self._clock.monotonic() - self._noted_at >= self._settings.note_s):
            await self.note()

    async def _clean_up(self) -> str:
        """Delete uploads; return a warning if that failed."""
        if self._settings.keep_files or not (self.job.input or self.job.id):
            return ""
        return await self._tidy(lambda: self._api.clean_up(self.job), f"its input {self.job.input} is")

    async def _clean_results(self) -> str:
        """Delete results that were read, if the provider allows it; return a warning if that failed."""
        api = self._api
        if self._settings.keep_files or not isinstance(api, CleansResults):
            return ""
        return await self._tidy(lambda: api.clean_results(self.job), "its results are")

    async def _tidy(self, call: Callable[[], Awaitable[None]], what: str) -> str:
        """Try a cleanup call a few times; its failure does not matter to the rows."""
        for tries in range(1, TIDY_TRIES + 1):
            try:
                await call()
            except TryAgain as error:
                message = error.message
                if tries < TIDY_TRIES:
                    await self._course.sleep(
                        max(self._course.pause_s(tries), min(error.retry_after_s or 0.0, TIDY_DELAY_MAX_S))
                    )
            except BatchmillError as error:
                message = error.message
                break
            else:
                return ""
        return f"{what} still there: {message}"


def doubt(job: RemoteJob, message: str) -> str:
    """The message to the user about a batch that may or may not exist."""
    return (
        f"{message.rstrip('.')}. Look at the provider for {job.id or 'a job'} of {job.rows:,} rows ({job.tag}), then "
        f"run `batchmill remote adopt JOB {job.tag} ID` or, if there is no such job, `batchmill remote forget JOB "
        f"{job.tag}`, and then `batchmill resume JOB`."
    )
