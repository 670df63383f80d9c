"""The states of all rows of a job: in a file they are what they are in memory."""

from __future__ import annotations

import os
import random

import pytest

from batchmill.errors import StorageFull
from batchmill.jobs.ledger import row_states
from batchmill.jobs.ledger.row_states import RowStates

ROWS = 50_000


def test_a_file_keeps_what_was_set(tmp_path, monkeypatch):
    """States are kept in whichever order and however far apart they are set; the file has no name."""
    monkeypatch.setattr(row_states, "WINDOW_BYTES", 16_384)
    monkeypatch.setattr(row_states, "STEP_ROWS", 15_000)
    memory, file = RowStates(tmp_path, ROWS, in_memory_rows=ROWS), RowStates(tmp_path, ROWS, in_memory_rows=ROWS - 1)
    numbers = list(range(ROWS))
    random.Random(1).shuffle(numbers)
    for states in memory, file:
        states.put(numbers[:20_000], bytes(number % 3 for number in numbers[:20_000]))
        states.put(range(10, 5_000), b"\2" * 4_990)
        states.put([3, ROWS - 1, 3, 12_345], b"\0\2\1\2")  # the last one of a row counts
    assert file.of([ROWS - 1, 3]) == memory.of([ROWS - 1, 3]) == b"\2\1"
    assert file.of(numbers[:100]) == memory.of(numbers[:100])
    assert file.of(range(5_100)) == file.read(0, 5_100) == memory.read(0, 5_100)
    assert [file.count(state) for state in range(3)] == [memory.count(state) for state in range(3)]
    assert file.read(0, ROWS) == memory.read(0, ROWS)
    assert os.listdir(tmp_path) == []
    memory.close()
    file.close()


def test_a_full_disk_is_said_before_anything_is_set(tmp_path, monkeypatch):
    """Room is taken when the states are made: memory that is written later cannot fail."""

    def refused(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_states.os, "posix_fallocate", refused)
    with pytest.raises(StorageFull, match="no room to write"):
        RowStates(tmp_path, ROWS, in_memory_rows=0)
