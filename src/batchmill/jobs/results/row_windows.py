"""The finished lines of a job in row order, a bounded window at a time, however its rows were run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from batchmill.datasets.readers import open_rows
from batchmill.datasets.sealed import DatasetRows, load_seal, moved
from batchmill.errors import LedgerBroken
from batchmill.jobs.ledger.plan import FOLLOWERS, ORDER, PlanReader, Progress, RefusedRows, Rejected, iter_rejected
from batchmill.jobs.results.results import GatherOrder
from batchmill.jobs.results.row_arrays import RowArrays
from batchmill.part_files import full_disk_named
from batchmill.store.segments.blocks import open_segments
from batchmill.store.segments.format import Block, read_exactly, read_outcomes, read_payload, where
from batchmill.types import Outcome, Row, RowError, SegmentRef
from batchmill.wire.rows.forms import Form, added_columns

MISSING = np.uint64(2**64 - 1)  # no outcome
REFUSED = np.uint64(2**64 - 2)  # refused by validation
IS_ERROR, FOLLOWS = np.uint64(1 << 63), np.uint64(1 << 62)
PLACE = np.uint64(2**62 - 1)  # the other bits: a byte in all segments, one after the other
NEWLINE = 10


class OutcomeIndex:
    """Where the newest outcome of every row is. Subclasses say what they keep of a block.

    Raises: LedgerBroken for whatever does not add up: a damaged block, a row with two outcomes in one generation, an
    outcome of a row that the plan does not run.
    """

    missing = 0  # rows without an outcome

    def __init__(self, order: GatherOrder, progress: Progress) -> None:
        self._plan = PlanReader(Path(order.plans[0]))
        self.rows = self._plan.plan.rows
        self.arrays = RowArrays(self._plan.home, self.rows, piece_rows=order.piece_rows)
        self.segments = open_segments(order.segments)
        self._begin([ref for _, ref in order.committed])
        seen = self.arrays.full(bool, False)
        total, done = sum(ref.length for _, ref in order.committed), 0
        by_generation = sorted(order.committed, key=lambda commit: commit[0])
        for generation, commits in groupby(by_generation, key=lambda commit: commit[0]):
            planned = _Planned(Path(order.plans[generation]), self.arrays)
            self.arrays.fill(seen, False)
            counted = 0
            for _, ref in commits:
                for block in read_outcomes(self.segments, ref):
                    rows = self._rows_of(block, generation, planned)
                    self._add(block, rows)
                    seen[rows] = True
                    self.arrays.touch(block.n)
                    counted += block.n
                done += ref.length
                progress(done / total)
            if (found := self.count(seen, True)) != counted:
                raise LedgerBroken(f"generation {generation}: {counted} outcomes for {found} rows")
        self._finish(order)

    def count(self, array: np.ndarray, value: object) -> int:
        """How many rows have this value in an array of `arrays`."""
        found = 0
        for step in self.arrays.steps():
            found += int(np.count_nonzero(array[step] == value))
            self.arrays.touch(len(array[step]))
        return found

    def _begin(self, refs: list[SegmentRef]) -> None:
        """Called before the first block. Args: refs: all committed ranges."""

    def _add(self, block: Block, rows: np.ndarray) -> None:
        """Record the rows of a block; they replace those of an earlier generation."""
        raise NotImplementedError

    def _finish(self, order: GatherOrder) -> None:
        """Called after the last block."""

    def _rows_of(self, block: Block, generation: int, planned: _Planned) -> np.ndarray:
        """The numbers of a block's rows, which are those that the plan has at their positions."""
        place = where(self.segments, block)
        if block.generation != generation:
            raise LedgerBroken(f"{place}: generation {block.generation}, committed for {generation}")
        rows, positions = _numbers(block.rows()), _numbers(block.positions())
        if not planned.has(positions, rows):
            raise LedgerBroken(f"{place}: rows are not those that the plan has at their positions")
        return rows


