"""The live requests that a worker answers: each in a task of its own, no further ahead of its reader than agreed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec
from msgspec import Struct

from batchmill.errors import BatchmillError
from batchmill.models import redaction
from batchmill.models.redaction import Scrubber
from batchmill.ports import Engine
from batchmill.types import LiveHead
from batchmill.wire.messages import LIVE_AHEAD_BYTES, Answered, Chunk, Head, Predict
from batchmill.wire.raised import Raised

CHUNK_BYTES = 256 * 1024  # the longest piece of a body in one message


class _Answer(Struct, eq=False):
    task: asyncio.Task[None]
    room: asyncio.Event
    ahead: int = 0  # bytes sent that nobody has taken yet


class Answering:
    """
    Args:
        engine: answers; it has started.
        send: queues a message to the owner.
        drained: returns once the owner's socket has taken what was queued.
    """

    def __init__(self, engine: Engine, send: Callable[[Struct], None], drained: Callable[[], object]) -> None:
        self._engine, self._send, self._drained = engine, send, drained
        self._answers: dict[int, _Answer] = {}

    def begin(self, message: Predict) -> None:
        task = asyncio.create_task(self._answer(message))
        self._answers[message.id] = _Answer(task, asyncio.Event())
        task.add_done_callback(lambda _: self._answers.pop(message.id, None))

    def abandon(self, id_: int) -> None:
        """Nobody waits for this answer any more."""
        answer = self._answers.get(id_)
        if answer is not None:
            answer.task.cancel()

    def taken(self, id_: int, size: int) -> None:
        """So many bytes of an answer have been handed on."""
        answer = self._answers.get(id_)
        if answer is not None:
            answer.ahead -= size
            answer.room.set()

    async def finish(self) -> None:
        """Return when every answer that was begun has ended."""
        while tasks := [answer.task for answer in self._answers.values()]:
            await asyncio.wait(tasks)

    def end(self) -> None:
        """Answer no more."""
        for answer in list(self._answers.values()):
            answer.task.cancel()

    async def _answer(self, message: Predict) -> None:
        raised = None
        try:
            async with contextlib.aclosing(self._engine.predict(message.request)) as pieces:
                await self._hand_on(message.id, pieces)
        except BatchmillError as error:
            raised = Raised.of(error)
        except ConnectionError:
            return  # the owner has gone: the worker is about to end
        except Exception as error:  # an engine's own bug: who waits must hear of it
            redaction.print_exception(error)
            text = f"the engine failed: {type(error).__name__}: {error}"
            raised = Raised.of(BatchmillError(text, code="engine_bug"))
        self._send(Answered(message.id, raised and without_secrets(raised)))

    async def _hand_on(self, id_: int, pieces: AsyncIterator[LiveHead | bytes]) -> None:
        """A service that was given a key may repeat it, and a function that has one may return it: neither is told."""
        scrubber = Scrubber(redaction.known())
        async for piece in pieces:
            if isinstance(piece, LiveHead):
                self._send(Head(id_, LiveHead(piece.status, redaction.mask_known(piece.content_type))))
            else:
                await self._send_piece(id_, scrubber.feed(piece))
        await self._send_piece(id_, scrubber.rest())

    async def _send_piece(self, id_: int, piece: bytes) -> None:
        answer = self._answers[id_]
        for at in range(0, len(piece), CHUNK_BYTES):
            while answer.ahead >= LIVE_AHEAD_BYTES:
                answer.room.clear()
                await answer.room.wait()
            data = piece[at : at + CHUNK_BYTES]
            answer.ahead += len(data)
            self._send(Chunk(id_, data))
            await self._drained()


def without_secrets(raised: Raised) -> Raised:
    """An error as others may read it."""
    message = redaction.mask_known(raised.message)
    return raised if message == raised.message else msgspec.structs.replace(raised, message=message)
