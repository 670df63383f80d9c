"""The memory in which a function's process notes what it calls: which rows are running, which requests have begun.

`function_runtime.printing.Progress` writes it. The process maps it too, so nothing in it is trusted beyond its layout.
"""

from __future__ import annotations

import mmap
import os
import struct

from batchmill.function_runtime.printing import BYTES, ENTRIES_BYTES, ENTRIES_MAX, SLOTS_MAX

_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct("<QII")
_SLOT = struct.Struct("<I")
NO_SLOT = -1

Call = tuple[int, int, int]  # request id, first row, rows


class ProgressPage:
    """The worker's view. A slot holds the id of the request that was given it, once that request has begun."""

    def __init__(self, fd: int) -> None:
        """`fd`: a file of memory, which the process gets too; it may be closed after this. Raises: OSError."""
        os.ftruncate(fd, BYTES)
        self._page = mmap.mmap(fd, BYTES)
        self._free = list(range(SLOTS_MAX - 1, -1, -1))

    def running(self) -> list[Call]:
        """The rows whose calls are running now, or were running when the process died."""
        (count,) = _COUNT.unpack_from(self._page)
        offsets = range(_COUNT.size, _COUNT.size + min(count, ENTRIES_MAX) * _ENTRY.size, _ENTRY.size)
        return [_ENTRY.unpack_from(self._page, offset) for offset in offsets]

    def last_called(self) -> int:
        """The id of the request whose call started last, even if it has ended; 0 before the first call."""
        request_id: int = _ENTRY.unpack_from(self._page, _COUNT.size)[0]
        return request_id

    def take_slot(self) -> int:
        """A slot for a request; NO_SLOT if there are SLOTS_MAX requests with one."""
        return self._free.pop() if self._free else NO_SLOT

    def return_slot(self, slot: int) -> None:
        if slot != NO_SLOT:
            self._free.append(slot)

    def has_begun(self, request_id: int, slot: int) -> bool:
        """Whether rows of the request have been called, now or earlier. Without a slot: whether they are running."""
        if slot == NO_SLOT:
            return any(running == request_id for running, _, _ in self.running())
        return _SLOT.unpack_from(self._page, ENTRIES_BYTES + slot * _SLOT.size)[0] == request_id & 0xFFFFFFFF

    def close(self) -> None:
        self._page.close()
