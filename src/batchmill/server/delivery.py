"""Whether a reply has arrived: written whole to a client that was there, and acknowledged by its machine.

Two promises stand on this proof, and nothing else does:

* An order without an idempotency key, from a client that sends no retry header (requests, predibase, opensearch-py),
  makes one job when its reply is lost and the client sends it again, and a second job when the client has its reply
  and means another. Only the acknowledgement tells these apart: `take_order`, `services/repeats.py`.
* A link that works once is used up by a download that arrived, and not by one that broke off: `services/links.py`.

A reply without a callback costs one comparison. One with a callback costs two system calls where the acknowledgement is
there at once, and a duplicate of the socket until it comes, 15 s at the most, where it is not. Requests that come
meanwhile take the normal way, never the fast path, since they may be the repeat.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import sys
import termios
from collections.abc import Awaitable, Callable, Sequence

from batchmill.server.operations import Call, Callback
from batchmill.services.repeats import RepeatedOrders
from batchmill.types import Once

POLLS_S = (0.001, 0.005, 0.02, 0.1, 0.3, 1.0, 3.0, 10.0)  # how long to wait for an acknowledgement, step by step
ESTABLISHED, CLOSED = 1, 7  # of TCP_INFO; a client that has closed its end leaves CLOSE_WAIT
CAN_ASK = sys.platform == "linux"


async def take_order(call: Call, repeats: RepeatedOrders, once: Once, submit: Callable[[], Awaitable[str]]) -> str:
    """The id of the job that an order is or becomes; from then on it is stored, and nothing may fail.

    An order that is known already is answered whatever has become of its input, its model or the key's rate.
    """
    job = await repeats.find(once)
    if job is None:
        call.spend()
        job = await submit()
    call.on_delivered(lambda: repeats.delivered(once))
    return job


class Delivery:
    """One reply that was written, until it is known to have arrived. Holds the connection's socket open meanwhile."""

    def __init__(self, transport: asyncio.Transport, callbacks: Sequence[Callback]) -> None:
        self._transport, self._callbacks = transport, callbacks
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        if transport.is_closing() and not transport.get_write_buffer_size():
            self._socket.shutdown(socket.SHUT_WR)  # the transport's own close would wait for ours
        self.is_over = False

    async def check(self) -> None:
        """Run the callbacks, once, if the reply has arrived."""
        if self.is_over or self._transport.get_write_buffer_size():
            return
        if _state(self._socket) == CLOSED:
            self.is_over = True  # it was reset: what had not been read is lost
        elif _unacknowledged(self._socket) == 0:
            self.is_over = True
            await _run(self._callbacks)

    def close(self) -> None:
        self.is_over = True
        self._socket.close()


class Deliveries:
    """Replies with callbacks that are still on their way."""

    def __init__(self) -> None:
        self._open: set[Delivery] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def follow(self, transport: asyncio.Transport, callbacks: Sequence[Callback]) -> None:
        """Call back when the reply that was just written arrives: now, or from the background."""
        sock = transport.get_extra_info("socket")
        if not CAN_ASK or sock is None:
            return await _run(callbacks)
        if sock.fileno() < 0 or _state(sock) == CLOSED:
            return None
        if not transport.get_write_buffer_size() and _unacknowledged(sock) == 0:
            return await _run(callbacks)
        delivery = Delivery(transport, callbacks)
        self._open.add(delivery)
        task = asyncio.create_task(self._wait(delivery))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return None

    @property
    def is_idle(self) -> bool:
        """No reply is waited for."""
        return not self._open

    async def check(self) -> None:
        """Before a request is handled: what has arrived counts as arrived, whenever it was noticed."""
        for delivery in list(self._open):
            await delivery.check()

    async def _wait(self, delivery: Delivery) -> None:
        try:
            for seconds in POLLS_S:
                await asyncio.sleep(seconds)
                await delivery.check()
                if delivery.is_over:
                    return
        finally:
            self._open.discard(delivery)
            delivery.close()

    async def close(self) -> None:
        """Wait no longer for what has not arrived yet."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _run(callbacks: Sequence[Callback]) -> None:
    for callback in callbacks:
        await callback()


def is_listening(transport: asyncio.Transport) -> bool:
    """The client has not closed its end, as far as its machine has told ours."""
    sock = transport.get_extra_info("socket")
    if transport.is_closing() or sock is None:
        return not transport.is_closing()
    return not CAN_ASK or _state(sock) == ESTABLISHED


def _state(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def _unacknowledged(sock: socket.socket) -> int:
    return struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]
