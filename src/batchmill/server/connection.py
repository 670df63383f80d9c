"""HTTP connections: uvicorn's protocol with limits on time and size, for clients that may be slow, broken or hostile.

Plain requests to operations with a fast handler leave uvicorn here for the fast path: see `server/fast_path.py`.
Bytes that are not a request, and bytes after a refusal, are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from batchmill.errors import BatchmillError, InvalidConfig, InvalidInput, TooLarge, Unavailable
from batchmill.run_next import run_next
from batchmill.server.admission_control import ConnectionPool, Stage, group_of
from batchmill.server.fast_path import FastPath, FastReply, FastRequest
from batchmill.server.http import HttpRoot

HEAD_BYTES_MAX = 64 * 1024
HEADERS_MAX = 128  # of one head
HEAD_PATIENCE_S = 5.0  # a head that takes longer must arrive at HEAD_RATE_MIN
HEAD_RATE_MIN = 64  # bytes a second
FAST_METHODS = frozenset({b"GET", b"POST"})
FAST_BODY_S = 0.1  # on the fast path, from the first read to the end of the body
PIPELINED_MAX = 64  # requests that a client sends before the first of them is answered
LEFTOVER_BYTES_MAX = 64 * 1024  # of a refused body that is read and dropped, if the client has sent a valid key
# Framing is what arrives with a body beside its data: chunk sizes, chunk extensions, trailers.
FRAMING_BYTES_MAX = 64 * 1024
FRAMING_TIMES = 16  # further framing bytes allowed for each byte of the body
UNSENT_BYTES_MAX = 16 * 1024  # of replies to a client without a key, before the next reply waits
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class _Unreadable(Exception):
    """Makes the parser stop reading."""

    def __init__(self, error: BatchmillError) -> None:
        super().__init__()
        self.error = error


class Connection(HttpToolsProtocol):
    head_s = 15.0  # from the first byte of a request, or the start of the connection, to the end of the headers
    linger_s = 30.0  # how long a client with a key may go on sending a refused body
    anonymous_linger_s = 2.0  # the same without a key: long enough to read the refusal

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fast_path: FastPath | None = self.config.fast_path  # type: ignore[attr-defined]
        self._pool: ConnectionPool = self.config.pool  # type: ignore[attr-defined]
        self._unreadable: Callable[[BatchmillError], Response] = self.config.unreadable  # type: ignore[attr-defined]
        self.address, self.project, self.url = "", "", b""
        self.is_authenticated = self.has_slot = False
        self.since = self.loop.time()
        self._deadline: float | None = None  # in the loop's time
        self._timer: asyncio.TimerHandle | None = None  # fires at the deadline, or earlier and checks again
        self._head_bytes = 0  # received of an incomplete head
        self._read_bytes = 0  # size of the read that is being parsed
        self._framing = 0  # framing bytes after a head, less the allowance for its body
        self._in_head = True  # the next bytes belong to the head of a request
        self._has_begun = self._is_timed = False  # an incomplete head has begun; its timer runs
        self._is_lingering = False  # the reply under way is the last one
        self._is_over = False  # further bytes are dropped
        self._fast_request: FastRequest | None = None  # its headers fit the fast path, and its body is arriving
        self._body: list[bytes] = []
        self._fast_path_timer: asyncio.TimerHandle | None = None  # moves a request with a slow body off the fast path
        self._fast_reply: FastReply | None = None  # under way on the fast path
        self._unsent = 0  # bytes of replies that the client had not received at the last check

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = group_of(self.client[0]) if self.client else ""
        if not self._pool.add(self):
            self._is_over = True
            transport.abort()
            return
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        self.app_state = {**self.app_state, "transport": transport, "connection": self}
        self._set_deadline(self.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.remove(self)
        self._deadline = None
        if self._timer is not None:
            self._timer.cancel()
        reply, self._fast_reply = self._fast_reply, None
        self._cancel_fast_path_timer()
        self._fast_request, self._body = None, []
        if reply is not None:
            reply.drop()
        super().connection_lost(exc)
        self.app_state = {}  # it refers to this connection

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._read_bytes = len(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._deadline is None:
                self._set_deadline(self.head_s)
            end = data.find(b"\r\n\r\n")
            if data.find(b"pgrade:", 0, len(data) if end < 0 else end) >= 0:  # not in the body, which may be long
                data = _without_upgrade(data)
        else:
            self._framing += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the client offers another protocol; it gets HTTP/1.1
        except httptools.HttpParserError as error:
            cause = error.__context__
            failure = InvalidInput("this is not a valid HTTP request", code="invalid_http")
            self._refuse(cause.error if isinstance(cause, _Unreadable) else failure)
            return
        if self._has_begun and not self._is_timed:
            self._is_timed = True
            self._set_deadline(min(HEAD_PATIENCE_S, self.head_s))
        if self._fast_request is not None and self._fast_path_timer is None and self.parser is not None:
            self._fast_path_timer = self.loop.call_later(FAST_BODY_S, self._on_fast_path_timeout)
        if self._in_head and (self._head_bytes > HEAD_BYTES_MAX or len(self.headers or ()) > HEADERS_MAX):
            self._refuse(self._head_too_large())
        elif len(self.pipeline) > PIPELINED_MAX or self._framing > FRAMING_BYTES_MAX:
            self.transport.abort()

    # -- the connection pool ------------------------------------------------------------------------------------------

    def stage(self) -> Stage:
        """What the connection is doing, for the pool. A request without a slot does not protect it from eviction."""
        if self._fast_reply is not None or self.has_slot:
            return Stage.BUSY
        if self._is_over or self._is_lingering:
            return Stage.REFUSED
        is_idle = self._in_head and not self._head_bytes and (self.cycle is None or self.cycle.response_complete)
        if self.is_authenticated:
            return Stage.AUTHENTICATED_IDLE if is_idle else Stage.AUTHENTICATED_ARRIVING
        return Stage.IDLE if is_idle else Stage.ARRIVING

    def end(self) -> None:
        self._is_over = True
        self.transport.abort()

    def mark_authenticated(self, project: str) -> None:
        """Record that a request had a valid key of this project."""
        if not self.is_authenticated:
            self.project = project
            self._pool.mark_authenticated(self)
            self.is_authenticated = True
            if not self.transport.is_closing():
                self.transport.set_write_buffer_limits()

    async def wait_until_drained(self) -> None:
        await self.flow.drain()

    # -- refusals and the end -----------------------------------------------------------------------------------------

    def _head_too_large(self) -> BatchmillError:
        if len(self.url) > HEAD_BYTES_MAX // 2:
            return TooLarge(f"the URL is longer than {HEAD_BYTES_MAX // 2:,} bytes", code="uri_too_long")
        return TooLarge(
            f"the head of the request is longer than {HEAD_BYTES_MAX:,} bytes, or has more than {HEADERS_MAX} headers",
            code="head_too_large",
        )

    def _refuse(self, error: BatchmillError) -> None:
        """Answer an unreadable request, and stop reading."""
        is_open = not self.transport.is_closing()
        cycle = self.cycle
        has_earlier_requests = self._fast_reply is not None or bool(self.pipeline)
        if cycle is not None and not cycle.response_complete:  # its own body is broken, or the bytes after it
            has_earlier_requests = has_earlier_requests or cycle.response_started or not cycle.more_body
        self._is_over = True
        self._fast_request, self._body = None, []
        self._cancel_fast_path_timer()
        response = self._unreadable(error)
        if not is_open:
            return
        if has_earlier_requests:  # the client would read it as the reply to another request
            self.transport.abort()
            return
        head = [STATUS_LINE[response.status_code]]
        head += [b"%b: %b\r\n" % header for header in response.raw_headers]
        self.transport.write(b"".join([*head, b"connection: close\r\n\r\n", bytes(response.body)]))
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # its reply cannot be sent any more
            cycle.message_event.set()
        self._end_soon()

    def has_unread(self) -> bool:
        """Whether a body is still arriving. A short one of a client with a key does not count."""
        if self._in_head or self._is_over or self.pipeline or self.cycle is None or not self.cycle.more_body:
            return False  # the body may be that of a pipelined request, which waits for this reply
        if not self.is_authenticated:
            return True
        length = next((value for name, value in self.cycle.scope["headers"] if name == b"content-length"), b"")
        return not length.isdigit() or int(length) > LEFTOVER_BYTES_MAX

    def linger(self) -> None:
        """Make the reply that has begun the last one, and keep reading after it for a while.

        uvicorn would close at its end. The bytes that still arrive would reset the connection, and the client would
        lose the reply.
        """
        self._is_lingering, self.cycle.keep_alive = True, True

    def _end_soon(self) -> None:
        """Close the sending side, and drop what arrives until the client closes its side."""
        self._is_over = True
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            try:
                self.transport.write_eof()
            except OSError:  # the client has reset the connection; the loop has not noticed yet
                self.transport.abort()
                return
        self.flow.resume_reading()
        self._set_deadline(self.linger_s if self.is_authenticated else self.anonymous_linger_s)

    # -- callbacks of the parser --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head = self._has_begun = True
        if self._fast_path is None:
            super().on_message_begin()
        else:  # `_go_normally` calls uvicorn's method later if the request leaves the fast path
            self.url, self.headers, self.expect_100_continue = b"", [], False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are ignored: the headers have been checked already
            name = name.lower()
            self.headers.append((name, value))
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True

    def on_headers_complete(self) -> None:
        is_long = self._head_bytes > HEAD_BYTES_MAX or self._read_bytes > HEAD_BYTES_MAX  # or the bytes after it
        if len(self.headers) > HEADERS_MAX or (is_long and self._head_size() > HEAD_BYTES_MAX):
            raise _Unreadable(self._head_too_large())
        self._in_head = self._has_begun = self._is_timed = False
        self._head_bytes = self._framing = 0
        self._deadline = None
        if self._fast_path is None:
            super().on_headers_complete()
            return
        method = self.parser.get_method()
        if method in FAST_METHODS and self._has_nothing_under_way() and self.parser.get_http_version() == "1.1":
            self._fast_request = self._fast_path.match(method, self.url, self.headers)
        if self._fast_request is None:
            self._start_on_normal_path()

    def _head_size(self) -> int:
        """The size of the received head."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _has_nothing_under_way(self) -> bool:
        """Whether nothing else is under way on this connection, or waits to be sent."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return is_idle and not self.pipeline and not self.transport.get_write_buffer_size()

    def _start_on_normal_path(self) -> None:
        """Hand a request to uvicorn, which has not seen its headers."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers  # the scope holds this list object
        super().on_headers_complete()
        self.cycle.scope["state"]["cycle"] = self.cycle  # for `is_last`: its task has not begun

    def _start_asgi_task(self, *request: Any) -> None:
        """As uvicorn does it; the task begins once the data that is here has been parsed, most often the whole body."""
        run_next(self.loop, lambda: super(Connection, self)._start_asgi_task(*request))

    def _on_fast_path_timeout(self) -> None:
        """Leave the fast path because the body is slow; the normal path reads it piece by piece with a time limit."""
        self._fast_path_timer = None
        if self._fast_request is not None and not self.transport.is_closing():
            self._leave_fast_path(self._fast_request)

    def shutdown(self) -> None:
        if self._fast_request is not None:  # uvicorn does not know of requests on the fast path
            self._leave_fast_path(self._fast_request)
        super().shutdown()

    def _cancel_fast_path_timer(self) -> None:
        if self._fast_path_timer is not None:
            self._fast_path_timer.cancel()
            self._fast_path_timer = None

    def _leave_fast_path(self, request: FastRequest) -> None:
        """Continue on the normal path with the part of the body that has arrived."""
        self._cancel_fast_path_timer()
        self._fast_request = None
        self._start_on_normal_path()
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
            self._cancel_fast_path_timer()
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            reply = None if self.transport.is_closing() else self._fast_path.begin(request, body, self._send_fast_reply)
            if reply is None:
                self._leave_fast_path(request)
            else:
                self._fast_request, self._body = None, []
                if reply.has_key and not self.is_authenticated:
                    self.mark_authenticated(reply.project)
                if not reply.response_complete:
                    self.cycle = self._fast_reply = reply  # type: ignore[assignment]
                return
        is_answered = self.cycle.response_complete  # then uvicorn does not time the next request
        self._set_deadline(self.timeout_keep_alive if is_answered else None)
        super().on_message_complete()

    # -- replies ------------------------------------------------------------------------------------------------------

    def _send_fast_reply(self, reply: FastReply, pieces: list[bytes]) -> None:
        """Send the reply of a request on the fast path, then go on with the next request."""
        self._fast_reply = None
        if self.transport.is_closing():
            return
        if len(pieces) == 1:
            self.transport.write(pieces[0])
        else:
            self._write_pieces(pieces)
        self.server_state.total_requests += 1
        if not reply.keep_alive:
            self.transport.close()
            self._set_deadline(self.timeout_keep_alive)
        elif self.pipeline:
            self.flow.resume_reading()
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._set_deadline(self.timeout_keep_alive if self._in_head and not self._head_bytes else self.head_s)

    def _write_pieces(self, pieces: list[bytes]) -> None:
        """Write a long reply without joining it. The transport gets what the kernel does not take at once."""
        sent = 0
        if not self.transport.get_write_buffer_size():
            with contextlib.suppress(OSError):  # it takes nothing now; or the transport finds the error too, and ends
                sent = os.writev(self.transport.get_extra_info("socket").fileno(), pieces)
        for piece in pieces:
            if sent < len(piece):
                self.transport.write(memoryview(piece)[sent:])
            sent = max(sent - len(piece), 0)

    def is_last(self, cycle: RequestResponseCycle) -> bool | None:
        """Whether the reply to a request is the last one, if it can be sent at once; None: ASGI sends it."""
        if cycle.response_started or cycle.disconnected or self.transport.is_closing():
            return None
        if self.transport.get_write_buffer_size() or self.has_unread():
            return None
        return not cycle.keep_alive

    def send_at_once(self, cycle: RequestResponseCycle, data: bytes) -> None:
        """Send the whole reply to a request, and end its cycle as uvicorn does."""
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        self.transport.write(data)
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    def end_fast_reply(self) -> None:
        """Refuse the request on the fast path: the server is stopping, and the time for requests has passed."""
        if self._fast_reply is not None:
            self._fast_reply.stop(Unavailable("the server is stopping; try again"))

    def on_response_complete(self) -> None:
        is_last, cycle = not self.pipeline, self.cycle
        if cycle.response_complete and cycle.body:
            cycle.body = bytearray()  # free what the handler did not read
        if self._is_lingering:
            self.server_state.total_requests += 1
            self._end_soon()
            return
        super().on_response_complete()
        if not self._in_head and not self.transport.is_closing():
            self._set_deadline(self.linger_s)  # the rest of its body still arrives: not much is left of it
        elif is_last and self.transport.get_write_buffer_size():
            self._set_deadline(self.timeout_keep_alive)

    def timeout_keep_alive_handler(self) -> None:
        if self._in_head:
            super().timeout_keep_alive_handler()

    # -- time ---------------------------------------------------------------------------------------------------------

    def _set_deadline(self, seconds: float | None) -> None:
        """Abort unless this is called again within `seconds`. None: no deadline.

        A timer that fires early is cheaper than a new one for each call.
        """
        if seconds is None:
            self._deadline = None
            return
        self.since = self.loop.time()
        self._deadline = self.since + seconds
        if self._timer is None or self._timer.when() > self._deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(self._deadline, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self.loop.time() < self._deadline:
            self._timer = self.loop.call_at(self._deadline, self._check_deadline)
        elif self._is_timed and self._deadline < self.since + self.head_s and self._has_head_rate():
            self._deadline = self.since + self.head_s
            self._timer = self.loop.call_at(self._deadline, self._check_deadline)
        elif not self._is_over and self._has_reply_progress():
            self._set_deadline(self.timeout_keep_alive)
        else:
            self.transport.abort()

    def _has_head_rate(self) -> bool:
        return self._head_bytes >= HEAD_RATE_MIN * HEAD_PATIENCE_S

    def _has_reply_progress(self) -> bool:
        """Whether the client has read some of a long reply since the last check."""
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        return self._unsent != before


def _without_upgrade(data: bytes) -> bytes:
    """Rename the Upgrade header of a head. At an Upgrade the parser would stop, and lose the body.

    Java's client and `curl --http2` offer h2c with every request.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest


KEEP_ALIVE_S = 75
BACKLOG = 2048
ACCEPTED_MAX = 16
CANCELLED_S = 2.0  # how long cancelled requests may take to send their refusal


class _Config(uvicorn.Config):
    """The configuration that uvicorn hands to each connection."""

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
            sock.listen(BACKLOG)  # the loop accepts at most ACCEPTED_MAX of them in one turn
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
        """Args: app: `root`, or a wrapper of it; fast_path: for requests that need not go through `app`."""
        config = _Config(
            app, http=connection, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False,
            server_header=False, date_header=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=drain_s,
            backlog=ACCEPTED_MAX,
        )  # fmt: skip
        config.fast_path, config.pool, config.unreadable = fast_path, root.admission.pool, root.unreadable
        self._sock, self._server = sock, _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start serving, and return once requests are answered."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._sock]))
        await self._server.listens.wait()

    async def close(self, *, at_once: bool = False) -> None:
        """Accept no more connections, and let requests under way end within `drain_s`."""
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
        if state.tasks:  # cancelled above, or at the end of `drain_s`
            await asyncio.wait(state.tasks, timeout=CANCELLED_S)


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to the address; it does not listen yet. Raises: InvalidConfig."""
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InvalidConfig(f"the address {host!r} cannot be resolved: {error.strerror}") from None
    family, kind, protocol, _, address = candidates[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address[0] == "::" else 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        hint = (
            "stop the process that listens there, or choose another --port"
            if error.errno == errno.EADDRINUSE
            else "see --host"
        )
        raise InvalidConfig(f"cannot listen on {host}:{port}: {error.strerror}; {hint}") from None
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket, shown: str = "") -> str:
    """Return the URL at which a client on this machine reaches the socket.

    Args: shown: the name of this machine, for clients of other ones, where the socket takes any address.
    """
    host, port = sock.getsockname()[:2]
    any_address = {"0.0.0.0": shown or "127.0.0.1", "::": shown or "::1"}
    host = any_address.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
