"""The contract suite over every place for segments."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest
from contract.segment_suite import SegmentSuite, block, rows_at

from batchmill.ports.storage import SegmentSink, SegmentSource
from batchmill.store.segments import blocks as segment_blocks
from batchmill.store.segments import format as segments
from batchmill.store.segments.blocks import CarriedSegment, open_segments
from batchmill.store.segments.files import SegmentFile
from batchmill.store.segments.format import SegmentHead
from batchmill.types import SegmentPlace, SegmentRef


class TestSegmentFiles(SegmentSuite):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def sink(self, worker: str = "w1", roll: int = 0) -> SegmentSink:
        return SegmentFile(self.folder, SegmentHead("job_1", "same", worker), roll)

    def source(self) -> SegmentSource:
        return open_segments(SegmentPlace(str(self.folder)))

    def store(self, ref: SegmentRef, blocks: bytes) -> None:
        raise AssertionError("a file needs no commit to carry blocks")


class TestCarriedSegments(SegmentSuite):
    """Blocks that commits carry to the database."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder, self.stored = tmp_path / "segments", {}

    def sink(self, worker: str = "w1", roll: int = 0) -> SegmentSink:
        head = SegmentHead("job_1", "same", worker)
        return CarriedSegment(head, partial(self._open_file, head), roll)

    def _open_file(self, head: SegmentHead, roll: int) -> SegmentFile:
        self.folder.mkdir(exist_ok=True)
        return SegmentFile(self.folder, head, roll)

    def source(self) -> SegmentSource:
        return open_segments(SegmentPlace(str(self.folder), self.stored))

    def store(self, ref: SegmentRef, blocks: bytes) -> None:
        self.stored.setdefault(ref.segment, []).append((ref.offset, blocks))

    def test_nothing_is_written_while_commits_carry_it(self):
        """Blocks of few bytes make no file, not even a folder."""
        sink = self.sink()
        self.commit(sink, sink.append(block([0])))
        sink.close()
        assert not self.folder.exists() and sink.is_acknowledged

    def test_long_blocks_go_to_a_file(self, monkeypatch):
        """A block that is too long, or one too many, goes to a file, and so do all after it."""
        size_bytes = len(block([0]))
        monkeypatch.setattr(segment_blocks, "CARRIED_BYTES_MAX", 2 * size_bytes)
        sink = self.sink()
        refs = [sink.append(block([row])) for row in range(4)]
        monkeypatch.setattr(segment_blocks, "BLOCK_BYTES_MAX", size_bytes - 1)
        other = self.sink("w2")
        refs.append(other.append(block([4])))
        for ref in refs:
            self.commit(sink if ref.segment.startswith("w1") else other, ref)
        assert [ref.segment.endswith(segment_blocks.CARRIED) for ref in refs] == [True, True, False, False, False]
        with closing(self.source()) as source:
            assert [rows_at(source, ref) for ref in refs] == [[0], [1], [2], [3], [4]]
            assert len(source.names("w1")) == 2

    def test_a_refused_commit_spills_its_own_blocks(self):
        """The blocks of a commit that does not count are written to a file; other commits still carry theirs."""
        sink = self.sink()
        refused, other = sink.append(block([0])), sink.append(block([1]))
        sink.spill_refused(refused)
        assert not sink.carried(refused) and len(sink.carried(other)) == other.length
        self.commit(sink, other)
        with closing(self.source()) as source:
            (name,) = [name for name in source.names() if name.endswith(".seg")]
            assert [found.row for found in segments.scan(source, name)] == [0]

    def test_what_nobody_acknowledged_is_spilled(self):
        """Blocks whose commit was not acknowledged are written to a file, once; the others are not."""
        sink = self.sink()
        kept, lost = sink.append(block([0])), sink.append(block([1]))
        self.commit(sink, kept)
        assert sink.carried(lost)
        sink.spill()
        sink.spill()
        with closing(self.source()) as source:
            (name,) = [name for name in source.names() if name.endswith(".seg")]
            assert [found.row for found in segments.scan(source, name)] == [1]
