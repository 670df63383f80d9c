"""The finished lines of a job in row order, a bounded window at a time, however its rows were run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from batchmill.datasets.sealed import SealedRows
from batchmill.errors import LedgerBroken
from batchmill.jobs.plan import Rejected, iter_rejected
from batchmill.jobs.results import GatherOrder
from batchmill.jobs.row_index import FOLLOWS, IS_ERROR, MISSING, PLACE, REFUSED, RowIndex
from batchmill.types import Outcome, Row, RowError
from batchmill.wire.forms import Form

WINDOW_ROWS = 1024 * 1024
WINDOW_BYTES = 128 * 1024 * 1024  # of lines; a window has at least one row
READ_BYTES = 4 * 1024 * 1024  # one read of a segment, about
GAP_BYTES = 8 * 1024  # two lines closer than this are read together
RAW_ROWS = 64  # rows of the dataset held at once


class Window(Struct, frozen=True):
    """Rows in row order. `failed`: the indexes of those whose outcome is an error."""

    numbers: Sequence[int]
    lines: list[bytes]
    failed: list[int]


class RowWindows:
    """Iterates as often as asked, over the same rows. With `partial` rows that have no outcome yet are left out."""

    def __init__(self, order: GatherOrder, index: RowIndex, *, partial: bool = False) -> None:
        self._form: Form = order.form
        self._unrun = order.unrun
        self._dataset = Path(order.dataset)
        self._index, self._partial = index, partial
        self._sealed: SealedRows | None = None  # opened when a row of it is needed: most jobs need none
        self.folds = len(index.followers) > 0

    def __iter__(self) -> Iterator[Window]:
        first, refused = 0, iter_rejected(self._dataset)
        while first < self._index.rows:
            last = self._window_end(first)
            yield self._window(first, last, refused)
            first = last

    def close(self) -> None:
        if self._sealed is not None:
            self._sealed.close()
            self._sealed = None

    def _raws(self, numbers: list[int]) -> list[bytes]:
        if self._sealed is None:
            self._sealed = SealedRows(self._dataset)
        return self._sealed.read_many(numbers)

    def _window_end(self, first: int) -> int:
        sizes = self._index.size[first : first + WINDOW_ROWS].cumsum(dtype=np.uint64)
        return first + max(1, int(np.searchsorted(sizes, WINDOW_BYTES, side="right")))

    def _window(self, first: int, last: int, refused: Iterator[Rejected]) -> Window:
        places = self._index.place[first:last]
        located = places < REFUSED
        if located.all():
            lines = self._read(places, self._index.size[first:last]).tolist()
        else:
            spread = np.empty(last - first, object)
            spread[located] = self._read(places[located], self._index.size[first:last][located])
            lines = spread.tolist()
            self._write_refused(first, lines, refused, int(np.count_nonzero(places == REFUSED)))
        self._write_followers(first, lines, np.flatnonzero(located & ((places & FOLLOWS) != 0)))
        missing = np.flatnonzero(places == MISSING)
        failed = np.flatnonzero(~located | ((places & IS_ERROR) != 0))
        numbers: Sequence[int] = range(first, last)
        if len(missing) and self._partial:
            kept = np.flatnonzero(places != MISSING)
            numbers = (kept + first).tolist()
            lines = [lines[index] for index in kept.tolist()]
            failed = np.searchsorted(kept, failed[places[failed] != MISSING])
        elif len(missing):
            self._write_unrun(first, lines, missing.tolist())
        return Window(numbers, lines, failed.tolist())

    def _read(self, places: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """The lines at these places, in the same order, as an array of bytes objects."""
        starts = places & PLACE
        by_place = np.argsort(starts, kind="stable")
        starts = starts[by_place]
        ends = starts + sizes[by_place]
        segments = self._index.segment_at(starts)
        apart = (starts[1:] > ends[:-1] + np.uint64(GAP_BYTES)) | (segments[1:] != segments[:-1])
        apart |= starts[1:] // np.uint64(READ_BYTES) != starts[:-1] // np.uint64(READ_BYTES)
        cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(starts)]
        lows, highs, found = starts.tolist(), ends.tolist(), []
        for begin, end in zip(cuts, cuts[1:], strict=False):
            if begin == end:
                continue
            low, segment = lows[begin], int(segments[begin])
            path, base = self._index.paths[segment], int(self._index.bases[segment])
            data = self._index.reader.read(path, highs[end - 1] - low, low - base)
            found += [data[a - low : b - low] for a, b in zip(lows[begin:end], highs[begin:end], strict=True)]
        lines = np.empty(len(starts), object)
        lines[by_place] = found
        return lines

    def _write_followers(self, first: int, lines: list[bytes], indexes: np.ndarray) -> None:
        """Turn the leaders' lines that stand for followers into lines of their own."""
        form = self._form
        leaders = self._index.leaders[np.searchsorted(self._index.followers, indexes + first)].tolist()
        for chunk, ahead in _in_chunks(indexes.tolist(), leaders):
            raws = self._raws([first + index for index in chunk])
            for index, leader, raw, leader_raw in zip(chunk, ahead, raws, self._raws(ahead), strict=True):
                try:
                    lines[index] = form.follow(
                        _row(leader, leader_raw, form), lines[index], _row(first + index, raw, form)
                    )
                except (msgspec.MsgspecError, KeyError) as error:
                    raise LedgerBroken(
                        f"the line of row {leader}, which row {first + index} follows, cannot be read: {error}"
                    ) from error

    def _write_refused(self, first: int, lines: list[bytes], refused: Iterator[Rejected], count: int) -> None:
        for chunk in _chunks(list(islice(refused, count))):
            raws = self._raws([row.row for row in chunk])
            for row, raw in zip(chunk, raws, strict=True):
                error = RowError(row.code, row.message)
                lines[row.row - first] = self._form.write(Outcome(_row(row.row, _text(raw), self._form), error=error))

    def _write_unrun(self, first: int, lines: list[bytes], indexes: list[int]) -> None:
        for chunk in _chunks(indexes):
            raws = self._raws([first + index for index in chunk])
            for index, raw in zip(chunk, raws, strict=True):
                row = _row(first + index, raw, self._form)
                lines[index] = self._form.write(Outcome(row, error=self._unrun, status=0))


def _row(number: int, raw: bytes, form: Form) -> Row:
    return Row(position=-1, number=number, raw=raw, form=form)  # it does not run: it has no place in the plan


def _text(raw: bytes) -> bytes:
    """A refused row may be no UTF-8; what is written must be."""
    return raw if raw.isascii() else raw.decode(errors="replace").encode()


def _chunks(items: list) -> Iterator[list]:
    for start in range(0, len(items), RAW_ROWS):
        yield items[start : start + RAW_ROWS]


def _in_chunks(left: list[int], right: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    return zip(_chunks(left), _chunks(right), strict=True)
