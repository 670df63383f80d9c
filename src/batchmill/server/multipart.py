"""Read multipart/form-data as it arrives: small text fields, and one file that is passed on piece by piece.

Only the fields are kept in memory. A part that is not a field is refused.
Source: RFC 7578, RFC 2046 section 5.1.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import lru_cache

from msgspec import Struct
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from batchmill.errors import InvalidInput
from batchmill.server.bodies import SHOWN_CHARS, InvalidField

FIELD_BYTES_MAX = 4096  # of a text field
PARTS_MAX = 32
HEADERS_MAX, HEADER_BYTES_MAX = 8, 4096  # of one part
HEADERS_KNOWN_MAX = 64
BOUNDARY_CHARS_MAX = 70
FORM_BYTES = 512 * 1024  # a body may have this much besides its file: fields, headers and boundaries need less
_PLAIN_HEADER = re.compile(rb"([A-Za-z0-9-]+): *([ -~]*)")
PLAIN = ("", "binary", "8bit", "7bit")  # transfer encodings that leave the bytes as they are

TakeField = Callable[[str, str], None]
TakePiece = Callable[[bytes], Awaitable[None]]


class FilePart(Struct, frozen=True):
    """The file of a form, whose bytes have been passed on."""

    filename: str | None  # None: the part had none
    media: str


class _Head(Struct, frozen=True):
    """The headers of a part."""

    name: str
    filename: str | None
    media: str


async def read_form(
    chunks: AsyncIterator[bytes], content_type: str, *, file_field: str, take_field: TakeField, take_piece: TakePiece
) -> FilePart:
    """Read a form to its end: text fields go to `take_field`, the bytes of the field `file_field` to `take_piece`.

    Raises: InvalidInput for a malformed or incomplete form, or one without exactly one file; what the callables raise.
    """
    parser = _Parser(_boundary(content_type))
    head: _Head | None = None
    file: FilePart | None = None
    text = b""
    async for chunk in chunks:
        for event in parser.feed(chunk):
            if isinstance(event, _Head):
                head, text = event, b""
                if head.name == file_field:
                    if file is not None:
                        raise InvalidField(
                            f"the form has two files {file_field!r}: send one", code=CODE, param=file_field
                        )
                    file = FilePart(head.filename, head.media)
            elif head is None:
                continue
            elif event is None:
                if head.name != file_field:
                    take_field(head.name, _text(head.name, text))
                head = None
            elif head.name == file_field:
                await take_piece(event)
            else:
                text += event
                if len(text) > FIELD_BYTES_MAX:
                    raise _too_long(head.name)
    if not parser.is_whole:
        raise InvalidField("the form ends in the middle: its last boundary is missing", code=CODE)
    if file is None:
        raise InvalidField(f"Missing required parameter: {file_field!r}", code=MISSING, param=file_field)
    return file


CODE, MISSING = "invalid_multipart", "missing_required_parameter"


class _Parser:
    """Parses a body into events: the head of a part, pieces of its bytes, and None at its end."""

    def __init__(self, boundary: bytes) -> None:
        self.is_whole = False
        self._delimiter = b"\r\n--" + boundary
        self._events: list[_Head | bytes | None] = []
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""
        self._parts = 0
        self._seen = b""  # the bytes that are being parsed
        self._in_data = False  # all bytes so far are parsed, and more bytes of a part are to come
        self._boundary = boundary
        self._parser: MultipartParser | None = None  # once there is something for it

    def feed(self, data: bytes) -> list[_Head | bytes | None]:
        if self._parser is None:
            if self.is_whole:
                return []  # as the parser ignores what comes after the last boundary
            if (whole := _read_whole(self._delimiter, data)) is not None:
                self.is_whole = True
                return whole
            self._parser = self._new_parser()
        if self._in_data:  # searching for the next boundary is many times faster than parsing
            plain = _bytes_before(self._delimiter, data)
            if plain == len(data):
                return [data]
            if plain:
                self._events.append(data[:plain])
                data = data[plain:]
        self._seen, self._in_data = data, False
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidField(f"the form cannot be read: {error}", code=CODE) from None
        events, self._events = self._events, []
        return events

    def _new_parser(self) -> MultipartParser:
        callbacks = {
            "on_part_begin": self._on_part_begin,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": lambda: self._events.append(_head(self._headers)),
            "on_end": self._on_end,
        }
        return MultipartParser(
            self._boundary, callbacks, max_header_count=HEADERS_MAX, max_header_size=HEADER_BYTES_MAX
        )

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise InvalidField(f"the form has more than {PARTS_MAX} parts", code=CODE)
        self._headers = {}

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._events.append(data[start:end])
        self._in_data = data is self._seen and end == len(data)  # it also reports bytes that might have been a boundary

    def _on_part_end(self) -> None:
        self._events.append(None)
        self._in_data = False

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        name = self._name.lower()
        if name in self._headers:
            raise InvalidField(f"a part of the form has two headers {name.decode('latin-1')!r}", code=CODE)
        self._headers[name] = self._value
        self._name = self._value = b""

    def _on_end(self) -> None:
        self.is_whole = True


def _read_whole(delimiter: bytes, data: bytes) -> list[_Head | bytes | None] | None:
    """The events of a form that is here whole, as most short ones are: to search for its boundaries is several times
    faster than to parse it. None: it is not, or there is something unusual about it, which the parser reads or refuses.
    """
    if not data.startswith(delimiter[2:] + b"\r\n"):
        return None
    events: list[_Head | bytes | None] = []
    at = len(delimiter)
    for _ in range(PARTS_MAX):
        end_of_head = data.find(b"\r\n\r\n", at)
        end = data.find(delimiter, end_of_head + 4)
        headers = _plain_headers(data[at:end_of_head]) if 0 <= end_of_head < end else None
        if headers is None:
            return None
        content = data[end_of_head + 4 : end]
        events += [_head(headers), content, None] if content else [_head(headers), None]
        at = end + len(delimiter) + 2
        after = data[at - 2 : at]
        if after == b"--":
            return events if data[at:] in (b"", b"\r\n") else None
        if after != b"\r\n":
            return None
    return None


def _plain_headers(head: bytes) -> dict[bytes, bytes] | None:
    """The headers of a part; None: the parser reads or refuses them."""
    lines = head.split(b"\r\n")
    headers = {}
    for line in lines:
        found = _PLAIN_HEADER.fullmatch(line)
        if found is None or len(line) > HEADER_BYTES_MAX // 2:
            return None
        headers[found[1].lower()] = found[2]
    return headers if len(headers) == len(lines) <= HEADERS_MAX else None


def _bytes_before(delimiter: bytes, data: bytes) -> int:
    """How many bytes of `data` come before a delimiter, or before a possible beginning of one."""
    at = data.find(delimiter)
    if at >= 0:
        return at
    at = data.find(b"\r", max(0, len(data) - len(delimiter) + 1))
    while at >= 0 and not delimiter.startswith(data[at:]):
        at = data.find(b"\r", at + 1)
    return at if at >= 0 else len(data)


def _boundary(content_type: str) -> bytes:
    media, options = _options(content_type)
    boundary = options.get(b"boundary", b"")
    if media != b"multipart/form-data":
        raise InvalidField("the body must have the Content-Type multipart/form-data", code="unsupported_media_type")
    if not 0 < len(boundary) <= BOUNDARY_CHARS_MAX:
        raise InvalidField(f"the Content-Type must name a boundary of 1 to {BOUNDARY_CHARS_MAX} characters", code=CODE)
    return boundary


@lru_cache(HEADERS_KNOWN_MAX)
def _options(header: str) -> tuple[bytes, Mapping[bytes, bytes]]:
    """The value and the options of a header. Clients send few different ones, which take long to parse."""
    return parse_options_header(header)


def _head(headers: dict[bytes, bytes]) -> _Head:
    kind, options = _options(headers.get(b"content-disposition", b"").decode("latin-1"))
    if kind != b"form-data" or b"name" not in options:
        raise InvalidField('a part of the form has no Content-Disposition: form-data; name="…"', code=CODE)
    encoding = headers.get(b"content-transfer-encoding", b"").strip().lower().decode("latin-1")
    if encoding not in PLAIN:
        raise InvalidField(
            f"the Content-Transfer-Encoding {encoding[:SHOWN_CHARS]!r} of a part is not supported: use binary",
            code=CODE,
        )
    filename = options.get(b"filename")
    return _Head(
        _decoded(options[b"name"], "the name of a field"),
        None if filename is None else _decoded(filename, "the name of the file"),
        headers.get(b"content-type", b"").decode("latin-1"),
    )


def _text(name: str, value: bytes) -> str:
    if len(value) > FIELD_BYTES_MAX:
        raise _too_long(name)
    return _decoded(value, f"the field {name[:SHOWN_CHARS]!r}")


def _too_long(name: str) -> InvalidInput:
    shown = name[:SHOWN_CHARS]
    return InvalidField(
        f"the field {shown!r} is longer than {FIELD_BYTES_MAX:,} bytes", code="invalid_value", param=shown
    )


def _decoded(value: bytes, what: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidField(f"{what} is not UTF-8", code=CODE) from None
