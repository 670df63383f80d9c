"""What requests and replies of this API have in common: parameters that any of them takes, and JSON objects."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response

from batchmill.dialects.ml_commons.filter_path import filtered
from batchmill.errors import InvalidInput
from batchmill.server.bodies import parse_object
from batchmill.server.operations import Call, Content

PREFIX = "/_plugins/_ml"
Flag = Literal["", "true", "false"]  # `?pretty` alone is true
OBJECT = Content("application/json", {"type": "object", "additionalProperties": True})
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
    common: Common = call.query
    told = msgspec.to_builtins(value)
    if common.filter_path:
        told = filtered(told, common.filter_path)
    data = msgspec.json.encode(told)
    if is_set(common.pretty):
        data = msgspec.json.format(data, indent=2) + b"\n"
    return Response(data, status, media_type="application/json")


def body_of(call: Call, missing: str = "request body is required") -> dict[str, Any]:
    """The JSON object of the body. Raises: InvalidInput; with the text `missing` where there is none."""
    if not call.raw.strip():
        raise InvalidInput(missing, code="missing_body")
    return parse_object(call.raw)


def search_of(call: Call) -> dict[str, Any]:
    """What is searched for: the body, or `source`; nothing is everything."""
    query: Search = call.query
    told = call.raw.strip() or query.source.encode()
    return parse_object(told) if told else {}
