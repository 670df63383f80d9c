"""The application of the control socket, which answers requests of the machine's user.

A command that is the owner calls `answer` directly; a command of another process calls it over HTTP. It needs no web
framework.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec
from msgspec import Struct

from batchmill.client.messages import HttpReply, HttpRequest
from batchmill.control.operations import PING, PROJECT
from batchmill.errors import BatchmillError, InvalidInput, TooLarge, Unavailable, to_storage_error
from batchmill.wire.error_statuses import Raised
from batchmill.wire.operations import EVENTS, NOTHING, Endpoint

BODY_BYTES_MAX = 256 * 1024 * 1024  # limit of an order with all its models
ERROR_STATUS = 400  # for every error: the body has the error
JSON = "application/json"
OWNER_STOPPING = "owner_stopping"  # the code of the error when an owner that is about to end refuses a request
EVENT, LAST_EVENT = b"event: view\ndata: %s\n\n", b"event: end\ndata: {}\n\n"


class OwnerCall(Struct, frozen=True):
    """One request of the machine's user. `project` None: not named."""

    names: dict[str, str]  # parameters of the path
    query: Any
    body: Any
    project: str | None

    @property
    def name(self) -> str:
        """The only parameter of the path."""
        (name,) = self.names.values()
        return name


Handler = Callable[[OwnerCall], Awaitable[Any]]


class Pieces(Struct, frozen=True):
    """A streamed reply."""

    pieces: AsyncIterator[bytes]
    media: str = EVENTS
    status: int = 200

    @property
    def headers(self) -> dict[str, str]:
        return {"content-type": self.media}


class _Route(Struct, frozen=True):
    endpoint: Endpoint[Any]
    pattern: re.Pattern[str]
    handler: Handler


class ControlApp:
    """Answers requests with the given handlers."""

    def __init__(self, handlers: Iterable[tuple[Endpoint[Any], Handler]]) -> None:
        all_handlers = [(PING, _ping), *handlers]
        self._routes = [_Route(endpoint, _pattern(endpoint.path), handler) for endpoint, handler in all_handlers]
        self._stopping = asyncio.Event()

    @property
    def endpoints(self) -> list[Endpoint[Any]]:
        """All operations that have a handler."""
        return [route.endpoint for route in self._routes]

    async def send(self, request: HttpRequest) -> HttpReply:
        """Answer a request in the owner's process. Raises: the errors of `answer`."""
        reply = await self.answer(request)
        assert isinstance(reply, HttpReply), "use `stream` for a streamed reply"
        return reply

    @contextlib.asynccontextmanager
    async def stream(self, request: HttpRequest) -> AsyncIterator[Pieces]:
        """Answer a request with a streamed reply. Raises: the errors of `answer`."""
        reply = await self.answer(request)
        assert isinstance(reply, Pieces)
        async with contextlib.aclosing(reply.pieces):  # type: ignore[type-var]
            yield reply

    async def answer(self, request: HttpRequest) -> HttpReply | Pieces:
        """Call the handler of a request. Raises: the handler's errors; InvalidInput for an unknown request."""
        route, names = self._find(request)
        endpoint = route.endpoint
        query = None if endpoint.query is None else _parse_query(request.query, endpoint.query)
        body = _parse_body(request.body, endpoint)
        reply = await route.handler(OwnerCall(names, query, body, request.headers.get(PROJECT)))
        if isinstance(reply, AsyncIterator):
            return Pieces(_events(reply))
        if isinstance(reply, bytes):
            return Pieces(_one_piece(reply), endpoint.media[0].media)
        data = b"" if endpoint.reply is NOTHING else msgspec.json.encode(reply)
        return HttpReply(endpoint.status, {"content-type": JSON}, data)

    def _find(self, request: HttpRequest) -> tuple[_Route, dict[str, str]]:
        for route in self._routes:
            if route.endpoint.method == request.method and (match := route.pattern.fullmatch(request.path)):
                return route, {name: unquote(value) for name, value in match.groupdict().items()}
        raise InvalidInput(
            f"the owner of this data directory does not support {request.method} {request.path}: is it "
            "another version of batchmill?",
            code="unknown_operation",
        )

    def stop(self) -> None:
        """Refuse changes from other processes from now on, which wait for the next owner, and end streams of events."""
        self._stopping.set()

    async def __call__(self, scope: dict[str, Any], receive: Callable, send: Callable) -> None:
        """The ASGI application, for commands of other processes."""
        try:
            request = await _request(scope, receive)
            if self._stopping.is_set() and not _may_answer_last(self._find(request)[0].endpoint):
                raise Unavailable("the process that owns the data directory is ending", code=OWNER_STOPPING)
            reply = await self.answer(request)
        except BatchmillError as error:
            reply = _refusal(error)
        except OSError as error:
            reply = _refusal(to_storage_error(error) or BatchmillError(f"{type(error).__name__}: {error}"))
        except Exception as error:  # reply with the error, or the client would retry forever
            text = f"the process that owns the data directory failed: {type(error).__name__}: {error}"
            reply = _refusal(BatchmillError(text))
        if isinstance(reply, Pieces):
            await _send_pieces(reply, receive, send, self._stopping if reply.media == EVENTS else None)
            return
        await send(_head(reply.status, reply.headers["content-type"], len(reply.body)))
        await send({"type": "http.response.body", "body": reply.body})


