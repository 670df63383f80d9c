"""Rows by model, adapter, shared prompt prefix and cost, and duplicates folded: with numpy, over the plan's columns.

Columns are read in windows, and what must be sorted is sorted in pieces on disk: memory does not grow with the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import pairwise

import numpy as np

from batchmill.datasets.checking.inspection import LEVEL_BITS, LEVELS
from batchmill.datasets.external_sort import ExternalSort, RowCursor
from batchmill.datasets.folders import Folder
from batchmill.datasets.layout import COST, FOLD, OFFSETS, PREFIX, TARGET
from batchmill.errors import LedgerBroken
from batchmill.jobs.ledger.plan import Arranged, PlanOrder, PlanParts, Progress, SummedFile, TargetPlan
from batchmill.part_files import full_disk_named

STEP_ROWS = 1024 * 1024
FOLD_SHARE, KEYS_SHARE = 0.3, 0.3  # of the progress
_DEPTH_BYTES = np.array((0, *LEVELS), np.int64)  # levels in common -> bytes in common
PREFIX_BITS = LEVEL_BITS * len(LEVELS)
_LOW = np.uint64(2**32 - 1)

Record = tuple[np.ndarray, np.ndarray, np.ndarray]  # three columns of u64


def arrange(order: PlanOrder, dataset: Folder, parts: PlanParts, progress: Progress) -> Arranged:
    """Rows by model, adapter, prefix and cost. Source: `plan.Arrange`."""
    folder, piece_rows = parts.sort_folder, order.piece_rows
    with ExitStack() as open_, full_disk_named(folder / "sorted rows"):
        columns = open_.enter_context(_Columns(order, dataset, parts.rows))
        pairs = open_.enter_context(ExternalSort(folder, 1, parts.rows, piece_rows=piece_rows))
        with ExternalSort(folder, 3, parts.rows, piece_rows=piece_rows) as keys:
            repeated = _repeated_halves(columns, parts.rows) if parts.rows <= piece_rows else None
            for window in columns.windows():
                _add_folds(keys, columns, window, parts, repeated)
                progress(FOLD_SHARE * window.stop / parts.rows)
            followers = _fold(keys, pairs)
        sorted_rows = open_.enter_context(ExternalSort(folder, 3, parts.rows, piece_rows=piece_rows))
        labels = _Labels(order)
        cursor = RowCursor(pairs.blocks())
        for window in columns.windows():
            labels.add(columns, window, _excluded(parts, window), _followers(cursor, window, parts), sorted_rows)
            progress(FOLD_SHARE + KEYS_SHARE * window.stop / parts.rows)
        pairs.close()
        positions = _Positions(parts.order, labels)
        for block in sorted_rows.blocks():
            positions.add(block)
            progress(FOLD_SHARE + KEYS_SHARE + (1 - FOLD_SHARE - KEYS_SHARE) * positions.at / parts.rows)
    return Arranged(targets=positions.finish(), permuted=not positions.in_place, followers=followers)


class _Columns:
    """The columns of the dataset's rows, read in windows. Raises: LedgerBroken when one has another length."""

    def __init__(self, order: PlanOrder, dataset: Folder, rows: int) -> None:
        self._rows, self._prompt_bytes = rows, np.uint64(order.prompt_bytes)
        self._step = min(STEP_ROWS, order.piece_rows)
        self.dataset = dataset.path
        sizes = {TARGET: (2, rows), PREFIX: (8, rows), COST: (4, rows), FOLD: (8, 2 * rows), OFFSETS: (8, rows + 1)}
        with ExitStack() as opening:
            self._files = {name: opening.enter_context(closing(dataset.source(name))) for name in sizes}
            for name, (width, count) in sizes.items():
                found = self._files[name].size_bytes / width
                if found != count:
                    raise LedgerBroken(f"{self.dataset / name} has {found:g} values instead of {count}")
            self._open = opening.pop_all()

    def __enter__(self) -> _Columns:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def windows(self) -> Iterator[range]:
        """All rows, in ranges."""
        for start in range(0, self._rows, self._step):
            yield range(start, min(start + self._step, self._rows))

    def targets(self, window: range) -> np.ndarray:
        return self._read(TARGET, np.uint16, window.start, window.stop)

    def prefixes(self, window: range) -> np.ndarray:
        return self._read(PREFIX, np.uint64, window.start, window.stop)

    def costs(self, window: range) -> np.ndarray:
        """Estimated tokens."""
        return self._read(COST, np.uint32, window.start, window.stop)

    def folds(self, window: range) -> np.ndarray:
        """[n, 2]: the halves of the keys."""
        return self._read(FOLD, np.uint64, 2 * window.start, 2 * window.stop).reshape(-1, 2)

    def sizes(self, window: range) -> np.ndarray:
        """Bytes of the rows and of what the prompt adds, up to 2**32 - 1."""
        offsets = self._read(OFFSETS, np.uint64, window.start, window.stop + 1)
        return np.minimum(np.diff(offsets) + self._prompt_bytes, _LOW)

    def _read(self, name: str, kind: type, start: int, stop: int) -> np.ndarray:
        """Values start <= n < stop of a column."""
        width = np.dtype(kind).itemsize
        values = np.empty(stop - start, kind)
        view = memoryview(values).cast("B")
        at = start * width
        while view:
            count = self._files[name].read_into(view, at)
            if not count:
                raise LedgerBroken(f"{self.dataset / name} became shorter while it was read")
            view, at = view[count:], at + count
        return values


