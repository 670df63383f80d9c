"""Memory that one process writes and another reads: large buffers of messages travel through it, not through a socket.

It has a fixed size. The writer copies each buffer into a free range and tells its place. A reader that does not trust
the writer, or whose code may keep or change a buffer, copies it out and returns the range; another one gets a view, and
the range returns once nothing refers to the view. A buffer that finds no room travels through the socket.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import weakref

log = logging.getLogger("batchmill.memory")

SIZE_BYTES = 16 * 1024 * 1024  # of one direction between two processes
SHARED_BYTES_MIN = 64 * 1024  # a smaller buffer costs less in a socket
PAGE_BYTES = 4096  # ranges begin at multiples of it
STEP_BYTES = 1024 * 1024  # of memory taken from the kernel at once
_MADV_POPULATE_WRITE = 23  # takes the pages, and reports a lack of memory where writing would end the process


class BrokenPlace(Exception):
    """The other side names a place that it cannot mean."""


def _create():
    """The descriptor of a memory in which nothing is written yet. Nobody can change its size. Raises: OSError."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory files")
    fd = os.memfd_create("batchmill-buffers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SIZE_BYTES)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


class MemoryWriter:
    """The writer's side. Raises: OSError where the memory cannot be mapped."""

    def __init__(self, fd):
        self._mmap = mmap.mmap(fd, SIZE_BYTES)
        self._view = memoryview(self._mmap)
        self._free = [(0, SIZE_BYTES)]  # (begin, end) of free ranges, in order
        self._used = {}  # begin -> end
        self.backed_bytes = 0  # up to here pages were taken from the kernel

    def put(self, *pieces):
        """Copy the pieces of a buffer in, and return its place; None if there is no room for it now."""
        sizes = [piece.nbytes if type(piece) is memoryview else len(piece) for piece in pieces]
        begin = self._reserve(-(-sum(sizes) // PAGE_BYTES) * PAGE_BYTES)
        if begin is None:
            return None
        at = begin
        for size, piece in zip(sizes, pieces):
            self._view[at : at + size] = piece.cast("B") if type(piece) is memoryview else piece
            at += size
        return begin

    def _reserve(self, size):
        for number, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                if not self._back(begin + size):
                    return None
                if end - begin == size:
                    del self._free[number]
                else:
                    self._free[number] = (begin + size, end)
                self._used[begin] = begin + size
                return begin
        return None

    def _back(self, end):
        """Take pages from the kernel up to here; False if it has none, or is too old to say so."""
        if end > self.backed_bytes:
            upto = min(-(-end // STEP_BYTES) * STEP_BYTES, SIZE_BYTES)
            try:
                self._mmap.madvise(_MADV_POPULATE_WRITE, self.backed_bytes, upto - self.backed_bytes)
            except OSError:
                return False
            self.backed_bytes = upto
        return True

    def release(self, begin):
        """Take a range back that the reader has copied. Raises: BrokenPlace."""
        end = self._used.pop(begin, None)
        if end is None:
            raise BrokenPlace(f"memory at {begin} is returned, and was not given")
        free = self._free
        at = next((number for number, each in enumerate(free) if each[0] > begin), len(free))
        if at < len(free) and free[at][0] == end:
            end = free.pop(at)[1]
        if at and free[at - 1][1] == begin:
            at -= 1
            begin = free.pop(at)[0]
        free.insert(at, (begin, end))

    def close(self):
        """Unmap it. Nothing can be put afterwards."""
        self._free.clear()
        self._view.release()
        self._mmap.close()


class MemoryReader:
    """The reader's side. Raises: OSError where the memory cannot be mapped.

    Args:
        kind: what buffers become: bytes or bytearray, which are copies, or memoryview.
    """

    def __init__(self, fd, kind=bytes):
        self._kind = kind
        self._unused = collections.deque()  # places to be returned to the writer; any thread appends
        if kind is memoryview:
            self._mmap = mmap.mmap(fd, SIZE_BYTES)  # ctypes finds the address of a writable one alone
            self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._mmap))
            self._areas = {}  # begin -> a reference to the area of its view
        else:
            self._mmap = mmap.mmap(fd, SIZE_BYTES, prot=mmap.PROT_READ)
        self._is_closed = False

    def take(self, begin, size):
        """The buffer at this place. Raises: BrokenPlace."""
        if self._is_closed or not 0 <= begin <= begin + size <= SIZE_BYTES:
            raise BrokenPlace(f"{size} bytes at {begin} of a memory of {SIZE_BYTES} bytes")
        if self._kind is memoryview:
            return self._view(begin, size)
        if begin in self._unused:  # the writer cannot have it again yet: so there are never more than fit
            raise BrokenPlace(f"the memory at {begin} is named twice")
        with memoryview(self._mmap) as whole:
            data = self._kind(whole[begin : begin + size])
        self._unused.append(begin)
        return data

    def _view(self, begin, size):
        area = _Area.from_address(self._address + begin)
        area.memory = self._mmap  # stays mapped as long as the view
        self._areas[begin] = reference = _AreaReference(area, self._free)
        reference.begin = begin
        return memoryview(area).cast("B")[:size].toreadonly()

    def _free(self, reference):
        del self._areas[reference.begin]
        self._unused.append(reference.begin)

    def returned(self):
        """The places that nothing refers to any more, and that were not returned before."""
        places = []
        while self._unused:
            places.append(self._unused.popleft())
        return places

    def close(self):
        """Take nothing afterwards. It is unmapped once there are no views."""
        self._is_closed = True
        self._mmap = None


class _Area(ctypes.c_ubyte * SIZE_BYTES):
    """What the views of one buffer refer to. It begins where the buffer does, and is cut to its length."""


class _AreaReference(weakref.ref):
    __slots__ = ("begin",)


class MemoryPair:
    """The memory of two processes, one for each direction. Both are None where there is none to share.

    The kernel frees it when both processes have ended, or have closed it.
    """

    def __init__(self):
        self.writer = None
        self.reader = None

    @contextlib.contextmanager
    def create(self, kind=bytes):
        """Yields the descriptors for the other process, which is to `join` them; none if there is no memory."""
        fds = []
        try:
            try:
                fds.append(_create())
                fds.append(_create())
                self._map(fds, kind)
            except OSError as error:  # a limit of descriptors, of file sizes or of memory
                log.warning("no memory can be shared with another process, which costs time alone: %s", error)
            yield fds if self.reader is not None else []
        finally:
            for fd in fds:
                os.close(fd)

    def join(self, fds, kind=bytes):
        """Map what the other process has created, if it has and if that is possible here. Closes the descriptors."""
        try:
            if fds:
                self._map(fds[::-1], kind)
        except OSError:  # a limit of this process's address space
            pass
        finally:
            for fd in fds:
                os.close(fd)

    def _map(self, fds, kind):
        writer = MemoryWriter(fds[0])
        try:
            self.reader = MemoryReader(fds[1], kind)
        except OSError:
            writer.close()
            raise
        self.writer = writer

    def close(self):
        """Unmap both."""
        for each in (self.writer, self.reader):
            if each is not None:
                each.close()
        self.writer = self.reader = None
