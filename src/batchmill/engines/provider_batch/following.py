"""One job at a provider: handed over, watched to its end, and found again. Every step is noted before the next."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from msgspec.structs import replace

from batchmill import faults
from batchmill.engines.provider_batch.course import PAUSE, Course, Left, Patience
from batchmill.engines.provider_batch.provider import CleansResults, JobGone, ProviderApi, TryAgain, Upload
from batchmill.engines.provider_batch.settings import Settings
from batchmill.errors import BatchmillError, RouteFailed, SubmitUnknown
from batchmill.ports import Clock, LeaseHandle
from batchmill.types import RemoteJob

GROWTH = 1.5  # of the time between two looks
TIDY_TRIES, TIDY_REST_S = 4, 60.0  # to delete a file, and at most so long between two


class Stuck(RouteFailed):
    """A job that says nothing new for too long."""


class Following:
    """`job` is what is known of it; whatever changes it is noted with the lease."""

    def __init__(
        self, job: RemoteJob, api: ProviderApi, course: Course, *, lease: LeaseHandle, settings: Settings, clock: Clock
    ) -> None:
        self.job = job
        self._api, self._course, self._lease = api, course, lease
        self._settings, self._clock = settings, clock
        self._noted_at = 0.0

    async def note(self, **changes: object) -> None:
        """Make durable what is known, with these changes."""
        self.job = replace(self.job, **changes)
        self._noted_at = self._clock.monotonic()
        await self._lease.note(self.job.tag, msgspec.json.encode(self.job))

    # -- the way there ------------------------------------------------------------------------------------------------

    async def hand_over(self, upload: Upload) -> None:
        """Bring the rows there; the intent is noted already. Raises: Left, JobRefused, SubmitUnknown, RouteFailed."""
        faults.point("before_submit")
        if not self.job.input:
            await self._insist(lambda: self._api.upload(self.job, upload), lambda job: bool(job.input or job.id))
        if not self.job.id:
            await self._insist(lambda: self._api.create(self.job, upload), lambda job: bool(job.id))

    async def find_again(self) -> bool:
        """Whether the provider has the job, of which only the intent is noted. Raises: SubmitUnknown, Left."""
        self.job = replace(self.job, is_doubtful=True)  # what its maker sent may still be on its way
        found = await self._find_twice(lambda job: bool(job.id))
        if found is not None and (found.id or found.input):
            await self._learned(found)
        return bool(self.job.id)

    async def forget(self, message: str) -> None:
        """Note that the job never came to be; what was uploaded for it goes."""
        message = " ".join(filter(None, [message, await self._clean_up()]))
        await self.note(state="forgotten", message=message, changed=self._clock.now())

    async def _insist(self, call: Callable[[], Awaitable[RemoteJob]], is_there: Callable[[RemoteJob], bool]) -> None:
        """Make a call that may be heard once only; after a lost reply, look what became of it first."""
        patience = Patience(self._course)
        while True:
            self._course.check()
            try:
                job = await call()
            except TryAgain as error:
                await patience.rest(error)
                if error.is_unseen:
                    continue
                self.job = replace(self.job, is_doubtful=True)
                found = await self._find_twice(is_there)
                if found is None or not is_there(found):
                    continue
                job = found
            self._course.trouble = ""
            await self._learned(job)
            return

    async def _learned(self, job: RemoteJob) -> None:
        """Note what a step has brought about."""
        if job == self.job:
            return
        if job.id and not self.job.id:
            faults.point("after_submit")
            now = self._clock.now()
            state = "submitted" if job.state in ("intent", "unknown") else job.state
            # One that has ended is looked at once more, in the usual way.
            state = "submitted" if state == "ended" else state
            self.job = replace(job, state=state, submitted=job.submitted or now, changed=now, message="")
            await self.note()
            faults.point("after_submit_noted")
        else:
            self.job = replace(job, state="intent", message="")
            await self.note()

    async def _find_twice(self, is_there: Callable[[RemoteJob], bool]) -> RemoteJob | None:
        """What the provider has; asked again where that is not it, since its lists may be a moment behind."""
        found = await self._find()
        if found is not None and is_there(found):
            return found
        await self._course.sleep(self._settings.poll_s)
        return await self._find()

    async def _find(self) -> RemoteJob | None:
        """Raises: SubmitUnknown, once that is noted."""
        try:
            return await self._course.persist(lambda: self._api.find(self.job))
        except SubmitUnknown as error:
            await self._in_doubt(error.message)
            raise SubmitUnknown(doubt(self.job, error.message)) from None

    async def _in_doubt(self, message: str) -> None:
        await self.note(state="unknown", message=message, changed=self._clock.now())

    # -- the wait -----------------------------------------------------------------------------------------------------

    async def until_ended(self) -> None:
        """Look until the provider says that it has ended. Raises: Left, Stuck, SubmitUnknown, RouteFailed."""
        delay = self._settings.poll_s
        while self.job.state not in ("ended", "collected"):
            self._course.check()
            before = self.job.remote_state
            await self._look()
            if self.job.state == "ended":
                return
            now = self._clock.now()
            if now < self.job.changed:  # the clock was set back: it is silent from now on
                self.job = replace(self.job, changed=now)
            silent = now - self.job.changed
            if silent > self._settings.stuck_after_s:
                raise Stuck(
                    f"the job {self.job.id} says {self.job.remote_state!r} and nothing new for {silent / 3600:,.1f} h"
                )
            self._course.check()
            await self._course.sleep(delay)
            self._course.check()
            moved = self.job.remote_state != before
            delay = self._settings.poll_s if moved else min(delay * GROWTH, self._settings.poll_max_s)

    async def wind_up(self) -> None:
        """Have the job end at the provider, and wait for that for a while. Raises: Left when there is a pause."""
        if self.job.state in ("intent", "unknown") and not await self.find_again():
            await self.forget("the job ended before it was handed over")
            return
        if self.job.state == "submitted":
            await self._learn(await self._insured(lambda: self._api.cancel(self.job)))
        until = self._clock.monotonic() + self._settings.cancel_wait_s
        while self.job.state not in ("ended", "collected") and self._clock.monotonic() < until:
            await self._course.sleep(self._settings.poll_s)
            if self._course.ending == PAUSE:
                raise Left
            await self._look()

    async def settle(self) -> str:
        """Have the provider end what it has of an ended job twice; what to say of it.

        Before the job's rows have outcomes: once they have, no lease may come that looks after it.
        """
        if not self.job.is_doubtful:
            return ""
        try:
            found = await self._course.persist(lambda: self._api.find(self.job))
        except SubmitUnknown as error:
            return f"it may be there twice: {error.message}"
        is_twice = found is not None and found.id not in ("", self.job.id)
        return f"{found.id} is the same job once more" if is_twice else ""

    async def collected(self, *told: str) -> None:
        """Note that the rows of an ended job have been read; what was uploaded for it goes."""
        left = await self._clean_up()
        await self.note(state="collected", is_doubtful=False, message="; ".join(filter(None, [*told, left])))
        # Only now do the rows count that were put before: see `ports.LeaseHandle.note`.
        if left := await self._clean_results():
            await self.note(message="; ".join(filter(None, [self.job.message, left])))

    async def _look(self) -> None:
        await self._learn(await self._insured(lambda: self._api.look(self.job)))

    async def _insured(self, call: Callable[[], Awaitable[RemoteJob]]) -> RemoteJob:
        """A call about a job whose id is known; one that the provider denies is in doubt. Raises: SubmitUnknown."""
        try:
            return await self._course.persist(call)
        except JobGone as error:
            await self._in_doubt(error.message)
            raise SubmitUnknown(doubt(self.job, error.message)) from None

    async def _learn(self, seen: RemoteJob) -> None:
        """Take over what a look says. What only says how far it has come is noted now and then."""
        job = self.job
        if job.state == "cancelling" and seen.state == "submitted":
            seen = replace(seen, state="cancelling")  # the provider has not got round to it
        now = self._clock.now()
        is_turn = (seen.state, seen.remote_state) != (job.state, job.remote_state)
        is_news = is_turn or (seen.completed, seen.failed) != (job.completed, job.failed)
        self.job = replace(seen, changed=now if is_news else job.changed)
        if is_turn or (is_news and self._clock.monotonic() - self._noted_at >= self._settings.note_s):
            await self.note()

    async def _clean_up(self) -> str:
        """Delete what was uploaded; what to say where that failed."""
        if self._settings.keep_files or not (self.job.input or self.job.id):
            return ""
        return await self._tidy(lambda: self._api.clean_up(self.job), f"its input {self.job.input} is")

    async def _clean_results(self) -> str:
        """Delete what has been read, where the provider lets us; what to say where that failed."""
        api = self._api
        if self._settings.keep_files or not isinstance(api, CleansResults):
            return ""
        return await self._tidy(lambda: api.clean_results(self.job), "its results are")

    async def _tidy(self, call: Callable[[], Awaitable[None]], what: str) -> str:
        """Make a call a few times; that it fails is not worth a job's rows."""
        for tries in range(1, TIDY_TRIES + 1):
            try:
                await call()
            except TryAgain as error:
                said = error.message
                if tries < TIDY_TRIES:
                    await self._course.sleep(max(self._course.pause_s(tries), min(error.rest_s or 0.0, TIDY_REST_S)))
            except BatchmillError as error:
                said = error.message
                break
            else:
                return ""
        return f"{what} still there: {said}"


def doubt(job: RemoteJob, message: str) -> str:
    """What a person is told of a job in doubt."""
    return (
        f"{message.rstrip('.')}. Look at the provider for {job.id or 'a job'} of {job.rows:,} rows ({job.tag}), then "
        f"say `batchmill remote adopt JOB {job.tag} ID` or, where there is none, `batchmill remote forget JOB "
        f"{job.tag}`, and `batchmill resume JOB`."
    )
