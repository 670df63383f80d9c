"""Calls of a provider's API: the whole answer, or the error of the engine's that it means.

Knows connections and how failures are sorted; nothing of jobs or rows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from batchmill.engines.clock import SystemClock
from batchmill.engines.connections import Connections, FilePart, NoReply
from batchmill.engines.provider_batch.provider import TryAgain
from batchmill.engines.replies import read_reply, redact
from batchmill.engines.retry import Fault, Kind, judge
from batchmill.errors import AuthRefused, BatchmillError, QuotaExhausted, RouteFailed
from batchmill.models.redaction import MASK_BYTES
from batchmill.ports import Clock
from batchmill.types import RowError
from batchmill.wire.json_bytes import shallow

T = TypeVar("T")

LINE_BYTES_MAX = 64 * 1024 * 1024  # of a results file
ERROR_BYTES_MAX = 64 * 1024  # of what is said instead of a file
LINES_MAX = 500  # handed on at a time


class Out(Struct, frozen=True):
    """A call as it goes out."""

    method: str
    url: str
    body: bytes | None = None
    headers: Mapping[str, str] = {}
    parts: Sequence[bytes | FilePart] | None = None  # instead of `body`: streamed
    sha256: str | None = None  # of the parts, in hex, where a signature covers them


class Answer(Struct, frozen=True):
    """A reply of status 200 to 299."""

    headers: Mapping[str, str]
    data: bytes

    def json(self) -> dict[str, Any]:
        """Raises: TryAgain for what is no JSON object: a proxy's page, or half of a reply."""
        try:
            return msgspec.json.decode(shallow(self.data), type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            start = self.data[:100].decode(errors="replace")
            raise TryAgain(f"the provider's reply is no JSON object: it begins {start!r}") from None

    def read(self, kind: type[T]) -> T:
        """The reply as `kind`. Raises: TryAgain for one of another shape."""
        try:
            return msgspec.convert(self.json(), kind)
        except msgspec.ValidationError as error:
            raise TryAgain(f"the provider's reply is not what it should be: {error}") from None


class Refusal(BatchmillError):
    """The provider said no, and will say it again."""

    code = "refused_by_provider"
    blame = "caller"

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason  # its own code


class Closed(Struct, frozen=True):
    """A call as it may be sent, and what no message may repeat of it."""

    out: Out
    secrets: Sequence[bytes] = ()


Close = Callable[[Out], Awaitable[Closed]]
Sort = Callable[[int, Mapping[str, str], bytes], BatchmillError | None]


class Calls:
    """Makes calls of one provider.

    `close` adds the credentials; `renew` reads these anew and says whether they have changed: a call that was refused
    for them is made once more then. `sort` knows errors that only this provider has.
    """

    def __init__(
        self,
        connections: Connections,
        close: Close,
        *,
        renew: Callable[[], bool] | None = None,
        sort: Sort | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._connections = connections
        self._close = close
        self._renew = renew
        self._sort = sort
        self._clock: Clock = clock or SystemClock()

    async def call(
        self, method: str, url: str, body: bytes | None = None, *, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Raises: TryAgain, AuthRefused, QuotaExhausted, RouteFailed; Refusal where the provider will not."""
        return await self.send(Out(method, url, body, headers or {}))

    async def send(self, out: Out) -> Answer:
        """As `call`."""
        try:
            return await self._send(out)
        except AuthRefused:
            if self._renew is None or not self._renew():
                raise
        return await self._send(out)

    async def _send(self, out: Out) -> Answer:
        closed = await self._close(out)
        out = closed.out
        try:
            if out.parts is None:
                response, data = await self._connections.exchange(out.method, out.url, out.body, out.headers)
            else:
                response, data = await self._connections.upload(out.method, out.url, out.parts, out.headers)
        except NoReply as failed:
            raise fault_error(failed.fault) from None
        if data is None:
            raise RouteFailed(f"a reply of {_place(out.url)} is larger than batchmill reads")
        if not 200 <= response.status < 300:
            raise self._error(response.status, response.headers, _without(data, closed.secrets))
        return Answer(response.headers, data)

    async def lines(self, url: str, *, headers: Mapping[str, str] | None = None) -> AsyncIterator[list[bytes]]:
        """The lines of a file at the provider, some hundreds at a time, as they come. Raises as `call`."""
        rest = b""
        async for piece in self.pieces(url, headers=headers):
            lines = (rest + piece).split(b"\n") if b"\n" in piece else [rest + piece]
            rest = lines.pop()
            if len(rest) > LINE_BYTES_MAX:
                raise RouteFailed(f"a line of the results is longer than {LINE_BYTES_MAX // 2**20} MiB")
            for first in range(0, len(lines), LINES_MAX):
                if some := [line for line in lines[first : first + LINES_MAX] if line.strip()]:
                    yield some
        if rest.strip():
            yield [rest]

    async def pieces(self, url: str, *, headers: Mapping[str, str] | None = None) -> AsyncIterator[bytes]:
        """A file at the provider in pieces of any length. Raises as `call`."""
        closed = await self._close(Out("GET", url, None, headers or {}))
        try:
            response = await self._connections.begin("GET", closed.out.url, None, closed.out.headers)
            try:
                if response.status != 200:
                    data = b""
                    while len(data) < ERROR_BYTES_MAX and (piece := await self._connections.read(response)):
                        data += piece
                    raise self._error(response.status, response.headers, _without(data, closed.secrets))
                if response.headers.get("content-type", "").startswith("text/html"):
                    raise TryAgain("a page came where a file was asked for: a proxy's, it may be")
                while piece := await self._connections.read(response):
                    yield piece
            finally:
                response.close()
        except NoReply as failed:
            raise fault_error(failed.fault) from None

    def _error(self, status: int, headers: Mapping[str, str], data: bytes) -> BatchmillError:
        own = None if self._sort is None else self._sort(status, headers, data)
        if own is not None:
            return own
        reply = read_reply(status, data)
        fault = judge(reply, headers, self._clock.now())
        if fault.kind is Kind.PERMANENT:
            return Refusal(status, fault.error.code, fault.error.message)
        return fault_error(fault)


def fault_error(fault: Fault) -> BatchmillError:
    """What a call that brought nothing means for the engine."""
    message = fault.error.message
    match fault.kind:
        case Kind.AUTH:
            return AuthRefused(message)
        case Kind.QUOTA:
            return QuotaExhausted(message)
        case Kind.PERMANENT:
            return RouteFailed(message)
        case kind:
            return TryAgain(message, rest_s=fault.rest_s, is_unseen=kind in (Kind.THROTTLED, Kind.UNREACHABLE))


def row_error(code: str, message: str) -> RowError:
    """An error of a row in a provider's words, as they may be kept."""
    return RowError(code[:100], redact(message))


def _without(data: bytes, secrets: Sequence[bytes]) -> bytes:
    for secret in secrets:
        data = data.replace(secret, MASK_BYTES)
    return data


def _place(url: str) -> str:
    return url.partition("?")[0]