def _excluded(parts: PlanParts, window: range) -> np.ndarray:
    """The indexes in the window of rows that validation refused."""
    return np.frombuffer(parts.refused.within(window), np.uint32).astype(np.int64) - window.start


def _repeated_halves(columns: _Columns, rows: int) -> np.ndarray:
    """The first halves that several keys have, ascending: of the rows of one piece, only these keys need sorting."""
    halves = np.empty(rows, np.uint64)
    for window in columns.windows():
        halves[window.start : window.stop] = columns.folds(window)[:, 0]
    halves.sort()
    return np.unique(halves[1:][halves[1:] == halves[:-1]])


def _add_folds(
    keys: ExternalSort, columns: _Columns, window: range, parts: PlanParts, repeated: np.ndarray | None
) -> None:
    """Add (first half, second half, row) for each row that runs and has a key; only those with a `repeated` half."""
    folds = columns.folds(window)
    runs = folds.any(axis=1)
    runs[_excluded(parts, window)] = False
    if repeated is not None:
        runs &= _is_in(folds[:, 0], repeated)
    found = np.flatnonzero(runs)
    keys.add(folds[found, 0], folds[found, 1], (found + window.start).astype(np.uint64))


def _is_in(values: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Whether each value is one of `among`, ascending."""
    if not len(among):
        return np.zeros(len(values), bool)
    at = np.searchsorted(among, values)
    return among.take(at, mode="clip") == values


def _fold(keys: ExternalSort, pairs: ExternalSort) -> int:
    """Add follower << 32 | leader for every row whose key an earlier row has; returns how many there are."""
    followers = 0
    last, leader = None, np.uint64(0)  # of the block before
    for block in keys.blocks():
        begins = np.ones(len(block), bool)
        begins[1:] = (block[1:, 0] != block[:-1, 0]) | (block[1:, 1] != block[:-1, 1])
        begins[0] = last is None or not np.array_equal(block[0, :2], last)
        rows = block[:, 2]
        starts = np.flatnonzero(begins)
        leaders = np.concatenate(([leader], rows[starts]))[np.cumsum(begins)]
        follows = ~begins
        pairs.add(rows[follows] << np.uint64(32) | leaders[follows])
        followers += int(np.count_nonzero(follows))
        last, leader = block[-1, :2].copy(), leaders[-1]
    return followers


def _followers(cursor: RowCursor, window: range, parts: PlanParts) -> np.ndarray:
    """Write the pairs of a window's followers; returns their indexes in it."""
    pairs = cursor.until(window.stop)
    followers = (pairs >> np.uint64(32)).astype(np.uint32)
    both = np.stack((followers, (pairs & _LOW).astype(np.uint32)), axis=1)
    parts.followers.write(both.tobytes())
    return followers.astype(np.int64) - window.start


class _Labels:
    """The (model, adapter) pairs in the order in which they run, and sums over their rows."""

    def __init__(self, order: PlanOrder) -> None:
        self.labels = sorted(set(order.targets), key=lambda pair: (pair[0], pair[1] is not None, pair[1] or ""))
        if len(self.labels) >= 2**16 - 1:
            raise LedgerBroken(f"{len(self.labels)} models and adapters in one job are more than a plan can tell apart")
        index = {pair: number for number, pair in enumerate(self.labels)}
        self._targets = len(order.targets)
        self._ranks = np.array([index[pair] for pair in order.targets], np.uint16)
        self.keeps_order = np.array([model in order.file_order for model, _ in self.labels])
        self.rows, self.folded, self.tokens = (np.zeros(len(self.labels), np.int64) for _ in range(3))

    def add(
        self, columns: _Columns, window: range, refused: np.ndarray, followers: np.ndarray, sorted_rows: ExternalSort
    ) -> None:
        """Count the rows of a window, and add those that run to `sorted_rows`."""
        target = columns.targets(window)
        target[refused] = 0
        if int(target.max()) >= self._targets:
            raise LedgerBroken(f"{columns.dataset}: a row goes to target {int(target.max())} of {self._targets}")
        rank = self._ranks[target]
        self.folded += self._count(rank[followers])
        runs = np.ones(len(window), bool)
        runs[refused] = False
        runs[followers] = False
        found = np.flatnonzero(runs)
        rank, cost = rank[found], columns.costs(window)[found]
        self.rows += self._count(rank)
        self.tokens += np.bincount(rank, cost, len(self.labels)).astype(np.int64)  # exact: less than 2**53
        prefix = columns.prefixes(window)[found]
        if prefix.max(initial=0) >> PREFIX_BITS:
            raise LedgerBroken(f"{columns.dataset}: a prefix key has more than {PREFIX_BITS} bits")
        dear = _LOW - cost
        keeps_order = self.keeps_order[rank]
        prefix[keeps_order] = 0
        dear[keeps_order] = 0
        sorted_rows.add(*_packed(rank, prefix, dear, found + window.start, columns.sizes(window)[found]))

    def _count(self, rank: np.ndarray) -> np.ndarray:
        return np.bincount(rank, minlength=len(self.labels))


def _packed(rank: np.ndarray, prefix: np.ndarray, dear: np.ndarray, rows: np.ndarray, sizes: np.ndarray) -> Record:
    """Records that sort as the rows run.

    From the highest bit on: rank (16), prefix (60), inverted cost (32), row (32), and its bytes, which decide nothing.
    """
    rows = rows.astype(np.uint64)
    first = rank.astype(np.uint64) << np.uint64(48) | prefix >> np.uint64(12)
    second = (prefix & np.uint64(0xFFF)) << np.uint64(52) | dear << np.uint64(20) | rows >> np.uint64(12)
    return first, second, (rows & np.uint64(0xFFF)) << np.uint64(32) | sizes


def _unpacked(records: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(rank, prefix, row, bytes) of each record."""
    first, second, third = records.T
    prefix = (first & np.uint64(2**48 - 1)) << np.uint64(12) | second >> np.uint64(52)
    rows = (second & np.uint64(0xFFFFF)) << np.uint64(12) | third >> np.uint64(32)
    return first >> np.uint64(48), prefix, rows.astype(np.uint32), (third & _LOW).astype(np.int64)


class _Positions:
    """Writes the row at each position, and sums up what the rows of each label have in common."""

    def __init__(self, file: SummedFile, labels: _Labels) -> None:
        self._file, self._labels = file, labels
        self._shared: dict[int, _Sharing] = {}
        self.at = 0  # the next position
        self.in_place = True  # each row is at the position that is its number

    def add(self, records: np.ndarray) -> None:
        """Add the next rows."""
        rank, prefix, rows, sizes = _unpacked(records)
        expected = np.arange(self.at, self.at + len(rows), dtype=np.uint32)
        self.in_place = self.in_place and np.array_equal(rows, expected)
        self._file.write(rows.tobytes())
        self.at += len(rows)
        edges = [0, *(np.flatnonzero(rank[1:] != rank[:-1]) + 1).tolist(), len(rank)]
        for start, end in pairwise(edges):
            number = int(rank[start])
            if not self._labels.keeps_order[number]:
                sharing = self._shared.setdefault(number, _Sharing())
                sharing.add(prefix[start:end], sizes[start:end])

    def finish(self) -> list[TargetPlan]:
        """The labels that have rows, in the order in which they run."""
        if self.at != int(self._labels.rows.sum()):
            raise LedgerBroken(f"{self.at} rows sorted of {int(self._labels.rows.sum())}")
        return [self._target(number) for number in np.flatnonzero(self._labels.rows + self._labels.folded).tolist()]

    def _target(self, number: int) -> TargetPlan:
        labels, sharing = self._labels, self._shared.get(number) or _Sharing()
        model, adapter = labels.labels[number]
        return TargetPlan(
            model=model, adapter=adapter, rows=int(labels.rows[number]), folded=int(labels.folded[number]),
            tokens=int(labels.tokens[number]), prefix_groups=sharing.groups(), shared_bytes=sharing.shared,
            input_bytes=sharing.size,
        )  # fmt: skip


class _Sharing:
    """What rows in plan order have in common with the row before.

    A group is a run of rows with a prefix in common that is as long as saves most: at 4,096 bytes rows with the same
    long system prompt form one; at 128 the opening words that all rows share would.
    """

    def __init__(self) -> None:
        self.shared = self.size = 0  # bytes in common with the row before, and bytes
        self._deeper = np.zeros(len(LEVELS) + 1, np.int64)  # rows that share at least that many levels with it
        self._begun = np.zeros(len(LEVELS) + 1, np.int64)  # of those, the row before does not
        self._before, self._depth_before = np.zeros(1, np.uint64), np.zeros(1, np.uint8)

    def add(self, keys: np.ndarray, sizes: np.ndarray) -> None:
        """Add the next rows: their prefix keys and bytes."""
        depth = _depth(keys, np.concatenate((self._before, keys[:-1])))
        previous = np.concatenate((self._depth_before, depth[:-1]))
        for level in range(1, len(LEVELS) + 1):
            at_least = depth >= level
            self._deeper[level] += np.count_nonzero(at_least)
            self._begun[level] += np.count_nonzero(at_least & (previous < level))
        self.shared += int(np.minimum(_DEPTH_BYTES[depth], sizes).sum())
        self.size += int(sizes.sum())
        self._before, self._depth_before = keys[-1:].copy(), depth[-1:].copy()

    def groups(self) -> int:
        return int(self._begun[int(np.argmax(self._deeper * _DEPTH_BYTES))])


def _depth(keys: np.ndarray, before: np.ndarray) -> np.ndarray:
    """How many levels each key has in common with the one before; none where there is no key (0)."""
    differ = keys ^ before
    depth = np.zeros(len(keys), np.uint8)
    for level in range(1, len(LEVELS) + 1):
        depth += (differ >> np.uint64(LEVEL_BITS * (len(LEVELS) - level))) == 0
    depth[keys == 0] = 0
    return depth
