"""What is found in a damaged segment: every block that is sound, and where the others were."""

from __future__ import annotations

import pytest

from batchmill.store.segments import format as segments
from batchmill.store.segments.files import SegmentFile
from batchmill.store.segments.format import Block, BlockMeta, BlockRows, Damage, SegmentHead, salvage


def write(folder, parts: list[list[int]]) -> tuple[SegmentFile, list]:
    file = SegmentFile(folder, SegmentHead("job_1", "abc", "w1"))
    refs = []
    for rows in parts:
        lines = [b'{"row":%d,"text":"BMBK"}\n' % row for row in rows]
        part = BlockRows(rows, rows, lines)
        refs.append(file.append(segments.frame(part, generation=0, shard=0, epoch=1, ok=True, meta=BlockMeta())))
    file.close()
    return file, refs


def test_damage_anywhere_costs_one_block(tmp_path, source):
    """Whatever byte of a block is damaged, the blocks before and behind it are found, and the damage is that block."""
    file, refs = write(tmp_path, [[0, 1], [7, 3], [4, 5]])
    data, middle = (tmp_path / file.name).read_bytes(), refs[1]
    for at in range(middle.offset, middle.offset + middle.length):
        (tmp_path / "bad.seg").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        first, damage, last = salvage(source, "bad.seg")
        assert isinstance(first, Block) and isinstance(damage, Damage) and isinstance(last, Block)
        assert (first.offset, last.offset) == (refs[0].offset, refs[2].offset)
        assert (damage.offset, damage.length, damage.is_tail) == (middle.offset, middle.length, False)
        in_header = at < middle.offset + segments.HEADER_BYTES
        assert damage.rows == (None if in_header else 2)


def test_a_damaged_head_costs_no_block(tmp_path, source):
    """A segment whose own head is damaged still yields its blocks."""
    file, refs = write(tmp_path, [[0, 1], [2]])
    data = (tmp_path / file.name).read_bytes()
    (tmp_path / "bad.seg").write_bytes(b"x" + data[1:])
    damage, *found = salvage(source, "bad.seg")
    assert isinstance(damage, Damage) and [block.offset for block in found] == [ref.offset for ref in refs]
    assert segments.read_head(source, "bad.seg") is None


@pytest.mark.parametrize("search", [5, 61, 1024])
def test_a_search_reads_a_little_at_a_time(tmp_path, source, monkeypatch, search):
    """A block behind much garbage is found, wherever the pieces that are read end."""
    monkeypatch.setattr(segments, "SEARCH_BYTES", search)
    file, refs = write(tmp_path, [[0], [1]])
    data = (tmp_path / file.name).read_bytes()
    cut = refs[1].offset
    garbage = b"BMBK, BMB and BM" * 40 + b"BMB"
    (tmp_path / "bad.seg").write_bytes(data[:cut] + garbage + data[cut:])
    _, damage, last = salvage(source, "bad.seg")
    assert (damage.offset, damage.length) == (cut, len(garbage))
    assert last.row == 1


def test_a_torn_tail_is_told_from_damage(tmp_path, source):
    """A block that was being written when its writer died is the tail of the file."""
    file, refs = write(tmp_path, [[0], [1, 2]])
    data = (tmp_path / file.name).read_bytes()
    (tmp_path / "torn.seg").write_bytes(data[: refs[1].offset + refs[1].length - 3])
    _, tail = salvage(source, "torn.seg")
    assert isinstance(tail, Damage) and tail.is_tail and tail.rows is None
