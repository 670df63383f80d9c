"""Arrays over all rows of a job: in files they hold what they hold in memory."""

import os

import numpy as np
import pytest

from batchmill.errors import StorageFull
from batchmill.jobs.results import row_arrays
from batchmill.jobs.results.row_arrays import RESIDENT_ROWS, RowArrays


def test_files_keep_what_was_set(tmp_path):
    """Values survive that their pages leave the process; the file has no name."""
    rows = 3 * RESIDENT_ROWS
    memory, files = RowArrays(tmp_path, rows, piece_rows=rows), RowArrays(tmp_path, rows, piece_rows=rows - 1)
    left, right = memory.full(np.uint64, 7), files.full(np.uint64, 7)
    numbers = np.random.default_rng(1).permutation(rows)
    for part in np.split(numbers, 6):
        for array, owner in ((left, memory), (right, files)):
            array[part] = part
            owner.touch(len(part))
    assert np.array_equal(left, right) and np.array_equal(right, np.arange(rows))
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_said_before_anything_is_set(tmp_path, monkeypatch):
    """Room is taken when an array is made: memory that is written later cannot fail."""

    def refused(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_arrays.os, "posix_fallocate", refused)
    with pytest.raises(StorageFull, match="no room to write"):
        RowArrays(tmp_path, 10, piece_rows=0).full(np.uint32, 0)
