"""An HTTP/1.1 reply, read as its bytes come in whatever pieces. Knows no connection.

Source: RFC 9112.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from msgspec import Struct

HEAD_BYTES_MAX = 64 * 1024


class BadReply(OSError):
    """What came is no HTTP reply, or not all of one."""


class Received(Struct, gc=False):
    """A whole reply. `headers` are in lower case; `body` is decoded, and None when it is larger than was allowed."""

    status: int
    headers: Mapping[str, str]
    body: bytes | None


class Incoming:
    """A reply whose head is read, and as much of its body as has come."""

    __slots__ = ("_body", "_max", "_chunks", "_headers", "_left", "_size", "_status", "_too_large", "keeps_connection")

    def __init__(self, status: int, headers: dict[str, str], keeps_connection: bool, body_bytes_max: int) -> None:
        self._status = status
        self._headers = headers
        self._max = body_bytes_max
        self._body: list[bytes] = []
        self._size = 0
        self._too_large = False
        self._chunks = _Chunks() if "transfer-encoding" in headers else None
        self._left = None if self._chunks is not None else body_length(status, headers)
        self.keeps_connection = keeps_connection and not self.ends_with_connection
        if self._left is not None and self._left > body_bytes_max:
            self._too_large = True

    @property
    def ends_with_connection(self) -> bool:
        return self._chunks is None and self._left is None

    def take(self, data: bytes) -> bool:
        """Add bytes. True once the reply is complete, or cannot be taken. Raises: BadReply."""
        if self._too_large:
            return True
        if self._chunks is not None:
            is_whole, data = self._chunks.take(data)
        elif self._left is not None:
            if len(data) > self._left:
                raise BadReply("it is longer than its length")
            self._left -= len(data)
            is_whole = self._left == 0
        else:
            is_whole = False
        self._size += len(data)
        self._too_large = self._size > self._max
        self._body.append(data)
        return is_whole or self._too_large

    def received(self) -> Received:
        """The whole reply. Raises: BadReply when it cannot be decoded."""
        body = None if self._too_large else self._body[0] if len(self._body) == 1 else b"".join(self._body)
        encoding = self._headers.get("content-encoding", "identity").lower()
        if encoding != "identity" and body:
            body = inflate(body, encoding, self._max)
        return Received(self._status, self._headers, body)


class _Chunks:
    """The chunked coding, taken apart as it comes."""

    def __init__(self) -> None:
        self._buffer = b""
        self._left = 0  # of the content of the chunk
        self._in_chunk = False  # until the line end after its content
        self._in_trailer = False

    def take(self, data: bytes) -> tuple[bool, bytes]:
        """Whether the last chunk has been seen, and the content in `data`. Raises: BadReply."""
        data = self._buffer + data if self._buffer else data
        content, at = [], 0
        while True:
            piece = data[at : at + self._left]
            content.append(piece)
            at += len(piece)
            self._left -= len(piece)
            end = -1 if self._left else data.find(b"\r\n", at)
            if end < 0:
                break
            line, at = data[at:end], end + 2
            if self._in_trailer and not line:
                if at < len(data):
                    raise BadReply("it goes on after its end")
                return True, b"".join(content)
            self._line(line)
        if len(data) - at > HEAD_BYTES_MAX:
            raise BadReply("a line between its chunks is too long")
        self._buffer = data[at:]
        return False, b"".join(content)

    def _line(self, line: bytes) -> None:
        if self._in_chunk:
            if line:
                raise BadReply("a chunk is longer than its size")
            self._in_chunk = False
        elif not self._in_trailer:
            self._left = _chunk_size(line)
            self._in_chunk = self._left > 0
            self._in_trailer = not self._in_chunk


def read_head(head: bytes) -> tuple[int, dict[str, str], bool]:
    """Status, headers in lower case, and whether the connection may be used again. Raises: BadReply."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if (
        version not in ("HTTP/1.1", "HTTP/1.0")
        or not status.isdigit()
        or len(status) != 3
        or rest[3:4] not in ("", " ")
    ):
        raise BadReply(f"it begins {first[:60]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        if not colon or not name or name[0] in " \t" or name[-1] in " \t":
            raise BadReply(f"it has the header line {line[:60]!r}")
        if name == "content-length" and headers.get(name, value) != value:
            raise BadReply("it has two lengths")
        headers[name] = value
    coding = headers.get("transfer-encoding")
    if coding is not None and coding.lower() != "chunked":
        raise BadReply(f"its transfer coding {coding[:60]!r} is unknown")
    connection = headers.get("connection", "").lower()
    keeps = "close" not in connection if version == "HTTP/1.1" else "keep-alive" in connection
    return int(status), headers, keeps


def body_length(status: int, headers: dict[str, str]) -> int | None:
    """Bytes of a body that is not chunked; None: it ends with the connection. Raises: BadReply."""
    if status in (204, 304):
        return 0
    length = headers.get("content-length")
    if length is None:
        return None
    if not (length.isascii() and length.isdigit() and len(length) < 19):
        raise BadReply(f"its length is {length[:60]!r}")
    return int(length)


def inflate(body: bytes, encoding: str, size_max: int) -> bytes | None:
    """A compressed body unpacked; None when it is larger than `size_max`. Raises: BadReply."""
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise BadReply(f"its content coding {encoding[:60]!r} was not asked for")
    inflater = zlib.decompressobj(wbits=47)  # told from the bytes: gzip or zlib
    try:
        data = inflater.decompress(body, size_max + 1)
    except zlib.error as error:
        raise BadReply(f"it cannot be unpacked: {error}") from None
    if len(data) > size_max:
        return None
    if not inflater.eof:
        raise BadReply("its compressed body is cut off")
    return data


def _chunk_size(line: bytes) -> int:
    text = line.partition(b";")[0].strip(b" \t")
    if not text or len(text) > 15 or not all(byte in b"0123456789abcdefABCDEF" for byte in text):
        raise BadReply(f"it has a chunk of size {line[:60]!r}")
    return int(text, 16)
