"""Operations: one method of one path each, described once; which of them a path means; what reaches a handler."""

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
BODY_BYTES_MAX = 1024 * 1024  # of an operation that says nothing else


def _spend_nothing() -> None:
    """Of a call that nobody counts."""


def _hold_nothing(size: int) -> None:
    """Of a call whose memory nobody counts."""


def _stay(project: str) -> None:
    """Of a call that has no place."""


class Call(Struct, frozen=True):
    """One request on its way through an operation: who asks, and what, already checked."""

    request: Request
    caller: Caller
    id: str  # of the request: logs and the reply's x-request-id have it
    query: Any = None  # the operation's `query`, filled
    body: Any = None  # the operation's `body`, filled
    raw: bytes = b""  # the body as it came, of an operation that takes JSON
    callbacks: list[Callback] = []
    programs: Programs | None = None  # where what callers can make long is done; None: it came over gRPC
    spend: Callable[[], None] = _spend_nothing  # count the request; raises RateLimited. See Operation
    hold: Callable[[int], None] = _hold_nothing  # count so many bytes as its own in memory; raises Unavailable
    belongs_to: Callable[[str], None] = _stay  # count it for a project that a link names; raises Unavailable

    def on_delivered(self, callback: Callback) -> None:
        """Run `callback` once the client's machine has taken the whole reply; never, if the client left before.

        Concurrency: it has begun before any later request is looked at.
        """
        self.callbacks.append(callback)

    async def until_gone(self) -> None:
        """Wait until the client has left, or has its whole reply. Only once the body has been read."""
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    @property
    def path(self) -> dict[str, str]:
        """The parameters of the path, decoded once. Names only: no file's path is ever made of one."""
        return self.request.path_params


class Elsewhere(Exception):
    """A handler looked at its request: it is for the next operation whose template fits its path.

    `raw` is the body, which it has read.
    """

    def __init__(self, raw: bytes) -> None:
        super().__init__()
        self.raw = raw


class Operation(Struct, frozen=True):
    """One method of one path.

    `query` and `body` are structs that a request is converted to, unknown fields refused; `body` may be a Content,
    which the handler reads from `call.request` itself, piece by piece. `reply` describes a success for the document;
    None is an empty reply. `scope` None: anybody may ask, without a key.
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
    also: dict[int, Any] = {}  # further statuses that are no error, as `reply`: {206: Content(...)}
    errors: tuple[int, ...] = ()  # besides 400, 401, 403, 408, 413, 415, 429, 500 and 503, which any may answer
    body_is_optional: bool = False
    body_bytes_max: int | None = BODY_BYTES_MAX  # None: `server.body_bytes_max`, which bounds all but uploads
    values_max: int = VALUES_MAX  # of JSON
    is_raw: bool = False  # the handler reads the body itself, whatever its Content-Type and Content-Encoding say
    claims: Callable[[dict[str, str]], bool] | None = None  # of its path's parameters; False: for the next template
    admits: Callable[[Caller, dict[str, str]], None] | None = None  # raises for what the path names, before the body
    is_vital: bool = False  # it is answered whatever else is under way, and waits for nobody
    last_slash_is_optional: bool = False  # "/things/" means what "/things" means
    has_free_query: bool = False  # whatever stands in its query is for what lies between: it is not read
    spends_itself: bool = False  # the handler calls `call.spend`: an order that was taken already costs nothing
    fast_handler: FastHandler | None = None  # answers plain requests alike, sooner; never with `spends_itself`

    @classmethod
    def of(cls, endpoint: Endpoint[Any], handler: Callable[[Call], Awaitable[Response]], **more: Any) -> Operation:
        """An operation of our own API, whose description the SDK and the control socket share."""
        media = endpoint.media[0] if len(endpoint.media) == 1 else endpoint.media
        reply = media or (None if endpoint.reply is NOTHING else endpoint.reply)
        return cls(
            endpoint.name, endpoint.method, endpoint.path, endpoint.summary, endpoint.scope, handler,
            query=endpoint.query, body=endpoint.body, reply=reply, status=endpoint.status,
            body_is_optional=endpoint.body_is_optional, **more,
        )  # fmt: skip

    @property
    def is_upload(self) -> bool:
        """Its handler takes the body piece by piece, and puts it elsewhere."""
        return isinstance(self.body, Content) and not self.is_raw and self.body.media != JSON

    def bytes_max(self, server_max: int) -> int:
        """How long its body may be, where the server takes bodies of `server_max` bytes."""
        if self.body_bytes_max is None:
            return server_max
        return self.body_bytes_max if self.is_upload else min(self.body_bytes_max, server_max)


class Dialect(Protocol):
    """Speaks one public API: its operations, and how it says that something is wrong."""

    name: str

    def operations(self) -> Sequence[Operation]: ...

    def refusal(self, error: BatchmillError) -> Response:
        """The reply to a request that failed: status and envelope by `error.code`. Never raises."""

    def error_schema(self) -> dict[str, Any]:
        """JSON schema of the envelope."""


_encoder = msgspec.json.Encoder()


def json_reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A struct, or anything JSON can hold, as a reply."""
    return Response(_encoder.encode(value), status, headers, media_type="application/json")


