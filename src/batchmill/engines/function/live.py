"""Live calls: a form parses the body, the process runs it, and the form encodes the reply.

Large bodies and results are read and written in a thread, so that the loop stays responsive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from batchmill.engines.function.process import (
    CRASHED,
    GPU_LOST,
    HUNG,
    Blame,
    Counts,
    Process,
    ProcessWork,
    hung,
    no_answer,
    results_of,
)
from batchmill.errors import BatchmillError, InvalidInput, ModelFailed
from batchmill.function_runtime.frames import pack
from batchmill.function_runtime.shared_memory import MemoryWriter
from batchmill.models import redaction
from batchmill.models.function_socket import Buffer
from batchmill.ports.engines import AnswerSink
from batchmill.types import FunctionRequest, FunctionSpec, Interface, LiveHead, ModelSpec
from batchmill.wire.calls import (
    ARGUMENTS,
    CALL_FORMS,
    INFERLESS_TENSORS,
    TENSORS,
    CallError,
    CallForm,
    FunctionResults,
    ParsedCalls,
    failure,
)
from batchmill.wire.error_statuses import Raised
from batchmill.wire.messages import FunctionReply

LARGE_BYTES = 1024 * 1024  # of a body, or of results: from here on a thread does it
EXACT = frozenset([TENSORS, INFERLESS_TENSORS])  # forms that want arrays and numbers as they are

T = TypeVar("T")


class FunctionLiveCall(ProcessWork):
    """A live call between its arrival and its reply."""

    __slots__ = ("_calls", "_is_second", "answering", "arrived", "form", "limit_s")

    def __init__(
        self, request: FunctionRequest, parsed: ParsedCalls, calls: FunctionLive, answering: AnswerSink, arrived: float
    ) -> None:
        super().__init__(request.id, parsed, is_exact=request.form in EXACT)
        self.form, self.answering, self.arrived = request.form, answering, arrived
        self._calls, self._is_second = calls, False
        self.limit_s = calls.limit_s if request.timeout_s is None else request.timeout_s
        if parsed.timeout_s is not None and parsed.timeout_s < self.limit_s:
            self.limit_s = parsed.timeout_s
        self.deadline = arrived + self.limit_s
        self.origin = request.project, request.request

    def take(self, meta: dict[str, Any], buffers: list[Buffer]) -> bool:
        results = results_of(meta, buffers)
        for error in results.errors.values():
            if error.trace:
                self.note(self._calls.log, error.trace)
        self._calls.write(self, results, sum(map(len, buffers)))
        return True

    def blame(self, blame: Blame) -> tuple[ProcessWork | None, list[ProcessWork]]:
        can_repeat = self._calls.is_idempotent and blame.fault.code != HUNG
        if blame.fault.code == GPU_LOST and not blame.is_alone and self._calls.interface.calls != "row":
            can_repeat = True  # as the rows of a batch that raised
        if can_repeat and not self._is_second:
            self._is_second = True
            return None, [self]
        self.fail(blame.fault.error())
        return None, []

    def expire(self, *, was_called: bool) -> None:
        self.fail((hung if was_called else no_answer)(self.limit_s).error())

    def fail(self, error: BatchmillError) -> None:
        self._calls.end(self, FunctionReply(self.id, raised=Raised.of(error)))


class FunctionLive:
    """Runs live calls. Concurrency: one event loop.

    Args:
        function: the model's, as it was deployed.
    """

    def __init__(self, model: ModelSpec, function: FunctionSpec, process: Process, counts: Counts) -> None:
        self._name, self._version, self._process, self._counts = model.name, function.number, process, counts
        self._received_shapes = function.received_shapes
        self.log = process.calls
        self.is_idempotent = function.is_idempotent
        self.limit_s = model.limits.attempt_timeout_s
        self.interface: Interface = function.interface
        self.in_flight = 0
        self._forms: dict[str, CallForm] = {}  # those that were used
        self._in_threads: set[int] = set()  # calls whose body is being read, or whose results are being written

    def call(self, request: FunctionRequest, answering: AnswerSink) -> None:
        """See `ports.engines.CallEngine`."""
        self.in_flight += 1
        arrived = time.monotonic()
        if len(request.body) < LARGE_BYTES:
            self._begin(request, answering, arrived, self.read(request))
        else:
            self._in_thread(
                request.id, lambda: self.read(request), lambda parsed: self._begin(request, answering, arrived, parsed)
            )

    def abandon(self, request_id: int) -> None:
        """See `ports.engines.CallEngine`."""
        if request_id in self._in_threads:
            self._in_threads.discard(request_id)
        elif isinstance(work := self._process.works.get(request_id), FunctionLiveCall):
            self._process.drop(work)
        else:
            return
        self.in_flight -= 1

    def read(self, request: FunctionRequest) -> ParsedCalls | Raised:
        """Parse the body into calls, or return its error."""
        try:
            form = self._forms.get(request.form) or self._load(request.form)
            body = request.body if request.form in EXACT else bytes(request.body)
            return form.read(body, request.head, self.interface, received_shapes=self._received_shapes)
        except BatchmillError as error:
            return Raised.of(error)
        except Exception as error:  # a form's own bug: who waits must hear of it
            return _bug(error)

    def _load(self, name: str) -> CallForm:
        if name not in CALL_FORMS:
            raise InvalidInput(f"no form of calls is named {name!r}", code="unknown_form")
        form = self._forms[name] = CALL_FORMS[name]
        return form

    def _begin(
        self, request: FunctionRequest, answering: AnswerSink, arrived: float, parsed: ParsedCalls | Raised
    ) -> None:
        if isinstance(parsed, Raised):
            self._put(answering, FunctionReply(request.id, raised=parsed), arrived)
        else:
            self._process.begin(FunctionLiveCall(request, parsed, self, answering, arrived))

    def write(self, call: FunctionLiveCall, results: FunctionResults, size: int) -> None:
        """Reply with the results."""
        if size < LARGE_BYTES:
            self.end(call, self._written(call, results))
        else:
            self._in_thread(call.id, lambda: self._written(call, results), lambda answer: self.end(call, answer))

    def _written(self, call: FunctionLiveCall, results: FunctionResults) -> FunctionReply:
        try:
            pieces, head = self._forms[call.form].write_pieces(call.parsed, results, self._name, self._version)
            if len(pieces) == 1:
                return FunctionReply(call.id, bytes(pieces[0]), head)
            return FunctionReply(call.id, head=head, pieces=pieces)
        except BatchmillError as error:
            return FunctionReply(call.id, raised=Raised.of(error))
        except Exception as error:  # as in `read`
            return FunctionReply(call.id, raised=_bug(error))

    def end(self, call: FunctionLiveCall, answer: FunctionReply) -> None:
        """Put the reply."""
        self._put(call.answering, answer, call.arrived)

    def _put(self, answering: AnswerSink, answer: FunctionReply, arrived: float) -> None:
        self.in_flight -= 1
        self._counts.answered(answer.raised is None, int((time.monotonic() - arrived) * 1e9))
        answering.put(answer)

    def _in_thread(self, request_id: int, call: Callable[[], T], then: Callable[[T], None]) -> None:
        """Run `call` in a thread and `then` with its result here, unless the call is abandoned."""
        self._in_threads.add(request_id)

        def done(future: asyncio.Future[T]) -> None:
            if request_id in self._in_threads and not future.cancelled():
                self._in_threads.discard(request_id)
                then(future.result())

        asyncio.get_running_loop().run_in_executor(None, call).add_done_callback(done)


def _bug(error: Exception) -> Raised:
    redaction.print_exception(error)
    return Raised.of(BatchmillError(f"the engine failed: {type(error).__name__}: {error}", code="engine_bug"))


EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"
AHEAD = 4  # events that are requested ahead of the client

Piece = tuple[bytes, list[Buffer]] | BatchmillError | None  # None: there are no more


class Stream(ProcessWork):
    """One stream of events."""

    __slots__ = ("_has_begun", "_process", "_wanted", "pieces")
    holds_up = False

    def __init__(self, request: FunctionRequest, parsed: ParsedCalls, process: Process) -> None:
        super().__init__(request.id, parsed, is_exact=request.form in EXACT)
        self.origin = request.project, request.request
        self._process = process
        self.pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self._wanted = AHEAD
        self._has_begun = False

    def frame(self, memory: MemoryWriter | None) -> list[Buffer]:
        parsed = self.parsed
        meta = {"kind": "open", "id": self.id, "layout": parsed.layout, "exact": self.is_exact, "of": self.origin}
        return pack(meta, [parsed.calls, *parsed.buffers], memory) + self._next() * self._wanted

    def _next(self) -> list[Buffer]:
        return pack({"kind": "next", "id": self.id})

    def more(self) -> None:
        """Note that one event has been taken."""
        self._wanted += 1
        if self.is_sent and self._process.child is not None:
            self._process.child.write(self._next())

    def take(self, meta: dict[str, Any], buffers: list[Buffer]) -> bool:
        self._has_begun = True
        self._wanted -= 1
        if meta.get("error") is not None:
            error = CallError(*meta["error"])
            if error.trace:
                self.note(self._process.calls, error.trace)
            self.pieces.put_nowait(failure(error))
            return True
        if buffers:
            self.pieces.put_nowait((bytes(buffers[0]), buffers[1:]))
        if meta["ended"]:
            self.pieces.put_nowait(None)
        return bool(meta["ended"])

    def again(self) -> ProcessWork | None:
        if not self._has_begun:
            return self
        self.fail(ModelFailed("the function's process was replaced in the midst of this stream", code=CRASHED))
        return None

    def blame(self, blame: Blame) -> tuple[ProcessWork | None, list[ProcessWork]]:
        self.fail(blame.fault.error())
        return None, []

    def fail(self, error: BatchmillError) -> None:
        self.pieces.put_nowait(error)


async def events(
    process: Process, request: FunctionRequest, parsed: ParsedCalls, form: CallForm
) -> AsyncGenerator[LiveHead | bytes]:
    """The head and the events of a stream. Raises: ModelFailed, InvalidInput from the function."""
    stream = Stream(request, parsed, process)
    process.begin(stream)
    has_begun = False
    try:
        while (piece := await stream.pieces.get()) is not None:
            if isinstance(piece, BatchmillError):
                raise piece
            event = b"data: " + form.event(parsed, *piece) + b"\n\n"
            if not has_begun:
                has_begun = True
                yield LiveHead(200, EVENT_STREAM)
            yield event
            stream.more()
        if not has_begun:
            yield LiveHead(200, EVENT_STREAM)
        if request.form == ARGUMENTS:
            yield DONE
    finally:
        process.drop(stream)


def no_stream(source: str) -> InvalidInput:
    return InvalidInput(
        f"`stream` is true, and {source} returns its answer in one piece: leave `stream` out, "
        "or write the function with `yield`",
        code="streaming_not_supported",
    )
