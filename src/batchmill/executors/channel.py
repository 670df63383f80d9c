"""One end of the socket between owner and worker: reads all available messages, writes without waiting.

Large bodies of calls and replies, and other large messages, are written to memory that both share, and their places to
the socket: see `function_runtime.shared_memory`. `complete` puts bodies back.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from batchmill.children.process_end import end_reading
from batchmill.function_runtime.shared_memory import SHARED_BYTES_MIN, BrokenPlace, MemoryPair
from batchmill.types import FunctionRequest
from batchmill.wire import messages
from batchmill.wire.messages import Answers, FunctionReply, FunctionRequests, ToWorker

READ_AHEAD_BYTES = 4 * 1024 * 1024  # of unread messages; beyond that the other side has to wait
LENGTH_BYTES = PLACE_BYTES = 4
BUFFER_BYTES = 64 * 1024
SOCKET_BYTES = 4 * 1024 * 1024  # requested socket buffer; the kernel may give less
SHARED, RETURNED = 1 << 31, 1 << 30  # flags of a length: a place in shared memory follows, or places that return
LENGTH_MASK = RETURNED - 1
RETURNED_MAX = 1024  # places in one piece
NO_MEMORY = "a body in shared memory, where there is none"

Message = TypeVar("Message", bound=Struct)
Part = TypeVar("Part", FunctionRequest, FunctionReply)


class WorkerChannel(Protocol):
    """A worker's end of what connects it with its owner."""

    heartbeat_s: float  # statistics that change are sent no more often
    idle_heartbeat_s: float  # a worker whose statistics do not change says so often that it is alive
    commit_pace_s: float  # the time between two commits of a worker whose rows are slow
    fast_commit_pace_s: float  # the same of one whose rows end by thousands
    grants_max: int  # that are requested in one message
    ahead_s: float  # rows are requested that last so long; 0: one grant
    is_on_node: bool  # the owner does not see the files that the worker writes

    def send(self, message: Struct) -> None: ...
    def complete(self, message: ToWorker) -> ToWorker: ...
    async def read(self) -> list[memoryview]: ...
    async def drain(self) -> None: ...


