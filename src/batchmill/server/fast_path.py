"""The fast path: a plain call of a deployed function is matched, begun and answered without a task and without ASGI.
So is a GET whose answer is in memory, as of a job that a client polls.

The gain: a request of 12 bytes that is echoed costs the server's process 123 µs on the fast path and 470 µs on the
normal path (64 connections, medians of three runs of 6,000 replies in turn). With it `benchmarks/live_functions.py`
serves 12,700 requests a second, 1.91 times as many as mosec; the normal path alone would serve fewer than mosec.

An unusual request takes the normal path, through `HttpRoot`. Both paths share gate, routes, admission and watchers, and
a client sees the same bytes from both. `server/connection.py` hands over the heads and bodies that uvicorn parses, so
this file and that one depend on the internals of uvicorn (see pyproject.toml).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from batchmill.errors import BatchmillError
from batchmill.server.access_log import RequestRecord
from batchmill.server.auth import ANYBODY
from batchmill.server.http import REQUEST_ID, HttpRoot
from batchmill.server.operations import JSON, Content, MountedOperation, Operation
from batchmill.server.replies import mask_error, new_request_id, refusal
from batchmill.server.reply_heads import Headers
from batchmill.services.trace_context import request_id
from batchmill.types import Caller, Scope

Cancel = Callable[[], None]  # tells the handler that its reply is not needed any more


class Reply(Protocol):
    """The one reply to a request. The first call of `__call__` or `refuse` sends it."""

    def __call__(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer. `headers` has lower-case names, and lacks Content-Length and the headers that every reply has."""

    def refuse(self, error: BatchmillError) -> None:
        """Answer with the dialect's `refusal` of the error, as if the handler had raised it."""


class FastHandler(Protocol):
    """Answers the plain requests of an operation, beside its handler: see `Operation.fast_handler`."""

    def begin(self, path: dict[str, str], headers: Headers, body: bytes, caller: Caller, reply: Reply) -> Cancel | None:
        """Begin to answer, and return what stops it. None: it has replied, or else done nothing, and the handler gets
        the request.

        Never waits and never raises. The host, the key and its rate have been checked; `path` is decoded, `body` is
        whole, and there is no query. `reply` may be called before this returns.
        """


BODY_BYTES_MAX = 1024 * 1024  # a longer body is read piece by piece, with a time limit
SMALL_BYTES = 16 * 1024  # a longer body counts as memory, and is accepted only from an authenticated caller
ROUTES_MAX = 1024  # cached paths
HOSTS_MAX = 64  # cached Host headers that are allowed
ROUTES_TTL_S = 1.0  # cached paths live this long: what a path means may change
CLIENT_LEFT = 499
# Requests with one of these headers take the normal path.
UNUSUAL = frozenset(
    {
        b"transfer-encoding", b"expect", b"upgrade", b"origin", b"sec-fetch-site", b"trailer", b"te",
    }
)  # fmt: skip


_ALL = tuple(Scope)
# The scopes of keys that may call an operation of a scope; None: one that needs no key.
_SCOPES_FROM = {None: frozenset(_ALL), **{scope: frozenset(_ALL[_ALL.index(scope) :]) for scope in _ALL}}


class FastRoute(Struct, frozen=True, eq=False):
    """What a path means on the fast path."""

    route: MountedOperation
    handler: FastHandler
    parameters: dict[str, str]
    media: str | None  # the required Content-Type; None: any
    bytes_max: int
    any_encoding: bool
    scopes: frozenset[Scope]  # scopes of keys that may call it
    operation: Operation


class FastRequest(Struct, eq=False):
    """A request whose headers have arrived and fit the fast path."""

    fast_route: FastRoute
    headers: list[tuple[bytes, bytes]]
    header_map: dict[bytes, bytes]


