"""The fast path: a plain call of a deployed function is matched, begun and answered without a task and without ASGI.

What it earns: a request of 12 bytes that is echoed costs the server's process 123 µs on the fast path and 470 µs on
the normal one (64 connections, medians of three runs of 6,000 replies in turn). With it `benchmarks/live_functions.py`
serves 12,700 requests a second, 1.91 times as many as mosec; the normal path alone would serve fewer than mosec.

A request that is in any way unusual takes the normal way, through `HttpRoot`, with which the fast path shares gate,
routes, admission and watchers: what a client sees is the same to the byte. `server/connection.py` hands over the heads
and bodies that uvicorn parses, so this file and that one depend on the insides of uvicorn (see pyproject.toml).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from batchmill.errors import BatchmillError
from batchmill.server.access_log import Served
from batchmill.server.auth import ANYBODY
from batchmill.server.http import REQUEST_ID, HttpRoot
from batchmill.server.operations import JSON, Content, MountedOperation, Operation
from batchmill.server.replies import date, hidden, new_request_id, refusal, security_headers
from batchmill.services.trace_context import request_id
from batchmill.types import Caller, Scope

Headers = Sequence[tuple[bytes, bytes]]
Cancel = Callable[[], None]  # nobody waits for the answer any more


class Reply(Protocol):
    """The one reply to a request; `__call__` or `refuse` ends it, whichever comes first."""

    def __call__(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer. `headers` without Content-Length and those that every reply has; names in lower case."""

    def refuse(self, error: BatchmillError) -> None:
        """Answer as the operation's dialect says it: its `refusal`, as if the handler had raised."""


class FastHandler(Protocol):
    """How an operation answers plain requests, beside its handler: see `Operation.fast_handler`."""

    def begin(self, path: dict[str, str], headers: Headers, body: bytes, caller: Caller, reply: Reply) -> Cancel | None:
        """Begin to answer, or return None without having done anything: the handler then gets the request.

        Never waits and never raises. The host, the key and its rate have been looked at; `path` is decoded, `body` is
        whole, and there is no query. `reply` may be called before this returns.
        """


BODY_BYTES_MAX = 1024 * 1024  # a longer body is read piece by piece, within its time
SMALL_BYTES = 16 * 1024  # a body that is longer is counted, and is only waited for where it is known who sends it
ROUTES_MAX = 1024  # paths that are remembered
HOSTS_MAX = 64  # Host headers that are remembered as right
HEADS_MAX = 256  # of replies, that are remembered as they are written
FORGET_S = 1.0  # what a path means may change
CLIENT_LEFT = 499
# What has these is looked at the normal way.
UNUSUAL = frozenset(
    {
        b"transfer-encoding", b"expect", b"upgrade", b"origin", b"sec-fetch-site", b"trailer", b"te",
    }
)  # fmt: skip
_HEADER = re.compile(rb"[a-z0-9!#$%&'*+.^_`|~-]+")
_UNSAFE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class FastRoute(Struct, frozen=True, eq=False):
    """What a path means on the fast path."""

    route: MountedOperation
    handler: FastHandler
    parameters: dict[str, str]
    media: str | None  # the Content-Type that a body must have; None: any
    bytes_max: int
    any_encoding: bool
    scopes: frozenset[Scope]  # whose callers may
    operation: Operation


class FastRequest(Struct, eq=False):
    """A request whose headers are there and fit the fast path."""

    way: FastRoute
    headers: list[tuple[bytes, bytes]]
    named: dict[bytes, bytes]


