"""Repeated custom_ids, found by hash in pieces: exactly those that a dictionary of all ids finds."""

from array import array

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill.datasets import duplicates
from batchmill.datasets.folders import DiskFolder, MemoryFolder
from batchmill.datasets.layout import HASHES


class Rows:
    """A dataset as far as duplicates read it: the lines by number."""

    def __init__(self, ids: list[str]) -> None:
        self.rows = len(ids)
        self._lines = [msgspec.json.encode({"custom_id": each}) if each else b"{}" for each in ids]

    def read_many(self, numbers: list[int]) -> list[bytes]:
        return [self._lines[number] for number in numbers]


def reference(ids: list[str]) -> list[tuple[int, int]]:
    firsts: dict[str, int] = {}
    pairs = [(row, firsts.setdefault(each, row)) for row, each in enumerate(ids) if each]
    return [(row, first) for row, first in pairs if row != first]


@settings(deadline=None, max_examples=150)
@given(
    ids=st.lists(st.sampled_from(["", "a", "b", "c", "d", "e", "f"]), max_size=70),
    hashes=st.lists(st.sampled_from([0, 1, 2**64 - 1, 2**62]), min_size=7, max_size=7),
    piece_rows=st.integers(1, 12),
)
def test_repeated_ids_are_those_of_a_dictionary(tmp_path_factory, ids, hashes, piece_rows):
    """Rows whose hashes are equal by chance repeat nothing; of equal ids every row but the first is reported."""
    dataset = MemoryFolder(tmp_path_factory.mktemp("hashes"))
    kinds = ["", "a", "b", "c", "d", "e", "f"]
    dataset.write(HASHES, array("Q", [hashes[kinds.index(each)] for each in ids]).tobytes())
    assert list(duplicates.find(dataset, Rows(ids), piece_rows=piece_rows)) == reference(ids)


def test_an_id_that_all_rows_have(tmp_path):
    """A group larger than what is compared at once is one group."""
    dataset = DiskFolder(tmp_path)
    dataset.write(HASHES, array("Q", [9]).tobytes() * 500)
    assert list(duplicates.find(dataset, Rows(["same"] * 500), piece_rows=7)) == [(row, 0) for row in range(1, 500)]
