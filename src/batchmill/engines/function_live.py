"""Live requests to a function: what it returns is the body; what a generator yields are the events of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any

from msgspec import Struct

from batchmill.engines.function_calls import Calls
from batchmill.engines.user_code import UserThread
from batchmill.errors import BatchmillError, InvalidInput, ModelFailed
from batchmill.types import LiveHead, LiveRequest, Row, RowError
from batchmill.wire.forms import TableForm

EVENT_STREAM = "text/event-stream"
LIVE_ROW = -1  # the number of a row that is none
CALLER_CODES = frozenset({"invalid_json", "missing_argument"})  # of row errors: the body does not fit the function
MODEL_CODES = frozenset({"bad_return", "timeout"})
DONE = b"data: [DONE]\n\n"

_form = TableForm()  # a body's fields are the arguments, as a table's columns are


class _Ended(Struct, frozen=True):
    """What a generator gives when it has no more."""


class LiveCalls:
    """Answers live requests with the function that rows are run through."""

    def __init__(self, calls: Calls, thread: UserThread, timeout_s: float) -> None:
        self._calls = calls
        self._thread = thread
        self._timeout_s = timeout_s
        self.in_flight = 0

    async def predict(self, request: LiveRequest) -> AsyncGenerator[LiveHead | bytes]:
        """As `ports.Engine.predict`."""
        row = Row(LIVE_ROW, LIVE_ROW, request.body, _form)
        self.in_flight += 1
        try:
            if request.stream:
                events = self._stream(row)
                try:
                    async for piece in events:
                        yield piece
                finally:
                    await events.aclose()
            else:
                body = await self._answer(row)
                yield LiveHead(200)
                yield body
        finally:
            self.in_flight -= 1

    async def _answer(self, row: Row) -> bytes:
        if self._calls.loaded.is_async:
            [outcome] = await self._calls.answer_async([row], self._timeout_s)
        else:
            outcome = await self._thread.submit_ahead(lambda: self._calls.answer_one(row))
        if outcome.error is not None:
            raise _raised(outcome.error)
        assert outcome.body is not None
        return outcome.body

    # -- streams ------------------------------------------------------------------------------------------------------

    async def _stream(self, row: Row) -> AsyncGenerator[LiveHead | bytes]:
        loaded = self._calls.loaded
        if not loaded.yields:
            raise InvalidInput(
                f"`stream` is true, and {loaded.name} returns its answer in one piece: leave `stream` "
                "out, or write the function with `yield`",
                code="streaming_not_supported",
            )
        arguments = self._calls.arguments(row)
        if isinstance(arguments, RowError):
            raise _raised(arguments)
        made = loaded.call(**arguments)  # runs nothing of a generator yet
        try:
            has_begun = False
            while not isinstance(value := await self._next(made), _Ended):
                event = b"data: " + self._encoded(row, value) + b"\n\n"
                if not has_begun:
                    has_begun = True
                    yield LiveHead(200, EVENT_STREAM)
                yield event
            if not has_begun:
                yield LiveHead(200, EVENT_STREAM)
            yield DONE
        finally:
            await self._close(made)

    async def _next(self, made: Generator[Any] | AsyncGenerator[Any]) -> Any:
        """The next value, or `_Ended`. Raises: ModelFailed where the function does."""
        timer = asyncio.timeout(self._timeout_s)
        try:
            if isinstance(made, Generator):
                return await self._thread.submit_ahead(lambda: next(made, _Ended()))
            async with timer:
                return await anext(made, _Ended())
        except (Exception, SystemExit) as error:  # user code, as where rows are called
            if timer.expired():
                raise _raised(RowError("timeout", f"the function took longer than {self._timeout_s:g} s")) from None
            raise _raised(self._calls.told(error)) from None

    async def _close(self, made: Generator[Any] | AsyncGenerator[Any]) -> None:
        """Let the function's own `finally` run where the rest of it ran; nobody waits for a thread that is busy."""
        if isinstance(made, Generator):
            self._thread.submit_ahead(lambda: self._close_here(made))
            return
        try:
            await made.aclose()
        except Exception as error:  # user code once more; the answer is over
            self._calls.told(error)

    def _close_here(self, made: Generator[Any]) -> None:
        try:
            made.close()
        except Exception as error:  # as above
            self._calls.told(error)

    def _encoded(self, row: Row, value: Any) -> bytes:
        outcome = self._calls.outcome(row, value)
        if outcome.error is not None:
            raise _raised(outcome.error)
        assert outcome.body is not None
        return outcome.body


def _raised(error: RowError) -> BatchmillError:
    """What a row would have got, for somebody who waits."""
    if error.code in CALLER_CODES:
        return InvalidInput(error.message, code=error.code)
    if error.code in MODEL_CODES:
        return ModelFailed(error.message, code=error.code)
    return ModelFailed(f"{error.code}: {error.message}", code="function_error")