class Channel(asyncio.BufferedProtocol):
    """Made by `open_channel`. Concurrency: one task reads.

    Small messages are read together into one buffer and copied out of it. A message that does not fit is read into its
    own buffer and not copied.

    Args:
        memory: for large messages. The side that has created it uses it once the other one has said that it joined.
        has_joined: this side has joined it.
    """

    is_on_node = False
    heartbeat_s = idle_heartbeat_s = commit_pace_s = fast_commit_pace_s = ahead_s = 0.0  # messages cost nearly nothing
    grants_max = 1

    def __init__(self, memory: MemoryPair, *, has_joined: bool = False) -> None:
        self._memory = memory
        self._shares = has_joined and memory.writer is not None
        self._transport: asyncio.Transport | None = None
        self._unread: deque[memoryview] = deque()  # complete messages
        self._buffer = bytearray(BUFFER_BYTES)  # for messages that fit
        self._large: bytearray | None = None  # for a message that does not fit
        self._filled = 0  # bytes in the current buffer
        self._ahead = 0  # bytes of `_unread`
        self._is_paused = self._is_over = self._is_closed = False
        self._error: ConnectionError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._can_write = asyncio.Event()  # the kernel accepts more data
        self._can_write.set()

    def send(self, message: Struct) -> None:
        """Queue a message; does nothing once the other side has closed the socket."""
        if self._transport is None or self._transport.is_closing():
            return
        data = messages.encode(self._share(message) if self._shares else message)
        size = len(data)
        memory = self._memory
        if self._shares and size >= SHARED_BYTES_MIN and (place := memory.writer.put(data)) is not None:  # type: ignore[union-attr]
            data = struct.pack("<I", place)
            size |= SHARED
        pieces = [size.to_bytes(LENGTH_BYTES, "little"), data]
        if memory.reader is not None and (places := memory.reader.returned()):
            pieces.insert(0, _pack_returned(places))
        self._transport.write(b"".join(pieces))

    def _share(self, message: Struct) -> Struct:
        """Put large bodies into shared memory."""
        match message:
            case FunctionRequests(requests) if any(len(each.body) >= SHARED_BYTES_MIN for each in requests):
                return FunctionRequests([self._shared(each, [each.body]) for each in requests])
            case Answers(answers, stats) if any(each.size_bytes >= SHARED_BYTES_MIN for each in answers):
                return Answers([self._shared(each, each.pieces or [each.body]) for each in answers], stats)
        return message

    def _shared(self, part: Part, body: list[bytes]) -> Part:
        size = sum(map(len, body))
        writer = self._memory.writer
        if size < SHARED_BYTES_MIN or writer is None or (begin := writer.put(*body)) is None:
            return part
        if isinstance(part, FunctionReply):
            return replace(part, body=b"", pieces=[], place=(begin, size))
        return replace(part, body=b"", place=(begin, size))

    def complete(self, message: Message) -> Message:
        """The message with the bodies that were sent through shared memory. Raises: ConnectionError."""
        match message:
            case FunctionRequests(requests) if any(each.place is not None for each in requests):
                return FunctionRequests([self._completed(each) for each in requests])  # type: ignore[return-value]
            case Answers(answers, stats) if any(each.place is not None or each.pieces for each in answers):
                return Answers([self._completed(each) for each in answers], stats)  # type: ignore[return-value]
        return message

    def _completed(self, part: Part) -> Part:
        if part.place is not None:
            if self._memory.reader is None:
                raise ConnectionError(NO_MEMORY)
            try:
                return replace(part, body=self._memory.reader.take(*part.place), place=None)
            except BrokenPlace as error:
                raise ConnectionError(str(error)) from None
        if isinstance(part, FunctionReply) and part.pieces:
            return replace(part, body=part.joined(), pieces=[])
        return part

    async def read(self) -> list[memoryview]:
        """The messages that have arrived, packed; none once the other side has closed it. Raises: ConnectionError."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._is_over:
                self._memory.close()
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
        """Close the socket, and read nothing more."""
        self._is_closed = True
        if self._is_over:
            self._memory.close()
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        if self._shares:
            transport.write(RETURNED.to_bytes(LENGTH_BYTES, "little"))  # no places: it has joined

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
            word = int.from_bytes(view[at : at + LENGTH_BYTES], "little")
            length = word & LENGTH_MASK
            if length > messages.MESSAGE_BYTES_MAX:
                self._fail(f"a message of {length} bytes: the other side speaks another protocol")
                break
            at += LENGTH_BYTES
            if word > LENGTH_MASK:
                end = at + PLACE_BYTES * (1 if word & SHARED else length)
                if end > size:
                    at -= LENGTH_BYTES
                    break
                self._follow(word, view[at:end])
                at = end
                continue
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

    def _follow(self, word: int, data: memoryview) -> None:
        """Take a message from shared memory, or places there that return."""
        places = struct.unpack(f"<{len(data) // PLACE_BYTES}I", data)
        reader, writer = self._memory.reader, self._memory.writer
        if reader is None or writer is None:
            self._fail("a place in shared memory, where there is none")
            return
        try:
            if word & SHARED:
                self._take(memoryview(reader.take(places[0], word & LENGTH_MASK)))
                return
            self._shares = True
            for place in places:
                writer.release(place)
        except BrokenPlace as error:
            self._fail(str(error))

    def _fail(self, why: str) -> None:
        self._error = ConnectionError(why)
        self.close()

    def _take(self, message: memoryview) -> None:
        self._unread.append(message)
        self._ahead += len(message)

    def eof_received(self) -> None:
        """Drop unsent data: the other side reads no more, and the transport would wait for ever."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        if self._is_closed:
            self._memory.close()  # otherwise `read` does: what it has returned may have its bodies there
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


def joined(message: Message) -> Message:
    """As `Channel.complete`, between machines, which share no memory. Raises: ConnectionError."""
    match message:
        case FunctionRequests(requests) if any(each.place is not None for each in requests):
            raise ConnectionError(NO_MEMORY)
        case Answers(answers, stats) if any(each.place is not None or each.pieces for each in answers):
            if any(each.place is not None for each in answers):
                raise ConnectionError(NO_MEMORY)
            return Answers([replace(each, body=each.joined(), pieces=[]) for each in answers], stats)  # type: ignore[return-value]
    return message


def _pack_returned(places: list[int]) -> bytes:
    pieces = [places[at : at + RETURNED_MAX] for at in range(0, len(places), RETURNED_MAX)]
    return b"".join([struct.pack(f"<{1 + len(each)}I", RETURNED | len(each), *each) for each in pieces])


async def open_channel(sock: socket.socket, memory: MemoryPair, *, has_joined: bool = False) -> Channel:
    """A channel on a connected socket. It owns socket and memory from now on. `has_joined`: see Channel."""
    loop = asyncio.get_running_loop()
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
    _, channel = await loop.create_unix_connection(lambda: Channel(memory, has_joined=has_joined), sock=sock)
    return channel
