"""Runs callers' templates, filters and connector fields in a child process: see `children.programs`.

A connector of the configuration, and a filter that is a plain path, run in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.children.bounds import ResourceLimits
from batchmill.children.programs import PATIENCE_S, Programs
from batchmill.models.connectors import processing, reading
from batchmill.models.connectors.rendering import Rendered, Renderer
from batchmill.optional import require
from batchmill.types.connectors import Action, Connector
from batchmill.wire.json_bytes import encode

INLINE_BYTES_MAX = 256 * 1024  # of a reply from a caller's service that the event loop itself reads
LENGTH_BYTES = 8
MODULE = "batchmill.models.connectors.bounded"
BOUNDS = ResourceLimits()
SHOWN_CHARS = 100

Progress = Callable[[float], None]
Tensors = processing.Tensors


class _Process(Struct, frozen=True):
    """Followed by the bytes of the reply."""

    action: Action
    filter: str | None
    as_row: bool


class _Read(Struct, frozen=True):
    """`old` is None for a new connector, with the id `id`."""

    old: Connector | None
    id: str
    fields: Raw


class _Render(Struct, frozen=True):
    connector: Connector
    action: Action
    parameters: dict[str, Any]
    credentials: dict[str, str]


class Processing:
    """Post-processes the replies of one connector."""

    def __init__(self, connector: Connector, programs: Programs) -> None:
        self._connector, self._programs = connector, programs

    async def result_json(
        self, action: Action, reply: bytes, parameters: Mapping[str, Any], *, who: str, patience_s: float = PATIENCE_S
    ) -> bytes:
        """As `processing.result_json`. Also raises TooComplex and RateLimited."""
        if self._is_inline(reply, parameters):
            return processing.result_json(action, reply, self._merged(parameters))
        return await self._process(action, reply, parameters, who, patience_s, as_row=True)

    async def output_json(
        self, action: Action, reply: bytes, parameters: Mapping[str, Any], *, who: str, patience_s: float = PATIENCE_S
    ) -> bytes:
        """As `processing.output_json`. Also raises TooComplex and RateLimited."""
        if self._is_inline(reply, parameters):
            return encode(processing.tensors(action, reply, self._merged(parameters)))
        return await self._process(action, reply, parameters, who, patience_s, as_row=False)

    def _merged(self, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**self._connector.parameters, **parameters}

    def _is_inline(self, reply: bytes, parameters: Mapping[str, Any]) -> bool:
        """Whether the reply can be processed here, because no caller can make that slow."""
        trusted = self._connector.is_trusted
        if not trusted and len(reply) > INLINE_BYTES_MAX:
            return False
        if trusted and processing.FILTER not in parameters:
            return True
        expression = self._merged(parameters).get(processing.FILTER)
        return (
            not isinstance(expression, str)
            or not expression.strip()
            or require(processing.JSON_PATHS, "a filter").is_plain(expression)
        )

    async def _process(
        self, action: Action, reply: bytes, parameters: Mapping[str, Any], who: str, patience_s: float, *, as_row: bool
    ) -> bytes:
        filter_text = self._merged(parameters).get(processing.FILTER)
        expression = filter_text if isinstance(filter_text, str) else None
        head = encode(_Process(action, expression, as_row))
        work = "the reply of the service" if expression is None else f"the response_filter {expression[:SHOWN_CHARS]!r}"
        return await self._programs.run(
            f"{MODULE}:process", len(head).to_bytes(LENGTH_BYTES, "little") + head + reply,
            who=who, work=work, program=b"" if expression is None else expression.encode(errors="replace"),
            bounds=BOUNDS, patience_s=patience_s,
        )  # fmt: skip


async def read_fields(
    programs: Programs, who: str, fields: Mapping[str, Any], *, old: Connector | None = None, id: str = ""
) -> tuple[Connector, dict[str, str]]:
    """As `reading.read_connector` or `update_connector`, for a caller. Also raises TooComplex and RateLimited."""
    order = encode(_Read(old, id, Raw(encode(fields))))
    answer = await programs.run(f"{MODULE}:read", order, who=who, work="the connector", bounds=BOUNDS)
    return msgspec.json.decode(answer, type=tuple[Connector, dict[str, str]])


async def render_call(
    programs: Programs, who: str, connector: Connector, action: Action, parameters: Mapping[str, Any],
    credentials: Mapping[str, str],
) -> Rendered:  # fmt: skip
    """As `Renderer.render`, for a caller's connector. Also raises TooComplex and RateLimited."""
    order = encode(_Render(connector, action, dict(parameters), dict(credentials)))
    answer = await programs.run(f"{MODULE}:render", order, who=who, work="a template of the connector", bounds=BOUNDS)
    return msgspec.msgpack.decode(answer, type=Rendered)


# -- in the child -----------------------------------------------------------------------------------------------------


def process(order: bytes, progress: Progress) -> bytes:
    end = LENGTH_BYTES + int.from_bytes(order[:LENGTH_BYTES], "little")
    request, reply = msgspec.json.decode(order[LENGTH_BYTES:end], type=_Process), order[end:]
    parameters = {} if request.filter is None else {processing.FILTER: request.filter}
    if request.as_row:
        return processing.result_json(request.action, reply, parameters)
    return encode(processing.tensors(request.action, reply, parameters))


def read(order: bytes, progress: Progress) -> bytes:
    request = msgspec.json.decode(order, type=_Read)
    fields = msgspec.json.decode(request.fields, type=dict[str, Any])
    if request.old is None:
        return encode(reading.read_connector(fields, id=request.id, is_trusted=False))
    return encode(reading.update_connector(request.old, fields))


def render(order: bytes, progress: Progress) -> bytes:
    request = msgspec.json.decode(order, type=_Render)
    return msgspec.msgpack.encode(
        Renderer(request.connector, request.action).render(request.parameters, request.credentials)
    )