def _numbers(numbers: Sequence[int]) -> np.ndarray:
    return np.arange(numbers.start, numbers.stop) if isinstance(numbers, range) else np.asarray(numbers)


class RangeTotals(Struct, frozen=True):
    """Of a range of rows: those that failed, and the bytes of lines that are copied as they are. `all_copied`: these
    are all lines.
    """

    failed: int
    copied_bytes: int
    all_copied: bool


class RowIndex(OutcomeIndex):
    """`place` and `size` of every row's line; `followers` and their `leaders`, ascending by follower."""

    first = 0  # the row that the arrays begin with
    raws: Mapping[int, bytes] | None = None  # the rows of the input that lines are made of; None: the dataset has them
    has_failed = False  # some row has an error
    is_flawed = False  # some result's reply has a flaw
    reuses = False  # some row took over the result of another job

    @property
    def folds(self) -> bool:
        """Whether some row shares another row's outcome."""
        return len(self.followers) > 0

    def places_of(self, first: int, last: int) -> np.ndarray:
        """`place` of rows first <= n < last."""
        return self.place[first - self.first : last - self.first]

    def sizes_of(self, first: int, last: int) -> np.ndarray:
        """`size` of rows first <= n < last."""
        return self.size[first - self.first : last - self.first]

    def segment_at(self, places: np.ndarray) -> np.ndarray:
        """The number of the segment that holds each place; see `bases` and `names`."""
        return np.searchsorted(self.bases, places, side="right") - 1

    def leaders_of(self, followers: np.ndarray, window: range) -> np.ndarray:
        """The rows whose outcomes these followers share. Args: window: rows that contain all of them."""
        known, leaders = self.pairs_of(window.start, window.stop)
        return leaders[np.searchsorted(known, followers)]

    def pairs_of(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """The followers of rows first <= n < last, and their leaders."""
        lo, hi = (bisect_left(self.followers, row) for row in (first, last))
        return self.followers[lo:hi], self.leaders[lo:hi]

    def totals(self, rows: range) -> RangeTotals:
        """What results of these rows must have."""
        failed = copied_rows = copied_bytes = 0
        for first in range(rows.start, rows.stop, WINDOW_ROWS):
            last = min(first + WINDOW_ROWS, rows.stop)
            place, size = self.places_of(first, last), self.sizes_of(first, last)
            located = place < REFUSED
            copied = located & ((place & FOLLOWS) == 0)
            failed += int(np.count_nonzero(~located | ((place & IS_ERROR) != 0)))
            copied_rows += int(np.count_nonzero(copied))
            copied_bytes += int(size[copied].sum(dtype=np.uint64))
            self.arrays.touch(len(place))
        return RangeTotals(failed, copied_bytes, copied_rows == len(rows))

    def _begin(self, refs: list[SegmentRef]) -> None:
        self.place = self.arrays.full(np.uint64, MISSING)
        self.size = self.arrays.full(np.uint32, 0)
        ends: dict[str, int] = {}
        for ref in refs:
            ends[ref.segment] = max(ends.get(ref.segment, 0), ref.offset + ref.length)
        self.names = sorted(ends)
        self.bases = np.cumsum([0, *(ends[name] for name in self.names)]).astype(np.uint64)[:-1]
        self._base_of = dict(zip(self.names, self.bases.tolist(), strict=True))

    def _add(self, block: Block, rows: np.ndarray) -> None:
        payload = np.frombuffer(read_payload(self.segments, block), np.uint8)
        if block.table is None:
            ends = np.flatnonzero(payload == NEWLINE) + 1
        else:
            ends = np.cumsum(np.asarray(block.line_lengths(), np.int64))
        if len(ends) != block.n or int(ends[-1]) != len(payload) or not np.all(payload[ends - 1] == NEWLINE):
            raise LedgerBroken(f"{where(self.segments, block)}: the payload is not {block.n} lines")
        sizes = np.diff(ends, prepend=0)
        start = self._base_of[block.segment] + block.payload_offset
        places = (ends - sizes + start).astype(np.uint64)
        self.place[rows] = places if block.ok else places | IS_ERROR
        self.has_failed, self.is_flawed = self.has_failed or not block.ok, self.is_flawed or bool(block.meta.warnings)
        self.reuses = self.reuses or bool(block.meta.reused)
        self.size[rows] = sizes

    def _finish(self, order: GatherOrder) -> None:
        """Give followers the lines of their leaders, and mark refused rows."""
        plan = self._plan.plan
        pairs = self._open_followers()
        refused = RefusedRows(Path(order.dataset), self.rows, plan.rejected)
        self.refused = plan.rejected
        for step in self.arrays.steps():
            rows = np.frombuffer(refused.within(range(step.start, step.stop)), np.uint32)
            self._check_idle(rows)
            self.place[rows] = REFUSED
        for start in range(0, len(pairs), FOLLOWERS_AT_ONCE):
            self._follow(pairs[start : start + FOLLOWERS_AT_ONCE])
        self.missing = self.count(self.place, MISSING)

    def _open_followers(self) -> np.ndarray:
        home = self._plan.home
        pairs = self.arrays.opened(home / FOLLOWERS).reshape(-1, 2)
        self.followers, self.leaders = pairs[:, 0], pairs[:, 1]
        if len(pairs) != self._plan.plan.followers:
            raise LedgerBroken(f"{home}: the plan has other followers than it says")
        return pairs

    def save(self, folder: Path) -> None:
        """Keep the index for `SavedRowIndex` of other processes. Raises: StorageFull."""
        about = _Saved(self.names, self.bases.tolist(), self.has_failed, self.is_flawed, self.reuses)
        with full_disk_named(folder / SAVED):
            (folder / SAVED).write_bytes(msgspec.json.encode(about))
            for name, array in ((PLACES, self.place), (SIZES, self.size)):
                with open(folder / name, "xb") as file:
                    for step in self.arrays.steps():
                        file.write(array[step].data)
                        self.arrays.touch(len(array[step]))

    def _follow(self, pairs: np.ndarray) -> None:
        """Give some followers the places of their leaders, which never follow."""
        followers, leaders = pairs[:, 0], pairs[:, 1]
        self._check_idle(followers)
        places = self.place[leaders]
        if np.any(places == REFUSED):
            raise LedgerBroken(f"{self._plan.home}: a row follows one that was refused")
        self.place[followers] = np.where(places == MISSING, MISSING, places | FOLLOWS)
        self.size[followers] = self.size[leaders]
        self.arrays.touch(2 * len(pairs))

    def _check_idle(self, rows: np.ndarray) -> None:
        if np.any(self.place[rows] != MISSING):
            raise LedgerBroken("a row has an outcome that the plan does not run: it was refused, or follows another")
        self.arrays.touch(len(rows))


SAVED, PLACES, SIZES = "index.json", "place.u64", "size.u32"


class _Saved(Struct, frozen=True):
    names: list[str]
    bases: list[int]
    has_failed: bool
    is_flawed: bool
    reuses: bool


class SavedRowIndex(RowIndex):
    """An index that another process has made and checked; of a job with missing rows, too."""

    def __init__(self, order: GatherOrder, folder: Path) -> None:
        self._plan = PlanReader(Path(order.plans[0]))
        self.rows = self._plan.plan.rows
        self.refused = self._plan.plan.rejected
        self.arrays = RowArrays(folder, self.rows, piece_rows=order.piece_rows)
        saved = msgspec.json.decode((folder / SAVED).read_bytes(), type=_Saved)
        self.names, self.bases = saved.names, np.array(saved.bases, np.uint64)
        self.has_failed, self.is_flawed, self.reuses = saved.has_failed, saved.is_flawed, saved.reuses
        self.place = self.arrays.opened(folder / PLACES, np.uint64)
        self.size = self.arrays.opened(folder / SIZES)
        self._open_followers()
        self.segments = open_segments(order.segments)


class _Planned:
    """The row number of each position of a generation's plan."""

    def __init__(self, home: Path, arrays: RowArrays) -> None:
        reader = PlanReader(home)
        self._leaders = reader.leaders
        self._numbers = arrays.opened(home / ORDER) if reader.plan.permuted else None

    def has(self, positions: np.ndarray, rows: np.ndarray) -> bool:
        if int(positions.max()) >= self._leaders:
            return False
        return np.array_equal(positions if self._numbers is None else self._numbers[positions], rows)


FOLLOWERS_AT_ONCE = 64 * 1024
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
    """Iterates as often as asked, over the same rows. With `partial` rows that have no outcome yet are left out.

    Args: rows: those of the windows; None: all.
    """

    def __init__(
        self, order: GatherOrder, index: RowIndex, *, partial: bool = False, rows: range | None = None
    ) -> None:
        self._rows = range(index.rows) if rows is None else rows
        self._form: Form = order.form
        self._unrun = order.unrun
        self._dataset, self._moved = Path(order.dataset), order.moved
        self._index, self._partial = index, partial
        self._sealed: DatasetRows | None = None  # opened when a row of it is needed: most jobs need none
        self.added = added_columns(
            self._form, has_failed=index.has_failed, is_flawed=index.is_flawed, folds=index.folds, reuses=index.reuses,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Window]:
        first = self._rows.start
        refused = iter_rejected(self._dataset, self._rows.start)
        while first < self._rows.stop:
            last = self._window_end(first)
            yield self._window(first, last, refused)
            self._index.arrays.touch(last - first)
            first = last

    def close(self) -> None:
        if self._sealed is not None:
            self._sealed.close()
            self._sealed = None

    def _raws(self, numbers: list[int]) -> list[bytes]:
        if self._index.raws is not None:
            return [self._index.raws[number] for number in numbers]
        if self._sealed is None:
            self._sealed = open_rows(self._dataset, moved(load_seal(self._dataset), self._moved))
        return self._sealed.read_many(numbers)

    def _window_end(self, first: int) -> int:
        sizes = self._index.sizes_of(first, min(first + WINDOW_ROWS, self._rows.stop)).cumsum(dtype=np.uint64)
        return first + max(1, int(np.searchsorted(sizes, WINDOW_BYTES, side="right")))

    def _window(self, first: int, last: int, refused: Iterator[Rejected]) -> Window:
        places, sizes = self._index.places_of(first, last), self._index.sizes_of(first, last)
        located = places < REFUSED
        if located.all():
            lines = self._read(places, sizes).tolist()
        else:
            spread = np.empty(last - first, object)
            spread[located] = self._read(places[located], sizes[located])
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
        """Read the lines at these places, in the same order, as an array of bytes objects."""
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
            name, base = self._index.names[segment], int(self._index.bases[segment])
            data = read_exactly(self._index.segments, name, low - base, highs[end - 1] - low)
            found += [data[a - low : b - low] for a, b in zip(lows[begin:end], highs[begin:end], strict=True)]
        lines = np.empty(len(starts), object)
        lines[by_place] = found
        return lines

    def _write_followers(self, first: int, lines: list[bytes], indexes: np.ndarray) -> None:
        """Rewrite copies of the leaders' lines as lines of their followers."""
        form = self._form
        leaders = self._index.leaders_of(indexes + first, range(first, first + len(lines))).tolist()
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
    """Decode a refused row, which may not be UTF-8; the output must be."""
    return raw if raw.isascii() else raw.decode(errors="replace").encode()


def _chunks(items: list) -> Iterator[list]:
    for start in range(0, len(items), RAW_ROWS):
        yield items[start : start + RAW_ROWS]


def _in_chunks(left: list[int], right: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    return zip(_chunks(left), _chunks(right), strict=True)
