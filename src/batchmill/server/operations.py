"""Operations (one method of one path each), the routing of paths to them, and the calls that their handlers get."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from batchmill.children.programs import Programs
from batchmill.errors import BatchmillError
from batchmill.server.json_inspection import VALUES_MAX
from batchmill.types import Caller, Scope
from batchmill.wire.operations import NOTHING, Content, Endpoint

if TYPE_CHECKING:
    from batchmill.server.fast_path import FastHandler


Callback = Callable[[], Awaitable[None]]

JSON = "application/json"
BODY_BYTES_MAX = 1024 * 1024  # the default of an operation


def _spend_nothing() -> None:
    """Do nothing: the call is not counted."""


def _hold_nothing(size: int) -> None:
    """Do nothing: the memory of the call is not counted."""


def _keep_project(project: str) -> None:
    """Do nothing: the call has no slot."""


class Call(Struct, frozen=True):
    """One request to an operation: the authenticated caller, and the checked query and body."""

    request: Request
    caller: Caller
    id: str  # the request's id, as in logs and in the reply's x-request-id
    query: Any = None  # the operation's `query`, filled
    body: Any = None  # the operation's `body`, filled
    raw: bytes = b""  # the body's bytes, of an operation that takes JSON
    callbacks: list[Callback] = []
    programs: Programs | None = None  # child processes for work whose length the caller controls; None: a gRPC call
    spend: Callable[[], None] = _spend_nothing  # count the request; raises RateLimited. See Operation
    unspend: Callable[[], None] = _spend_nothing  # do not count it after all
    hold: Callable[[int], None] = _hold_nothing  # count this many bytes as held in memory; raises Unavailable
    belongs_to: Callable[[str], None] = _keep_project  # count the request for a link's project; raises Unavailable

    def on_delivered(self, callback: Callback) -> None:
        """Run `callback` once the whole reply is delivered; never, if the client disconnects before.

        Concurrency: the callback begins before any later request is handled that is no upload.
        """
        self.callbacks.append(callback)

    async def wait_for_disconnect(self) -> None:
        """Wait until the client disconnects, or has its whole reply. Call it only after the body has been read."""
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    @property
    def path(self) -> dict[str, str]:
        """The parameters of the path, decoded once. They are names only; no file path is ever made from one."""
        return self.request.path_params


class TryNextRoute(Exception):
    """Raised by a handler to pass its request to the next operation whose template fits the path.

    `raw` is the body, which the handler has read.
    """

    def __init__(self, raw: bytes) -> None:
        super().__init__()
        self.raw = raw


class Operation(Struct, frozen=True):
    """One method of one path.

    `query` and `body` are structs that a request is converted to; unknown fields are refused. `body` may be a Content,
    which the handler reads from `call.request` itself, piece by piece. `reply` describes a success for the OpenAPI
    document; None is an empty reply. `scope` None: the operation needs no key.
    """

    name: str  # the operationId
    method: str
    path: str  # "/v1/files/{file_id}"
    summary: str
    scope: Scope | None
    handler: Callable[[Call], Awaitable[Response]]
    query: type[Struct] | None = None
    body: type[Struct] | Content | None = None
    reply: Any = None
    status: int = 200
    also: dict[int, Any] = {}  # further success statuses, as `reply`: {206: Content(...)}
    errors: tuple[int, ...] = ()  # besides 400, 401, 403, 408, 413, 415, 429, 500 and 503, which are always possible
    body_is_optional: bool = False
    body_bytes_max: int | None = BODY_BYTES_MAX  # None: `server.body_bytes_max`, the limit for all but uploads
    values_max: int = VALUES_MAX  # of JSON
    is_raw: bool = False  # the handler reads the body itself; Content-Type and Content-Encoding are not checked
    claims: Callable[[dict[str, str]], bool] | None = None  # given the path's parameters; False: try the next template
    check_access: Callable[[Caller, dict[str, str]], None] | None = None  # raises; called before the body is read
    is_vital: bool = False  # always answered: no limit on requests under way applies
    last_slash_is_optional: bool = False  # "/things/" means the same as "/things"
    has_free_query: bool = False  # the query is ignored: it is for proxies in front of the server
    spends_itself: bool = False  # the handler calls `call.spend`, so that a repeated order costs nothing
    fast_handler: FastHandler | None = None  # answers plain requests sooner, with the same reply; see `spends_itself`

    @classmethod
    def of(cls, endpoint: Endpoint[Any], handler: Callable[[Call], Awaitable[Response]], **more: Any) -> Operation:
        """Make an operation of batchmill's own API; the SDK and the control socket share the endpoint's description."""
        media = endpoint.media[0] if len(endpoint.media) == 1 else endpoint.media
        reply = media or (None if endpoint.reply is NOTHING else endpoint.reply)
        return cls(
            endpoint.name, endpoint.method, endpoint.path, endpoint.summary, endpoint.scope, handler,
            query=endpoint.query, body=endpoint.body, reply=reply, status=endpoint.status,
            body_is_optional=endpoint.body_is_optional, **more,
        )  # fmt: skip

    @property
    def is_upload(self) -> bool:
        """Whether the handler reads the body piece by piece and stores it."""
        return isinstance(self.body, Content) and not self.is_raw and self.body.media != JSON

    def bytes_max(self, server_max: int) -> int:
        """The limit of its body, where the server accepts bodies of `server_max` bytes."""
        if self.body_bytes_max is None:
            return server_max
        return self.body_bytes_max if self.is_upload else min(self.body_bytes_max, server_max)


class Dialect(Protocol):
    """One public API: its operations, and how it renders errors."""

    name: str

    def operations(self) -> Sequence[Operation]: ...

    def refusal(self, error: BatchmillError) -> Response:
        """Render the reply to a failed request: status and envelope by `error.code`. Never raises."""

    def error_schema(self) -> dict[str, Any]:
        """The JSON schema of the error envelope."""


_encoder = msgspec.json.Encoder()
JSON_HEADERS = ((b"content-type", JSON.encode()),)  # of the replies that `json_reply` makes


def json_bytes(value: Any) -> bytes:
    """The body of the reply that `json_reply` makes."""
    return _encoder.encode(value)


def json_reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Make a JSON reply of a struct, or of anything else that JSON can hold."""
    return Response(json_bytes(value), status, headers, media_type=JSON)


