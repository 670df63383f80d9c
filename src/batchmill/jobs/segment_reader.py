"""Reads from the segments of a job through a bounded number of open files."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

from batchmill.errors import LedgerBroken
from batchmill.store.segments import Block

OPEN_MAX = 64


class SegmentReader:
    """`folder` holds the segments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()

    def payload(self, block: Block) -> bytes:
        """The lines of a block, one after the other."""
        return self.read(Path(block.path).name, block.payload_bytes, block.payload_offset)

    def read(self, segment: str, size: int, offset: int) -> bytes:
        """Exactly these bytes. Raises: LedgerBroken when the segment is shorter now."""
        data = os.pread(self._descriptor(segment), size, offset)
        while len(data) < size:
            more = os.pread(self._descriptor(segment), size - len(data), offset + len(data))
            if not more:
                path = self.folder / segment
                raise LedgerBroken(f"{path} ends before byte {offset + size}, which is committed", code="segment_corrupt")
            data += more
        return data

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, segment: str) -> int:
        if segment in self._open:
            self._open.move_to_end(segment)
            return self._open[segment]
        if len(self._open) >= OPEN_MAX:
            os.close(self._open.popitem(last=False)[1])
        self._open[segment] = os.open(self.folder / segment, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[segment]
