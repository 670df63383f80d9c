"""The interface of each provider's batch API, and its calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
from msgspec import Struct

from batchmill.engines.clock import SystemClock
from batchmill.engines.connections import Connections, FileRange
from batchmill.engines.retry import Fault, FaultKind, NoReply, judge, read_reply, redact
from batchmill.errors import AuthRefused, BatchmillError, InvalidRow, QuotaExhausted, RouteFailed
from batchmill.models.redaction import MASK_BYTES
from batchmill.ports.clock import Clock
from batchmill.types import ModelSpec, RemoteJob, Request, RowError, Usage
from batchmill.wire.json_bytes import shallow
from batchmill.wire.rows.forms import with_model


class BatchLimits(Struct, frozen=True):
    """The limits of one batch, and how its rows are joined in an upload."""

    rows_max: int
    bytes_max: int  # of the upload
    window_s: float  # within which the provider intends to complete a batch
    inputs_max: int | None = None  # of all rows together: see Line.inputs
    head: bytes = b""  # before the first line
    between: bytes = b"\n"
    tail: bytes = b"\n"  # after the last


class ProviderRow(Struct, frozen=True, gc=False):
    """One row in the provider's form."""

    data: bytes  # without `BatchLimits.between`
    group: str = ""  # rows of different groups (another URL or model) go into different jobs
    inputs: int = 1  # counted against `BatchLimits.inputs_max`


class Upload(Struct, frozen=True):
    """A file with the lines of one batch, in the order of `RemoteJob.runs`. All are of one group."""

    path: Path
    group: str
    rows: int
    size_bytes: int


class RowReply(Struct, frozen=True, gc=False):
    """The provider's reply to one row."""

    status: int = 200
    body: bytes | None = None  # the JSON of the reply, on one line
    error: RowError | None = None
    usage: Usage | None = None
    request_id: str | None = None
    is_undone: bool = False  # the row was not run (its job expired, the provider was overloaded) and may be sent again
    is_garbled: bool = False  # the file is unreadable; another download may help


class TryAgain(BatchmillError):
    """The call may succeed later. Its effect may have happened, unless `is_unseen`."""

    code = "try_again"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float | None = None, is_unseen: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s  # how long the provider requests to wait
        self.is_unseen = is_unseen  # the provider did not process the call: throttled, or no connection


class JobRefused(BatchmillError):
    """The provider will not run this batch, or ended it without running rows. The message is the provider's."""

    code = "job_refused"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s  # when it may accept the same job: its queue for us is full


class JobGone(BatchmillError):
    """The provider has no batch with this id."""

    code = "job_gone"


