"""Finds rows that repeat the custom_id of an earlier row, by hash, and verifies them by reading them.

Memory is 8 bytes a row while the hashes are sorted; rows are read again only where hashes are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from batchmill.datasets.sealed import SealedRows
from batchmill.datasets.validation import id_of

WINDOW_ROWS = 1 << 20
IDS_MAX = 1 << 18  # custom_ids in memory at once: with more candidates the rows are read several times
READ_ROWS = 1024


def find(hashes: Path, rows: SealedRows) -> Iterator[tuple[int, int]]:
    """Yield (row, the first row with its custom_id), in row order."""
    numbers, values = _candidates(hashes)
    shares = len(numbers) // IDS_MAX + 1
    share_of = values.view(np.uint64) % np.uint64(shares)
    pairs = [_repeated(numbers[share_of == share], rows) for share in range(shares)]
    repeated = np.concatenate(pairs)
    for row, first in repeated[np.argsort(repeated[:, 0], kind="stable")]:
        yield int(row), int(first)


def _candidates(hashes: Path) -> tuple[np.ndarray, np.ndarray]:
    """The numbers, ascending, and the hashes of rows that share their hash with another row."""
    values = np.fromfile(hashes, np.int64)
    values.sort()
    shared = np.unique(values[1:][values[1:] == values[:-1]])
    del values
    if not len(shared):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    numbers, hashes_shared = [], []
    with open(hashes, "rb") as file:
        start = 0
        while len(window := np.fromfile(file, np.int64, WINDOW_ROWS)):
            indexes = np.searchsorted(shared, window)
            indexes[indexes == len(shared)] = 0
            hits = np.flatnonzero(shared[indexes] == window)
            numbers.append(hits + start)
            hashes_shared.append(window[hits])
            start += len(window)
    return np.concatenate(numbers), np.concatenate(hashes_shared)


def _repeated(numbers: np.ndarray, rows: SealedRows) -> np.ndarray:
    """[n, 2] int64: rows and the first row with the same custom_id."""
    firsts: dict[str, int] = {}
    pairs: list[tuple[int, int]] = []
    for start in range(0, len(numbers), READ_ROWS):
        batch = numbers[start : start + READ_ROWS].tolist()
        for row, line in zip(batch, rows.read_many(batch), strict=True):
            custom_id = id_of(line)
            if custom_id is None:
                continue
            first = firsts.setdefault(custom_id, row)
            if first != row:
                pairs.append((row, first))
    return np.array(pairs, np.int64).reshape(-1, 2)
