"""Reads the results of an ended batch and puts its rows' outcomes."""

from __future__ import annotations

import asyncio

from msgspec import Struct, field

from batchmill.engines.provider_batch.answers import Answers
from batchmill.engines.provider_batch.following import OVER, PAUSE, Course, LeaseAbandoned, Patience
from batchmill.engines.provider_batch.provider import JobGone, JobRefused, ProviderApi, RowReply, TryAgain
from batchmill.engines.provider_batch.spool import WINDOW, Spool
from batchmill.ports.engines import CheckingSink, LeaseHandle, Sink
from batchmill.types import Outcome, RemoteJob, Row, RowError, Usage

OVER_S = 10.0  # so long a cancelled job waits for answers that are being validated


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

    def __init__(
        self, api: ProviderApi, spool: Spool, sink: Sink, course: Course, lease: LeaseHandle, answers: Answers
    ) -> None:
        self._api, self._spool, self._sink, self._course = api, spool, sink, course
        self._lease, self._answers = lease, answers
        self.unchecked: set[int] = set()  # positions of answers that the lease has no time to validate

    async def collect(self, job: RemoteJob, mine: set[int], misfits: dict[int, Usage]) -> CollectedRows:
        """Put the outcomes of an ended batch; rows without one stay in `mine`.

        Args: misfits: gets the positions of rows whose answers do not fit their schema and may be asked for again, with
        what is to be counted for each. They stay in the spool, and their answers are kept.

        Raises: LeaseAbandoned if the lease is paused meanwhile; JobGone; RouteFailed if the results cannot be read.
        """
        patience, is_second = Patience(self._course), False
        while True:
            collected, garbled = CollectedRows(), dict[int, RowReply]()
            try:
                await self._read(job, mine, collected, garbled, misfits)
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
        self, job: RemoteJob, mine: set[int], collected: CollectedRows, garbled: dict[int, RowReply],
        misfits: dict[int, Usage],
    ) -> None:  # fmt: skip
        runs, counted = Runs(job.runs), Runs(job.misfits)
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
                await self._put_answers(job, answered, mine, misfits, counted)
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
        self._answers.drop(numbers)
        mine.difference_update(numbers)
        self._sink.put([_outcome(row, reply) for row, (_, reply) in zip(rows, replies, strict=True)])

    async def _put_answers(
        self, job: RemoteJob, answered: dict[int, RowReply], mine: set[int], misfits: dict[int, Usage], counted: Runs
    ) -> None:
        """As `_put`; answers that may be asked for again are kept."""
        if not isinstance(self._sink, CheckingSink):
            self._put(list(answered.items()), mine)
            return
        rows = self._spool.read(list(answered))
        for row in rows:
            row.earlier = self._answers.earlier(row.position, job.attempt)
        outcomes = [_outcome(row, answered[row.position], is_counted=row.position in counted) for row in rows]
        stopping = asyncio.ensure_future(self._until_stopped())
        try:
            returned, unchecked = await self._sink.put_or_return(outcomes, stopping)
        finally:
            stopping.cancel()
        self._answers.keep(returned)
        self.unchecked.update(outcome.row.position for outcome in unchecked)
        for outcome in [*returned, *(unchecked if self._course.ending == OVER else ())]:  # nobody reads these again
            usage = outcome.usage or Usage()
            misfits[outcome.row.position] = usage
            self._lease.spend(outcome.row, usage)
        left = self.unchecked | misfits.keys()
        done = answered.keys() - left
        mine.difference_update(answered.keys() - self.unchecked)
        self._answers.drop(done)
        self._spool.remove(done)
        kept = [row for row in rows if row.position in left]
        for row in kept:
            row.earlier = ()
        self._spool.release(kept)
        if unchecked:
            raise LeaseAbandoned

    async def _until_stopped(self) -> None:
        """Return when no more answers are to be validated: at a pause, or a while after the job has been cancelled."""
        while self._course.ending != PAUSE:
            if self._course.ending == OVER:
                await self._course.sleep(OVER_S)
                return
            await self._course.turned()

    async def recall(self, job: RemoteJob, wanted: set[int]) -> None:
        """Keep the answers again that an earlier worker read in this batch and that did not fit.

        Raises: LeaseAbandoned, RouteFailed as `collect`.
        """
        patience = Patience(self._course)
        while True:
            try:
                async for replies in self._api.results(job):
                    found = {number: reply for number, reply in replies if number in wanted and _is_answer(reply)}
                    await self._keep(job, found)
            except TryAgain as error:
                await patience.rest(error)
                continue
            except (JobRefused, JobGone):
                pass  # what the provider does not have any more is asked for without it
            self._course.trouble = ""
            return

    async def _keep(self, job: RemoteJob, answered: dict[int, RowReply]) -> None:
        assert isinstance(self._sink, CheckingSink), "another one returns no answers"
        rows = self._spool.read(list(answered))
        try:
            for row in rows:
                if self._course.ending == PAUSE:
                    raise LeaseAbandoned
                row.earlier = self._answers.earlier(row.position, job.attempt)
                self._answers.keep([await self._sink.as_returned(_outcome(row, answered[row.position]))])
        finally:
            for row in rows:
                row.earlier = ()
            self._spool.release(rows)


def _outcome(row: Row, reply: RowReply, *, is_counted: bool = False) -> Outcome:
    """Args: is_counted: what it cost is counted already."""
    usage = None if is_counted else reply.usage
    return Outcome(row, reply.body, reply.error, reply.status, usage, reply.request_id)


def _is_answer(reply: RowReply) -> bool:
    return reply.body is not None and reply.error is None and not (reply.is_garbled or reply.is_undone)


class Runs:
    """A set of numbers, given as runs (first, count)."""

    def __init__(self, runs: list[tuple[int, int]]) -> None:
        self._runs = runs

    def __contains__(self, number: int) -> bool:
        return any(first <= number < first + count for first, count in self._runs)