class ProviderApi(Protocol):
    """One provider. Constructed as `Class(model: ModelSpec, connections: Connections)`.

    A row is identified by `number`, its position in the plan. `RemoteJob.runs` lists the same numbers, ascending, in
    the order of the lines of the upload. Every method that calls the provider may raise TryAgain, AuthRefused or
    QuotaExhausted. Methods return an updated copy of the job (see `msgspec.structs.replace`).
    """

    limits: BatchLimits
    arguments: frozenset[str]  # engine arguments of this provider; all others but the engine's own are refused

    def encode(self, number: int, request: Request) -> ProviderRow:
        """Encode a row as a line of the upload. Raises: InvalidRow for a row that this provider does not support."""

    async def find(self, job: RemoteJob) -> RemoteJob | None:
        """Look for a batch with this `tag`; return it with its `id`, and its `input` if it has one.

        A job that was only uploaded is returned with its `input` and no `id`. None: certainly neither exists. If the
        provider has several jobs with this tag, all but the most advanced are cancelled.
        Raises: SubmitUnknown, with what to check, if the provider's API cannot tell.
        """

    async def upload(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        """Upload the file; return the job with its `input`, or unchanged if `create` sends the rows.

        Raises: JobRefused.
        """

    async def create(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        """Create the batch; return the job with its `id`, and state "submitted".

        Raises: JobRefused; SubmitUnknown if the reply was lost and `find` cannot tell what happened.
        """

    async def refresh(self, job: RemoteJob) -> RemoteJob:
        """Poll the batch: state "submitted", "cancelling" or "ended", `remote_state`, `completed`, `failed`.

        Raises: JobGone.
        """

    async def cancel(self, job: RemoteJob) -> RemoteJob:
        """Cancel the batch; state "cancelling", or "ended" if it had ended. Raises: JobGone."""

    def results(self, job: RemoteJob) -> AsyncIterator[list[tuple[int, RowReply]]]:
        """The provider's replies to the rows of an ended batch, in any order, some hundreds at a time.

        Rows without a reply are left out. A reply whose number is unreadable has number -1.
        Raises: JobRefused, after the available replies, if the job ended without running the other rows.
        """

    async def clean_up(self, job: RemoteJob) -> None:
        """Delete the uploads of an ended batch, if the API can; never its results."""


@runtime_checkable
class CleansResults(Protocol):
    """A provider whose results can be deleted."""

    async def clean_results(self, job: RemoteJob) -> None:
        """Delete the results of a job. The outcomes of its rows are already committed."""


def row_id(number: int) -> str:
    """The id of a row at the provider."""
    return f"r{number}"


def row_number(name: str) -> int:
    """The row number in such an id; -1 if it is not one."""
    digits = name[1:]
    return int(digits) if name[:1] == "r" and digits.isascii() and digits.isdecimal() and len(digits) < 12 else -1


class _Head(Struct, gc=False):
    model: str | None = None
    stream: bool | None = None


_head = msgspec.json.Decoder(_Head)
_fields = msgspec.json.Decoder(dict[str, Any])


def remote_name(model: ModelSpec, named: str | None) -> str:
    """The provider's name for the model that a row names. No name, and batchmill's own name, mean `source`."""
    own = model.name if model.name not in model.adapters else model.source
    return model.source if not named or named in (own, model.alias) else named


def with_remote_model(body: bytes, model: ModelSpec) -> bytes:
    """The body with the provider's model name. Raises: InvalidRow for a row that requests a stream."""
    head = _head.decode(body)
    _refuse_stream(head.stream)
    name = remote_name(model, head.model)
    return body if name == head.model else with_model(body, name)


def fields_of(body: bytes, model: ModelSpec) -> dict[str, Any]:
    """The members of a body, with the provider's name for the model. Raises: as `with_remote_model`."""
    fields = _fields.decode(body)
    named = fields.get("model")
    _refuse_stream(fields.get("stream"))
    return fields | {"model": remote_name(model, named if isinstance(named, str) else None)}


def _refuse_stream(stream: Any) -> None:
    if stream:
        raise InvalidRow("a row's answer cannot be streamed: leave `stream` out", code="unsupported_parameter")


T = TypeVar("T")

LINE_BYTES_MAX = 64 * 1024 * 1024  # of a results file
ERROR_BYTES_MAX = 64 * 1024  # of an error reply to a download
LINES_MAX = 500  # yielded at a time


class Out(Struct, frozen=True):
    """An outgoing call."""

    method: str
    url: str
    body: bytes | None = None
    headers: Mapping[str, str] = {}
    parts: Sequence[bytes | FileRange] | None = None  # instead of `body`: streamed
    sha256: str | None = None  # of the parts, in hex, if the signature needs it


class ProviderReply(Struct, frozen=True):
    """A reply of status 200 to 299."""

    headers: Mapping[str, str]
    data: bytes

    def json(self) -> dict[str, Any]:
        """The reply's object. Raises: TryAgain if it is not a JSON object: a proxy's page, or a partial reply."""
        try:
            return msgspec.json.decode(shallow(self.data), type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            start = self.data[:100].decode(errors="replace")
            raise TryAgain(f"the provider's reply is not a JSON object: it begins {start!r}") from None

    def read(self, kind: type[T]) -> T:
        """The reply as `kind`. Raises: TryAgain if it has another shape."""
        try:
            return msgspec.convert(self.json(), kind)
        except msgspec.ValidationError as error:
            raise TryAgain(f"the provider's reply has an unexpected shape: {error}") from None


class ProviderRefusal(BatchmillError):
    """The provider refused the call, and would refuse it again."""

    code = "refused_by_provider"
    blame = "caller"

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason  # the provider's error code


class SignedCall(Struct, frozen=True):
    """A signed call, and the secrets that no message may contain."""

    out: Out
    secrets: Sequence[bytes] = ()


Sign = Callable[[Out], Awaitable[SignedCall]]
Classify = Callable[[int, Mapping[str, str], bytes], BatchmillError | None]


class ProviderClient:
    """Makes calls of one provider.

    `sign` adds the credentials. `renew` reads the credentials again and returns whether they have changed; then a
    call that was refused for its credentials is made once more. `classify` handles errors of this provider only.
    """

    def __init__(
        self,
        connections: Connections,
        sign: Sign,
        *,
        renew: Callable[[], bool] | None = None,
        classify: Classify | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._connections = connections
        self._sign = sign
        self._renew = renew
        self._classify = classify
        self._clock: Clock = clock or SystemClock()

    async def call(
        self, method: str, url: str, body: bytes | None = None, *, headers: Mapping[str, str] | None = None
    ) -> ProviderReply:
        """Make a call. Raises: TryAgain, AuthRefused, QuotaExhausted, RouteFailed, ProviderRefusal."""
        return await self.send(Out(method, url, body, headers or {}))

    async def send(self, out: Out) -> ProviderReply:
        """Make a call, again with new credentials if they have changed. Raises: as `call`."""
        try:
            return await self._send(out)
        except AuthRefused:
            if self._renew is None or not self._renew():
                raise
        return await self._send(out)

    async def _send(self, out: Out) -> ProviderReply:
        signed = await self._sign(out)
        out = signed.out
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
            raise self._error(response.status, response.headers, _without(data, signed.secrets))
        return ProviderReply(response.headers, data)

    async def lines(self, url: str, *, headers: Mapping[str, str] | None = None) -> AsyncIterator[list[bytes]]:
        """Stream the lines of a file at the provider, some hundreds at a time. Raises: as `call`."""
        rest = b""
        async for piece in self.pieces(url, headers=headers):
            lines = (rest + piece).split(b"\n") if b"\n" in piece else [rest + piece]
            rest = lines.pop()
            if len(rest) > LINE_BYTES_MAX:
                raise RouteFailed(f"a line of the results is longer than {LINE_BYTES_MAX // 2**20} MiB")
            for first in range(0, len(lines), LINES_MAX):
                if batch := [line for line in lines[first : first + LINES_MAX] if line.strip()]:
                    yield batch
        if rest.strip():
            yield [rest]

    async def pieces(self, url: str, *, headers: Mapping[str, str] | None = None) -> AsyncIterator[bytes]:
        """Stream a file at the provider in pieces of any length. Raises: as `call`."""
        signed = await self._sign(Out("GET", url, None, headers or {}))
        try:
            response = await self._connections.begin("GET", signed.out.url, None, signed.out.headers)
            try:
                if response.status != 200:
                    data = b""
                    while len(data) < ERROR_BYTES_MAX and (piece := await self._connections.read(response)):
                        data += piece
                    raise self._error(response.status, response.headers, _without(data, signed.secrets))
                if response.headers.get("content-type", "").startswith("text/html"):
                    raise TryAgain("an HTML page arrived instead of a file, perhaps from a proxy")
                while piece := await self._connections.read(response):
                    yield piece
            finally:
                response.close()
        except NoReply as failed:
            raise fault_error(failed.fault) from None

    def _error(self, status: int, headers: Mapping[str, str], data: bytes) -> BatchmillError:
        own = None if self._classify is None else self._classify(status, headers, data)
        if own is not None:
            return own
        reply = read_reply(status, data)
        fault = judge(reply, headers, self._clock.now())
        if fault.kind is FaultKind.PERMANENT:
            return ProviderRefusal(status, fault.error.code, fault.error.message)
        return fault_error(fault)


def fault_error(fault: Fault) -> BatchmillError:
    """The error that a failed call means for the engine."""
    message = fault.error.message
    match fault.kind:
        case FaultKind.AUTH:
            return AuthRefused(message)
        case FaultKind.QUOTA:
            return QuotaExhausted(message)
        case FaultKind.PERMANENT:
            return RouteFailed(message)
        case kind:
            return TryAgain(
                message,
                retry_after_s=fault.retry_after_s,
                is_unseen=kind in (FaultKind.THROTTLED, FaultKind.UNREACHABLE),
            )


def row_error(code: str, message: str) -> RowError:
    """A row's error in the provider's words, without secrets."""
    return RowError(code[:100], redact(message))


def _without(data: bytes, secrets: Sequence[bytes]) -> bytes:
    for secret in secrets:
        data = data.replace(secret, MASK_BYTES)
    return data


def _place(url: str) -> str:
    return url.partition("?")[0]