class FastPath:
    def __init__(self, root: HttpRoot) -> None:
        self._root, self._clock, self._places = root, root.clock, root.admission.places
        self._routes: dict[bytes, FastRoute | None] = {}
        self._hosts: set[bytes] = set()
        self._heads: dict[tuple[tuple[bytes, bytes], ...], tuple[bytes, bytes]] = {}
        self._cleared = self._dated = -FORGET_S
        self._date = b""

    # -- whether ------------------------------------------------------------------------------------------------------

    def match(self, url: bytes, headers: list[tuple[bytes, bytes]]) -> FastRequest | None:
        """Whether a POST of HTTP/1.1 with these headers may take the fast path, before its body is there."""
        now = self._clock.monotonic()
        if now - self._cleared >= FORGET_S:
            self._routes.clear()
            self._cleared = now
        way = self._routes.get(url, False)
        if way is False:
            way = self._find(url)
        if way is None:
            return None
        named = dict(headers)
        if len(named) != len(headers) or not UNUSUAL.isdisjoint(named):
            return None
        if b"connection" in named and named[b"connection"].lower() != b"keep-alive":
            return None
        size = named.get(b"content-length", b"")
        if not 0 < len(size) <= 9 or not size.isdigit() or int(size) > way.bytes_max or not self._is_right(way, named):
            return None
        request = FastRequest(way, headers, named)
        return None if int(size) > SMALL_BYTES and self._caller(request) is None else request

    def _is_right(self, way: FastRoute, named: dict[bytes, bytes]) -> bool:
        host = named.get(b"host", b"")
        if host not in self._hosts:
            try:
                self._root.hosts.check("POST", [(b"host", host)])
            except BatchmillError:
                return False
            if len(self._hosts) < HOSTS_MAX:
                self._hosts.add(host)
        if not way.any_encoding and b"content-encoding" in named:
            return False
        return way.media is None or named.get(b"content-type", b"").partition(b";")[0].decode("latin-1") == way.media

    def _find(self, url: bytes) -> FastRoute | None:
        """None for what is not on the fast path; a path with escapes or a query never is."""
        way = None
        if not url.startswith(b"/") or not url.isascii() or any(each in url for each in (b"%", b"?", b"#")):
            return None
        found = self._root.routes.find("POST", url.decode())
        if found.route is not None and (handler := found.route.operation.fast_handler) is not None:
            way = self._way(found.route, handler, found.parameters)
        if len(self._routes) < ROUTES_MAX:
            self._routes[url] = way
        return way

    def _way(self, route: MountedOperation, handler: FastHandler, parameters: dict[str, str]) -> FastRoute:
        operation = route.operation
        assert not operation.spends_itself, "an operation with a fast handler is counted before it begins"
        media = operation.body.media if isinstance(operation.body, Content) else JSON
        scopes = list(Scope)
        return FastRoute(
            route, handler, parameters, None if operation.is_raw or media == "*/*" else media,
            min(operation.bytes_max(self._root.admission.body_bytes_max), BODY_BYTES_MAX), operation.is_raw,
            frozenset(scopes if operation.scope is None else scopes[scopes.index(operation.scope) :]), operation,
        )  # fmt: skip

    def _caller(self, request: FastRequest) -> Caller | None:
        """Who asks, if they may and have a request left; None: the normal way finds out, or says what is wrong."""
        operation = request.way.operation
        caller = ANYBODY if operation.scope is None else self._root.gate.known(request.named.get(b"authorization"))
        if caller is None or caller.scope not in request.way.scopes or not self._root.gate.has_room(caller):
            return None
        return caller

    # -- the way ------------------------------------------------------------------------------------------------------

    def begin(self, request: FastRequest, body: bytes, done: Callable[[FastReply, bytes], None]) -> FastReply | None:
        """Begin to answer a request that is whole. `done` gets the bytes of the reply."""
        root, way = self._root, request.way
        if not root.deliveries.is_idle:
            return None
        claims = way.operation.claims
        caller = self._caller(request) if claims is None or claims(way.parameters) else None
        if caller is None or not self._places.try_take(caller.project):
            return None
        given = request.named.get(b"x-request-id", b"")
        name = given.decode() if given and REQUEST_ID.fullmatch(given) else new_request_id()
        served = Served(name, "POST", way.operation.path, started=self._clock.monotonic(), bytes_in=len(body))
        served.project, served.key = caller.project, caller.key
        reply = FastReply(self, way.route, served, done, caller.project)
        if len(body) > SMALL_BYTES:
            if not root.admission.memory.has_room(caller.project, len(body)):
                self._places.leave(caller.project)
                return None
            reply.held = len(body)
            root.admission.memory.take(caller.project, reply.held)
        token = request_id.set(name)
        try:
            reply.cancel = way.handler.begin(way.parameters, request.headers, body, caller, reply)
        except Exception as error:  # the edge, as in HttpRoot
            reply.refuse(hidden(error, name))
        finally:
            request_id.reset(token)
        if reply.cancel is None and not reply.response_complete:
            reply.is_ours = False
            self.left(reply)
            return None
        if way.operation.scope is not None:
            root.gate.spend(caller)
        reply.go()
        return reply

    def ended(self, served: Served) -> None:
        served.seconds = self._clock.monotonic() - served.started
        self._root.ended(served)

    def left(self, reply: FastReply) -> None:
        self._places.leave(reply.project)
        if reply.held:
            self._root.admission.memory.give(reply.project, reply.held)

    # -- the reply ----------------------------------------------------------------------------------------------------

    def written(self, status: int, headers: Headers, body: bytes, end: bytes) -> bytes:
        """A reply as its bytes, in the order in which the normal way has its headers; `end`: the last of them."""
        key = tuple(headers)
        before, after = self._heads.get(key) or self._head(key)
        now = self._clock.monotonic()
        if now - self._dated >= 0.5:
            self._date, self._dated = b"date: %b\r\n" % date(), now
        return b"".join(
            (STATUS_LINE[status], before, b"content-length: %d\r\n" % len(body), after, self._date, end, body)
        )

    def _head(self, headers: tuple[tuple[bytes, bytes], ...]) -> tuple[bytes, bytes]:
        """The lines before the length of the body, and those behind it."""
        for name, value in headers:
            if not _HEADER.fullmatch(name) or _UNSAFE.search(value):
                raise ValueError(f"a header {name!r} that cannot be sent")
        own = [(name, value) for name, value in headers if name not in (b"content-length", b"content-type")]
        media = [(name, value) for name, value in headers if name == b"content-type"]
        media += security_headers(name for name, _ in headers)
        lines = _lines(own), _lines(media)
        if len(self._heads) < HEADS_MAX:
            self._heads[headers] = lines
        return lines


