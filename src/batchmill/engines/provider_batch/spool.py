"""Spool: keeps rows that wait for a provider, with their bytes on disk. Drafts: writes the files to upload."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct, field

from batchmill.engines.provider_batch.provider import BatchLimits, ProviderRow, Upload
from batchmill.errors import InvalidRow
from batchmill.types import Row

PIECE_BYTES = 1024 * 1024  # of an upload, buffered before they are written
WINDOW = 1024  # rows handled in one turn of the event loop
WINDOW_BYTES = 32 * 1024 * 1024  # of rows that are read at once
SPARSE = 4  # rows are read in one piece if it is at most this many times larger than the rows


class Spool:
    """The rows of one lease by position. `take` removes them."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # unnamed: deleted with the process
        self._index: dict[int, int] = {}  # position -> index into `_rows` and `_ends`
        self._rows: list[Row | None] = []
        self._ends = array("Q", [0])  # where the bytes of each row end

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows: their `raw` is empty from now on."""
        data = memoryview(b"".join([row.raw for row in rows]))
        end = self._ends[-1]
        for row in rows:
            self._index[row.position] = len(self._rows)
            self._rows.append(row)
            end += len(row.raw)
            self._ends.append(end)
            row.raw = b""
        while data:
            data = data[self._file.write(data) :]

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, position: int) -> bool:
        return position in self._index

    def positions(self) -> list[int]:
        """The positions of the spooled rows, ascending."""
        return sorted(self._index)

    def windows(self, positions: Sequence[int], beside: Callable[[int], int] = lambda _: 0) -> Iterator[list[int]]:
        """The same positions in pieces that can be read at once: few rows, and few bytes or one row.

        Args: beside: the bytes that are read with a row.
        """
        piece: list[int] = []
        size = 0
        for position in positions:
            index = self._index[position]
            more = self._ends[index + 1] - self._ends[index] + beside(position)
            if piece and (len(piece) == WINDOW or size + more > WINDOW_BYTES):
                yield piece
                piece, size = [], 0
            piece.append(position)
            size += more
        if piece:
            yield piece

    def read(self, positions: Sequence[int]) -> list[Row]:
        """Read these rows with their bytes. `release` drops the bytes."""
        indices = [self._index[position] for position in positions]
        rows, ends = self._rows, self._ends
        read: list[Row] = []
        first, last = ends[min(indices, default=0)], ends[max(indices, default=-1) + 1]
        size = sum(ends[index + 1] - ends[index] for index in indices)
        whole = self._pread(last - first, first) if last - first <= SPARSE * size + PIECE_BYTES else None
        for index in indices:
            row, start, end = rows[index], ends[index], ends[index + 1]
            assert row is not None, "the index has only rows that are not taken"
            row.raw = self._pread(end - start, start) if whole is None else whole[start - first : end - first]
            read.append(row)
        return read

    def release(self, rows: Iterable[Row]) -> None:
        """Drop the bytes of rows that were read and remain in the spool."""
        for row in rows:
            row.raw = b""

    def take(self, positions: Sequence[int]) -> list[Row]:
        """Remove these rows, with their bytes."""
        rows = self.read(positions)
        self.remove(positions)
        return rows

    def remove(self, positions: Iterable[int]) -> None:
        """Remove rows that were read."""
        for position in positions:
            self._rows[self._index.pop(position)] = None

    def close(self) -> None:
        self._file.close()

    def _pread(self, size: int, offset: int) -> bytes:
        data = os.pread(self._file.fileno(), size, offset)
        while len(data) < size:
            more = os.pread(self._file.fileno(), size - len(data), offset + len(data))
            if not more:
                raise OSError(f"the spool of rows has become shorter: {len(data)} of {size} bytes")
            data += more
        return data


class Draft(Struct, frozen=True):
    """The planned content of one batch."""

    upload: Upload
    runs: list[tuple[int, int]]


class _Open(Struct):
    """A draft that accepts lines."""

    group: str
    path: Path
    size: int
    rows: int = 0
    inputs: int = 0
    runs: list[tuple[int, int]] = []
    pieces: list[bytes] = field(default_factory=list)
    piece_bytes: int = 0


class Drafts:
    """Writes lines to files: one for each group, and more if the provider's limits require it."""

    def __init__(self, folder: Path, name: str, limits: BatchLimits) -> None:
        self._folder, self._name, self._limits = folder, name, limits
        self._open: dict[str, _Open] = {}
        self._done: list[_Open] = []

    def add(self, number: int, line: ProviderRow) -> None:
        """Add a line; numbers must ascend. Raises: InvalidRow for a line that is too large for any batch."""
        limits, size = self._limits, len(line.data) + len(self._limits.between)
        draft = self._open.get(line.group)
        if draft is None or not self._has_room(draft, size, line.inputs):
            self._check(size, line.inputs)
            if draft is not None:
                self._finish(draft)
            draft = self._begin(line.group)
        draft.pieces.append(line.data if not draft.rows else limits.between + line.data)
        draft.rows += 1
        draft.size += size
        draft.inputs += line.inputs
        draft.piece_bytes += size
        runs = draft.runs
        if runs and runs[-1][0] + runs[-1][1] == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
        if draft.piece_bytes >= PIECE_BYTES:
            _write(draft)

    def finish(self) -> list[Draft]:
        """Every draft with its file, in the order of their first rows."""
        for draft in list(self._open.values()):
            self._finish(draft)
        done = sorted(self._done, key=lambda draft: draft.runs[0])
        return [Draft(Upload(each.path, each.group, each.rows, each.path.stat().st_size), each.runs) for each in done]

    def _begin(self, group: str) -> _Open:
        number = len(self._done) + len(self._open)
        path = self._folder / f"{self._name}-{number}"
        draft = _Open(group, path, len(self._limits.head) + len(self._limits.tail), runs=[])
        draft.pieces.append(self._limits.head)
        path.write_bytes(b"")
        self._open[group] = draft
        return draft

    def _has_room(self, draft: _Open, size: int, inputs: int) -> bool:
        limits = self._limits
        if draft.rows >= limits.rows_max or draft.size + size > limits.bytes_max:
            return False
        return limits.inputs_max is None or draft.inputs + inputs <= limits.inputs_max

    def _check(self, size: int, inputs: int) -> None:
        limits = self._limits
        size_max = limits.bytes_max - len(limits.head) - len(limits.tail)
        if size > size_max:
            raise InvalidRow(
                f"the row has {size:,} bytes; a batch of the provider may have {size_max:,}", code="row_too_large"
            )
        if limits.inputs_max is not None and inputs > limits.inputs_max:
            text = f"the row has {inputs:,} inputs; a batch of the provider may have {limits.inputs_max:,}"
            raise InvalidRow(text, code="row_too_large")

    def _finish(self, draft: _Open) -> None:
        draft.pieces.append(self._limits.tail)
        _write(draft)
        del self._open[draft.group]
        self._done.append(draft)


def _write(draft: _Open) -> None:
    with draft.path.open("ab") as file:
        file.writelines(draft.pieces)
    draft.pieces.clear()
    draft.piece_bytes = 0
