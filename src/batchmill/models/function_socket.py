"""Frames to and from a function's process over one socket, on the event loop: no task and no stream in between."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from batchmill.function_runtime.frames import BrokenFrame, Reader

READS_MAX = 16  # at one wake-up: the loop has others to serve
PIECES_MAX = 512  # handed to the kernel in one call; it takes 1024
JOIN_BYTES_MAX = 64 * 1024  # pieces up to here together are copied into one
SOCKET_BYTES = 4 * 1024 * 1024  # asked of the kernel for what is under way; it gives what it allows

Buffer = bytes | memoryview
Frame = tuple[dict[str, Any], list[Buffer]]


class FrameSocket:
    """
    Args:
        sock: one end of a socket pair; taken over.
        on_frames: is given all frames that one read completed, in order.
        closed: is called once when the other side has gone or speaks no frames; why, or "".
    """

    def __init__(
        self, sock: socket.socket, *, on_frames: Callable[[list[Frame]], None], closed: Callable[[str], None]
    ) -> None:
        self._sock, self._on_frames, self._closed = sock, on_frames, closed
        self._loop = asyncio.get_running_loop()
        self._reader = Reader()
        self._out: deque[bytes | memoryview] = deque()
        self._is_flushing = False  # a flush is due, or waits for room
        self._is_blocked = False
        self.is_open = True
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        self._loop.add_reader(sock.fileno(), self._readable)

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Queue the pieces of a frame; those of one turn of the loop leave together. Quiet once the other has gone."""
        if not self.is_open:
            return
        self._out.extend(pieces)
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def drain(self) -> None:
        """Hear what has come and was not read: the other side has ended."""
        while self.is_open and self._read():
            pass

    def close(self) -> None:
        """Hear and say no more."""
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._out.clear()
            self._sock.close()

    def _readable(self) -> None:
        for _ in range(READS_MAX):
            if not (self.is_open and self._read()):
                return

    def _read(self) -> bool:
        """Whether there may be more."""
        room = self._reader.room()
        try:
            size = self._sock.recv_into(room)
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
        except BrokenFrame as error:
            self._end(str(error))
            return False
        if frames:
            self._on_frames(frames)
        return size == len(room)

    def _end(self, why: str) -> None:
        self.close()
        self._closed(why)

    def _flush(self) -> None:
        out = self._out
        while out and self.is_open:
            if len(out) > 1 and len(out) <= PIECES_MAX and sum(map(len, out)) <= JOIN_BYTES_MAX:
                joined = b"".join(out)
                out.clear()
                out.append(joined)
            pieces = list(itertools.islice(out, PIECES_MAX))
            try:
                sent = self._sock.sendmsg(pieces)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock.fileno(), self._flush)
                self._is_blocked = True
                return
            except OSError:
                out.clear()  # it has gone; the reader hears of it, after what it said last
                break
            for piece in pieces:
                if sent < len(piece):
                    out[0] = memoryview(piece)[sent:]
                    break
                sent -= len(piece)
                out.popleft()
        if self._is_blocked and self.is_open:
            self._loop.remove_writer(self._sock.fileno())
        self._is_flushing = self._is_blocked = False
