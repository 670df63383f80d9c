"""Read and check requests: the query and the body become the structs of the operation, or the request is refused."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import io
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, get_args, get_origin
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct
from msgspec.structs import fields
from starlette.requests import ClientDisconnect

from batchmill.children.programs import Programs
from batchmill.errors import InvalidInput, TooLarge
from batchmill.server.admission_control import NO_BODY_S, PARSED_TIMES, STREAM_BYTES, BodyPacer, Hold, Pace
from batchmill.server.json_inspection import inspect
from batchmill.server.operations import JSON, Content, Operation
from batchmill.wire.choices import values_at
from batchmill.wire.json_bytes import DEPTH_MAX, is_too_deep

QUERY_FIELDS_MAX = 100
NO_BODY_BYTES_MAX = 64  # for what clients send where a request has no body: "{}", "null", white space
SHOWN_CHARS = 80  # of a client's text, in a message

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`( - at `\$\.?(.*)`)?", re.DOTALL)
_AT_PATH = re.compile(r"(.*) - at (?:`key` in )?`\$\.?(.*)`", re.DOTALL)


class InvalidField(InvalidInput):
    """`param` names the field of the query or body that is wrong."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, code=code)
        self.param = param


class BodyReader:
    """Reads the body of one request and counts its bytes as they arrive; Content-Length is only a first hint.

    `hold` counts a body that is read whole before it arrives. Of an upload it counts what is on its way to the disk.
    """

    def __init__(
        self,
        receive: Receive,
        headers: Sequence[tuple[bytes, bytes]],
        operation: Operation,
        *,
        bytes_max: int,
        pace: Pace,
        hold: Hold,
    ) -> None:
        """Args: bytes_max: the limit of bodies other than uploads. Raises: InvalidInput, TooLarge."""
        self._receive, self._operation, self._hold = receive, operation, hold
        self._max = NO_BODY_BYTES_MAX if operation.body is None else operation.bytes_max(bytes_max)
        self.bytes = 0
        header_map = dict(headers)
        self.media = header_map.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        self.is_present = b"transfer-encoding" in header_map or header_map.get(b"content-length", b"0").strip() != b"0"
        self.is_done = not self.is_present
        self._replay: bytes | None = None
        if not operation.is_raw and header_map.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise InvalidField(
                "a compressed body is not supported: send it without Content-Encoding", code="unsupported_media_type"
            )
        content_length = header_map.get(b"content-length", b"0")
        if len(content_length) > 18 or int(content_length) > self._max:
            raise self._too_large()
        self._content_length = int(content_length) if b"content-length" in header_map else None
        total_s = NO_BODY_S if operation.body is None else None if operation.is_upload else pace.total_s
        self._pacer = BodyPacer(pace, total_s)
        self._times = PARSED_TIMES if isinstance(operation.body, type) and not operation.is_raw else 1

    def _too_large(self) -> InvalidInput:
        if self._operation.body is None:
            return _unexpected_body()
        return TooLarge(f"the body is longer than {self._max:,} bytes", code="request_too_large")

    async def receive(self) -> Message:
        """The same as ASGI's `receive`.

        Raises: TooLarge; InvalidInput when the client stops in the middle of the body; Unavailable when there is no
        memory for it.
        """
        if self._replay is not None:
            data, self._replay = self._replay, None
            return {"type": "http.request", "body": data, "more_body": False}
        if self.is_done:
            return await self._receive()
        if self._operation.is_raw:  # its handler reads the whole body at once
            await self.read()
            return await self.receive()
        if self._operation.is_upload and not self.bytes:
            self._hold.grow_to(
                STREAM_BYTES if self._content_length is None else min(self._content_length, STREAM_BYTES)
            )
        return await self._next()

    async def _next(self) -> Message:
        """Return the next piece. Raises: InvalidInput if the client is too slow."""
        clock = asyncio.get_running_loop().time
        while True:
            began, message = clock(), None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pacer.patience_s):
                    message = await self._receive()
            size = len(message.get("body", b"")) if message is not None else 0
            self._pacer.waited(clock() - began, size)
            if message is not None:
                break
            if reason := self._pacer.late():
                raise InvalidField(reason, code="request_timeout")
        if message["type"] == "http.request":
            self.bytes += size
            self.is_done = not message.get("more_body", False)
            if self.bytes > self._max:
                raise self._too_large()
            if not self.is_done and (reason := self._pacer.late()):
                raise InvalidField(reason, code="request_timeout")
        return message

    async def read(self) -> bytes:
        """Read the whole body. It can be read once more through `receive`."""
        if self._replay is not None:
            return self._replay
        if self._operation.body is not None:
            self._hold.grow_to((self._content_length or 0) * self._times)
        buffer = io.BytesIO()  # `getvalue` does not copy
        while not self.is_done:
            message = await self._next()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            if self._content_length is None and self._operation.body is not None:
                self._hold.grow_to(self.bytes * self._times)
            buffer.write(message.get("body", b""))
        self._replay = buffer.getvalue()
        return self._replay


def _unexpected_body() -> InvalidField:
    return InvalidField("this request has no body: leave it out", code="unexpected_body")


