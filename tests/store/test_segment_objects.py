"""Segments as objects: the suite of all segments, and what a dead worker left on its machine or in the store."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from contract.segment_suite import SegmentSuite, block, rows_at

from batchmill.checksums import checksum
from batchmill.errors import StorageFailed
from batchmill.jobs.intake.reuse_results import ResultFiles
from batchmill.ports.storage import SegmentSink, SegmentSource
from batchmill.store.objects import StoreObjects
from batchmill.store.segments import files as segment_files
from batchmill.store.segments import objects as segment_objects
from batchmill.store.segments.files import SegmentFolder
from batchmill.store.segments.format import SegmentHead
from batchmill.store.segments.objects import JOBS_LISTED_MAX, ObjectSegment, ObjectSource, ObjectSpans, list_objects
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


class Ranges(StoreObjects):
    """Notes what is read of each object."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.read: list[tuple[str, int, int]] = []

    def get_range(self, info, start, end):
        self.read.append((info.key.rpartition("/")[2], start, end))
        return super().get_range(info, start, end)


def test_spans_of_segments(tmp_path: Path) -> None:
    """Exactly the bytes of each span are read, from as many objects as hold them; a gap ends its span."""
    objects, folder = Ranges(f"file://{tmp_path}"), segment_objects.folder_of(JOB)
    data = bytes(range(100))
    for start, end in ((0, 10), (10, 30), (30, 40), (50, 100)):  # one is missing
        objects.put(segment_objects.object_name(folder, "w-0.seg", start, end - start), data[start:end])
    with closing(ObjectSpans(objects)) as spans:
        found = spans.read(JOB, "w-0.seg", [(2, 4), (8, 35), (38, 60), (60, 61)])
        assert found == [data[2:4], data[8:35], data[38:40], data[60:61]]
        assert sorted(objects.read) == sorted([
            ("000000000000-10", 2, 4), ("000000000000-10", 8, 10), ("000000000010-20", 0, 20),
            ("000000000030-10", 0, 5), ("000000000030-10", 8, 10), ("000000000050-50", 10, 11),
        ])  # fmt: skip
        assert spans.read(JOB, "other.seg", [(0, 1)]) == [b""] == spans.read("job_2", "w-0.seg", [(0, 1)])
        for number in range(JOBS_LISTED_MAX + 1):
            spans.read(f"job_{number + 3}", "w-0.seg", [(0, 1)])
        objects.delete([f"{folder}w-0.seg/000000000000-10"])
        assert spans.read(JOB, "w-0.seg", [(0, 1)]) == [b""]  # it was listed again


def test_results_of_objects(tmp_path: Path) -> None:
    """A result that is not in the file here, or not as it was, is read from its object; results that lie close
    together in one request. A store that fails is asked no more for that job, and says why."""
    objects = StoreObjects(f"file://{tmp_path}/store")
    path = tmp_path / "jobs" / JOB / "segments" / "w-0.seg"
    path.parent.mkdir(parents=True)
    data = b"".join(b'{"row":%06d}\n' % number for number in range(1000))
    size = len(data) // 1000
    path.write_bytes(data[: 10 * size] + b"x" * size)  # a copy that ends early, in a damaged line
    objects.put(segment_objects.object_name(segment_objects.folder_of(JOB), path.name, 0, len(data)), data)
    rows = [3, 10, 11, 500, 999]
    places = np.array([(row * size, size, checksum(data[row * size : (row + 1) * size]), 1) for row in rows], np.uint64)
    expected = [data[row * size : (row + 1) * size] for row in rows]
    for store, found in ((f"file://{tmp_path}/store", expected), ("", [expected[0], *[None] * 4])):
        with closing(ResultFiles(store)) as results:
            assert results.lines([path], places) == found and not results.unread()
    with closing(ResultFiles(f"file://{tmp_path}/store")) as results:
        assert results.lines([path], places[3:]) == expected[3:]
        (changed,) = (tmp_path / "store").rglob("0000*")
        changed.write_bytes(data[:-1])
        assert results.lines([path], places) == [expected[0], *[None] * 4]
        assert [JOB in reason for reason in results.unread()] == [True]


class TestObjectSource(TestObjectSegments):
    """Readers that have no folder read the objects."""

    def source(self) -> SegmentSource:
        return ObjectSource(self.objects, JOB, list_objects(self.objects, JOB))