_PARAMETER = re.compile(r"\{([a-z_]+)(:path)?\}")
NAME_CHARS_MAX = 1024  # of a path parameter; a longer one is not found


class MountedOperation(Struct, frozen=True):
    """An operation, and the dialect that renders its refusals."""

    operation: Operation
    dialect: Dialect


class Match(Struct, frozen=True):
    """The result of routing. `route` None: nothing has the path and method; `methods`: those that the path has."""

    dialect: Dialect
    route: MountedOperation | None = None
    parameters: dict[str, str] = {}
    methods: tuple[str, ...] = ()


class _Template(Struct, frozen=True, eq=False):
    path: str
    pattern: re.Pattern[str]
    rank: tuple[int, ...]  # for each segment: 0 a literal, 1 a parameter, 2 the rest of the path
    methods: dict[str, MountedOperation]

    @property
    def is_catch_all(self) -> bool:
        """Whether it matches every path that nothing else matches; then another method is a 404, not a 405."""
        return self.rank == (0, 2)

    def claims(self, parameters: dict[str, str]) -> bool:
        """Whether one of its operations claims a path with these parameters."""
        claims = [route.operation.claims for route in self.methods.values()]
        return any(each is None or each(parameters) for each in claims)


class Routes:
    """Routes paths to operations. Raises: ValueError when two operations have the same method and path."""

    def __init__(self, frontends: Sequence[tuple[Dialect, Sequence[Operation]]], fallback: Dialect) -> None:
        self._fallback = fallback
        self._owners: dict[str, Dialect] = {}  # first path segment -> the first dialect with a path below it
        exact: dict[str, _Template] = {}
        optional_slash: set[str] = set()
        for dialect, operations in frontends:
            for operation in operations:
                template = exact.setdefault(operation.path, _template(operation))
                if operation.last_slash_is_optional:
                    optional_slash.add(operation.path)
                if operation.method in template.methods:
                    raise ValueError(f"{operation.method} {operation.path} has two operations")
                template.methods[operation.method] = MountedOperation(operation, dialect)
                if operation.path != "/":  # the root owns no paths below it
                    self._owners.setdefault(_first(operation.path), dialect)
        self._exact = {path: each for path, each in exact.items() if "{" not in path}
        self._exact |= {
            f"{path}/": exact[path] for path in optional_slash if "{" not in path and f"{path}/" not in exact
        }
        self._templates = sorted((each for path, each in exact.items() if "{" in path), key=lambda each: each.rank)
        names = {_first(each.path) for each in self._templates}
        # Only templates that begin with the segment of a path are tried.
        self._of_any = [each for each in self._templates if "{" in _first(each.path)]
        self._by_first = {
            name: [each for each in self._templates if _first(each.path) == name or each in self._of_any]
            for name in names
            if "{" not in name
        }

    def find(self, method: str, path: str, after: MountedOperation | None = None) -> Match:
        """Route a decoded path. HEAD goes to GET unless the path has an operation for HEAD.

        `after`: an operation that passed the request on; only the templates after its own are tried.
        """
        if path.startswith("//"):  # the client's base URL ends with a slash
            path = f"/{path.lstrip('/')}"
        template, parameters = None if after is not None else self._exact.get(path), {}
        if template is None:
            template, parameters = self._match(path, after)
        if template is None or any(len(value) > NAME_CHARS_MAX for value in parameters.values()):
            return Match(self._owners.get(_first(path), self._fallback))
        methods = template.methods
        route = methods.get(method) or (methods.get("GET") if method == "HEAD" else None)
        if route is None and template.is_catch_all:
            return Match(self._owners.get(_first(path), self._fallback))
        if route is None:
            return Match(next(iter(methods.values())).dialect, methods=tuple(sorted(methods)))
        return Match(route.dialect, route, parameters)

    def _match(self, path: str, after: MountedOperation | None) -> tuple[_Template | None, dict[str, str]]:
        for template in self._by_first.get(_first(path), self._of_any):
            if after is not None:
                after = None if template.path == after.operation.path else after
            elif (match := template.pattern.fullmatch(path)) and template.claims(match.groupdict()):
                return template, match.groupdict()
        return None, {}

    def all(self) -> list[MountedOperation]:
        """All operations, for the OpenAPI document and for tests."""
        templates = [*dict.fromkeys(self._exact.values()), *self._templates]
        return [route for template in templates for route in template.methods.values()]


def _first(path: str) -> str:
    return path.split("/", 2)[1] if path.startswith("/") else ""


def _template(operation: Operation) -> _Template:
    path, pattern, at = operation.path, "", 0
    for match in _PARAMETER.finditer(path):
        pattern += re.escape(path[at : match.start()])
        pattern += f"(?P<{match[1]}>{'.+' if match[2] else '[^/]+'})"
        at = match.end()
    rank = tuple(2 if ":path}" in segment else 1 if segment.startswith("{") else 0 for segment in path.split("/")[1:])
    pattern += re.escape(path[at:]) + ("/?" if operation.last_slash_is_optional else "")
    return _Template(path, re.compile(pattern, re.DOTALL), rank, {})
