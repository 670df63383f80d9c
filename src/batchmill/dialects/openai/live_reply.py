"""The answer to a live request, event by event."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from batchmill.dialects.openai.errors import envelope
from batchmill.errors import BatchmillError
from batchmill.server.piece_reply import PieceReply
from batchmill.types import LiveHead
from batchmill.wire.json_bytes import encode


class EventReply(PieceReply):
    """Server-sent events, handed on as they come."""

    def __init__(self, head: LiveHead, pieces: AsyncGenerator[bytes], hide: Callable[[str], str]) -> None:
        self._hide = hide
        super().__init__(pieces, media=head.content_type, status=head.status)

    def late(self, error: BatchmillError) -> bytes:
        """The openai package raises what such an event says."""
        return b"data: " + encode(envelope(error, self._hide(error.message))) + b"\n\n"