class FastPath:
    def __init__(self, root: HttpRoot) -> None:
        self._root, self._clock, self._limiter = root, root.clock, root.admission.project_requests
        self._routes: dict[tuple[bytes, bytes], FastRoute | None] = {}  # by method and URL
        self._hosts: set[bytes] = set()
        self._cleared = -ROUTES_TTL_S
        self.heads = root.heads

    # -- matching -----------------------------------------------------------------------------------------------------

    def match(self, method: bytes, url: bytes, headers: list[tuple[bytes, bytes]]) -> FastRequest | None:
        """Return the request if a GET or POST of HTTP/1.1 with these headers fits the fast path. The body of a POST may
        come later; a GET has none.
        """
        now = self._clock.monotonic()
        if now - self._cleared >= ROUTES_TTL_S:
            self._routes.clear()
            self._cleared = now
        fast_route = self._routes.get((method, url), False)
        if fast_route is False:
            fast_route = self._find_route(method, url)
        if fast_route is None:
            return None
        header_map = dict(headers)
        if len(header_map) != len(headers) or not UNUSUAL.isdisjoint(header_map):
            return None
        if b"connection" in header_map and header_map[b"connection"].lower() != b"keep-alive":
            return None
        if method == b"GET":
            is_plain = b"content-length" not in header_map and self._has_host(header_map)
            return FastRequest(fast_route, headers, header_map) if is_plain else None
        size = header_map.get(b"content-length", b"")
        if (
            not 0 < len(size) <= 9
            or not size.isdigit()
            or int(size) > fast_route.bytes_max
            or not self._fits(fast_route, header_map)
        ):
            return None
        request = FastRequest(fast_route, headers, header_map)
        return None if int(size) > SMALL_BYTES and self._caller(request) is None else request

    def _has_host(self, header_map: dict[bytes, bytes]) -> bool:
        """Whether the server may be called by the name that a request has for it."""
        host = header_map.get(b"host", b"")
        if host not in self._hosts:
            try:
                self._root.hosts.check("POST", [(b"host", host)])
            except BatchmillError:
                return False
            if len(self._hosts) < HOSTS_MAX:
                self._hosts.add(host)
        return True

    def _fits(self, fast_route: FastRoute, header_map: dict[bytes, bytes]) -> bool:
        if not self._has_host(header_map):
            return False
        if not fast_route.any_encoding and b"content-encoding" in header_map:
            return False
        return (
            fast_route.media is None
            or header_map.get(b"content-type", b"").partition(b";")[0].decode("latin-1") == fast_route.media
        )

    def _find_route(self, method: bytes, url: bytes) -> FastRoute | None:
        """Return the route of a URL, or None if it is not on the fast path, as any URL with escapes or a query."""
        fast_route = None
        if not url.startswith(b"/") or not url.isascii() or any(each in url for each in (b"%", b"?", b"#")):
            return None
        match = self._root.routes.find(method.decode(), url.decode())
        if match.route is not None and (handler := match.route.operation.fast_handler) is not None:
            fast_route = self._make_route(match.route, handler, match.parameters)
        if len(self._routes) < ROUTES_MAX:
            self._routes[method, url] = fast_route
        return fast_route

    def _make_route(self, route: MountedOperation, handler: FastHandler, parameters: dict[str, str]) -> FastRoute:
        operation = route.operation
        assert not operation.spends_itself, "an operation with a fast handler is counted before it begins"
        media = operation.body.media if isinstance(operation.body, Content) else JSON
        return FastRoute(
            route, handler, parameters, None if operation.is_raw or media == "*/*" else media,
            min(operation.bytes_max(self._root.admission.body_bytes_max), BODY_BYTES_MAX), operation.is_raw,
            _SCOPES_FROM[operation.scope], operation,
        )  # fmt: skip

    def _caller(self, request: FastRequest) -> Caller | None:
        """Return the caller if it may call and is within its rate; None: the normal path authenticates, or refuses."""
        operation = request.fast_route.operation
        caller = (
            ANYBODY
            if operation.scope is None
            else self._root.gate.cached_caller(request.header_map.get(b"authorization"))
        )
        if caller is None or caller.scope not in request.fast_route.scopes or not self._root.gate.has_room(caller):
            return None
        return caller

    # -- answering ----------------------------------------------------------------------------------------------------

    def begin(
        self, request: FastRequest, body: bytes, send: Callable[[FastReply, list[bytes]], None]
    ) -> FastReply | None:
        """Begin to answer a complete request. `done` gets the bytes of the reply. None: take the normal path."""
        root, fast_route = self._root, request.fast_route
        method = fast_route.operation.method
        if method == "POST" and not root.deliveries.is_idle:
            return None  # it may be the repeat of a request whose reply is on its way
        claims = fast_route.operation.claims
        caller = self._caller(request) if claims is None or claims(fast_route.parameters) else None
        if caller is None or not self._limiter.try_take(caller.project):
            return None
        sent_id = request.header_map.get(b"x-request-id", b"")
        own_id = sent_id.decode() if sent_id and REQUEST_ID.fullmatch(sent_id) else new_request_id()
        record = RequestRecord(
            own_id, method, fast_route.operation.path, started=self._clock.monotonic(), bytes_in=len(body)
        )
        record.project, record.key = caller.project, caller.key
        reply = FastReply(self, fast_route.route, record, send, caller.project)
        if len(body) > SMALL_BYTES:
            if not root.admission.memory.has_room(caller.project, len(body)):
                self._limiter.leave(caller.project)
                return None
            reply.held = len(body)
            root.admission.memory.take(caller.project, reply.held)
        token = request_id.set(own_id)
        try:
            reply.cancel = fast_route.handler.begin(fast_route.parameters, request.headers, body, caller, reply)
        except Exception as error:  # the edge, as in HttpRoot
            reply.refuse(mask_error(error, own_id))
        finally:
            request_id.reset(token)
        if reply.cancel is None and not reply.response_complete:
            reply.is_on_fast_path = False
            self.release(reply)
            return None
        if fast_route.operation.scope is not None:
            root.gate.spend(caller)
        reply.start()
        return reply

    def report(self, record: RequestRecord) -> None:
        record.seconds = self._clock.monotonic() - record.started
        self._root.report(record)

    def release(self, reply: FastReply) -> None:
        self._limiter.leave(reply.project)
        if reply.held:
            self._root.admission.memory.give(reply.project, reply.held)


