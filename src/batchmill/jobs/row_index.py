"""Where the newest outcome of every row lies: 12 bytes a row, built in one pass over the committed blocks."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np

from batchmill.errors import LedgerBroken
from batchmill.jobs.plan import FOLLOWERS, ORDER, PlanReader, Progress, read_rejected
from batchmill.jobs.results import GatherOrder
from batchmill.store.segments import Block, SegmentReader, read_ref
from batchmill.types import SegmentRef

MISSING = np.uint64(2**64 - 1)  # no outcome
REFUSED = np.uint64(2**64 - 2)  # refused by validation
IS_ERROR, FOLLOWS = np.uint64(1 << 63), np.uint64(1 << 62)
PLACE = np.uint64(2**62 - 1)  # the other bits: a byte in all segments, one after the other
NEWLINE = 10


class RowIndex:
    """`place` and `size` of every row's line; `followers` and their `leaders`, ascending by follower.

    Raises: LedgerBroken for whatever does not add up: a damaged block, a row with two outcomes in one generation, an
    outcome of a row that the plan does not run.
    """

    def __init__(self, order: GatherOrder, progress: Progress) -> None:
        self._plan = PlanReader(Path(order.plans[0]))
        self._plan.close()
        self.rows = self._plan.plan.rows
        self.place = np.full(self.rows, MISSING, np.uint64)
        self.size = np.zeros(self.rows, np.uint32)
        self.reader = SegmentReader()
        folder = Path(order.segments)
        self._number_segments(folder, [ref for _, ref in order.committed])
        total, done = sum(ref.length for _, ref in order.committed), 0
        by_generation = sorted(order.committed, key=lambda commit: commit[0])
        for generation, commits in groupby(by_generation, key=lambda commit: commit[0]):
            planned = _Planned(Path(order.plans[generation]))
            seen, counted = np.zeros(self.rows, bool), 0
            for _, ref in commits:
                for block in read_ref(folder, ref):
                    rows = self._add(block, generation, planned)
                    seen[rows] = True
                    counted += block.n
                done += ref.length
                progress(done / total)
            if np.count_nonzero(seen) != counted:
                raise LedgerBroken(f"generation {generation}: {counted} outcomes for {np.count_nonzero(seen)} rows")
        self._share(order)

    def segment_at(self, places: np.ndarray) -> np.ndarray:
        """The number of the segment that each place is in; see `bases` and `paths`."""
        return np.searchsorted(self.bases, places, side="right") - 1

    def _number_segments(self, folder: Path, refs: list[SegmentRef]) -> None:
        ends: dict[str, int] = {}
        for ref in refs:
            path = str(folder / ref.segment)
            ends[path] = max(ends.get(path, 0), ref.offset + ref.length)
        self.paths = sorted(ends)
        self.bases = np.cumsum([0, *(ends[path] for path in self.paths)]).astype(np.uint64)[:-1]
        self._base_of = dict(zip(self.paths, self.bases.tolist(), strict=True))

    def _add(self, block: Block, generation: int, planned: _Planned) -> np.ndarray:
        """Note the rows of a block; what an earlier generation said of them is forgotten."""
        if block.generation != generation:
            raise LedgerBroken(f"{_where(block)}: generation {block.generation}, committed for {generation}")
        rows, positions = np.asarray(block.rows()), np.asarray(block.positions())
        if not planned.has(positions, rows):
            raise LedgerBroken(f"{_where(block)}: rows are not those that the plan has at their positions")
        payload = np.frombuffer(self.reader.payload(block), np.uint8)
        if block.table is None:
            ends = np.flatnonzero(payload == NEWLINE) + 1
        else:
            ends = np.cumsum(np.asarray(block.line_lengths(), np.int64))
        if len(ends) != block.n or int(ends[-1]) != len(payload) or not np.all(payload[ends - 1] == NEWLINE):
            raise LedgerBroken(f"{_where(block)}: the payload is not {block.n} lines")
        sizes = np.diff(ends, prepend=0)
        start = self._base_of[block.path] + block.payload_offset
        places = (ends - sizes + start).astype(np.uint64)
        self.place[rows] = places if block.ok else places | IS_ERROR
        self.size[rows] = sizes
        return rows

    def _share(self, order: GatherOrder) -> None:
        """Give followers the places of their leaders, and mark the rows that were refused."""
        plan, home = self._plan.plan, self._plan.home
        pairs = np.fromfile(home / FOLLOWERS, np.uint32).reshape(-1, 2)
        self.followers, self.leaders = pairs[:, 0].copy(), pairs[:, 1].copy()
        refused = np.frombuffer(read_rejected(Path(order.dataset), self.rows), np.uint32)
        if len(refused) != plan.rejected or len(self.followers) != plan.followers:
            raise LedgerBroken(f"{home}: the plan has other followers or refused rows than it says")
        idle = np.concatenate((self.followers, refused))
        if np.any(self.place[idle] != MISSING):
            raise LedgerBroken("a row has an outcome that the plan does not run: it was refused, or follows another")
        self.place[refused] = REFUSED
        places = self.place[self.leaders]
        if np.any(places == REFUSED):
            raise LedgerBroken(f"{home}: a row follows one that was refused")
        self.place[self.followers] = np.where(places == MISSING, MISSING, places | FOLLOWS)
        self.size[self.followers] = self.size[self.leaders]
        self.refused = len(refused)
        self.missing = int(np.count_nonzero(self.place == MISSING))


class _Planned:
    """Which row each position of a generation's plan stands for."""

    def __init__(self, home: Path) -> None:
        reader = PlanReader(home)
        reader.close()
        self._leaders = reader.leaders
        self._numbers = np.fromfile(home / ORDER, np.uint32) if reader.plan.permuted else None

    def has(self, positions: np.ndarray, rows: np.ndarray) -> bool:
        if int(positions.max()) >= self._leaders:
            return False
        return np.array_equal(positions if self._numbers is None else self._numbers[positions], rows)


def _where(block: Block) -> str:
    return f"{block.path} at byte {block.offset}"
