"""Reads from the segments of a job through a bounded number of open files."""

from __future__ import annotations

import os
from collections import OrderedDict

from batchmill.errors import LedgerBroken
from batchmill.store.segments import Block

OPEN_MAX = 64


class SegmentReader:
    """Concurrency: one thread at a time."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()

    def payload(self, block: Block) -> bytes:
        """The lines of a block, one after the other."""
        return self.read(block.path, block.payload_bytes, block.payload_offset)

    def read(self, path: str, size: int, offset: int) -> bytes:
        """Exactly these bytes. Raises: LedgerBroken when the segment is shorter now."""
        data = os.pread(self._descriptor(path), size, offset)
        while len(data) < size:
            more = os.pread(self._descriptor(path), size - len(data), offset + len(data))
            if not more:
                raise LedgerBroken(
                    f"{path} ends before byte {offset + size}, which is committed", code="segment_corrupt"
                )
            data += more
        return data

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, path: str) -> int:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) >= OPEN_MAX:
            os.close(self._open.popitem(last=False)[1])
        self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]
