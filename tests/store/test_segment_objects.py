"""Segments as objects: the suite of all segments, and what a dead worker left on its machine or in the store."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from contract.segment_suite import SegmentSuite, block, rows_at

from batchmill.errors import StorageFailed
from batchmill.ports import SegmentSink, SegmentSource
from batchmill.store.objects import StoreObjects
from batchmill.store.segments import files as segment_files
from batchmill.store.segments import objects as segment_objects
from batchmill.store.segments.files import SegmentFolder
from batchmill.store.segments.format import SegmentHead
from batchmill.store.segments.objects import ObjectSegment, ObjectSource, list_objects
from batchmill.types import SegmentRef

JOB = "job_1"


class TestObjectSegments(SegmentSuite):
    """Workers write on one machine, and are read on another."""

    @pytest.fixture(autouse=True)
    def room(self, tmp_path: Path) -> None:
        self.written, self.read = tmp_path / "written", tmp_path / "read"
        self.written.mkdir()
        self.read.mkdir()
        self.objects = StoreObjects(f"file://{tmp_path}/store")

    def sink(self, worker: str = "w1", roll: int = 0) -> SegmentSink:
        return ObjectSegment(self.written, SegmentHead(JOB, "identity", worker), roll, self.objects)

    def source(self) -> SegmentSource:
        segment_objects.settle(self.objects, self.read, JOB)
        return SegmentFolder(self.read)

    def store(self, ref: SegmentRef, blocks: bytes) -> None:
        raise AssertionError("commits carry no blocks: they are objects")

    def names(self) -> list[str]:
        return [name for name, _ in self.objects.list(segment_objects.folder_of(JOB))]

    def test_one_object_for_each_sync(self) -> None:
        """Blocks of one sync are one object; a sync without new blocks puts none."""
        sink = self.sink()
        for rows in ([0], [1], [2]):
            sink.append(block(rows))
        sink.sync()
        sink.sync()
        assert len(self.names()) == 1
        sink.append(block([3]))
        sink.sync()
        assert len(self.names()) == 2

    def test_what_was_spooled_and_not_put(self) -> None:
        """The next owner on the machine puts what a dead worker had written, once; another machine then has it."""
        sink = self.sink()
        sink.append(block([0]))
        sink.sync()
        late = sink.append(block([1]))  # in the kernel, and the worker dies
        segment_objects.settle(self.objects, self.written, JOB)
        names = self.names()
        segment_objects.settle(self.objects, self.written, JOB)
        assert len(names) == 2 and self.names() == names
        with closing(self.source()) as source:
            assert rows_at(source, late) == [1]

    def test_a_full_file_of_a_spool_is_removed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A worker's disk on a node holds the file that it writes to, and what the store does not have; all is read."""
        monkeypatch.setattr(segment_files, "SEGMENT_BYTES_MAX", 1)
        sink = ObjectSegment(self.written, SegmentHead(JOB, "identity", "w1"), 0, self.objects, is_spool=True)
        refs = [sink.append(block([row])) for row in range(3)]
        assert len(list(self.written.iterdir())) == 3
        sink.sync()
        assert [path.name for path in self.written.iterdir()] == [refs[2].segment]
        refs.append(sink.append(block([3])))
        sink.sync()
        with closing(self.source()) as source:
            assert [rows_at(source, ref) for ref in refs] == [[0], [1], [2], [3]]

    def test_a_full_file_that_was_not_put(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Blocks of a file that the store refused are put by the next sync, which does not return before."""
        monkeypatch.setattr(segment_files, "SEGMENT_BYTES_MAX", 1)
        sink = self.sink()
        first = sink.append(block([0]))
        last = sink.append(block([1]))
        put, self.objects.put = self.objects.put, refuse  # type: ignore[method-assign]
        with pytest.raises(StorageFailed):
            sink.sync()
        self.objects.put = put  # type: ignore[method-assign]
        sink.sync()
        sink.close()
        with closing(self.source()) as source:
            assert rows_at(source, first) == [0] and rows_at(source, last) == [1]


def refuse(name: str, data: bytes) -> None:
    raise StorageFailed("the store is away")


class TestObjectSource(TestObjectSegments):
    """Readers that have no folder read the objects."""

    def source(self) -> SegmentSource:
        return ObjectSource(self.objects, JOB, list_objects(self.objects, JOB))
