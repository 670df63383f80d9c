"""What every place for segments promises: subclass SegmentSuite and give it a sink and a source."""

from __future__ import annotations

from contextlib import closing

import pytest

from batchmill.ports.storage import SegmentSink, SegmentSource
from batchmill.store.segments import format as segments
from batchmill.store.segments.format import BlockMeta, BlockRows
from batchmill.types import SegmentRef, Usage


def block(rows: list[int], *, epoch: int = 1) -> bytes:
    part = BlockRows(rows, rows, [b'{"row":%d}\n' % row for row in rows])
    return segments.frame(part, generation=0, shard=0, epoch=epoch, ok=True, meta=BlockMeta(Usage(1, 0, 2)))


def rows_at(source: SegmentSource, ref: SegmentRef) -> list[int]:
    return [row for found in segments.read_ref(source, ref) for row in found.rows()]


class SegmentSuite:
    def sink(self, worker: str = "w1", roll: int = 0) -> SegmentSink:
        """The sink of a worker, for the same job each time."""
        raise NotImplementedError

    def source(self) -> SegmentSource:
        """A source of all that the job has by now."""
        raise NotImplementedError

    def store(self, ref: SegmentRef, blocks: bytes) -> None:
        """Store what a commit carried, as the ledger does."""
        raise NotImplementedError

    def commit(self, sink: SegmentSink, ref: SegmentRef) -> None:
        """What worker and owner do with a range."""
        sink.sync()
        if blocks := sink.carried(ref):
            assert len(blocks) == ref.length
            self.store(ref, blocks)
        sink.acknowledge(ref)

    def test_committed_blocks_are_read_back(self):
        """Every committed range is read back as it was, in any order of commits, also when its worker has gone."""
        sink = self.sink()
        refs = [sink.append(block([3 * n, 3 * n + 2])) for n in range(5)]
        for ref in reversed(refs):
            self.commit(sink, ref)
        sink.close()
        with closing(self.source()) as source:
            assert [rows_at(source, ref) for ref in refs] == [[3 * n, 3 * n + 2] for n in range(5)]
            (found,) = segments.read_ref(source, refs[1])
            assert segments.read_payload(source, found) == b'{"row":3}\n{"row":5}\n'
            assert segments.read_block(source, refs[2].segment, refs[2].offset).row == 6

    def test_adjacent_ranges_are_one(self):
        """Ranges that follow each other may be committed and read as one."""
        sink = self.sink()
        first, second = sink.append(block([0])), sink.append(block([1]))
        assert (first.segment, first.offset + first.length) == (second.segment, second.offset)
        whole = SegmentRef(first.segment, first.offset, first.length + second.length)
        self.commit(sink, whole)
        with closing(self.source()) as source:
            assert rows_at(source, whole) == [0, 1]
        sink.close()

    def test_a_read_ends_with_the_segment(self):
        """Fewer bytes than wanted come only at the end of a segment."""
        sink = self.sink()
        ref = sink.append(block([0]))
        self.commit(sink, ref)
        with closing(self.source()) as source:
            size = source.size(ref.segment)
            assert size == ref.offset + ref.length
            assert len(source.read(ref.segment, ref.offset, ref.length + 100)) == ref.length
            assert source.read(ref.segment, size, 10) == b""
        sink.close()

    def test_what_is_not_there(self):
        """A segment that does not exist is told from an empty one, and has a place in messages."""
        with closing(self.source()) as source:
            for read in (source.size, lambda name: source.read(name, 0, 1)):
                with pytest.raises(FileNotFoundError):
                    read("nobody-0001.seg")
            assert "nobody-0001.seg" in source.where("nobody-0001.seg")

    def test_names_are_never_used_twice(self):
        """A later sink of a worker, and another worker, write other bytes: no reference gets a second meaning."""
        found = []
        first = self.sink()
        found.append(first.append(block([0])))
        self.commit(first, found[0])
        first.close()
        for sink in (self.sink(roll=first.roll), self.sink("w2")):
            ref = sink.append(block([len(found)]))
            self.commit(sink, ref)
            sink.close()
            found.append(ref)
        assert len({(ref.segment, ref.offset) for ref in found}) == 3
        with closing(self.source()) as source:
            assert [rows_at(source, ref) for ref in found] == [[0], [1], [2]]

    def test_blocks_that_no_commit_names_are_found(self):
        """A block that was appended and synced is durable: it is carried by its commit, or a source finds it."""
        sink = self.sink("w7")
        ref = sink.append(block([4]))
        sink.sync()
        if sink.carried(ref):
            assert sink.carried(ref) == block([4])
        else:
            with closing(self.source()) as source:
                assert source.names("w7") == [ref.segment] and source.names("w8") == []
                source.sync(ref.segment)
                assert rows_at(source, ref) == [4]
        sink.acknowledge(ref)
        sink.close()
