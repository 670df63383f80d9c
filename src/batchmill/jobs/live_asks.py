"""Calls of deployed functions between `LivePath` and the workers: what each holds, who hears its answer, and the sums.

All calls that come in one turn of the loop travel in one message; so do the answers.
"""

from __future__ import annotations

from collections.abc import Callable

from batchmill.errors import BatchmillError, ModelFailed, Unavailable
from batchmill.jobs.pool_worker import PoolWorker
from batchmill.types import Ask, LiveHead, ModelSpec
from batchmill.wire.messages import Answer
from batchmill.wire.raised import Raised

BYTES_IN_FLIGHT_MAX = 512 * 1024 * 1024  # of the bodies of one model's calls
LOST = "worker_crashed"  # the code of a call whose worker died with it

HearAnswer = Callable[[Answer], None]
Cancel = Callable[[], None]


class Line:
    """One model's calls: how many are on their way, and whether their pool is held for them."""

    def __init__(self, model: ModelSpec, key: str, user: str) -> None:
        """`user`: who holds the pool."""
        self.model, self.key, self.user = model, key, user
        self.is_idempotent = model.function is not None and model.function.is_idempotent
        self.in_flight = 0
        self.bytes = 0
        self.begun = 0  # calls that were ever begun
        self.is_held = False

    def has_room(self, size: int) -> bool:
        """A call of so many bytes may begin."""
        return self.bytes + size <= BYTES_IN_FLIGHT_MAX


class LiveAsk:
    """A call that a worker has, and what its `calls` hold: called with the answer, or with why there is none."""

    __slots__ = ("_again", "_ask", "_hear", "_is_second", "_line", "_worker")

    def __init__(self, line: Line, ask: Ask, hear: HearAnswer, again: Callable[[LiveAsk], None]) -> None:
        """`again` gets a call that may be made once more, on another worker."""
        self._line, self._ask, self._again = line, ask, again
        self._hear: HearAnswer | None = hear  # until it has heard
        self._worker: PoolWorker | None = None
        self._is_second = False
        line.in_flight += 1
        line.begun += 1
        line.bytes += len(ask.body)

    @property
    def line(self) -> Line:
        return self._line

    def begin(self, worker: PoolWorker) -> None:
        if self._hear is not None:
            self._worker = worker
            worker.ask(self._ask, self)

    def __call__(self, piece: Answer | LiveHead | bytes | Exception | None) -> None:
        if isinstance(piece, Answer):
            self._end(piece)
            return
        assert isinstance(piece, BatchmillError), "an Ask is answered in one piece"
        if isinstance(piece, Unavailable) and self._line.is_idempotent and not self._is_second:
            self._is_second, self._worker = True, None
            self._again(self)
        else:
            self.fail(self._told(piece))

    def fail(self, error: BatchmillError) -> None:
        """There will be no answer."""
        self._end(Answer(self._ask.id, raised=Raised.of(error)))

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        if self._hear is not None:
            self._leave()
            if self._worker is not None:
                self._worker.abandon(self._ask.id)

    def _told(self, error: BatchmillError) -> BatchmillError:
        """The end of a worker is this call's own: whether it was the cause, nobody knows."""
        if not isinstance(error, Unavailable):
            return error
        return ModelFailed(f"the worker of {self._line.model.name!r} died before it had answered", code=LOST)

    def _end(self, answer: Answer) -> None:
        hear = self._hear
        if hear is not None:
            self._leave()
            hear(answer)

    def _leave(self) -> None:
        self._hear = None  # who heard knows this call: what goes round has to be found to be freed
        self._line.in_flight -= 1
        self._line.bytes -= len(self._ask.body)
