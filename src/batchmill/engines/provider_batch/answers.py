"""Answers of a provider that do not fit the schema of their job, on disk while their rows are asked for again.

Nothing here is needed after a crash: the results that the answers came from stay at the provider until then.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.types import EarlierAnswer, Outcome, Row, RowError, Usage

GONE = EarlierAnswer("", ["it did not fit, and the provider has deleted it since"], Usage())


class _Kept(Struct, array_like=True):
    """The last answer of a row as its outcome, and all of its answers so far."""

    earlier: tuple[EarlierAnswer, ...]
    body: bytes | None
    error: RowError
    status: int
    request_id: str | None


_decoder = msgspec.msgpack.Decoder(_Kept)


class Answers:
    """By plan position. Space of answers that are replaced is freed with the file: each row has a few."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # unnamed: deleted with the process
        self._places: dict[int, tuple[int, int]] = {}  # offset, length
        self._end = 0

    def __contains__(self, position: int) -> bool:
        return position in self._places

    def size(self, position: int) -> int:
        """How many bytes the answers of a row have."""
        return self._places.get(position, (0, 0))[1]

    def keep(self, returned: Iterable[Outcome]) -> None:
        """Keep outcomes of `ports.engines.CheckingSink.put_or_return`, each in place of the row's earlier one."""
        pieces: list[bytes] = []
        for each in returned:
            assert each.error is not None, "what is returned has the error that it may become"
            kept = _Kept(each.row.earlier, each.body, each.error, each.status, each.request_id)
            pieces.append(msgspec.msgpack.encode(kept))
            self._places[each.row.position] = (self._end, len(pieces[-1]))
            self._end += len(pieces[-1])
        data = memoryview(b"".join(pieces))
        while data:
            data = data[self._file.write(data) :]

    def earlier(self, position: int, attempt: int) -> tuple[EarlierAnswer, ...]:
        """The answers of a row that is asked for the `attempt`-th time again."""
        found = self._read(position).earlier if position in self._places else ()
        return (*found, *[GONE] * (attempt - len(found)))

    def outcome(self, row: Row, why: str) -> Outcome:
        """The last answer of a row as its outcome, and why it is not asked for again. Its cost is counted."""
        kept = self._read(row.position)
        error = replace(kept.error, message=f"{kept.error.message}; not asked again: {why}")
        return Outcome(row, kept.body, error, kept.status, None, kept.request_id)

    def drop(self, positions: Iterable[int]) -> None:
        """Forget rows that have their outcomes."""
        for position in positions:
            self._places.pop(position, None)

    def close(self) -> None:
        self._file.close()

    def _read(self, position: int) -> _Kept:
        offset, length = self._places[position]
        data = os.pread(self._file.fileno(), length, offset)
        while len(data) < length:
            more = os.pread(self._file.fileno(), length - len(data), offset + len(data))
            if not more:
                raise OSError(f"the file of answers has become shorter: {len(data)} of {length} bytes")
            data += more
        return _decoder.decode(data)
