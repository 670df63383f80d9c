"""Frames between a function's process and its worker: a short JSON head and raw bytes.

Large buffers travel through shared memory where there is some: the frame tells their places then. The reader returns
the places in frames of their own, which nobody above this module sees.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import threading
import zlib

from . import installed
from .shared_memory import PAGE_BYTES, SHARED_BYTES_MIN, SIZE_BYTES, BrokenPlace

MAGIC = b"bmf1"
RETURN_MAGIC = b"bmr1"  # of a frame that returns places: they follow, in the place of sizes
HEAD = struct.Struct("<4sIII")
HEAD_OF_ONE = struct.Struct("<4sIIIQ")  # of a frame with one buffer
BUFFERS_MAX = 1 << 16
TEXT_BYTES_MAX = 1 << 28
BYTES_MAX = 1 << 31
ROOM_BYTES = 256 * 1024  # received at once
LARGE_BYTES = 32 * 1024  # a frame from here up is received into memory of its own, and its buffers are parts of that
ALIGN = 64  # where the first large buffer of a frame begins, from the frame's own begin
SHARED = 1 << 63  # of a size: the buffer is in shared memory, at this page
PAGE_SHIFT = 40
SIZE_MASK = (1 << PAGE_SHIFT) - 1
PAGE_MASK = (SHARED >> PAGE_SHIFT) - 1


class BrokenFrame(Exception):
    """The other side does not speak this protocol, or something else wrote to the socket."""


def pack(meta, buffers=(), memory=None):
    """The pieces of a frame, to be written one after another; large buffers are not copied.

    Args:
        memory: a MemoryWriter for large buffers; None: they are pieces.
    """
    return pack_text(installed.dump(meta), buffers, memory)


def pack_text(text, buffers=(), memory=None):
    """As `pack`, for encoded JSON."""
    count = len(buffers)
    sizes = [each.nbytes if type(each) is memoryview else len(each) for each in buffers]
    if count == 1 and sizes[0] < LARGE_BYTES:
        return [b"%b%b%b" % (HEAD_OF_ONE.pack(MAGIC, len(text), 1, zlib.crc32(text), sizes[0]), text, buffers[0])]
    if memory is not None and sum(sizes) >= SHARED_BYTES_MIN:
        sizes, buffers = _share(sizes, buffers, memory)
    text += b" " * _padding(HEAD.size + 8 * count + len(text), sizes)
    head = HEAD.pack(MAGIC, len(text), count, zlib.crc32(text))
    return [b"%b%b%b" % (head, struct.pack("<%dQ" % count, *sizes), text), *buffers]  # noqa: UP031


def _share(sizes, buffers, memory):
    """Put large buffers into shared memory. Returns all sizes or places, and the buffers that are left."""
    sizes, left = list(sizes), []
    for number, (size, data) in enumerate(zip(sizes, buffers)):
        begin = memory.put(data) if size >= SHARED_BYTES_MIN else None
        if begin is None:
            left.append(data)
        else:
            sizes[number] = SHARED | begin // PAGE_BYTES << PAGE_SHIFT | size
    return sizes, left


def pack_returned(places):
    """A frame that returns places of shared memory."""
    return HEAD.pack(RETURN_MAGIC, 0, len(places), 0) + struct.pack("<%dQ" % len(places), *places)  # noqa: UP031


def _padding(place, sizes):
    """The padding that aligns the first large buffer for its numbers."""
    for size in sizes:
        if size >= SHARED:
            continue
        if size >= LARGE_BYTES:
            return -place % ALIGN
        place += size
    return 0


class Reader:
    """Assembles frames from pieces of bytes.

    Either `feed` it bytes; or receive into `room()` and call `received` with their number: this saves a copy.
    The buffers of a large frame are parts of one piece of memory, which lives as long as any of them.

    Args:
        memory: a MemoryReader, for buffers that the other side shares.
        shared: the MemoryWriter whose places the other side returns.
    """

    def __init__(self, memory=None, shared=None):
        self.memory, self._shared = memory, shared
        self._view = memoryview(bytearray(ROOM_BYTES))
        self._begin = self._end = 0  # what has come and was not taken
        self._large = None  # the memory of a large frame that is on its way
        self._filled = 0

    def feed(self, data):
        """The complete frames, as (meta, buffers). Raises: BrokenFrame."""
        data = memoryview(data)
        frames = []
        while len(data):
            room = self.room()
            size = min(len(room), len(data))
            room[:size] = data[:size]
            frames += self.received(size)
            data = data[size:]
        return frames

    def room(self):
        """The memory for the next bytes; never empty."""
        if self._large is not None:
            return self._large[self._filled :]
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == len(self._view):
            self._move(len(self._view))
        return self._view[self._end :]

    def received(self, size):
        """The complete frames after `size` more bytes in `room`. Raises: BrokenFrame."""
        if self._large is not None:
            self._filled += size
            if self._filled < len(self._large):
                return []
            whole, self._large = self._large, None
            return [self._take(whole, 0, len(whole), is_large=True)]
        self._end += size
        frames = self._small()
        while self._end - self._begin >= HEAD.size:
            frame = self._next()
            if frame is None:
                break
            if frame is not _RETURN:
                frames.append(frame)
        return frames

    def _small(self):
        """The frames of one buffer at the front: the fast case of nearly all frames."""
        have, at = self._end - self._begin, 0
        if have < HEAD_OF_ONE.size:
            return []
        _, text_size, count, _, size = HEAD_OF_ONE.unpack_from(self._view, self._begin)
        if count != 1 or HEAD_OF_ONE.size + text_size + size > have:
            return []
        frames, data = [], bytes(self._view[self._begin : self._end])
        while have - at >= HEAD_OF_ONE.size:
            magic, text_size, count, crc, size = HEAD_OF_ONE.unpack_from(data, at)
            middle = at + HEAD_OF_ONE.size + text_size
            if count != 1 or magic != MAGIC or middle + size > have:
                break
            text = data[at + HEAD_OF_ONE.size : middle]
            if zlib.crc32(text) != crc:
                raise BrokenFrame("a frame whose checksum is wrong")
            at = middle + size
            frames.append((installed.load(text), [data[middle:at]]))
        self._begin += at
        return frames

    def _next(self):
        view, begin, have = self._view, self._begin, self._end - self._begin
        magic, text_size, count, _ = HEAD.unpack_from(view, begin)
        if magic not in (MAGIC, RETURN_MAGIC) or count > BUFFERS_MAX or text_size > TEXT_BYTES_MAX:
            raise BrokenFrame("the bytes are not a frame")
        need = HEAD.size + 8 * count
        if have < need:
            if need > len(view) - begin:
                self._move(max(need, ROOM_BYTES))
            return None
        sizes = struct.unpack_from(f"<{count}Q", view, begin + HEAD.size)
        if magic == RETURN_MAGIC:
            self._begin += need
            self._release(sizes)
            return _RETURN
        size = need + text_size + sum([each for each in sizes if each < SHARED])
        if size > BYTES_MAX:
            raise BrokenFrame(f"a frame of {size} bytes")
        if have >= size:
            self._begin += size
            return self._take(view, begin, size, is_large=False)
        if size >= LARGE_BYTES:
            self._large, self._filled = memoryview(bytearray(size)), have
            self._large[:have] = view[begin : self._end]
            self._begin = self._end = 0
        elif size > len(view) - begin:
            self._move(len(view))
        return None

    def _move(self, size):
        """Move to the front, with room for `size` bytes."""
        rest = bytes(self._view[self._begin : self._end])
        if size > len(self._view):
            self._view = memoryview(bytearray(size))
        assert len(rest) < len(self._view), "what fills the room would have been a frame, or a large one"
        self._view[: len(rest)] = rest
        self._begin, self._end = 0, len(rest)

    def _take(self, view, begin, size, *, is_large):
        """The frame in `view` from `begin`: views of that memory, or copies."""
        _, text_size, count, crc = HEAD.unpack_from(view, begin)
        place = begin + HEAD.size + 8 * count + text_size
        text = view[place - text_size : place]
        if zlib.crc32(text) != crc:
            raise BrokenFrame("a frame whose checksum is wrong")
        buffers, shared_bytes = [], 0
        for length in struct.unpack_from(f"<{count}Q", view, begin + HEAD.size):
            if length >= SHARED:
                shared_bytes += length & SIZE_MASK
                if shared_bytes > SIZE_BYTES:  # places would have to overlap
                    raise BrokenFrame(f"a frame with {shared_bytes} bytes in shared memory")
                buffers.append(self._copy(length))
                continue
            part = view[place : place + length]
            buffers.append(part if is_large else bytes(part))
            place += length
        assert place == begin + size
        return installed.load(text), buffers

    def _copy(self, length):
        if self.memory is None:
            raise BrokenFrame("a place in shared memory, and there is none")
        try:
            return self.memory.take((length >> PAGE_SHIFT & PAGE_MASK) * PAGE_BYTES, length & SIZE_MASK)
        except BrokenPlace as error:
            raise BrokenFrame(str(error)) from None

    def _release(self, places):
        if self._shared is None:
            raise BrokenFrame("a place in shared memory is returned, and there is none")
        try:
            for place in places:
                self._shared.release(place)
        except BrokenPlace as error:
            raise BrokenFrame(str(error)) from None


_RETURN = object()

PIECES_MAX = 512  # handed to the kernel in one call; it takes 1024
JOIN_BYTES_MAX = 64 * 1024  # pieces up to here together are copied into one
SOCKET_BYTES = 4 * 1024 * 1024  # asked of the kernel for what is under way; it gives what it allows
_SELECT_FDS = 1024  # descriptors that select can take
HIGH_FD = 512  # user code that closes or reuses low descriptors does not meet ours by chance
_PR_SET_PDEATHSIG = 1

GONE, BROKEN = 0, 70  # exit codes: the worker has gone; what it said, or our own state, cannot be relied on


class WorkerSocket:
    """One end of a socket pair, taken over.

    `is_child` becomes true in a process that user code forks: there the socket is closed, and code that returns into
    this program must end.

    Args:
        memory: the MemoryPair for large buffers.
    """

    def __init__(self, fd, memory):
        self._socket = socket.socket(fileno=high(fd))
        self._socket.setblocking(True)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        self._inode = os.fstat(self._socket.fileno()).st_ino
        self._pid = os.getpid()
        self._memory = memory
        self._reader = Reader(memory.reader, memory.writer)
        self._poll = select.poll()
        self._poll.register(self._socket.fileno(), select.POLLIN)
        self._out = []
        self.is_child = False
        os.register_at_fork(after_in_child=self._forked)

    def fileno(self):
        return self._socket.fileno()

    def _forked(self):
        self.is_child = True
        self._out = []
        self._socket.close()

    def wait(self, timeout_s=None):
        """Wait; whether frames, or the end, have arrived."""
        if self.is_child:
            os._exit(0)
        fd = self._socket.fileno()
        if timeout_s is None or fd >= _SELECT_FDS:
            return bool(self._poll.poll(None if timeout_s is None else max(0, timeout_s * 1000)))
        try:
            return bool(select.select([fd], (), (), max(0, timeout_s))[0])  # to the microsecond; poll rounds up to 1 ms
        except OSError:  # user code has closed it: `receive` ends the process
            return True

    def receive(self):
        """The frames that have arrived; never waits. Ends the process when the worker has gone."""
        frames, is_more = [], True
        while is_more:
            room = self._reader.room()
            try:
                size = self._socket.recv_into(room, 0, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:  # user code has closed it
                os._exit(GONE)
            if size == 0:
                os._exit(GONE)
            try:
                frames += self._reader.received(size)
            except BrokenFrame:
                os._exit(BROKEN)
            is_more = size == len(room)
        return frames

    def put(self, meta, buffers=()):
        """Queue a frame until `flush`."""
        self.put_text(installed.dump(meta), buffers)

    def put_text(self, text, buffers):
        """As `put`, for encoded JSON."""
        if self.is_child:  # it would write to memory that its parent shares with the worker
            os._exit(0)
        self._out += pack_text(text, buffers, self._memory.writer)

    def flush(self):
        """Write everything queued to the worker."""
        out = self._out
        if self._memory.reader is not None and (places := self._memory.reader.returned()):
            out.insert(0, pack_returned(places))
        if not out:
            return
        if os.getpid() != self._pid:
            os._exit(0)
        self._out = []
        if len(out) > 1 and sum(map(len, out)) <= JOIN_BYTES_MAX:
            out = [b"".join(out)]
        try:
            if os.fstat(self._socket.fileno()).st_ino != self._inode:
                os._exit(BROKEN)  # user code has closed it, and something else has its number now
            while out:
                out = _rest(out, self._socket.sendmsg(out[:PIECES_MAX]))
        except OSError:
            os._exit(GONE)


def _rest(pieces, sent):
    """The remaining pieces after so many bytes."""
    for number, piece in enumerate(pieces):
        size = len(piece)
        if sent < size:
            return [memoryview(piece)[sent:], *pieces[number + 1 :]]
        sent -= size
    return []


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def keep_freed_memory(size_bytes):
    """Let glibc keep so much freed memory for later frames, instead of a new page from the kernel for each of them."""
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_M_TRIM_THRESHOLD, size_bytes)
        library.mallopt(_M_MMAP_THRESHOLD, size_bytes)


def share_freed_memory():
    """Let all threads that begin to allocate share one arena of glibc, which keeps freed memory once, not for each."""
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_M_ARENA_MAX, 1)


def high(fd):
    """The same descriptor with a high number, closed when another program is run."""
    try:
        high = _duplicate(fd)
    except OSError:  # fewer descriptors are allowed
        os.set_inheritable(fd, False)
        return fd
    os.close(fd)
    return high


def _duplicate(fd):
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)


def end_with_worker(fd):
    """End this process when the worker has gone, whatever user code is doing then."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(GONE)
        return
    threading.Thread(target=_watch, args=(fd,), name="batchmill-worker-watch", daemon=True).start()


def _watch(fd):
    poll = select.poll()
    poll.register(fd, 0)  # POLLHUP is reported without being requested
    poll.poll()
    os._exit(GONE)
