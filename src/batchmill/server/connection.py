"""A connection of a client that may be slow, broken or hostile: uvicorn's protocol with limits on time and size.

Plain requests to operations with a fast handler leave uvicorn's way here: see `server/fast_path.py`. Of what is no
request, and of what follows a refusal, nothing is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from batchmill.errors import BatchmillError, InvalidConfig, InvalidInput, TooLarge, Unavailable
from batchmill.server.admission_control import ConnectionPool, Stage, group_of
from batchmill.server.fast_path import FastPath, FastReply, FastRequest
from batchmill.server.http import HttpRoot

HEAD_BYTES_MAX = 64 * 1024
HEADERS_MAX = 128  # of one head
HEAD_PATIENCE_S = 5.0  # a head that is so old has come at the least rate
HEAD_RATE_MIN = 64  # bytes a second
FAST_BODY_S = 0.1  # on the fast path, from the first read to the end of the body
PIPELINED_MAX = 64  # requests sent before the first of them was answered
LEFTOVER_BYTES_MAX = 64 * 1024  # the length of a refused body that is read past, of a client that showed a key
# What comes with a body and is none of it: sizes of chunks, their extensions, trailers.
FRAMING_BYTES_MAX = 64 * 1024
FRAMING_TIMES = 16  # and so many bytes for each of the body's
UNSENT_BYTES_MAX = 16 * 1024  # of replies to a client without a key, before the next one waits
_OFFER = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class _Unreadable(Exception):
    """Raised for the parser, to read no further."""

    def __init__(self, error: BatchmillError) -> None:
        super().__init__()
        self.error = error


class Connection(HttpToolsProtocol):
    head_s = 15.0  # from the first byte of a request, or the connection, to the end of its headers
    linger_s = 30.0  # how long a client with a key may go on sending a body that was refused
    stranger_linger_s = 2.0  # and one without: long enough to read why

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fast_path: FastPath | None = self.config.fast_path  # type: ignore[attr-defined]
        self._pool: ConnectionPool = self.config.pool  # type: ignore[attr-defined]
        self._unreadable: Callable[[BatchmillError], Response] = self.config.unreadable  # type: ignore[attr-defined]
        self.address, self.project, self.url = "", "", b""
        self.is_known = self.is_placed = False
        self.since = self.loop.time()
        self._deadline: float | None = None  # of the loop's time
        self._timer: asyncio.TimerHandle | None = None  # goes off at the deadline, or before it and looks again
        self._head_bytes = 0  # read so far of a head that is not complete
        self._read_bytes = 0  # of the read that is being parsed
        self._framing = 0  # bytes behind a head that belong to no body, less what its body may cost
        self._in_head = True  # what comes next belongs to the head of a request
        self._has_begun = self._is_timed = False  # a head that is not complete; its time runs
        self._lingers = False  # the reply under way is the last one
        self._is_over = False  # nothing that still comes is looked at
        self._fast_request: FastRequest | None = None  # its headers fit the fast path, and its body comes
        self._body: list[bytes] = []
        self._leaving: asyncio.TimerHandle | None = None  # when a body that is still coming has to leave the fast path
        self._fast_reply: FastReply | None = None  # under way on the fast path
        self._unsent = 0  # bytes of replies that the client had not taken when that was looked at last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = group_of(self.client[0]) if self.client else ""
        if not self._pool.add(self):
            self._is_over = True
            transport.abort()
            return
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        self.app_state = {**self.app_state, "transport": transport, "connection": self}
        self._within(self.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.remove(self)
        self._deadline = None
        if self._timer is not None:
            self._timer.cancel()
        reply, self._fast_reply = self._fast_reply, None
        self._stay()
        self._fast_request, self._body = None, []
        if reply is not None:
            reply.drop()
        super().connection_lost(exc)
        self.app_state = {}  # which leads back here

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._read_bytes = len(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._deadline is None:
                self._within(self.head_s)
            if b"pgrade:" in data:
                data = _without_offer(data)
        else:
            self._framing += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # a client that offers another protocol is answered in this one
        except httptools.HttpParserError as error:
            cause = error.__context__
            failure = InvalidInput("this is no HTTP request that can be read", code="invalid_http")
            self._refuse(cause.error if isinstance(cause, _Unreadable) else failure)
            return
        if self._has_begun and not self._is_timed:
            self._is_timed = True
            self._within(min(HEAD_PATIENCE_S, self.head_s))
        if self._fast_request is not None and self._leaving is None and self.parser is not None:
            self._leaving = self.loop.call_later(FAST_BODY_S, self._leave_late)
        if self._in_head and (self._head_bytes > HEAD_BYTES_MAX or len(self.headers or ()) > HEADERS_MAX):
            self._refuse(self._too_long())
        elif len(self.pipeline) > PIPELINED_MAX or self._framing > FRAMING_BYTES_MAX:
            self.transport.abort()

    # -- whose it is --------------------------------------------------------------------------------------------------

    def stage(self) -> Stage:
        """What it is doing, for the pool: a stranger's request that has no place yet is no reason to stay."""
        if self._fast_reply is not None or self.is_placed:
            return Stage.BUSY
        if self._is_over or self._lingers:
            return Stage.REFUSED
        is_idle = self._in_head and not self._head_bytes and (self.cycle is None or self.cycle.response_complete)
        if self.is_known:
            return Stage.KNOWN_IDLE if is_idle else Stage.KNOWN_ARRIVING
        return Stage.IDLE if is_idle else Stage.ARRIVING

    def end(self) -> None:
        self._is_over = True
        self.transport.abort()

    def know(self, project: str) -> None:
        """A request on it had a key that was right."""
        if not self.is_known:
            self.project = project
            self._pool.know(self)
            self.is_known = True
            if not self.transport.is_closing():
                self.transport.set_write_buffer_limits()

    async def drained(self) -> None:
        await self.flow.drain()

    # -- the end ------------------------------------------------------------------------------------------------------

    def _too_long(self) -> BatchmillError:
        if len(self.url) > HEAD_BYTES_MAX // 2:
            return TooLarge(f"the URL is longer than {HEAD_BYTES_MAX // 2:,} bytes", code="uri_too_long")
        return TooLarge(
            f"the head of the request is longer than {HEAD_BYTES_MAX:,} bytes, or has more than {HEADERS_MAX} headers",
            code="head_too_large",
        )

    def _refuse(self, error: BatchmillError) -> None:
        """Answer what cannot be read, and read no further."""
        is_open = not self.transport.is_closing()
        cycle = self.cycle
        is_behind = self._fast_reply is not None or bool(self.pipeline)
        if cycle is not None and not cycle.response_complete:  # the broken body is its own, or what came behind it
            is_behind = is_behind or cycle.response_started or not cycle.more_body
        self._is_over = True
        self._fast_request, self._body = None, []
        self._stay()
        response = self._unreadable(error)
        if not is_open:
            return
        if is_behind:  # the client would take it for the answer to another request
            self.transport.abort()
            return
        head = [STATUS_LINE[response.status_code]]
        head += [b"%b: %b\r\n" % header for header in response.raw_headers]
        self.transport.write(b"".join([*head, b"connection: close\r\n\r\n", bytes(response.body)]))
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # nobody hears of it any more
            cycle.message_event.set()
        self._end_soon()

    def has_unread(self) -> bool:
        """A body that is still coming, unless its client has shown a key and it is short."""
        if self._in_head or self._is_over or self.pipeline or self.cycle is None or not self.cycle.more_body:
            return False  # or the body is that of a request which waits for this one's reply
        if not self.is_known:
            return True
        claimed = next((value for name, value in self.cycle.scope["headers"] if name == b"content-length"), b"")
        return not claimed.isdigit() or int(claimed) > LEFTOVER_BYTES_MAX

    def linger(self) -> None:
        """The reply that has begun is the last one. uvicorn would close at its end, and what is still coming would
        have the client's machine drop the reply."""
        self._lingers, self.cycle.keep_alive = True, True

    def _end_soon(self) -> None:
        """Say that nothing more is answered, and drop what comes until the client has closed its end."""
        self._is_over = True
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            try:
                self.transport.write_eof()
            except OSError:  # the client has reset the connection, which the loop has not read yet
                self.transport.abort()
                return
        self.flow.resume_reading()
        self._within(self.linger_s if self.is_known else self.stranger_linger_s)

    # -- what the parser finds ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head = self._has_begun = True
        if self._fast_path is None:
            super().on_message_begin()
        else:  # which is done only for those that leave the fast path
            self.url, self.headers, self.expect_100_continue = b"", [], False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # what comes behind a body changes nothing that was checked before it
            name = name.lower()
            self.headers.append((name, value))
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True

    def on_headers_complete(self) -> None:
        is_long = self._head_bytes > HEAD_BYTES_MAX or self._read_bytes > HEAD_BYTES_MAX  # or what comes behind it is
        if len(self.headers) > HEADERS_MAX or (is_long and self._size() > HEAD_BYTES_MAX):
            raise _Unreadable(self._too_long())
        self._in_head = self._has_begun = self._is_timed = False
        self._head_bytes = self._framing = 0
        self._deadline = None
        if self._fast_path is None:
            super().on_headers_complete()
            return
        if self._is_free() and self.parser.get_method() == b"POST" and self.parser.get_http_version() == "1.1":
            self._fast_request = self._fast_path.match(self.url, self.headers)
        if self._fast_request is None:
            self._go_normally()

    def _size(self) -> int:
        """Of the head that has come."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _is_free(self) -> bool:
        """Nothing else is under way here, or waits to be sent."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return is_idle and not self.pipeline and not self.transport.get_write_buffer_size()

    def _go_normally(self) -> None:
        """Have uvicorn begin a request whose headers it has not seen."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers  # the scope has this very list
        super().on_headers_complete()

    def _leave_late(self) -> None:
        """The body takes longer: it is read piece by piece, within its time."""
        self._leaving = None
        if self._fast_request is not None and not self.transport.is_closing():
            self._leave_fast_path(self._fast_request)

    def shutdown(self) -> None:
        if self._fast_request is not None:  # uvicorn knows only of requests that go its way
            self._leave_fast_path(self._fast_request)
        super().shutdown()

    def _stay(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None

    def _leave_fast_path(self, request: FastRequest) -> None:
        """The normal way, with what has come of the body."""
        self._stay()
        self._fast_request = None
        self._go_normally()
        body, self._body = b"".join(self._body), []
        if body:
            super().on_body(body)

    def on_body(self, body: bytes) -> None:
        self._framing -= (FRAMING_TIMES + 1) * len(body)
        if self._fast_request is not None:
            self._body.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        request = self._fast_request
        self._in_head = True
        if request is not None and self._fast_path is not None:
            self._stay()
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            reply = None if self.transport.is_closing() else self._fast_path.begin(request, body, self._answered)
            if reply is None:
                self._leave_fast_path(request)
            else:
                self._fast_request, self._body = None, []
                if reply.has_key and not self.is_known:
                    self.know(reply.project)
                if not reply.response_complete:
                    self.cycle = self._fast_reply = reply  # type: ignore[assignment]
                return
        is_answered = self.cycle.response_complete  # then nobody else waits for the next request
        self._within(self.timeout_keep_alive if is_answered else None)
        super().on_message_complete()

    # -- what becomes of requests -------------------------------------------------------------------------------------

    def _answered(self, reply: FastReply, data: bytes) -> None:
        """Send the reply of a request on the fast path; then comes the next one."""
        self._fast_reply = None
        if self.transport.is_closing():
            return
        self.transport.write(data)
        self.server_state.total_requests += 1
        if not reply.keep_alive:
            self.transport.close()
            self._within(self.timeout_keep_alive)
        elif self.pipeline:
            self.flow.resume_reading()
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._within(self.timeout_keep_alive if self._in_head and not self._head_bytes else self.head_s)

    def end_fast_reply(self) -> None:
        """The time that requests had when the server stopped is over."""
        if self._fast_reply is not None:
            self._fast_reply.stop(Unavailable("the server is stopping; try again"))

    def on_response_complete(self) -> None:
        is_last, cycle = not self.pipeline, self.cycle
        if cycle.response_complete and cycle.body:
            cycle.body = bytearray()  # what nobody read
        if self._lingers:
            self.server_state.total_requests += 1
            self._end_soon()
            return
        super().on_response_complete()
        if not self._in_head and not self.transport.is_closing():
            self._within(self.linger_s)  # its body goes on although it was answered: not much is left of it
        elif is_last and self.transport.get_write_buffer_size():
            self._within(self.timeout_keep_alive)

    def timeout_keep_alive_handler(self) -> None:
        if self._in_head:
            super().timeout_keep_alive_handler()

    # -- time ---------------------------------------------------------------------------------------------------------

    def _within(self, seconds: float | None) -> None:
        """Abort unless this is called again in time. A timer that goes off early is cheaper than one for each call."""
        if seconds is None:
            self._deadline = None
            return
        self.since = self.loop.time()
        self._deadline = self.since + seconds
        if self._timer is None or self._timer.when() > self._deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(self._deadline, self._look_at_time)

    def _look_at_time(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self.loop.time() < self._deadline:
            self._timer = self.loop.call_at(self._deadline, self._look_at_time)
        elif self._is_timed and self._deadline < self.since + self.head_s and self._keeps_pace():
            self._deadline = self.since + self.head_s
            self._timer = self.loop.call_at(self._deadline, self._look_at_time)
        elif not self._is_over and self._has_taken():
            self._within(self.timeout_keep_alive)
        else:
            self.transport.abort()

    def _keeps_pace(self) -> bool:
        return self._head_bytes >= HEAD_RATE_MIN * HEAD_PATIENCE_S

    def _has_taken(self) -> bool:
        """The client reads a long reply: there is less of it than when this was request last."""
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        return self._unsent != before


def _without_offer(data: bytes) -> bytes:
    """A head whose offer of another protocol is no longer one: the parser would end with it, and lose the body.

    Java's client and `curl --http2` offer h2c with every request.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _OFFER.sub(b"\r\nx-upgrade:", head) + end + rest


