"""What a client and its transport exchange. Nothing here sends or waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from msgspec import Struct

T = TypeVar("T")

TIMEOUT_S = 60.0  # without a byte, where the caller says nothing else
PIECE_BYTES = 1024 * 1024  # of an upload, at once


class Request(Struct, frozen=True):
    """An HTTP request, its path below the server's address."""

    method: str
    path: str
    query: dict[str, str] = {}
    headers: dict[str, str] = {}
    body: bytes | None = None
    is_repeatable: bool = True  # doing it twice is as doing it once
    is_long: bool = False  # the server may be silent for as long as it takes


class Ask(Struct, Generic[T], frozen=True):
    """A request, and what its reply is read as; None: it has no body."""

    request: Request
    reply: type[T]


class Reply(Struct, frozen=True):
    """A whole reply. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Broken(Exception):
    """No (whole) reply came. `was_sent`: the server may have seen the request."""

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class OwnerGone(Broken):
    """The process that owned a data directory has ended. Another takes over: it is asked at once."""
