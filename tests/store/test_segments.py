"""Segments: what is written whole is read back whole, and nothing else is."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.errors import LedgerBroken
from batchmill.store.segments import files as segment_files
from batchmill.store.segments import format as segments
from batchmill.store.segments.files import SegmentFile, SegmentFolder
from batchmill.store.segments.format import BlockMeta, BlockRows, SegmentHead
from batchmill.store.sql.positions import pack_parts, pack_positions, unpack_positions
from batchmill.types import SegmentRef, Usage

HEAD = SegmentHead("job_1", "abc", "w1")


def block(rows: list[int], *, ok: bool = True, positions: list[int] | None = None) -> bytes:
    part = BlockRows(positions or rows, rows, [b'{"row":%d}\n' % row for row in rows])
    return segments.frame(part, generation=0, shard=3, epoch=2, ok=ok, meta=BlockMeta(Usage(1, 0, 2)))


def lines_of(source: SegmentFolder, found: segments.Block) -> list[bytes]:
    return segments.read_payload(source, found).splitlines(keepends=True)


@given(st.lists(st.permutations(range(20)).map(lambda rows: rows[:7]), min_size=1, max_size=5))
def test_round_trip(tmp_path_factory, parts):
    """Blocks come back with their rows, positions, lengths and sums, in any order of rows."""
    folder = tmp_path_factory.mktemp("segments")
    file = SegmentFile(folder, HEAD)
    for rows in parts:
        file.append(block(rows, positions=[row + 100 for row in rows]))
    file.close()
    with closing(SegmentFolder(folder)) as source:
        found = list(segments.scan(source, file.name))
        assert [list(b.rows()) for b in found] == [list(rows) for rows in parts]
        assert [list(b.positions()) for b in found] == [[row + 100 for row in rows] for rows in parts]
        assert all(lines_of(source, b) == [b'{"row":%d}\n' % row for row in b.rows()] for b in found)
        assert all(b.meta.usage == Usage(1, 0, 2) and (b.shard, b.epoch) == (3, 2) for b in found)
        assert segments.read_head(source, file.name) == HEAD


def test_contiguous_rows_need_no_table(tmp_path, source):
    """Rows that run on without a gap cost a header and no table."""
    file = SegmentFile(tmp_path, HEAD)
    file.append(block(list(range(5, 9))))
    file.close()
    (found,) = segments.scan(source, file.name)
    assert found.table is None and list(found.rows()) == [5, 6, 7, 8]


def test_torn_tail_at_every_byte(tmp_path, source):
    """A segment cut anywhere in its last block still yields every block before it, and nothing of the torn one."""
    file = SegmentFile(tmp_path, HEAD)
    first = file.append(block([1, 2]))
    last = file.append(block([9, 3]))
    file.close()
    data = (tmp_path / file.name).read_bytes()
    for cut in range(last.offset, last.offset + last.length):
        (tmp_path / "cut.seg").write_bytes(data[:cut])
        assert [b.offset for b in segments.scan(source, "cut.seg")] == [first.offset]


def test_every_flipped_bit_is_seen(tmp_path, source):
    """A single flipped bit in a committed range is an error and never a row."""
    file = SegmentFile(tmp_path, HEAD)
    ref = file.append(block([4, 2]))
    file.close()
    data = (tmp_path / file.name).read_bytes()
    for at in range(ref.offset, ref.offset + ref.length):
        (tmp_path / "bad.seg").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(LedgerBroken):
            segments.read_ref(source, SegmentRef("bad.seg", ref.offset, ref.length))


def test_zeros_after_the_end_are_no_block(tmp_path, source):
    """A tail of zeros, as a power cut may leave it, is not a block."""
    file = SegmentFile(tmp_path, HEAD)
    file.append(block([1]))
    file.close()
    with open(tmp_path / file.name, "ab") as tail:
        tail.write(bytes(4096))
    assert len(list(segments.scan(source, file.name))) == 1


def test_rolls_to_another_file(tmp_path, source, monkeypatch):
    """A full segment is followed by another, and both are synced."""
    monkeypatch.setattr(segment_files, "SEGMENT_BYTES_MAX", 100)
    file = SegmentFile(tmp_path, HEAD)
    refs = [file.append(block([row])) for row in range(3)]
    file.sync()
    assert len({ref.segment for ref in refs}) > 1
    assert [b.row for ref in refs for b in segments.read_ref(source, ref)] == [0, 1, 2]
    file.close()


@given(st.sets(st.integers(0, 300)))
def test_positions_pack_as_runs(positions):
    """Packed positions are the same set, as disjoint runs."""
    runs = list(unpack_positions(pack_positions(sorted(p + 50 for p in positions), 50)))
    assert {p for start, count in runs for p in range(start, start + count)} == positions
    assert sum(count for _, count in runs) == len(positions)


def test_a_worker_never_writes_a_file_twice(tmp_path):
    """A worker that opens a job again goes on with another file."""
    first = SegmentFile(tmp_path, HEAD)
    first.append(block([1]))
    first.close()
    again = SegmentFile(tmp_path, HEAD, first.roll)
    again.append(block([2]))
    again.close()
    assert len(list(tmp_path.glob("*.seg"))) == 2


def test_disk_full_is_final(tmp_path, source, monkeypatch):
    """A failed sync is reported, nothing can be appended after it, and what it left unsure is not found again."""
    file = SegmentFile(tmp_path, HEAD)
    kept = file.append(block([1]))
    file.sync()
    file.append(block([2]))

    def refuse(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment_files.os, "fdatasync", refuse)
    with pytest.raises(OSError, match="No space"):
        file.sync()
    with pytest.raises(OSError, match="earlier"):
        file.append(block([3]))
    assert [b.offset for b in segments.scan(source, file.name)] == [kept.offset]
    file.close()


def test_an_append_beside_a_failing_sync_leaves_no_file_without_a_head(tmp_path, source, monkeypatch):
    """What is appended while a sync fails is dropped with the rest, or refused: blocks never stand in a file that has
    lost its head."""
    file = SegmentFile(tmp_path, HEAD)
    file.append(block([0]))
    is_syncing, is_writing, real = threading.Event(), threading.Event(), os.write

    def refuse(fd: int) -> None:
        is_syncing.set()
        assert is_writing.wait(60)
        raise OSError(errno.EIO, "Input/output error")

    def write(fd: int, data: memoryview) -> int:
        is_writing.set()
        failing.join(0.1)  # the file is taken back here, or once this has been written
        return real(fd, data)

    def sync() -> None:
        with pytest.raises(OSError, match="Input/output"):
            file.sync()

    failing = threading.Thread(target=sync)
    monkeypatch.setattr(segment_files.os, "fdatasync", refuse)
    failing.start()
    assert is_syncing.wait(60)
    with monkeypatch.context() as patched:
        patched.setattr(segment_files.os, "write", write)
        file.append(block([1]))
    failing.join()
    assert segments.read_head(source, file.name) is not None or (tmp_path / file.name).stat().st_size == 0
    file.close()


def test_a_failed_sync_of_a_full_file_keeps_what_was_synced(tmp_path, source, monkeypatch):
    """A file that becomes full while its sync fails keeps what had reached the disk before, and nothing after it."""
    file = SegmentFile(tmp_path, HEAD)
    kept = file.append(block([0]))
    file.sync()
    file.append(block([1]))

    def refuse(fd: int) -> None:
        monkeypatch.setattr(segment_files, "SEGMENT_BYTES_MAX", 1)
        file.append(block([2]))  # meanwhile, into another file
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(segment_files.os, "fdatasync", refuse)
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    assert file.name != kept.segment
    assert [b.offset for b in segments.scan(source, kept.segment)] == [kept.offset]
    file.close()


def test_a_sync_covers_what_another_one_is_bringing_to_the_disk(tmp_path, monkeypatch):
    """A sync that finds another one at work ends after it: a full file that the other one took is on the disk then."""
    file = SegmentFile(tmp_path, HEAD)
    file.append(block([0]))
    monkeypatch.setattr(segment_files, "SEGMENT_BYTES_MAX", 1)
    file.append(block([1]))
    other, real = threading.Thread(target=file.sync), os.fdatasync

    def slow(fd: int) -> None:
        monkeypatch.setattr(segment_files.os, "fdatasync", real)
        other.start()
        other.join(0.1)
        assert other.is_alive()
        real(fd)

    monkeypatch.setattr(segment_files.os, "fdatasync", slow)
    file.sync()
    other.join()
    file.close()


HIDDEN = segments.BLOCK_MAGIC * 2 + b"\0" + segments.BLOCK_MAGIC + b"end\n"


@pytest.mark.parametrize("rows", [[4, 5, 6], [9, 4, 6]])
def test_columns_come_back_as_they_were(tmp_path, source, rows):
    """A block of columns keeps bytes that look like the begin of a header, and has no lengths of lines."""
    file = SegmentFile(tmp_path, HEAD)
    payload = block([1, 2]) + HIDDEN
    data = segments.frame_columns(payload, rows, rows, generation=0, shard=3, epoch=2, meta=BlockMeta(Usage(1, 0, 2)))
    file.append(data)
    file.close()
    (found,) = segments.scan(source, file.name)
    assert (found.is_columnar, found.ok, list(found.rows()), found.line_lengths()) == (True, True, rows, None)
    assert found.meta.usage == Usage(1, 0, 2)
    assert segments.read_payload(source, found) == payload


def test_columns_never_look_like_a_block_to_a_salvage(tmp_path, source):
    """A whole valid block inside a damaged block of columns is not found: user code may have written it there."""
    file = SegmentFile(tmp_path, HEAD)
    whole = block([7, 8])
    file.append(segments.frame_columns(whole, [1, 2], [1, 2], generation=0, shard=3, epoch=2, meta=BlockMeta()))
    file.append(block([3]))
    file.close()
    path = tmp_path / file.name
    data = bytearray(path.read_bytes())
    at = data.index(segments.BLOCK_MAGIC)
    data[at : at + 8] = bytes(8)  # the header of the columns is gone
    path.write_bytes(data)
    found = [each for each in segments.salvage(source, file.name) if isinstance(each, segments.Block)]
    assert [list(each.rows()) for each in found] == [[3]]


def test_positions_of_several_blocks_pack_together():
    """Parts that follow each other are one run, whatever their order; a position that comes twice counts twice."""
    assert list(unpack_positions(pack_parts([range(5, 9), [9, 10], range(5), []], 0))) == [(0, 11)]
    assert sum(count for _, count in unpack_positions(pack_parts([range(5), [3, 4, 4]], 0))) == 8
