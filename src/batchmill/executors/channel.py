"""One end of the socket between owner and worker: reads all available messages, writes without waiting."""

from __future__ import annotations

import asyncio
import socket
from collections import deque

from msgspec import Struct

from batchmill.children.process_end import end_reading
from batchmill.wire import messages

READ_AHEAD_BYTES = 4 * 1024 * 1024  # of unread messages; beyond that the other side has to wait
LENGTH_BYTES = 4
BUFFER_BYTES = 64 * 1024
SOCKET_BYTES = 4 * 1024 * 1024  # requested socket buffer; the kernel may give less


class Channel(asyncio.BufferedProtocol):
    """Made by `open_channel`. Concurrency: one task reads.

    Small messages are read together into one buffer and copied out of it. A message that does not fit is read into its
    own buffer and not copied.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._unread: deque[memoryview] = deque()  # complete messages
        self._buffer = bytearray(BUFFER_BYTES)  # for messages that fit
        self._large: bytearray | None = None  # for a message that does not fit
        self._filled = 0  # bytes in the current buffer
        self._ahead = 0  # bytes of `_unread`
        self._is_paused = self._is_over = False
        self._error: ConnectionError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._can_write = asyncio.Event()  # the kernel accepts more data
        self._can_write.set()

    def send(self, message: Struct) -> None:
        """Queue a message; does nothing once the other side has closed the socket."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(messages.pack(message))

    async def read(self) -> list[memoryview]:
        """The messages that have arrived, packed; none once the other side has closed it. Raises: ConnectionError."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._is_over:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        received = list(self._unread)
        self._unread.clear()
        self._ahead = 0
        if self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()
        return received

    async def drain(self) -> None:
        """Wait until more can be sent. Raises: ConnectionResetError if the other side has closed the socket."""
        await self._can_write.wait()
        if self._is_over:
            raise ConnectionResetError("the other side has closed the socket")

    def finish(self) -> None:
        """The other process has ended: read what it sent, then end of file, even if its child has the socket open."""
        if self._transport is not None and not self._transport.is_closing():
            end_reading(self._transport.get_extra_info("socket"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer if self._large is None else self._large)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._large is None:
            self._cut()
        elif self._filled == len(self._large):
            self._take(memoryview(self._large))
            self._large, self._filled = None, 0
        else:
            return
        if self._ahead > READ_AHEAD_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def _cut(self) -> None:
        """Take complete messages out of the buffer, and move an incomplete one to its start."""
        view, at, size = memoryview(bytes(memoryview(self._buffer)[: self._filled])), 0, self._filled
        while size - at >= LENGTH_BYTES:
            length = int.from_bytes(view[at : at + LENGTH_BYTES], "little")
            if length > messages.MESSAGE_BYTES_MAX:
                self._error = ConnectionError(f"a message of {length} bytes: the other side speaks another protocol")
                self.close()
                break
            at += LENGTH_BYTES
            if length > size - at:
                if LENGTH_BYTES + length > BUFFER_BYTES:
                    self._large = bytearray(length)
                    self._large[: size - at] = view[at:]
                else:
                    at -= LENGTH_BYTES
                break
            self._take(view[at : at + length])
            at += length
        self._filled = size - at
        if self._large is None:
            self._buffer[: self._filled] = view[at:]

    def _take(self, message: memoryview) -> None:
        self._unread.append(message)
        self._ahead += len(message)

    def eof_received(self) -> None:
        """Drop unsent data: the other side reads no more, and the transport would wait for ever."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        self._can_write.set()
        self._wake()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


async def open_channel(sock: socket.socket) -> Channel:
    """A channel on a connected socket, which it owns from now on."""
    loop = asyncio.get_running_loop()
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
    _, channel = await loop.create_unix_connection(Channel, sock=sock)
    return channel
