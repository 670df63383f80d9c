"""Sorting in pieces: whatever the size of a piece, the records come as one sort in memory gives them."""

import os

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill.datasets.external_sort import ExternalSort, RowCursor

few = st.sampled_from([0, 1, 2, 2**32, 2**63, 2**64 - 1])
keys = st.lists(st.tuples(few, few), max_size=80)


def sorted_in_pieces(folder, rows: list[tuple[int, ...]], piece_rows: int, step: int) -> list[tuple[int, ...]]:
    with ExternalSort(folder, 3, len(rows), piece_rows=piece_rows) as sorting:
        for start in range(0, len(rows), step):
            sorting.add(*np.array(rows[start : start + step], np.uint64).T)
        return [tuple(record) for block in sorting.blocks() for record in block.tolist()]


@settings(deadline=None, max_examples=150)
@given(keys=keys, piece_rows=st.integers(1, 30), step=st.integers(1, 40), is_sorted=st.booleans())
def test_records_come_in_order(tmp_path_factory, keys, piece_rows, step, is_sorted):
    """Records of several columns come sorted, whatever came together, is sorted already, or begins equally."""
    folder = tmp_path_factory.getbasetemp()
    rows = [(*key, number) for number, key in enumerate(sorted(keys) if is_sorted else keys)]
    assert sorted_in_pieces(folder, rows, piece_rows, step) == sorted(rows)


def test_one_column_may_be_the_same_in_all_records(tmp_path):
    """A key that every record has costs no memory: nothing is routed by it."""
    rows = [(7, 7 - number % 2, number) for number in range(1000)]
    assert sorted_in_pieces(tmp_path, rows, 8, 100) == rows[1::2] + rows[::2]


def test_nothing_is_left(tmp_path):
    """The files of the runs have no names, while it sorts and after."""
    with ExternalSort(tmp_path, 1, 100, piece_rows=10) as sorting:
        sorting.add(np.arange(100, dtype=np.uint64)[::-1])
        assert len(next(sorting.blocks())) and os.listdir(tmp_path) == []


@settings(deadline=None, max_examples=60)
@given(rows=st.sets(st.integers(0, 50)), piece_rows=st.integers(1, 9), step=st.integers(1, 20))
def test_a_cursor_gives_each_row_once(tmp_path_factory, rows, piece_rows, step):
    """Records are taken up to a row, in order, each once, whatever block they are in."""
    with ExternalSort(tmp_path_factory.getbasetemp(), 1, 51, piece_rows=piece_rows) as sorting:
        sorting.add(np.array([row << 32 | 5 for row in rows], np.uint64))
        cursor, found = RowCursor(sorting.blocks()), []
        for end in range(step, 51 + step, step):
            taken = [int(record) >> 32 for record in cursor.until(end)]
            assert taken == sorted(row for row in rows if end - step <= row < end)
            found += taken
    assert found == sorted(rows)