class _Nobody:
    """Who waits for a `message_event`."""

    def set(self) -> None:
        """It has happened."""


_NOBODY = _Nobody()


class FastReply:
    """A request on the fast path, and the one reply to it. It stands where uvicorn has the cycle of a request."""

    def __init__(
        self,
        fast_path: FastPath,
        route: MountedOperation,
        served: Served,
        done: Callable[[FastReply, bytes], None],
        project: str,
    ) -> None:
        self.project, self.held = project, 0  # bytes of its body that are counted
        self._fast_path, self._route, self._served, self._done = fast_path, route, served, done
        self._reply: bytes | None = None  # that came before `go`
        self._has_begun = False
        self.cancel: Cancel | None = None
        self.is_ours = True  # until the normal way takes it
        # What uvicorn looks at:
        self.response_complete = self.disconnected = self.more_body = False
        self.keep_alive = True
        self.has_key = served.key is not None
        self.body = bytearray()
        self.message_event = _NOBODY

    def __call__(self, status: int, headers: Headers, body: bytes) -> None:
        if self.response_complete or not self.is_ours:
            return
        end = b"x-request-id: %b\r\n" % self._served.id.encode()
        if not self.keep_alive:
            end += b"connection: close\r\n"
        data = self._fast_path.written(status, headers, body, end + b"\r\n")
        self.response_complete = True
        self._served.status, self._served.bytes_out = status, len(body)
        self._reply = data
        if self._has_begun:
            self._end()

    def refuse(self, error: BatchmillError) -> None:
        if self.response_complete or not self.is_ours:
            return
        self._served.code, error.request_id = error.code, self._served.id
        response = refusal(self._route.dialect, error, ())
        self(response.status_code, [(n, v) for n, v in response.raw_headers if n != b"content-length"], response.body)

    def go(self) -> None:
        """It is under way from now on: a reply that is there already is sent."""
        self._has_begun = True
        if self.response_complete:
            self._end()

    def stop(self, error: BatchmillError) -> None:
        """Answer with an error, and end what was begun."""
        if not self.response_complete:
            cancel, self.cancel = self.cancel, None
            if cancel is not None:
                cancel()
            self.refuse(error)

    def drop(self) -> None:
        """The client has left."""
        if self.response_complete:
            return
        self.response_complete = self.disconnected = True
        cancel, self.cancel = self.cancel, None
        if cancel is not None:
            cancel()
        self._served.status = CLIENT_LEFT
        self._fast_path.left(self)
        self._fast_path.ended(self._served)

    def _end(self) -> None:
        data, self._reply = self._reply, None
        self.cancel = None  # which leads back here: what goes round has to be found to be freed
        assert data is not None
        self._fast_path.left(self)
        self._done(self, data)
        self._fast_path.ended(self._served)


def _lines(headers: Headers) -> bytes:
    return b"".join(b"%b: %b\r\n" % header for header in headers)
