"""A streamed completion as LoRAX streams it: an event for each token, the last of them with the whole text.

Source: LoRAX's router (`lib.rs`, StreamResponse) and predibase 2025.10.3, `resources/lorax/types.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import msgspec
from msgspec import Struct

from batchmill.dialects.predibase.lorax import Generate, Parameters
from batchmill.dialects.predibase.lorax_answers import Choice, Token, finish_of, read_answer, tokens_of
from batchmill.errors import BatchmillError
from batchmill.server.replies import EVENTS, PieceReply
from batchmill.wire.json_bytes import encode

EVENT_BYTES_MAX = 16 * 1024 * 1024  # of one event of the engine
_DATA, _END, _DONE = b"data:", b"\n\n", b"[DONE]"


class StreamDetails(Struct, frozen=True):
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    seed: int | None = None


class StreamEvent(Struct, frozen=True):
    token: Token
    generated_text: str | None = None
    details: StreamDetails | None = None


class TokenReply(PieceReply):
    """Tokens as server-sent events. An error after the first is one of them: its status can no longer be sent."""

    def __init__(self, pieces: AsyncGenerator[bytes], say: Callable[[BatchmillError], bytes]) -> None:
        self._say = say
        super().__init__(pieces, media=EVENTS)

    def late(self, error: BatchmillError) -> bytes:
        return b"event:error\ndata:" + self._say(error) + _END


async def events_of(asked: Generate, told: Parameters, pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """LoRAX's events out of an engine's. Raises: BatchmillError for an answer that the engine broke off."""
    told_so_far = _Told(asked, told)
    waiting = b""
    try:
        async for piece in pieces:
            *whole, waiting = (waiting + piece).split(_END)
            if len(waiting) > EVENT_BYTES_MAX:
                raise BatchmillError("the engine sent an event without an end", code="incomplete_generation")
            events = b"".join(told_so_far.read(event) for event in whole)
            if events:
                yield events
    finally:
        await pieces.aclose()
    if not told_so_far.is_done:
        raise BatchmillError("the engine broke the answer off", code="incomplete_generation")


class _Told:
    """What has been said of an answer."""

    def __init__(self, asked: Generate, told: Parameters) -> None:
        self._parameters = told
        self._text = asked.inputs if told.return_full_text else ""
        self._prompt_tokens = self._tokens = 0
        self.is_done = False

    def read(self, event: bytes) -> bytes:
        """Our events for one of the engine's."""
        data = event.removeprefix(_DATA).strip()
        if not event.startswith(_DATA) or data == _DONE:
            return b""
        try:
            answer = read_answer(data)
        except msgspec.MsgspecError as error:
            raise BatchmillError(f"the engine's answer cannot be read: {error}", code="internal_error") from None
        if answer.error is not None:
            told = answer.error.get("message") if isinstance(answer.error, dict) else answer.error
            raise BatchmillError(f"the engine stopped: {told}", code="generation")
        return b"".join(self._say(choice) for choice in answer.choices)

    def _say(self, choice: Choice) -> bytes:
        tokens = tokens_of(choice)
        self._text += choice.text
        self._tokens += len(tokens)
        self._prompt_tokens = len(choice.prompt_token_ids or ()) or self._prompt_tokens
        if choice.finish_reason is None:
            return b"".join(_event(StreamEvent(token)) for token in tokens)
        *before, last = tokens or [Token(0, choice.text, None, special=not choice.text)]
        self.is_done = True
        finish = finish_of(choice)
        details = StreamDetails(finish, self._prompt_tokens, self._tokens, self._parameters.seed)
        ended = StreamEvent(last, self._text, details if self._parameters.details else None)
        return b"".join(_event(StreamEvent(token)) for token in before) + _event(ended)


def _event(event: StreamEvent) -> bytes:
    return _DATA + encode(event) + _END
