"""The heads of replies that are whole in memory. Such a reply is sent at once: its head and its body are one write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from batchmill.ports.clock import Clock
from batchmill.server.replies import date, security_headers

Headers = Sequence[tuple[bytes, bytes]]

LONG_BYTES = 64 * 1024  # a longer reply is not joined with its head, which would copy it
HEADS_MAX = 256  # cached heads of replies
LENGTH = b"content-length", b""
DATE_S = 0.5  # how long a date is shown
_HEADER = re.compile(rb"[a-z0-9!#$%&'*+.^_`|~-]+")
_UNSAFE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class ReplyHeads:
    """Renders replies, and remembers the headers that many of them have."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heads: dict[tuple[tuple[bytes, bytes], ...], tuple[bytes, bytes]] = {}
        self._date, self._dated = b"", -DATE_S

    def render(self, status: int, headers: Headers, body: bytes, request_id: str, *, is_last: bool) -> list[bytes]:
        """A reply, a long body in a piece of its own. The headers have the order of a reply that is sent through ASGI.

        Args:
            headers: names are lower-case. A Content-Length need not be among them.
            is_last: the connection closes after it.

        Raises: ValueError for headers that cannot be sent.
        """
        key = tuple([LENGTH if each[0] == LENGTH[0] else each for each in headers])
        before, after = self._heads.get(key) or self._head(key)
        end = b"x-request-id: %b\r\n%b\r\n" % (request_id.encode(), b"connection: close\r\n" if is_last else b"")
        length = b"content-length: %d\r\n" % len(body)
        pieces = (STATUS_LINE[status], before, length, after, b"date: %b\r\n" % self.date(), end)
        return [b"".join(pieces), body] if len(body) >= LONG_BYTES else [b"".join((*pieces, body))]

    def date(self) -> bytes:
        """The value of a Date header: the time now, or not long ago."""
        now = self._clock.monotonic()
        if now - self._dated >= DATE_S:
            self._date, self._dated = date(), now
        return self._date

    def _head(self, headers: tuple[tuple[bytes, bytes], ...]) -> tuple[bytes, bytes]:
        """Return the header lines before the Content-Length, and those after it."""
        for name, value in headers:
            if not _HEADER.fullmatch(name) or _UNSAFE.search(value):
                raise ValueError(f"the header {name!r} cannot be sent: invalid name or value")
        if LENGTH in headers:
            at = headers.index(LENGTH)
            before, after = list(headers[:at]), list(headers[at + 1 :])
        else:
            before = [each for each in headers if each[0] != b"content-type"]
            after = [each for each in headers if each[0] == b"content-type"]
        after += security_headers(name for name, _ in headers)
        lines = _lines(before), _lines(after)
        if len(self._heads) < HEADS_MAX:
            self._heads[headers] = lines
        return lines


def _lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"%b: %b\r\n" % header for header in headers)
