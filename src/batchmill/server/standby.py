"""The HTTP server of a process that stands by: every reply is 503, and says when to try again.

It runs only while another process owns the database, so it reads no body and knows no operation.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import msgspec

from batchmill.errors import BatchmillError
from batchmill.ports.clock import Clock
from batchmill.server.auth import token_of
from batchmill.services.keys import KeyService
from batchmill.store.sql.database import Database

RETRY_AFTER_S = 5
HEAD_BYTES_MAX = 64 * 1024
HEAD_S = 10.0  # for a request's head to arrive, and for its reply to leave
CONNECTIONS_MAX = 256
KEYS_S = 2.0  # keys are read again after so long: their owner is another process
CODE = "standing_by"


class Standby:
    """Answers requests on a socket that `bind` made, until `close`. The socket stays open."""

    def __init__(self, sock: socket.socket, database: Database, clock: Clock) -> None:
        self._sock, self._database, self._clock = sock, database, clock
        self.owner = ""  # its URL, shown to callers with a valid key; empty: it serves nothing
        self._server: asyncio.Server | None = None
        self._requests: set[asyncio.Task[None]] = set()
        self._keys: tuple[float, KeyService] | None = None

    async def open(self) -> None:
        """Start to answer."""
        self._server = await asyncio.start_server(self._accept, sock=self._sock.dup(), limit=HEAD_BYTES_MAX)

    async def close(self) -> None:
        """Answer no more. Connections that are not accepted yet wait for the next server on the socket."""
        if self._server is not None:
            self._server.close()
            for task in self._requests:
                task.cancel()
            if self._requests:
                await asyncio.wait(self._requests)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio runs it as a task"
        if len(self._requests) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        self._requests.add(task)
        try:
            async with asyncio.timeout(HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._reply(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ConnectionError):
            writer.transport.abort()
        finally:
            self._requests.discard(task)

    async def _reply(self, head: bytes) -> bytes:
        method = head.partition(b" ")[0]
        message = "this server stands by: another one owns the database"
        if self.owner and await self._has_valid_key(head):
            message += f"; send requests to {self.owner}"
        error = {"message": message, "type": "server_error", "code": CODE, "param": None}
        body = msgspec.json.encode({"status": "standing_by", "error": error})
        lines = (
            "HTTP/1.1 503 Service Unavailable", "content-type: application/json", f"content-length: {len(body)}",
            f"retry-after: {RETRY_AFTER_S}", "cache-control: no-store", "connection: close",
        )  # fmt: skip
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if method == b"HEAD" else body)

    async def _has_valid_key(self, head: bytes) -> bool:
        lines = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
        token = token_of([(name.strip().lower(), value.strip()) for name, _, value in lines])
        if token is None:
            return False
        now = self._clock.monotonic()
        if self._keys is None or now - self._keys[0] > KEYS_S:
            self._keys = now, KeyService(self._database, self._clock)
        with contextlib.suppress(BatchmillError):  # a wrong key, or a database that cannot be reached
            await self._keys[1].authenticate(token)
            return True
        return False
