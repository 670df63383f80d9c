"""Shared parts of this API's operations: common query parameters, JSON bodies and JSON replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response

from batchmill.dialects.ml_commons.programs import Shape, ShapedReply, run_search, write_shaped
from batchmill.errors import InvalidInput
from batchmill.server.bodies import parse_object
from batchmill.server.operations import Call, Content, Operation
from batchmill.services.documents.search import Document
from batchmill.types import Scope

PREFIX = "/_plugins/_ml"
Flag = Literal["", "true", "false"]  # `?pretty` alone is true
OBJECT = Content("application/json", {"type": "object", "additionalProperties": True})
INLINE_MAX = 256 * 1024  # bytes of a reply times steps of its `filter_path`; up to this it is written in this process
PARAMETER_CHARS_MAX = 2048  # of a long parameter: a URL may have 64 KiB, and an encoded character up to 12 bytes


class Common(Struct, frozen=True, forbid_unknown_fields=True):
    """Query parameters of every request. `human` and `error_trace` have no effect, as the documentation says."""

    pretty: Flag = "false"
    human: Flag = "false"
    error_trace: Flag = "false"
    filter_path: Annotated[str, Meta(max_length=PARAMETER_CHARS_MAX)] = ""
    format: Literal["json"] = "json"


class Search(Common, frozen=True, forbid_unknown_fields=True):
    """Query parameters of a search. `source` is the body for clients that send no body with a GET."""

    source: Annotated[str, Meta(max_length=PARAMETER_CHARS_MAX)] = ""
    source_content_type: Literal["application/json"] = "application/json"


class Registering(Common, frozen=True, forbid_unknown_fields=True):
    deploy: Flag = "false"


def is_set(flag: Flag) -> bool:
    return flag != "false"


def is_plain(call: Call) -> bool:
    """True if the query does not change the form of the reply."""
    common: Common = call.query
    return not common.filter_path and not is_set(common.pretty)


def reply(call: Call, value: Any, status: int = 200) -> Response:
    """Reply with `value` as JSON, after `filter_path`."""
    return json_bytes_reply(call, msgspec.json.encode(value), status)


def json_bytes_reply(call: Call, data: bytes, status: int = 200) -> Response:
    """Reply with JSON after `filter_path`; a child process filters a long reply."""
    common: Common = call.query
    if is_plain(call):
        return Response(data, status, media_type="application/json")
    if len(data) * (1 + common.filter_path.count(".") + common.filter_path.count(",")) > INLINE_MAX:
        assert call.programs is not None, "calls over HTTP have programs"
        return ShapedReply(call.programs, call.caller.project, data, shape_of(call), status)
    return Response(write_shaped(msgspec.json.decode(data), shape_of(call)), status, media_type="application/json")


def shape_of(call: Call) -> Shape:
    common: Common = call.query
    return Shape(common.filter_path, is_set(common.pretty))


async def search_reply(call: Call, documents: Iterable[Document], index: str) -> Response:
    """Reply with the documents that a search finds. Without a body and `source`, it finds all."""
    query: Search = call.query
    assert call.programs is not None, "calls over HTTP have programs"
    body = call.raw.strip() or query.source.encode()
    data = await run_search(call.programs, call.caller.project, documents, body, index=index, shape=shape_of(call))
    return Response(data, media_type="application/json")


def body_of(call: Call, missing: str = "request body is required") -> dict[str, Any]:
    """Return the JSON object of the body. Raises: InvalidInput, with the message `missing` if there is no body."""
    refuse_missing(call, missing)
    return parse_object(call.raw)


def refuse_missing(call: Call, missing: str = "request body is required") -> None:
    if not call.raw or call.raw.isspace():
        raise InvalidInput(missing, code="missing_body")


def search_of(call: Call) -> dict[str, Any]:
    """Return the search of a request: its body or `source`. An empty object finds everything."""
    query: Search = call.query
    source = call.raw.strip() or query.source.encode()
    return parse_object(source) if source else {}


Handler = Callable[[Call], Awaitable[Response]]
MISSING, CONFLICT = 404, 409


def operation(
    name: str, route: str, summary: str, scope: Scope, handler: Handler, *,
    query: type[Common] = Common, body: str = "", errors: tuple[int, ...] = (MISSING,), **more: Any,
) -> Operation:  # fmt: skip
    """Create an operation. Its path may end with a slash.

    Args:
        route: "METHOD PATH".
        body: "required" or "optional" for a JSON object; empty for none.
        more: other fields of an Operation.
    """
    method, path = route.split()
    return Operation(
        name, method, path, summary, scope, handler,
        query=query, body=OBJECT if body else None, body_is_optional=body == "optional", reply=OBJECT, errors=errors,
        last_slash_is_optional=path != "/", **more,
    )  # fmt: skip


def search_operations(name: str, path: str, summary: str, handler: Handler) -> list[Operation]:
    """Create the operations of a search. Clients use GET or POST, each with an optional body."""
    return [
        operation(
            f"{name}{suffix}", f"{method} {path}", summary, Scope.READ, handler,
            query=Search, body="optional", errors=(),
        )
        for method, suffix in (("GET", ""), ("POST", "ByPost"))
    ]  # fmt: skip
