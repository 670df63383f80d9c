"""The contract suite over every place for segments."""

from __future__ import annotations

import pytest
from contract.segment_suite import SegmentSuite

from batchmill.ports import SegmentSink, SegmentSource
from batchmill.store.segment_files import SegmentFile, open_segments
from batchmill.store.segments import SegmentHead
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