_PARAMETER = re.compile(r"\{([a-z_]+)(:path)?\}")
NAME_CHARS_MAX = 1024  # of a parameter of a path; a longer one names nothing


class MountedOperation(Struct, frozen=True):
    """An operation, and the dialect that says what is wrong with a request for it."""

    operation: Operation
    dialect: Dialect


class Match(Struct, frozen=True):
    """What a path means. `route` None: nothing, or not with this method; then `methods` are those there are."""

    dialect: Dialect
    route: MountedOperation | None = None
    parameters: dict[str, str] = {}
    methods: tuple[str, ...] = ()


class _Template(Struct, frozen=True, eq=False):
    path: str
    pattern: re.Pattern[str]
    rank: tuple[int, ...]  # of each segment: 0 literal, 1 a parameter, 2 the rest of the path
    methods: dict[str, MountedOperation]

    @property
    def is_catch_all(self) -> bool:
        """It takes whatever nobody else has: with another method there is nothing there."""
        return self.rank == (0, 2)

    def claims(self, parameters: dict[str, str]) -> bool:
        """Some operation of it wants a path with these parameters."""
        wanted = [route.operation.claims for route in self.methods.values()]
        return any(each is None or each(parameters) for each in wanted)


class Routes:
    """Raises: ValueError when two operations claim one method of one path."""

    def __init__(self, frontends: Sequence[tuple[Dialect, Sequence[Operation]]], fallback: Dialect) -> None:
        self._fallback = fallback
        self._owners: dict[str, Dialect] = {}  # first segment -> the first dialect that has a path below it
        exact: dict[str, _Template] = {}
        slashed: set[str] = set()
        for dialect, operations in frontends:
            for operation in operations:
                template = exact.setdefault(operation.path, _template(operation))
                if operation.last_slash_is_optional:
                    slashed.add(operation.path)
                if operation.method in template.methods:
                    raise ValueError(f"{operation.method} {operation.path} stands for two operations")
                template.methods[operation.method] = MountedOperation(operation, dialect)
                if operation.path != "/":  # the root alone owns nothing below it
                    self._owners.setdefault(_first(operation.path), dialect)
        self._exact = {path: each for path, each in exact.items() if "{" not in path}
        self._exact |= {f"{path}/": exact[path] for path in slashed if "{" not in path and f"{path}/" not in exact}
        self._templates = sorted((each for path, each in exact.items() if "{" in path), key=lambda each: each.rank)

    def find(self, method: str, path: str, after: MountedOperation | None = None) -> Match:
        """What a decoded path means. HEAD is answered by GET where nothing else is said.

        `after`: an operation that had the path and does not want it; what it means to those that come behind it.
        """
        if path.startswith("//"):  # of a client whose base URL ends with a slash
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
        for template in self._templates:
            if after is not None:
                after = None if template.path == after.operation.path else after
            elif (match := template.pattern.fullmatch(path)) and template.claims(match.groupdict()):
                return template, match.groupdict()
        return None, {}

    def all(self) -> list[MountedOperation]:
        """Every operation, for the document and for tests."""
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