def _may_answer_last(endpoint: Endpoint[Any]) -> bool:
    """Whether a stopping owner answers: the operation only reads. A watch may resume its job (`JobHandlers.watch`)."""
    return endpoint.method == "GET" and not endpoint.streams_events


async def _ping(call: OwnerCall) -> None:
    """Reply without a body."""


def _pattern(path: str) -> re.Pattern[str]:
    """Compile a path. `{name}` matches one segment, `{name:path}` the rest."""
    parts = re.split(r"\{([a-z_]+)(:path)?\}", path)
    pattern = re.escape(parts[0])
    for name, rest, literal in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        pattern += f"(?P<{name}>{'.+' if rest else '[^/]+'}){re.escape(literal)}"
    return re.compile(pattern)


def _parse_query(query: dict[str, str], kind: type[Struct]) -> Struct:
    try:
        return msgspec.convert(query, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidInput(str(error), code="invalid_query") from None


def _parse_body(body: bytes | None, endpoint: Endpoint[Any]) -> Any:
    if not isinstance(endpoint.body, type):
        return None
    if not body and endpoint.body_is_optional:
        return endpoint.body()
    try:
        return msgspec.json.decode(body or b"", type=endpoint.body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidInput(str(error), code="invalid_body") from None


async def _one_piece(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _events(views: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(views):  # type: ignore[type-var]
        async for view in views:
            yield EVENT % msgspec.json.encode(view)
    yield LAST_EVENT


# -- ASGI -------------------------------------------------------------------------------------------------------------


async def _request(scope: dict[str, Any], receive: Callable) -> HttpRequest:
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if len(body) > BODY_BYTES_MAX:
            raise TooLarge(f"a request to the owner is limited to {BODY_BYTES_MAX:,} bytes")
        if not message.get("more_body"):
            break
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    query = dict(parse_qsl(scope["query_string"].decode("ascii", "replace"), keep_blank_values=True))
    return HttpRequest(scope["method"], scope["raw_path"].decode("ascii", "replace"), query, headers, bytes(body))


def _refusal(error: BatchmillError) -> HttpReply:
    return HttpReply(ERROR_STATUS, {"content-type": JSON}, msgspec.json.encode(Raised.of(error)))


def _head(status: int, media: str, size_bytes: int | None) -> dict[str, Any]:
    headers = [(b"content-type", media.encode())]
    if size_bytes is not None:
        headers.append((b"content-length", str(size_bytes).encode()))
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _send_pieces(reply: Pieces, receive: Callable, send: Callable, stopping: asyncio.Event | None) -> None:
    """Send the pieces until the end, until the client leaves, or until `stopping`. An error closes the stream.

    A client whose stream ends without its last event continues with the next owner.
    """
    await send(_head(200, reply.media, None))
    over = [asyncio.ensure_future(_wait_disconnect(receive))]
    over += [] if stopping is None else [asyncio.ensure_future(stopping.wait())]
    next_piece: asyncio.Future[bytes | None] | None = None
    try:
        while True:
            next_piece = asyncio.ensure_future(anext(reply.pieces, None))
            await asyncio.wait({next_piece, *over}, return_when=asyncio.FIRST_COMPLETED)
            if not next_piece.done() or (piece := next_piece.result()) is None:
                break
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        tasks = [*over, *([] if next_piece is None else [next_piece])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await reply.pieces.aclose()  # type: ignore[attr-defined]


async def _wait_disconnect(receive: Callable) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
