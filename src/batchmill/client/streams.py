"""Streamed replies: events of a job, result files line by line. Each continues where it was when
the connection breaks, as far as the server can tell that it is still the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from batchmill.client import calls
from batchmill.client.messages import Broken, HttpReply, HttpRequest, backoff_s, error_of, is_transient, unreachable
from batchmill.errors import BatchmillError, Conflict, InvalidInput
from batchmill.types import JobView

T = TypeVar("T")

LINES = ("application/jsonl", "application/x-ndjson")
EVENT_BYTES_MAX = 16 * 1024 * 1024
LINE_BYTES_MAX = 2 * 1024**3
NOT_LINES = "not_lines"  # InvalidInput: the file is of another format
BREAKS_MAX = 8  # in a row: about half a minute, in which a server may start again


class Stream(Protocol, Generic[T]):
    """A streamed body that the client feeds in: `request`, `begin`, `feed` …, `end`; after a break, `broke`."""

    @property
    def is_over(self) -> bool: ...

    def request(self) -> HttpRequest: ...

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Take the head of a successful reply."""

    def feed(self, data: bytes) -> list[T]: ...

    def end(self) -> list[T]:
        """Take the end of the body."""
        ...

    def broke(self, broken: Broken) -> float:
        """Seconds to wait before `request` is sent again. Raises: Unavailable if it cannot be resumed."""
        ...


def refusal(reply: HttpReply) -> Exception:
    """Why a stream did not begin: Broken if it is transient, else the server's error."""
    error = error_of(reply.status, reply.headers, reply.body)
    return Broken(error.message, was_sent=True) if is_transient(reply) else error


class _Resumed:
    """Counts the breaks since something arrived."""

    def __init__(self) -> None:
        self.is_over = False
        self._breaks = 0

    def broke(self, broken: Broken) -> float:
        self._breaks += 1
        if self._breaks >= BREAKS_MAX:
            raise unreachable(broken)
        return backoff_s(self._breaks - 1)


class Views(_Resumed):
    """The views of a job until it pauses or ends. Every event is a whole view, so a break loses nothing."""

    def __init__(self, job_id: str, interval_s: float) -> None:
        super().__init__()
        self._job_id, self._interval_s = job_id, interval_s
        self._rest = b""
        self._last: str | None = None

    def request(self) -> HttpRequest:
        return calls.events(self._job_id, self._interval_s, self._last)

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[JobView]:
        *events, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise BatchmillError(f"an event has more than {EVENT_BYTES_MAX:,} bytes", code="unexpected_reply")
        return [view for event in events if (view := self._read(event)) is not None]

    def _read(self, event: bytes) -> JobView | None:
        kind, data = "", []
        for line in event.decode().splitlines():
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            match name:
                case "event":
                    kind = value
                case "data":
                    data.append(value)
                case "id":
                    self._last = value
        self._breaks = 0
        if kind == "end":
            self.is_over = True
        return msgspec.json.decode("\n".join(data), type=JobView) if kind == "view" else None

    def end(self) -> list[JobView]:
        """A server that stops ends its streams without an `end`: then another connection continues."""
        if not self.is_over:
            raise Broken("the server ended the stream", was_sent=True)
        return []


class FileContent(_Resumed):
    """A file, piece by piece. Resumes after a break if the file is unchanged."""

    def __init__(self, request: HttpRequest, *, is_resumable: bool = True) -> None:
        super().__init__()
        self._request, self._is_resumable = request, is_resumable
        self._got = 0
        self._etag: str | None = None
        self._length: int | None = None

    def request(self) -> HttpRequest:
        if not self._got:
            return self._request
        assert self._etag is not None
        headers = {"range": f"bytes={self._got}-", "if-range": self._etag}
        return replace(self._request, headers={**self._request.headers, **headers})

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        if self._got and status != 206:
            raise Conflict("the file has changed while it was being read: read it again", code="file_changed")
        if not self._got:
            self._etag = headers.get("etag")
            length = headers.get("content-length", "")
            self._length = int(length) if length.isdigit() else None

    def feed(self, data: bytes) -> list[bytes]:
        if data:
            self._got += len(data)
            self._breaks = 0
        return [data] if data else []

    def end(self) -> list[bytes]:
        if self._length is not None and self._got < self._length:
            raise Broken(f"{self._got:,} of {self._length:,} bytes arrived", was_sent=True)
        self.is_over = True
        return []

    def broke(self, broken: Broken) -> float:
        if self._got and (self._etag is None or not self._is_resumable):
            raise unreachable(broken)
        return super().broke(broken)


class _LineStream(Generic[T]):
    """A file of JSON lines. Args: is_any: also a file that the server calls something else."""

    def __init__(self, bytes_: FileContent, decode: Callable[[bytes], T], *, is_any: bool = False) -> None:
        self._bytes, self._decode, self._is_any = bytes_, decode, is_any
        self._rest: list[bytes] = []
        self._rest_bytes = 0

    @property
    def is_over(self) -> bool:
        return self._bytes.is_over

    def request(self) -> HttpRequest:
        return self._bytes.request()

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        kind = headers.get("content-type", "").partition(";")[0]
        if kind not in LINES and not self._is_any:
            raise InvalidInput(f"the results are no JSON lines but {kind}: download them", code=NOT_LINES)
        self._bytes.begin(status, headers)

    def feed(self, data: bytes) -> list[T]:
        self._bytes.feed(data)
        head, newline, tail = data.rpartition(b"\n")
        if not newline:
            self._keep(data)
            return []
        whole = b"".join([*self._rest, head])
        self._rest, self._rest_bytes = [], 0
        self._keep(tail)
        return [self._decode(line) for line in whole.split(b"\n") if line]

    def _keep(self, data: bytes) -> None:
        self._rest_bytes += len(data)
        if self._rest_bytes > LINE_BYTES_MAX:
            raise BatchmillError(f"a line has more than {LINE_BYTES_MAX:,} bytes", code="unexpected_reply")
        self._rest.append(data)

    def end(self) -> list[T]:
        self._bytes.end()
        last = b"".join(self._rest)
        return [self._decode(last)] if last.strip() else []

    def broke(self, broken: Broken) -> float:
        return self._bytes.broke(broken)


class JsonLines(_LineStream[dict[str, Any]]):
    """A file of JSON lines, as objects."""

    def __init__(self, bytes_: FileContent) -> None:
        super().__init__(bytes_, msgspec.json.decode)


class Lines(_LineStream[bytes]):
    """A file of JSON lines, as they are; without empty ones."""

    def __init__(self, bytes_: FileContent, *, is_any: bool = False) -> None:
        super().__init__(bytes_, bytes, is_any=is_any)
