"""The records of an index: every digest is found where it was written, and no damaged byte is believed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from batchmill.jobs.intake.reuse_orders import VERSION, IndexHead, Section, read_head, write_head
from batchmill.jobs.intake.reuse_sections import (
    BLOCK_BYTES,
    BLOCK_ROWS,
    RECORD_WORDS,
    RUN_BLOCKS,
    WORDS,
    Damaged,
    SectionFiles,
    records_path,
    table_path,
    write_section,
)
from batchmill.owned_files import OwnedFiles

ALIKE = 2 * BLOCK_ROWS + 5  # digests that begin with the same 64 bits: they fill whole blocks


def records_of(rows: int) -> np.ndarray:
    """Records in order, some of which begin alike. The places tell them apart."""
    random = np.random.default_rng(7)
    records = random.integers(0, 2**64, (rows, RECORD_WORDS), np.uint64)
    records[: min(ALIKE, rows), 0] = 2**63
    records = records[np.lexsort(records[:, :WORDS].T[::-1])]
    records[:, WORDS] = np.arange(rows)
    return records


def write(home: Path, records: np.ndarray) -> Section:
    """In pieces whose bounds are not those of blocks."""
    return write_section(home, 0, "key", np.array_split(records, max(1, len(records) // 700)))


def find(home: Path, section: Section, wanted: np.ndarray, **options) -> dict[int, int]:
    """Number of a wanted digest -> the first word of its place."""
    with closing(SectionFiles(home, section, **options)) as files:
        found, places = files.find(wanted)
    return dict(zip(found.tolist(), places[:, 0].tolist(), strict=True))


@pytest.mark.parametrize("rows", [1, BLOCK_ROWS, BLOCK_ROWS + 1, (2 * RUN_BLOCKS + 3) * BLOCK_ROWS])
@pytest.mark.parametrize("share", [1.0, 0.01])
def test_every_digest_is_found_and_no_other(tmp_path, rows, share):
    """Among as many that are not there, some of which begin like those that are, or come before or after all."""
    records = records_of(rows)
    section = write(tmp_path, records)
    assert section.rows == rows
    random = np.random.default_rng(8)
    chosen = np.flatnonzero(random.random(rows) <= share) if rows > 1 else np.arange(1)
    known, strange = records[chosen, :WORDS], records[chosen, :WORDS] ^ np.array([0, 0, 0, 1], np.uint64)
    ends = np.array([[0, 1, 2, 3], [2**64 - 1, 1, 2, 3]], np.uint64)
    wanted = np.concatenate((known, strange, random.integers(0, 2**64, known.shape, np.uint64), ends))
    expected = np.concatenate((chosen, np.full(len(wanted) - len(chosen), -1)))
    order = np.argsort(wanted[:, 0])
    found = find(tmp_path, section, wanted[order])
    assert found == {at: row for at, row in enumerate(expected[order].tolist()) if row >= 0}


def test_of_equal_digests_the_first_is_kept(tmp_path):
    """Also where they come in two pieces."""
    records = np.repeat(records_of(10), 3, axis=0)
    section = write_section(tmp_path, 0, "key", [records[:4], records[4:]])
    assert section.rows == 10
    assert find(tmp_path, section, records[::3, :WORDS]) == {n: n for n in range(10)}


def test_an_empty_index(tmp_path):
    section = write_section(tmp_path, 0, "key", [])
    assert find(tmp_path, section, records_of(3)[:, :WORDS]) == {}


def test_damaged_blocks_are_not_believed(tmp_path):
    """A changed bit raises, and so does a file that was cut; of an index that cannot be made anew, the rest counts."""
    records = records_of(8 * BLOCK_ROWS)
    section, path = write(tmp_path, records), records_path(tmp_path, 0)
    order = np.argsort(records[:, 0], kind="stable")
    wanted = records[order, :WORDS]
    sound = path.read_bytes()
    changed = bytearray(sound)
    changed[3 * BLOCK_BYTES + 100] ^= 1
    for data, lost in ((bytes(changed), {3}), (sound[: 6 * BLOCK_BYTES + 8], {6, 7}), (b"", set(range(8)))):
        path.write_bytes(data)
        with pytest.raises(Damaged):
            find(tmp_path, section, wanted)
        found = find(tmp_path, section, wanted, is_partial=True)
        assert {row // BLOCK_ROWS for row in found.values()} == set(range(8)) - lost
        assert all(order[at] == row for at, row in found.items())
        untouched = wanted[-BLOCK_ROWS:]
        if 7 not in lost:
            assert len(find(tmp_path, section, untouched)) == BLOCK_ROWS  # what is not read is not checked
    path.write_bytes(sound)
    table = table_path(tmp_path, 0)
    data = bytearray(table.read_bytes())
    for wrong in (data[:-1], bytes(len(data))):
        table.write_bytes(wrong)
        with pytest.raises(Damaged):
            find(tmp_path, section, wanted)


def test_a_head_that_is_not_what_was_written_is_none(tmp_path):
    """Nor is one of another version, job or generation, and an empty or cut file."""
    head = IndexHead(VERSION, "job_1", 0, ["a.seg"], [Section("key", 0, 3, 4)])
    write_head(tmp_path, head, OwnedFiles())
    path = tmp_path / "index.json"
    data = path.read_bytes()
    assert read_head(tmp_path, "job_1", 0) == head
    assert read_head(tmp_path, "job_2", 0) is None and read_head(tmp_path, "job_1", 1) is None
    for wrong in (b"", data[:-1], data[9:], data.replace(b"a.seg", b"b.seg")):
        path.write_bytes(wrong)
        assert read_head(tmp_path, "job_1", 0) is None
    write_head(tmp_path, IndexHead(VERSION + 1, "job_1", 0, ["a.seg"], []), OwnedFiles())
    assert read_head(tmp_path, "job_1", 0) is None
