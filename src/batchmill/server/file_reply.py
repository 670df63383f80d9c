"""A file as a reply: whole, or the range that was asked for; read piece by piece as fast as the client takes it.

Source: RFC 9110 sections 13.1.5 (If-Range) and 14 (ranges), RFC 6266 (Content-Disposition).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from batchmill.services.files import READ_BYTES, OpenFile

OCTETS = "application/octet-stream"
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.IGNORECASE)
_UNSAFE = re.compile(r"[^A-Za-z0-9._ -]")


class Span(Struct, frozen=True):
    """Bytes first <= n < last; none of them where both are one."""

    first: int
    last: int


NOTHING = Span(0, 0)


async def _nothing() -> None:
    """Nobody wants to know."""


class FileReply(Response):
    """Closes `file` in the end. HEAD gets the same head and no body; who asks for several ranges gets the whole.

    `before_the_end` is called before the last byte of the file is sent. What it raises is the reply, where the file is
    small; otherwise the reply is broken off.
    """

    def __init__(
        self,
        request: Request,
        file: OpenFile,
        *,
        filename: str,
        media: str = OCTETS,
        before_the_end: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        self._file, self._is_head = file, request.method == "HEAD"
        self._before_the_end = before_the_end
        tag, size = f'"{file.record.id}"', file.size_bytes
        headers = {
            "accept-ranges": "bytes",
            "etag": tag,
            "content-disposition": disposition(filename),
            "cache-control": "private, no-transform",
        }
        self._span, status = Span(0, size), 200
        if (asked := _asked(request, tag)) is not None:
            span = span_of(asked, size)
            if span == NOTHING:
                self._span, status = span, 416
                headers["content-range"] = f"bytes */{size}"
            elif span is not None:
                self._span, status = span, 206
                headers["content-range"] = f"bytes {span.first}-{span.last - 1}/{size}"
        headers["content-length"] = str(self._span.last - self._span.first)
        super().__init__(None, status, headers, media_type=media)

    @property
    def is_to_the_end(self) -> bool:
        """It has the last byte of the file: who has taken it needs no more of it."""
        return not self._is_head and self.status_code != 416 and self._span.last == self._file.size_bytes

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[..., Any]) -> None:
        gone = asyncio.ensure_future(_until_gone(receive))
        is_one_piece = self._span.last - self._span.first <= READ_BYTES
        try:
            if self.is_to_the_end and is_one_piece:
                await self._before_the_end()
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            at = self._span.last if self._is_head else self._span.first
            while at < self._span.last and not gone.done():
                data = await self._file.read(at, min(READ_BYTES, self._span.last - at))
                if not data:
                    raise EOFError(f"{self._file.record.id} is shorter than its record says")
                at += len(data)
                if self.is_to_the_end and at == self._span.last and not is_one_piece:
                    await self._before_the_end()
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            await self._file.close()
        if self.background is not None:
            await self.background()


async def _until_gone(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    """Sending to a client that left succeeds: only its goodbye tells that there is nobody to read for."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _asked(request: Request, tag: str) -> str | None:
    """The range that is asked for, if it still counts: `If-Range` names the file it was begun with."""
    if request.method not in ("GET", "HEAD"):
        return None
    begun = request.headers.get("if-range")
    return request.headers.get("range") if begun is None or begun.strip() == tag else None


def span_of(asked: str, size: int) -> Span | None:
    """The bytes that a Range header means: NOTHING where there are none of them, None where it is to be ignored."""
    match = _RANGE.fullmatch(asked.strip())
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        length = min(int(match[2]), size)
        return Span(size - length, size) if length else NOTHING
    first = int(match[1])
    last = size if match[2] == "" else int(match[2]) + 1
    if match[2] and last <= first:
        return None  # no range at all, by the grammar
    return Span(first, min(last, size)) if first < size else NOTHING


def disposition(filename: str) -> str:
    """`attachment` with a name that is safe to save under: no folders, nothing that ends the header."""
    name = re.split(r"[/\\]", filename)[-1].lstrip(".") or "file"
    plain = _UNSAFE.sub("_", name)
    if plain == name:
        return f'attachment; filename="{name}"'
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"