async def read_body(operation: Operation, reader: BodyReader, programs: Programs, project: str) -> tuple[bytes, Any]:
    """Return the body's bytes and the operation's struct; neither for a Content that is not JSON: its handler reads it.

    Raises: InvalidInput, TooLarge, TooComplex, RateLimited, Unavailable.
    """
    body_type = operation.body
    if body_type is None:
        if reader.is_present and (await reader.read()).strip() not in (b"", b"{}", b"null"):
            raise _unexpected_body()
        return b"", None
    if operation.is_raw:
        return b"", None
    media = body_type.media if isinstance(body_type, Content) else JSON
    if operation.body_is_optional and reader.is_present and not reader.media and not await reader.read():
        return b"", _default_body(body_type)
    if not reader.is_present and operation.body_is_optional:
        return b"", _default_body(body_type)
    if media == JSON and isinstance(body_type, Content) and not reader.media and not await reader.read():
        return b"", None  # the handler reports the missing body in its dialect
    if reader.media != media and media != "*/*":
        sent = repr(reader.media[:SHOWN_CHARS]) if reader.media else "none"
        raise InvalidField(f"the body must have the Content-Type {media}, not {sent}", code="unsupported_media_type")
    if media != JSON:
        return b"", None
    raw = await reader.read()
    if operation.body_is_optional and (not raw or raw.isspace()):
        return raw, _default_body(body_type)
    await inspect(raw, operation.values_max, programs, project)
    if isinstance(body_type, Content):
        _refuse_deep(raw)
        return raw, None
    return raw, parse_json(raw, body_type)


def _default_body(body_type: type[Struct] | Content) -> Any:
    return None if isinstance(body_type, Content) else msgspec.convert({}, body_type)


def parse_json(raw: bytes, struct_type: type[Struct]) -> Any:
    """Decode JSON as a struct. Raises: InvalidInput, naming the wrong field and the nearest known one."""
    _refuse_deep(raw)
    try:
        return _decoder(struct_type).decode(raw)
    except msgspec.ValidationError as error:
        raise _explain(str(error), struct_type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidField(f"the body is not JSON: {error}", code="invalid_json") from None


def parse_object(raw: bytes) -> dict[str, Any]:
    """Decode a body that must be a JSON object. Raises: InvalidInput."""
    _refuse_deep(raw)
    try:
        members = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidField(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(members, dict):
        raise InvalidField("the body must be a JSON object", code="invalid_json")
    return members


def _refuse_deep(raw: bytes) -> None:
    """Refuse JSON that some later process could not read, because it nests too deep."""
    if is_too_deep(raw):
        raise InvalidField(f"the body's JSON is nested deeper than {DEPTH_MAX} levels", code="invalid_json")


_decoders: dict[type[Struct], msgspec.json.Decoder[Any]] = {}


def _decoder(struct_type: type[Struct]) -> msgspec.json.Decoder[Any]:
    decoder = _decoders.get(struct_type)
    if decoder is None:
        decoder = _decoders[struct_type] = msgspec.json.Decoder(struct_type)
    return decoder


def parse_query(text: bytes, struct_type: type[Struct] | None) -> Any:
    """Decode a query string as a struct. Raises: InvalidInput for unknown, repeated or invalid parameters."""
    if not text:
        return None if struct_type is None else _convert({}, struct_type)
    try:
        pairs = parse_qsl(
            text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=QUERY_FIELDS_MAX
        )
    except ValueError:
        raise InvalidField("the query string cannot be read", code="invalid_query") from None
    field_by_name = {} if struct_type is None else {each.encode_name: each for each in fields(struct_type)}
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name not in field_by_name:
            raise _unknown_name(name, list(field_by_name), "query parameter")
        if _is_list(field_by_name[name].type):
            values.setdefault(name, []).append(value)
        elif name in values:
            raise InvalidField(f"the query parameter {name} is repeated", code="repeated_parameter", param=name)
        else:
            values[name] = value
    if struct_type is None:
        return None
    query = _convert(values, struct_type)
    for name in values:
        if getattr(query, field_by_name[name].name) is None:  # msgspec reads the text "null" as None
            raise InvalidField(f"Invalid value for {name!r}: null", code="invalid_value", param=name)
    return query


def _convert(values: dict[str, Any], struct_type: type[Struct]) -> Any:
    try:
        return msgspec.convert(values, struct_type, strict=False)
    except msgspec.ValidationError as error:
        raise _explain(str(error), struct_type) from None


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is list or any(get_origin(each) is list for each in get_args(kind))


def _explain(sentence: str, struct_type: type[Struct]) -> InvalidField:
    """Turn msgspec's message into ours, naming the wrong field."""
    if match := _UNKNOWN.fullmatch(sentence):
        name, inside = match[1], match[3]
        names = [] if inside else [each.encode_name for each in fields(struct_type)]
        return _unknown_name(f"{inside}.{name}" if inside else name, names, "field")
    if sentence.startswith("Object missing required field `"):
        name = sentence.split("`")[1]
        return InvalidField(f"Missing required parameter: {name!r}", code="missing_required_parameter", param=name)
    match = _AT_PATH.fullmatch(sentence)
    detail, path = (match[1], match[2]) if match else (sentence, "")
    if detail.startswith("Object missing required field `"):
        name = f"{path}.{detail.split('`')[1]}"
        return InvalidField(f"Missing required parameter: {name!r}", code="missing_required_parameter", param=name)
    if known := values_at(struct_type, path) if detail.startswith("Invalid enum value") else []:
        detail += f"; known are {', '.join(known)}"
    message = f"Invalid value for {path!r}: {detail[:1].lower()}{detail[1:]}" if path else f"Invalid request: {detail}"
    return InvalidField(message, code="invalid_value", param=path or None)


def _unknown_name(name: str, names: list[str], kind: str) -> InvalidField:
    shown = name[:SHOWN_CHARS]
    nearest = difflib.get_close_matches(shown, names, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; known are {', '.join(names)}" if names else ""
    return InvalidField(f"Unknown {kind}: {shown!r}{hint}", code="unknown_parameter", param=shown)
