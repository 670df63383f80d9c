"""What operations, requests and replies of this API share: parameters that any of them takes, and JSON objects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response

from batchmill.dialects.ml_commons.programs import Shape, ShapedReply, found, write_shaped
from batchmill.errors import InvalidInput
from batchmill.server.bodies import parse_object
from batchmill.server.operations import Call, Content, Operation
from batchmill.services.documents.search import Document
from batchmill.types import Scope

PREFIX = "/_plugins/_ml"
Flag = Literal["", "true", "false"]  # `?pretty` alone is true
OBJECT = Content("application/json", {"type": "object", "additionalProperties": True})
INLINE_MAX = 256 * 1024  # bytes of a reply times steps of its `filter_path`: what is written in place
PARAMETER_CHARS_MAX = 2048  # of one that may be long: a whole URL may have 64 KiB, each character up to 12


class Common(Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters that every request takes. `human` and `error_trace` change nothing here: see the page."""

    pretty: Flag = "false"
    human: Flag = "false"
    error_trace: Flag = "false"
    filter_path: Annotated[str, Meta(max_length=PARAMETER_CHARS_MAX)] = ""
    format: Literal["json"] = "json"


class Search(Common, frozen=True, forbid_unknown_fields=True):
    """Those of a search, whose body may come as `source` from a client that sends none with a GET."""

    source: Annotated[str, Meta(max_length=PARAMETER_CHARS_MAX)] = ""
    source_content_type: Literal["application/json"] = "application/json"


class Registering(Common, frozen=True, forbid_unknown_fields=True):
    deploy: Flag = "false"


def is_set(flag: Flag) -> bool:
    return flag != "false"


def is_plain(call: Call) -> bool:
    """The reply goes out as it is."""
    common: Common = call.query
    return not common.filter_path and not is_set(common.pretty)


def reply(call: Call, value: Any, status: int = 200) -> Response:
    """`value` as JSON, with what `filter_path` leaves of it."""
    return written(call, msgspec.json.encode(value), status)


def written(call: Call, data: bytes, status: int = 200) -> Response:
    """JSON with what `filter_path` leaves of it; a long one in a child."""
    common: Common = call.query
    if is_plain(call):
        return Response(data, status, media_type="application/json")
    if len(data) * (1 + common.filter_path.count(".") + common.filter_path.count(",")) > INLINE_MAX:
        assert call.programs is not None, "it came over HTTP"
        return ShapedReply(call.programs, call.caller.project, data, shape_of(call), status)
    return Response(write_shaped(msgspec.json.decode(data), shape_of(call)), status, media_type="application/json")


def shape_of(call: Call) -> Shape:
    common: Common = call.query
    return Shape(common.filter_path, is_set(common.pretty))


async def searched(call: Call, documents: Iterable[Document], index: str) -> Response:
    """What a search finds: its body or `source` says what; nothing is everything."""
    query: Search = call.query
    assert call.programs is not None, "it came over HTTP"
    asked = call.raw.strip() or query.source.encode()
    data = await found(call.programs, call.caller.project, documents, asked, index=index, shape=shape_of(call))
    return Response(data, media_type="application/json")


def body_of(call: Call, missing: str = "request body is required") -> dict[str, Any]:
    """The JSON object of the body. Raises: InvalidInput; with the text `missing` where there is none."""
    refuse_missing(call, missing)
    return parse_object(call.raw)


def refuse_missing(call: Call, missing: str = "request body is required") -> None:
    if not call.raw or call.raw.isspace():
        raise InvalidInput(missing, code="missing_body")


def search_of(call: Call) -> dict[str, Any]:
    """What is searched for: the body, or `source`; nothing is everything."""
    query: Search = call.query
    source = call.raw.strip() or query.source.encode()
    return parse_object(source) if source else {}


Handler = Callable[[Call], Awaitable[Response]]
MISSING, TAKEN = 404, 409


def operation(
    name: str, route: str, summary: str, scope: Scope, handler: Handler, *,
    query: type[Common] = Common, body: str = "", errors: tuple[int, ...] = (MISSING,), **more: Any,
) -> Operation:  # fmt: skip
    """One operation; a slash may stand at the end of its path.

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


def searches(name: str, path: str, summary: str, handler: Handler) -> list[Operation]:
    """A search, which clients send with either method; it takes a body in both."""
    return [
        operation(
            f"{name}{suffix}", f"{method} {path}", summary, Scope.READ, handler,
            query=Search, body="optional", errors=(),
        )
        for method, suffix in (("GET", ""), ("POST", "ByPost"))
    ]  # fmt: skip