KEEP_ALIVE_S = 75
BACKLOG = 2048
ACCEPTED_MAX = 16
CANCELLED_S = 2.0  # for requests that were cancelled to say so


class _Config(uvicorn.Config):
    """What uvicorn hands to each connection."""

    fast_path: FastPath | None
    pool: ConnectionPool
    unreadable: Callable[[BatchmillError], Response]


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)  # of which the loop takes no more than ACCEPTED_MAX in one turn
        self.listens.set()


class Listener:
    """Serves an ASGI application on a socket that `bind` made."""

    def __init__(
        self,
        app: Any,
        sock: socket.socket,
        *,
        root: HttpRoot,
        drain_s: int,
        connection: type[Connection] = Connection,
        fast_path: FastPath | None = None,
    ) -> None:
        """Args: app: `root`, or what is around it; fast_path: of requests that need not go through `app`."""
        config = _Config(
            app, http=connection, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False,
            server_header=False, date_header=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=drain_s,
            backlog=ACCEPTED_MAX,
        )  # fmt: skip
        config.fast_path, config.pool, config.unreadable = fast_path, root.admission.pool, root.unreadable
        self._sock, self._server = sock, _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Returns once requests are answered."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._sock]))
        await self._server.listens.wait()

    async def close(self, *, at_once: bool = False) -> None:
        """Take no further connection and let requests under way end, within the bound."""
        if self._serving is None:
            self._sock.close()
            return
        self._server.should_exit = True
        self._server.force_exit = at_once
        state = self._server.server_state
        if at_once:
            for connection in list(state.connections):
                connection.transport.abort()
            for task in state.tasks:
                task.cancel()
        await asyncio.wait({self._serving})
        for connection in list(state.connections):
            connection.end_fast_reply()
        if state.tasks:  # they were cancelled, by us or at the end of the time that they had
            await asyncio.wait(state.tasks, timeout=CANCELLED_S)


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address and does not listen yet. Raises: InvalidConfig."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InvalidConfig(f"the address {host!r} is not known: {error.strerror}") from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address[0] == "::" else 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        way_out = (
            "end what listens there, or choose another --port" if error.errno == errno.EADDRINUSE else "see --host"
        )
        raise InvalidConfig(f"cannot listen on {host}:{port}: {error.strerror}; {way_out}") from None
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    """Where a client on this machine finds it."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