class _NoEvent:
    """Takes the place of uvicorn's `message_event`: nothing waits for it."""

    def set(self) -> None:
        """Do nothing."""


_NO_EVENT = _NoEvent()


class FastReply:
    """A request on the fast path, and its one reply. It takes the place of uvicorn's request cycle."""

    def __init__(
        self,
        fast_path: FastPath,
        route: MountedOperation,
        record: RequestRecord,
        send: Callable[[FastReply, list[bytes]], None],
        project: str,
    ) -> None:
        self.project, self.held = project, 0  # bytes of its body that count as memory
        self._fast_path, self._route, self._record, self._send = fast_path, route, record, send
        self._reply: list[bytes] | None = None  # a reply that came before `start`
        self._has_begun = False
        self.cancel: Cancel | None = None
        self.is_on_fast_path = True  # False: the normal path has taken over
        # Attributes that uvicorn reads:
        self.response_complete = self.disconnected = self.more_body = False
        self.keep_alive = True
        self.has_key = record.key is not None
        self.body = bytearray()
        self.message_event = _NO_EVENT

    def __call__(self, status: int, headers: Headers, body: bytes) -> None:
        if self.response_complete or not self.is_on_fast_path:
            return
        data = self._fast_path.heads.render(status, headers, body, self._record.id, is_last=not self.keep_alive)
        self.response_complete = True
        self._record.status, self._record.bytes_out = status, len(body)
        self._reply = data
        if self._has_begun:
            self._end()

    def refuse(self, error: BatchmillError) -> None:
        if self.response_complete or not self.is_on_fast_path:
            return
        self._record.code, error.request_id = error.code, self._record.id
        response = refusal(self._route.dialect, error, ())
        self(response.status_code, response.raw_headers, bytes(response.body))

    def start(self) -> None:
        """Mark the request as under way, and send the reply if it is ready."""
        self._has_begun = True
        if self.response_complete:
            self._end()

    def stop(self, error: BatchmillError) -> None:
        """Cancel the handler's work and answer with an error."""
        if not self.response_complete:
            cancel, self.cancel = self.cancel, None
            if cancel is not None:
                cancel()
            self.refuse(error)

    def drop(self) -> None:
        """Cancel the handler's work: the client has disconnected."""
        if self.response_complete:
            return
        self.response_complete = self.disconnected = True
        cancel, self.cancel = self.cancel, None
        if cancel is not None:
            cancel()
        self._record.status = CLIENT_LEFT
        self._fast_path.release(self)
        self._fast_path.report(self._record)

    def _end(self) -> None:
        data, self._reply = self._reply, None
        self.cancel = None  # it refers to this reply: without the cycle, memory is freed at once
        assert data is not None
        self._fast_path.release(self)
        self._send(self, data)
        self._fast_path.report(self._record)
