"""The common part of all gRPC calls: key, rate limit, request slot, access log, and errors as gRPC statuses.

gRPC reports the length of a message only when it has arrived. So the calls of a project read one at a time, which is
instant for a message that is already there. A slower call reserves memory for the largest allowed message and lets
others read beside it; without free memory it keeps its turn until its message has arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote
from weakref import WeakValueDictionary

import grpc
from grpc import StatusCode
from grpc.aio import EOF
from msgspec import Struct

from batchmill.dialects.open_inference.grpc.bodies import SERVICE, DecodeError, Message, Method
from batchmill.errors import BatchmillError, InvalidInput, RateLimited, Unavailable
from batchmill.ports.clock import Clock
from batchmill.server.access_log import RequestRecord
from batchmill.server.admission_control import Admission, Hold, RequestSlot
from batchmill.server.auth import ANYBODY, Gate
from batchmill.services.trace_context import request_id
from batchmill.types import Caller, Scope
from batchmill.wire.error_statuses import row_of, status_of

QUICK_S = 0.05  # a message that arrives within this time is small or was already there
MEMORY_WAIT_S, POLL_S = 30.0, 0.02  # how long a stream waits for memory, and how often it polls


class Receiver:
    """Reads the messages of calls and counts their memory."""

    def __init__(self, admission: Admission, bytes_max: int) -> None:
        """Args: bytes_max: the limit of one message."""
        self._memory, self._total_s, self._bytes_max = admission.memory, admission.pace.total_s, bytes_max
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def receive(self, context: Context, project: str, hold: Hold) -> bytes:
        """Read the message of a call and count it in `hold`. Raises: Unavailable; InvalidInput after a timeout."""
        turn = self._turns.get(project) or asyncio.Lock()
        self._turns[project] = turn
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(turn)
            reading = asyncio.ensure_future(context.read())
            try:
                done, _ = await asyncio.wait({reading}, timeout=QUICK_S)
                if not done:
                    with contextlib.suppress(Unavailable):
                        hold.grow_to(self._bytes_max)
                        await stack.aclose()
                    done, _ = await asyncio.wait({reading}, timeout=self._total_s)
                if not done:
                    raise InvalidInput(
                        f"the message did not arrive within {self._total_s:.0f} s: see server.body_timeout_s",
                        code="request_timeout",
                    )
            finally:
                reading.cancel()
        data = reading.result()
        if data is EOF:
            raise InvalidInput("the call ended without a message", code="missing_body")
        hold.shrink_to(len(data))
        hold.grow_to(len(data))
        return data

    async def receive_next(self, context: Context, project: str, size: int, hold: Hold) -> bytes | None:
        """Read the next message of a stream that already holds `size` bytes; None at the end.

        Raises: Unavailable if there is no memory for it within MEMORY_WAIT_S.
        """
        data = await context.read()
        if data is EOF:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MEMORY_WAIT_S):
                while not self._memory.has_room(project, len(data)):
                    await asyncio.sleep(POLL_S)
        hold.grow_to(size + len(data))
        return data


DETAILS_BYTES_MAX = 4096  # a status is sent in a header, and clients accept 8 KiB of headers
# For error codes without a row in BY_CODE.
BY_HTTP_STATUS = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    405: StatusCode.UNIMPLEMENTED,
    408: StatusCode.INVALID_ARGUMENT,
    409: StatusCode.ALREADY_EXISTS,
    410: StatusCode.NOT_FOUND,
    413: StatusCode.RESOURCE_EXHAUSTED,
    415: StatusCode.INVALID_ARGUMENT,
    429: StatusCode.RESOURCE_EXHAUSTED,
    500: StatusCode.INTERNAL,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}
BY_CODE = {
    "invalid_transition": StatusCode.FAILED_PRECONDITION,
    "storage_full": StatusCode.RESOURCE_EXHAUSTED,
    "streams_only": StatusCode.UNIMPLEMENTED,
}
# The HTTP status in logs and metrics. Source: google.rpc.Code.
HTTP_STATUS = {
    StatusCode.OK: 200,
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.FAILED_PRECONDITION: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.ALREADY_EXISTS: 409,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.CANCELLED: 499,
    StatusCode.INTERNAL: 500,
    StatusCode.UNIMPLEMENTED: 501,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}


def grpc_status_of(error: BatchmillError) -> StatusCode:
    """Return the gRPC status of an error, by its code or its HTTP status."""
    return row_of(error, BY_CODE) or BY_HTTP_STATUS[status_of(error)]


def details_of(message: str) -> str:
    """Shorten a long message in its middle, because the last line of a traceback says the most."""
    message = message.encode("utf-8", "replace").decode()  # a lone surrogate would break the call
    if _header_bytes(message) <= DETAILS_BYTES_MAX:
        return message
    half = DETAILS_BYTES_MAX // 2 - 16
    first, last = _truncate(message, half), _truncate(message[::-1], half)[::-1]
    return f"{first}\n[…]\n{last}"


def _header_bytes(text: str) -> int:
    """Return the size of a text in a header, where each byte that is not printable ASCII takes three."""
    return sum(_char_bytes(char) for char in text)


def _char_bytes(char: str) -> int:
    return 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode())


def _truncate(text: str, bytes_max: int) -> str:
    used = 0
    for at, char in enumerate(text):
        used += _char_bytes(char)
        if used > bytes_max:
            return text[:at]
    return text


log = logging.getLogger("batchmill.server")

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
ID = "x-request-id"

Context = Any  # a grpc.aio.ServicerContext
Action = Callable[[Caller, Any], Awaitable[Message | bytes]]
Write = Callable[[bytes], Awaitable[None]]
Messages = AsyncIterator[tuple[Any, Callable[[], None]]]  # each with a callback for when it is answered
StreamAction = Callable[[Caller, Messages, Write], Awaitable[None]]


class Admitted(Struct, frozen=True):
    """A call with a checked key and a request slot."""

    caller: Caller
    slot: RequestSlot

    @property
    def hold(self) -> Hold:
        return self.slot.hold


class CallGate:
    """Makes grpc's handlers for the actions of the service. It calls `watchers` at the end of every call, as HTTP does
    for requests; `hide` removes the server's paths from a message.
    """

    def __init__(
        self,
        gate: Gate,
        clock: Clock,
        *,
        hide: Callable[[str], str],
        watchers: Sequence[Callable[[RequestRecord], None]],
        admission: Admission,
        bytes_max: int,
    ) -> None:
        """Args: bytes_max: the limit of one message."""
        self._gate, self._clock, self._hide, self._watchers = gate, clock, hide, watchers
        self._admission, self._receiver = admission, Receiver(admission, bytes_max)
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no call is under way."""
        await self._idle.wait()

    def unary(self, method: Method, scope: Scope | None, action: Action) -> grpc.RpcMethodHandler:
        """Make a handler for one request and one reply.

        With `scope` None, anybody may call; the call counts for no project, and its request is not read. grpc sees a
        stream, so that it reads the request only after the key was checked.
        """

        async def answer(_: AsyncIterator[bytes], context: Context) -> None:
            record = self._begin(method, context)
            async with self._recorded(record, context) as admissions:
                admitted = await self._admit(record, context, scope)
                admissions.append(admitted)
                data = b""
                if scope is not None:
                    self.spend(admitted.caller)
                    data = await self._receiver.receive(context, admitted.caller.project, admitted.hold)
                    record.bytes_in = len(data)
                reply = await action(admitted.caller, parse(method, data))
                encoded = reply if isinstance(reply, bytes) else reply.SerializeToString()
                await _write(context, encoded)
                record.bytes_out = len(encoded)

        return grpc.stream_stream_rpc_method_handler(answer)

    def stream(self, method: Method, scope: Scope, action: StreamAction) -> grpc.RpcMethodHandler:
        """Make a handler for a stream of requests and replies, until the client closes its side.

        `action` calls `spend` for each request that counts, and a message's callback when it is answered.
        """

        async def answer(_: AsyncIterator[bytes], context: Context) -> None:
            record = self._begin(method, context)
            async with self._recorded(record, context) as admissions:
                admitted = await self._admit(record, context, scope)
                admissions.append(admitted)

                async def write(data: bytes) -> None:
                    await _write(context, data)
                    record.bytes_out += len(data)

                await action(admitted.caller, self._messages(method, record, context, admitted), write)

        return grpc.stream_stream_rpc_method_handler(answer)

    async def _messages(
        self, method: Method, record: RequestRecord, context: Context, admitted: Admitted
    ) -> AsyncIterator[tuple[Any, Callable[[], None]]]:
        unanswered_bytes = 0

        def done(size: int) -> None:
            nonlocal unanswered_bytes
            unanswered_bytes -= size
            admitted.hold.shrink_to(unanswered_bytes)

        while True:
            data = await self._receiver.receive_next(context, admitted.caller.project, unanswered_bytes, admitted.hold)
            if data is None:
                return
            unanswered_bytes += len(data)
            record.bytes_in += len(data)
            yield parse(method, data), partial(done, len(data))
            del data

    def spend(self, caller: Caller) -> None:
        """Count a request of a stream. Raises: RateLimited; Unavailable: see `Gate.check_owned`."""
        self._gate.check_owned()
        self._gate.spend(caller)

    def message_of(self, error: BatchmillError) -> str:
        """Return an error's message for the client."""
        return self._hide(error.message)

    def _begin(self, method: Method, context: Context) -> RequestRecord:
        sent_id = next((value for name, value in context.invocation_metadata() or () if name == ID), "")
        is_good = isinstance(sent_id, str) and REQUEST_ID.fullmatch(sent_id)
        id = sent_id if is_good else f"req_{secrets.token_hex(12)}"
        record = RequestRecord(id, "GRPC", started=self._clock.monotonic())
        request_id.set(record.id)
        record.route = f"/{SERVICE}/{method.name}"
        context.set_trailing_metadata(((ID, record.id),))
        return record

    async def _admit(self, record: RequestRecord, context: Context, scope: Scope | None) -> Admitted:
        """Check the key and take a request slot."""
        if scope is None:
            record.project = ANYBODY.project
            return Admitted(ANYBODY, self._admission.vital_slot())
        caller = await self._gate.admit(_headers(context), address_of(context.peer()), scope)
        record.project, record.key = caller.project, caller.key
        return Admitted(caller, self._admission.slot(caller.project))

    @contextlib.asynccontextmanager
    async def _recorded(self, record: RequestRecord, context: Context) -> AsyncIterator[list[Admitted]]:
        """Record a call, turn its exception into a status, and release the slots in the yielded list at its end."""
        self._under_way += 1
        self._idle.clear()
        status, failure = StatusCode.OK, None
        admissions: list[Admitted] = []
        try:
            yield admissions
        except asyncio.CancelledError:  # the client left, its deadline passed, or the server stops
            left_s = context.time_remaining()
            status = StatusCode.CANCELLED if left_s is None or left_s > 0 else StatusCode.DEADLINE_EXCEEDED
            raise
        except BatchmillError as error:
            failure, status = error, grpc_status_of(error)
        except Exception as error:  # the server's edge: the client only learns that the server failed
            log.error("request %s failed", record.id, exc_info=error)
            failure = BatchmillError(f"the server failed to answer; see request {record.id} in its log")
            status = StatusCode.INTERNAL
        finally:
            for each in admissions:
                each.slot.leave()
            self._under_way -= 1
            record.seconds = self._clock.monotonic() - record.started
            record.status, record.code = HTTP_STATUS[status], failure.code if failure is not None else None
            for watcher in self._watchers:
                watcher(record)
            if not self._under_way:
                self._idle.set()
        if failure is not None:
            await self._refuse(record, context, status, failure)

    async def _refuse(self, record: RequestRecord, context: Context, status: StatusCode, error: BatchmillError) -> None:
        if record.status >= 500:
            detail = error.message if error.blame == "system" else "see the reply"  # a model's message may quote a row
            log.warning("request %s: %s: %s", record.id, error.code, detail)
        metadata = [(ID, record.id), ("batchmill-code", error.code)]
        if isinstance(error, RateLimited):
            metadata.append(("grpc-retry-pushback-ms", str(max(1, round(error.retry_after_s * 1000)))))
        await context.abort(status, details_of(self.message_of(error)), tuple(metadata))


async def _write(context: Context, data: bytes) -> None:
    try:
        await context.write(data)
    except grpc.aio.InternalError:  # grpc's only sign that the client has left
        raise asyncio.CancelledError from None


def parse(method: Method, data: bytes) -> Any:
    """Parse a request. Raises: InvalidInput."""
    try:
        return method.request.FromString(data)
    except DecodeError:
        raise InvalidInput(f"the message is not a {method.request.DESCRIPTOR.name}") from None


def address_of(peer: str) -> str:
    """Return a client's address without the port, from "ipv4:10.0.0.1:5000" or "ipv6:%5B::1%5D:5000"."""
    kind, _, rest = peer.partition(":")
    return unquote(rest).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else peer


def _headers(context: Context) -> list[tuple[bytes, bytes]]:
    metadata = context.invocation_metadata() or ()
    return [(name.encode(), value.encode("latin-1")) for name, value in metadata if isinstance(value, str)]
