"""The tokens an answer reports, read on its way through: from a JSON body, or from the last events of a stream."""

from __future__ import annotations

import json

from batchmill.types import Usage
from batchmill.wire.forms import usage_of

TAIL_BYTES = 64 * 1024  # of an answer: `usage` stands at its end
_USAGE = b'"usage":'
_decoder = json.JSONDecoder()  # it reads one value and leaves what follows


class UsageReader:
    """Keeps the end of an answer and finds the usage in it."""

    def __init__(self) -> None:
        self._tail = bytearray()

    def read(self, piece: bytes) -> None:
        self._tail += piece
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]

    def found(self) -> Usage | None:
        """The usage the answer reports last; None where there is none."""
        end = len(self._tail)
        while (at := self._tail.rfind(_USAGE, 0, end)) >= 0:
            usage = _object_at(bytes(self._tail[at + len(_USAGE) :]).lstrip())
            if usage is not None:
                return usage_of({"usage": usage})
            end = at
        return None


def _object_at(data: bytes) -> dict | None:
    """The JSON object that `data` begins with, whatever follows it."""
    if data[:1] != b"{":
        return None
    try:
        return _decoder.raw_decode(data.decode(errors="replace"))[0]
    except (ValueError, RecursionError):
        return None
