"""Finds rows that repeat the custom_id of an earlier row, by hash, and verifies them by reading them.

Hashes are sorted in pieces on disk: memory does not grow with the rows, nor with the rows that repeat others. Rows are
read again only where hashes are equal.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from batchmill.datasets.external_sort import ExternalSort, RowCursor
from batchmill.datasets.folders import Folder
from batchmill.datasets.layout import HASHES, PIECE_ROWS
from batchmill.datasets.sealed import SealedRows
from batchmill.datasets.validation import id_of

WINDOW_ROWS = 1 << 20
IDS_MAX = 1 << 18  # rows that are compared at once: their custom_ids are in memory
READ_ROWS = 1024


def find(dataset: Folder, rows: SealedRows, *, piece_rows: int = PIECE_ROWS) -> Iterator[tuple[int, int]]:
    """Yield (row, the first row with its custom_id), in row order.

    Args: piece_rows: rows that are sorted in memory.
    """
    folder, step = dataset.path, min(WINDOW_ROWS, piece_rows)
    with ExternalSort(folder, 1, rows.rows, piece_rows=piece_rows) as repeated:
        with ExternalSort(folder, 2, rows.rows, piece_rows=piece_rows) as by_hash, dataset.open(HASHES) as file:
            start = 0
            while len(window := np.frombuffer(file.read(8 * step), np.uint64)):
                by_hash.add(window, np.arange(start, start + len(window), dtype=np.uint64))
                start += len(window)
            known = _KnownIds(rows)
            for batch in _batches(_shared(by_hash.blocks()), min(IDS_MAX, piece_rows)):
                repeated.add(known.repeated(batch))
        cursor = RowCursor(repeated.blocks())
        for end in range(step, rows.rows + step, step):
            for pair in cursor.until(end).tolist():
                yield pair >> 32, pair & 0xFFFFFFFF


def _shared(blocks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Of sorted records (hash, row) those whose hash another record has, in the same order."""
    held = np.empty((0, 2), np.uint64)  # the last record, whose hash the next block may have
    is_held_shared = False  # with the record before it
    for block in blocks:
        records = np.concatenate((held, block))
        same = np.zeros(len(records) + 1, bool)
        same[1:-1] = records[1:, 0] == records[:-1, 0]
        same[0] = is_held_shared
        shared = (same[1:] | same[:-1])[:-1]
        yield records[:-1][shared]
        held, is_held_shared = records[-1:].copy(), bool(same[len(records) - 1])
    if is_held_shared:
        yield held


def _batches(blocks: Iterator[np.ndarray], size: int) -> Iterator[np.ndarray]:
    for block in blocks:
        for start in range(0, len(block), size):
            yield block[start : start + size]


class _KnownIds:
    """The first row of each custom_id, of as many rows as are compared at once."""

    def __init__(self, rows: SealedRows) -> None:
        self._rows = rows
        self._last = np.uint64(0)  # hash
        self._firsts: dict[str, int] = {}  # of rows with this hash: the next batch may have more of them

    def repeated(self, batch: np.ndarray) -> np.ndarray:
        """row << 32 | first row of those that repeat a custom_id. Args: batch: the next records (hash, row)."""
        if batch[0, 0] != self._last:
            self._firsts = {}
        kept = dict(self._firsts) if batch[-1, 0] == self._last else {}
        self._last = batch[-1, 0]
        pairs = []
        by_row = batch[np.argsort(batch[:, 1])]
        is_last = (by_row[:, 0] == self._last).tolist()
        for row, custom_id, may_continue in zip(by_row[:, 1].tolist(), self._ids(by_row), is_last, strict=True):
            if custom_id is None:
                continue
            first = self._firsts.setdefault(custom_id, row)
            if first != row:
                pairs.append(row << 32 | first)
            if may_continue:
                kept[custom_id] = first
        self._firsts = kept
        return np.array(pairs, np.uint64)

    def _ids(self, batch: np.ndarray) -> Iterator[str | None]:
        for start in range(0, len(batch), READ_ROWS):
            yield from map(id_of, self._rows.read_many(batch[start : start + READ_ROWS, 1].tolist()))
