"""Detect whether a reply was delivered: written whole to a connected client, and acknowledged by TCP.

Two guarantees depend on this, and nothing else does:

* An order may come without an idempotency key, from a client that sends no retry header (requests, predibase,
  opensearch-py). If the client lost the reply and sends the order again, there is one job. If the client received the
  reply and sends the same order again, there is a second job. Only the acknowledgement tells these apart: `take_order`,
  `services/repeats.py`.
* A single-use link is used up by a delivered download, and not by a broken one: `services/links.py`.

A reply without a callback costs one comparison. A reply with a callback costs two system calls if the acknowledgement
is there at once; otherwise also a duplicate of the socket until it comes, for 15 s at most. POST requests that
arrive meanwhile take the normal path, never the fast path, since they may be the repeat.
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

from batchmill.errors import BatchmillError
from batchmill.server.operations import Call, Callback
from batchmill.services.repeats import RepeatedOrders
from batchmill.types import Once, Submitted

# Delays between checks for the acknowledgement. It comes with the client's next request, or 40 ms after the reply; what
# depends on it sooner calls `check`.
POLLS_S = (0.025, 0.025, 0.1, 0.3, 1.0, 3.0, 10.0)
ESTABLISHED, CLOSED = 1, 7  # states of TCP_INFO; after the client closes its side the state is CLOSE_WAIT
HAS_TCP_INFO = sys.platform == "linux"


async def take_order(
    call: Call, repeats: RepeatedOrders, once: Once, submit: Callable[[], Awaitable[Submitted]]
) -> Submitted:
    """Submit an order. Its job is stored then, and nothing may fail after.

    A repeated order is answered even if its input or its model is gone, or the key's rate limit is reached, and costs
    nothing. Few are repeated, so none is looked up before: `submit` finds its job in the transaction that would store
    another one, and a refused one is looked up.
    """
    is_counted = False
    try:
        call.spend()
        is_counted = True
        submitted = await submit()
    except BatchmillError:
        if (job := await repeats.find(once)) is None:
            raise
        submitted = Submitted(job, "repeated")
    if is_counted and submitted.how == "repeated":
        call.unspend()
    call.on_delivered(lambda: repeats.mark_delivered(once))
    return submitted


class Delivery:
    """One written reply, until it is known to be delivered. Keeps the connection's socket open meanwhile."""

    def __init__(self, transport: asyncio.Transport, callbacks: Sequence[Callback]) -> None:
        self._transport, self._callbacks = transport, callbacks
        sock = transport.get_extra_info("socket")
        self._socket = socket.socket(sock.family, sock.type, sock.proto, os.dup(sock.fileno()))
        if transport.is_closing() and not transport.get_write_buffer_size():
            self._socket.shutdown(socket.SHUT_WR)  # the transport's own close would wait for ours
        self.is_over = False

    async def check(self) -> None:
        """Run the callbacks, once, if the reply was delivered."""
        if self.is_over or self._transport.get_write_buffer_size():
            return
        if _state(self._socket) == CLOSED:
            self.is_over = True  # the connection was reset: unread bytes are lost
        elif _unacknowledged(self._socket) == 0:
            self.is_over = True
            await _run(self._callbacks)

    def close(self) -> None:
        self.is_over = True
        self._socket.close()


class Deliveries:
    """Replies with callbacks that are not delivered yet."""

    def __init__(self) -> None:
        self._open: set[Delivery] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def track(self, transport: asyncio.Transport, callbacks: Sequence[Callback]) -> None:
        """Run the callbacks when the reply that was just written is delivered: now, or later in the background."""
        sock = transport.get_extra_info("socket")
        if not HAS_TCP_INFO or sock is None:
            return await _run(callbacks)
        if sock.fileno() < 0:
            return None
        if not transport.get_write_buffer_size() and _unacknowledged(sock) == 0:
            return None if _state(sock) == CLOSED else await _run(callbacks)
        delivery = Delivery(transport, callbacks)
        self._open.add(delivery)
        task = asyncio.create_task(self._wait(delivery))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return None

    @property
    def is_idle(self) -> bool:
        """Whether no reply is tracked."""
        return not self._open

    async def check(self) -> None:
        """Run the callbacks of all delivered replies. Call it before a request is handled."""
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
        """Stop waiting for undelivered replies."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _run(callbacks: Sequence[Callback]) -> None:
    for callback in callbacks:
        await callback()


def is_listening(transport: asyncio.Transport) -> bool:
    """Whether the client has not closed its side, as far as this machine knows."""
    sock = transport.get_extra_info("socket")
    if transport.is_closing() or sock is None:
        return not transport.is_closing()
    return not HAS_TCP_INFO or _state(sock) == ESTABLISHED


def _state(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def _unacknowledged(sock: socket.socket) -> int:
    return struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]
