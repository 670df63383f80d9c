"""What a request says, read and checked: its query and its body become the structs of the operation, or a refusal."""

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
from batchmill.wire.json_bytes import DEPTH_MAX, is_too_deep

QUERY_FIELDS_MAX = 100
NO_BODY_BYTES_MAX = 64  # of what clients send where a request has no body: "{}", "null", white space
SHOWN_CHARS = 80  # of what somebody sent, in a message

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`( - at `\$\.?(.*)`)?", re.DOTALL)
_PLACE = re.compile(r"(.*) - at (?:`key` in )?`\$\.?(.*)`", re.DOTALL)


class InvalidField(InvalidInput):
    """`param` names the field of the query or body that is wrong."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, code=code)
        self.param = param


class BodyReader:
    """The body of one request, counted as it arrives: what Content-Length claims is only a first hint.

    A body that is read whole is counted in `hold` before it comes; of an upload, what is on its way to the disk.
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
        """Args: bytes_max: of bodies that are no uploads. Raises: InvalidInput, TooLarge."""
        self._receive, self._operation, self._hold = receive, operation, hold
        self._max = NO_BODY_BYTES_MAX if operation.body is None else operation.bytes_max(bytes_max)
        self.bytes = 0
        named = dict(headers)
        self.media = named.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        self.is_there = b"transfer-encoding" in named or named.get(b"content-length", b"0").strip() != b"0"
        self.is_done = not self.is_there
        self._replay: bytes | None = None
        if not operation.is_raw and named.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise InvalidField(
                "a compressed body is not taken: leave Content-Encoding out", code="unsupported_media_type"
            )
        claimed = named.get(b"content-length", b"0")
        if len(claimed) > 18 or int(claimed) > self._max:
            raise self._too_large()
        self._claimed = int(claimed) if b"content-length" in named else None
        total_s = NO_BODY_S if operation.body is None else None if operation.is_upload else pace.total_s
        self._pacer = BodyPacer(pace, total_s)
        self._times = PARSED_TIMES if isinstance(operation.body, type) and not operation.is_raw else 1

    def _too_large(self) -> InvalidInput:
        if self._operation.body is None:
            return _unexpected()
        return TooLarge(f"the body is longer than {self._max:,} bytes", code="request_too_large")

    async def receive(self) -> Message:
        """As ASGI's `receive`. Raises: TooLarge, InvalidInput when the client stops in the middle of the body;
        Unavailable where there is no memory for it."""
        if self._replay is not None:
            data, self._replay = self._replay, None
            return {"type": "http.request", "body": data, "more_body": False}
        if self.is_done:
            return await self._receive()
        if self._operation.is_raw:  # whoever reads it wants it whole
            await self.read()
            return await self.receive()
        if self._operation.is_upload and not self.bytes:
            self._hold.grow_to(STREAM_BYTES if self._claimed is None else min(self._claimed, STREAM_BYTES))
        return await self._next()

    async def _next(self) -> Message:
        """The next piece, as long as the client keeps the pace."""
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
            if why := self._pacer.late():
                raise InvalidField(why, code="request_timeout")
        if message["type"] == "http.request":
            self.bytes += size
            self.is_done = not message.get("more_body", False)
            if self.bytes > self._max:
                raise self._too_large()
            if not self.is_done and (why := self._pacer.late()):
                raise InvalidField(why, code="request_timeout")
        return message

    async def read(self) -> bytes:
        """The whole body. It can be read once more through `receive`."""
        if self._replay is not None:
            return self._replay
        if self._operation.body is not None:
            self._hold.grow_to((self._claimed or 0) * self._times)
        whole = io.BytesIO()  # whose value is no copy of it
        while not self.is_done:
            message = await self._next()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            if self._claimed is None and self._operation.body is not None:
                self._hold.grow_to(self.bytes * self._times)
            whole.write(message.get("body", b""))
        self._replay = whole.getvalue()
        return self._replay


def _unexpected() -> InvalidField:
    return InvalidField("this request has no body: leave it out", code="unexpected_body")


async def read_body(operation: Operation, reader: BodyReader, programs: Programs, project: str) -> tuple[bytes, Any]:
    """The body as it came and as the operation's struct; neither for a Content that is no JSON: its handler reads it.

    Raises: InvalidInput, TooLarge, TooComplex, RateLimited, Unavailable.
    """
    wanted = operation.body
    if wanted is None:
        if reader.is_there and (await reader.read()).strip() not in (b"", b"{}", b"null"):
            raise _unexpected()
        return b"", None
    if operation.is_raw:
        return b"", None
    media = wanted.media if isinstance(wanted, Content) else JSON
    if operation.body_is_optional and reader.is_there and not reader.media and not await reader.read():
        return b"", _filled(wanted)
    if not reader.is_there and operation.body_is_optional:
        return b"", _filled(wanted)
    if media == JSON and isinstance(wanted, Content) and not reader.media and not await reader.read():
        return b"", None  # who reads it says in the words of its API that it is missing
    if reader.media != media and media != "*/*":
        sent = repr(reader.media[:SHOWN_CHARS]) if reader.media else "none"
        raise InvalidField(f"the body must have the Content-Type {media}, not {sent}", code="unsupported_media_type")
    if media != JSON:
        return b"", None
    raw = await reader.read()
    if operation.body_is_optional and (not raw or raw.isspace()):
        return raw, _filled(wanted)
    await inspect(raw, operation.values_max, programs, project)
    if isinstance(wanted, Content):
        _refuse_deep(raw)
        return raw, None
    return raw, parse_json(raw, wanted)


def _filled(wanted: type[Struct] | Content) -> Any:
    return None if isinstance(wanted, Content) else msgspec.convert({}, wanted)


def parse_json(raw: bytes, wanted: type[Struct]) -> Any:
    """The struct that JSON holds. Raises: InvalidInput, naming the field and the nearest one that is known."""
    _refuse_deep(raw)
    try:
        return _decoder(wanted).decode(raw)
    except msgspec.ValidationError as error:
        raise _explained(str(error), wanted) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidField(f"the body is not JSON: {error}", code="invalid_json") from None


def parse_object(raw: bytes) -> dict[str, Any]:
    """The members of the JSON object that a body must be. Raises: InvalidInput."""
    _refuse_deep(raw)
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidField(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise InvalidField("the body must be a JSON object", code="invalid_json")
    return found


def _refuse_deep(raw: bytes) -> None:
    """It could not be read by every process that it may come to."""
    if is_too_deep(raw):
        raise InvalidField(f"the body's JSON is nested deeper than {DEPTH_MAX} levels", code="invalid_json")


_decoders: dict[type[Struct], msgspec.json.Decoder[Any]] = {}


def _decoder(wanted: type[Struct]) -> msgspec.json.Decoder[Any]:
    found = _decoders.get(wanted)
    if found is None:
        found = _decoders[wanted] = msgspec.json.Decoder(wanted)
    return found


def parse_query(text: bytes, wanted: type[Struct] | None) -> Any:
    """The struct that a query string fills. Raises: InvalidInput for what is unknown, repeated or does not fit."""
    if not text:
        return None if wanted is None else _converted({}, wanted)
    try:
        pairs = parse_qsl(
            text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=QUERY_FIELDS_MAX
        )
    except ValueError:
        raise InvalidField("the query string cannot be read", code="invalid_query") from None
    known = {} if wanted is None else {each.encode_name: each for each in fields(wanted)}
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name not in known:
            raise _unknown(name, list(known), "query parameter")
        if _is_list(known[name].type):
            values.setdefault(name, []).append(value)
        elif name in values:
            raise InvalidField(f"the query parameter {name} stands there twice", code="repeated_parameter", param=name)
        else:
            values[name] = value
    if wanted is None:
        return None
    found = _converted(values, wanted)
    for name in values:
        if getattr(found, known[name].name) is None:  # msgspec takes the text "null" for nothing
            raise InvalidField(f"Invalid value for {name!r}: null", code="invalid_value", param=name)
    return found


def _converted(values: dict[str, Any], wanted: type[Struct]) -> Any:
    try:
        return msgspec.convert(values, wanted, strict=False)
    except msgspec.ValidationError as error:
        raise _explained(str(error), wanted) from None


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is list or any(get_origin(each) is list for each in get_args(kind))


def _explained(sentence: str, wanted: type[Struct]) -> InvalidField:
    """msgspec's sentence in our words, with the field that is wrong."""
    if match := _UNKNOWN.fullmatch(sentence):
        name, inside = match[1], match[3]
        known = [] if inside else [each.encode_name for each in fields(wanted)]
        return _unknown(f"{inside}.{name}" if inside else name, known, "field")
    if sentence.startswith("Object missing required field `"):
        name = sentence.split("`")[1]
        return InvalidField(f"Missing required parameter: {name!r}", code="missing_required_parameter", param=name)
    match = _PLACE.fullmatch(sentence)
    what, place = (match[1], match[2]) if match else (sentence, "")
    if what.startswith("Object missing required field `"):
        name = f"{place}.{what.split('`')[1]}"
        return InvalidField(f"Missing required parameter: {name!r}", code="missing_required_parameter", param=name)
    message = f"Invalid value for {place!r}: {what[:1].lower()}{what[1:]}" if place else f"Invalid request: {what}"
    return InvalidField(message, code="invalid_value", param=place or None)


def _unknown(name: str, known: list[str], kind: str) -> InvalidField:
    shown = name[:SHOWN_CHARS]
    near = difflib.get_close_matches(shown, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}" if known else ""
    return InvalidField(f"Unknown {kind}: {shown!r}{hint}", code="unknown_parameter", param=shown)
