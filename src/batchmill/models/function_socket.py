"""Sends and receives frames of a function's process over a socket, directly on the event loop, without a task."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from batchmill.function_runtime.frames import BrokenFrame, Reader, pack_returned
from batchmill.function_runtime.shared_memory import MemoryPair

READS_MAX = 16  # in one turn of the event loop, which has other work
PIECES_MAX = 512  # passed to the kernel in one call, which takes up to 1024
JOIN_BYTES_MAX = 64 * 1024  # queued pieces with fewer bytes together are joined
SOCKET_BYTES = 4 * 1024 * 1024  # requested size of the kernel's buffers, which may grant less

Buffer = bytes | memoryview
Frame = tuple[dict[str, Any], list[Buffer]]


class FrameSocket:
    """
    Args:
        sock: one end of a socket pair. The FrameSocket closes it.
        memory: for large buffers of what comes. The places of what was sent return through this socket.
        on_frames: called with all frames that one read completed, in order.
        closed: called once when the other side closes the socket or breaks the protocol, with the reason or "".
    """

    def __init__(
        self, sock: socket.socket, memory: MemoryPair, *, on_frames: Callable[[list[Frame]], None],
        closed: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._sock, self._on_frames, self._on_close = sock, on_frames, closed
        self._loop = asyncio.get_running_loop()
        self._memory = memory.reader
        self._reader = Reader(memory.reader, memory.writer)
        self._queue: deque[bytes | memoryview] = deque()
        self._is_flushing = False  # a flush is scheduled, or waits until the socket is writable
        self._is_blocked = False
        self.is_open = True
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        self._loop.add_reader(sock.fileno(), self._readable)

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Queue the pieces of a frame. Pieces of one turn of the loop are sent together. Does nothing when closed."""
        if not self.is_open:
            return
        if self._memory is not None and (places := self._memory.returned()):
            self._queue.append(pack_returned(places))
        self._queue.extend(pieces)
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def drain(self) -> None:
        """Read the remaining frames after the other side has exited."""
        while self.is_open and self._read():
            pass

    def close(self) -> None:
        """Close the socket and drop queued pieces."""
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._queue.clear()
            self._sock.close()

    def _readable(self) -> None:
        for _ in range(READS_MAX):
            if not (self.is_open and self._read()):
                return

    def _read(self) -> bool:
        """Read once. Returns whether there may be more data."""
        buffer = self._reader.room()
        try:
            size = self._sock.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._end(str(error))
            return False
        if size == 0:
            self._end("")
            return False
        try:
            frames = self._reader.received(size)
        except (BrokenFrame, ValueError, RecursionError) as error:  # no frame, or one whose JSON is invalid
            self._end(str(error))
            return False
        if frames:
            self._on_frames(frames)
        return size == len(buffer)

    def _end(self, reason: str) -> None:
        self.close()
        self._on_close(reason)

    def _flush(self) -> None:
        queue = self._queue
        while queue and self.is_open:
            if len(queue) > 1 and len(queue) <= PIECES_MAX and sum(map(len, queue)) <= JOIN_BYTES_MAX:
                joined = b"".join(queue)
                queue.clear()
                queue.append(joined)
            pieces = list(itertools.islice(queue, PIECES_MAX))
            try:
                sent = self._sock.sendmsg(pieces)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock.fileno(), self._flush)
                self._is_blocked = True
                return
            except OSError:
                queue.clear()  # closed by the other side; the reader notices after the last frames
                break
            for piece in pieces:
                if sent < len(piece):
                    queue[0] = memoryview(piece)[sent:]
                    break
                sent -= len(piece)
                queue.popleft()
        if self._is_blocked and self.is_open:
            self._loop.remove_writer(self._sock.fileno())
        self._is_flushing = self._is_blocked = False
