"""What a provider brings back, reconciled row by row: the first answer counts, and what has none is left over."""

from __future__ import annotations

from msgspec import Struct, field

from batchmill.engines.provider_batch.course import PAUSE, Course, Left, Patience
from batchmill.engines.provider_batch.provider import JobRefused, ProviderApi, RowReply, TryAgain
from batchmill.engines.provider_batch.spool import Spool
from batchmill.ports import Sink
from batchmill.types import Outcome, RemoteJob, RowError

WINDOW = 1024  # rows handled between two turns of the loop


class Gathered(Struct):
    """What the results of one job were, beside its outcomes."""

    answered: int = 0
    repeated: int = 0  # answers to rows that had one
    strange: int = 0  # answers to rows that the job never held
    unread: int = 0  # lines that nobody can read
    undone: dict[int, RowReply] = field(default_factory=dict)  # what was said of rows that may be sent again
    refused: JobRefused | None = None  # the provider ended the job without running what is left over

    def told(self) -> str:
        """What was odd about it, for people; empty: nothing."""
        odd = ((self.repeated, "rows twice"), (self.strange, "unknown rows"), (self.unread, "unreadable lines"))
        return ", ".join(f"{count} {what}" for count, what in odd if count)


class Collector:
    """Of one lease."""

    def __init__(self, api: ProviderApi, spool: Spool, sink: Sink, course: Course) -> None:
        self._api, self._spool, self._sink, self._course = api, spool, sink, course

    async def collect(self, job: RemoteJob, mine: set[int]) -> Gathered:
        """Put the outcomes of an ended job; the rows of `mine` that have none are left in it.

        Raises: Left when the lease is paused meanwhile; JobGone; RouteFailed where the results cannot be had.
        """
        patience, is_second = Patience(self._course), False
        while True:
            gathered, garbled = Gathered(), dict[int, RowReply]()
            try:
                await self._read(job, mine, gathered, garbled)
            except TryAgain as error:
                await patience.rest(error)
                continue
            self._course.trouble = ""
            if not is_second and (garbled or gathered.unread):
                is_second = True  # the way here may have spoilt it: what is at the provider has been paid
                continue
            self._put(list(garbled.items()), mine)
            return gathered

    async def _read(self, job: RemoteJob, mine: set[int], gathered: Gathered, garbled: dict[int, RowReply]) -> None:
        runs = Runs(job.runs)
        before = set(mine)
        results = self._api.results(job)
        try:
            async for replies in results:
                found: dict[int, RowReply] = {}
                for number, reply in replies:
                    if number in mine and number not in found:
                        if reply.is_garbled:
                            garbled[number] = reply
                        elif reply.is_undone:
                            gathered.undone[number] = reply
                        else:
                            found[number] = reply
                    elif reply.is_garbled:
                        gathered.unread += number == -1
                    elif number in before:
                        gathered.repeated += 1
                    elif number in runs:
                        gathered.answered += 1  # for an earlier worker, or an earlier try
                    else:
                        gathered.strange += 1
                self._put(list(found.items()), mine)
                gathered.answered += len(found)
                for number in garbled.keys() & found.keys():
                    del garbled[number]
                if self._course.ending == PAUSE:
                    raise Left
        except JobRefused as error:
            gathered.refused = error

    def give_up(self, mine: set[int], gathered: Gathered, lost: RowError) -> None:
        """Errors for rows that are not sent again: what the provider last said of them, or that they are lost."""
        numbers = sorted(mine)
        for first in range(0, len(numbers), WINDOW):
            replies = []
            for number in numbers[first : first + WINDOW]:
                said = gathered.undone.get(number)
                if said is None or said.status < 400:
                    words = "" if said is None or said.error is None else f": {said.error.message}"
                    said = RowReply(0, None, RowError(lost.code, lost.message + words))
                replies.append((number, said))
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
    """Whether a number lies in runs of them."""

    def __init__(self, runs: list[tuple[int, int]]) -> None:
        self._runs = runs

    def __contains__(self, number: int) -> bool:
        return any(first <= number < first + count for first, count in self._runs)
