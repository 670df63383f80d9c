"""What every gRPC call passes: its key, its rate, its place, its line in the log; errors become statuses.

gRPC tells the length of a message only once it has all of it. So one call of a project reads at a time, which takes no
time for a message that has come; one that takes longer either gets room for the largest message there may be, and lets
the others read beside it, or keeps its turn until it ends.
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
from batchmill.ports import Clock
from batchmill.server.access_log import Served
from batchmill.server.admission_control import Admission, Hold, RequestSlot
from batchmill.server.auth import ANYBODY, Gate
from batchmill.services.trace_context import request_id
from batchmill.types import Caller, Scope
from batchmill.wire.error_statuses import row_of, status_of

QUICK_S = 0.05  # a message that has come by then was small, or was there
ROOM_S, LOOK_S = 30.0, 0.02  # how long a stream waits for memory, and how often it looks


class Receiver:
    def __init__(self, admission: Admission, bytes_max: int) -> None:
        """Args: bytes_max: of one message."""
        self._memory, self._total_s, self._bytes_max = admission.memory, admission.pace.total_s, bytes_max
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def one(self, context: Context, project: str, hold: Hold) -> bytes:
        """The message of a call, counted in `hold`. Raises: Unavailable; InvalidInput where none comes in time."""
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
                        f"the message did not come within {self._total_s:.0f} s: see server.body_timeout_s",
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

    async def of_stream(self, context: Context, project: str, size: int, hold: Hold) -> bytes | None:
        """The next message of a stream that holds `size` bytes of others; None: there are no more.

        Raises: Unavailable, where there is no room for it, nor comes any.
        """
        data = await context.read()
        if data is EOF:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROOM_S):
                while not self._memory.has_room(project, len(data)):
                    await asyncio.sleep(LOOK_S)
        hold.grow_to(size + len(data))
        return data


DETAILS_BYTES_MAX = 4096  # a status travels in a header, of which clients take 8 KiB
# By HTTP status, where a code has no row of its own.
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
# What logs and metrics call it, where every other request has an HTTP status. Source: google.rpc.Code.
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
    """By its code, or else by the HTTP status that it has everywhere."""
    return row_of(error, BY_CODE) or BY_HTTP_STATUS[status_of(error)]


def details_of(message: str) -> str:
    """The message, without its middle where it is too long: a traceback's last line says most."""
    message = message.encode("utf-8", "replace").decode()  # what is half a character would end the call itself
    if _travelling(message) <= DETAILS_BYTES_MAX:
        return message
    half = DETAILS_BYTES_MAX // 2 - 16
    first, last = _fitting(message, half), _fitting(message[::-1], half)[::-1]
    return f"{first}\n[…]\n{last}"


def _travelling(text: str) -> int:
    """The bytes of a text in a header: whatever is not printable ASCII takes three for each of its own."""
    return sum(_cost(char) for char in text)


def _cost(char: str) -> int:
    return 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode())


def _fitting(text: str, bytes_max: int) -> str:
    used = 0
    for at, char in enumerate(text):
        used += _cost(char)
        if used > bytes_max:
            return text[:at]
    return text


log = logging.getLogger("batchmill.server")

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
ID = "x-request-id"

Context = Any  # a grpc.aio.ServicerContext
Action = Callable[[Caller, Any], Awaitable[Message | bytes]]
Write = Callable[[bytes], Awaitable[None]]
Messages = AsyncIterator[tuple[Any, Callable[[], None]]]  # each with what is called once it is answered
StreamAction = Callable[[Caller, Messages, Write], Awaitable[None]]


class Admitted(Struct, frozen=True):
    """A call that was let in."""

    caller: Caller
    place: RequestSlot

    @property
    def hold(self) -> Hold:
        return self.place.hold


class CallGate:
    """Makes handlers for grpc of what the service does. `watchers` hear of every call that has ended, as of requests
    over HTTP; `hide` takes out of a message what is nobody's business.
    """

    def __init__(
        self,
        gate: Gate,
        clock: Clock,
        *,
        hide: Callable[[str], str],
        watchers: Sequence[Callable[[Served], None]],
        admission: Admission,
        bytes_max: int,
    ) -> None:
        """Args: bytes_max: of one message."""
        self._gate, self._clock, self._hide, self._watchers = gate, clock, hide, watchers
        self._admission, self._receiver = admission, Receiver(admission, bytes_max)
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self) -> None:
        """Returns when no call is under way."""
        await self._idle.wait()

    def unary(self, method: Method, scope: Scope | None, action: Action) -> grpc.RpcMethodHandler:
        """One message in, one out. `scope` None: anybody may ask, it counts for nobody, and what is sent is not read.

        To grpc it is a stream, whose messages it hands out only when they are asked for: after the key was judged.
        """

        async def answer(_: AsyncIterator[bytes], context: Context) -> None:
            served = self._begin(method, context)
            async with self._watched(served, context) as entered:
                place = await self._admit(served, context, scope)
                entered.append(place)
                data = b""
                if scope is not None:
                    self.spend(place.caller)
                    data = await self._receiver.one(context, place.caller.project, place.hold)
                    served.bytes_in = len(data)
                reply = await action(place.caller, parse(method, data))
                written = reply if isinstance(reply, bytes) else reply.SerializeToString()
                await _write(context, written)
                served.bytes_out = len(written)

        return grpc.stream_stream_rpc_method_handler(answer)

    def stream(self, method: Method, scope: Scope, action: StreamAction) -> grpc.RpcMethodHandler:
        """Messages in and out until the client ends its side. `action` calls `spend` for each that counts, and the
        callable that comes with a message once that is answered."""

        async def answer(_: AsyncIterator[bytes], context: Context) -> None:
            served = self._begin(method, context)
            async with self._watched(served, context) as entered:
                place = await self._admit(served, context, scope)
                entered.append(place)

                async def write(data: bytes) -> None:
                    await _write(context, data)
                    served.bytes_out += len(data)

                await action(place.caller, self._messages(method, served, context, place), write)

        return grpc.stream_stream_rpc_method_handler(answer)

    async def _messages(
        self, method: Method, served: Served, context: Context, place: Admitted
    ) -> AsyncIterator[tuple[Any, Callable[[], None]]]:
        held = 0

        def done(size: int) -> None:
            nonlocal held
            held -= size
            place.hold.shrink_to(held)

        while True:
            data = await self._receiver.of_stream(context, place.caller.project, held, place.hold)
            if data is None:
                return
            held += len(data)
            served.bytes_in += len(data)
            yield parse(method, data), partial(done, len(data))
            del data

    def spend(self, caller: Caller) -> None:
        """Count a request of a stream. Raises: RateLimited."""
        self._gate.spend(caller)

    def message_of(self, error: BatchmillError) -> str:
        """What whoever asked is told of an error."""
        return self._hide(error.message)

    def _begin(self, method: Method, context: Context) -> Served:
        sent_id = next((value for name, value in context.invocation_metadata() or () if name == ID), "")
        is_good = isinstance(sent_id, str) and REQUEST_ID.fullmatch(sent_id)
        served = Served(sent_id if is_good else f"req_{secrets.token_hex(12)}", "GRPC", started=self._clock.monotonic())
        request_id.set(served.id)
        served.route = f"/{SERVICE}/{method.name}"
        context.set_trailing_metadata(((ID, served.id),))
        return served

    async def _admit(self, served: Served, context: Context, scope: Scope | None) -> Admitted:
        """Who calls, with a place among the calls under way."""
        if scope is None:
            served.project = ANYBODY.project
            return Admitted(ANYBODY, self._admission.vital_place())
        caller = await self._gate.admit(_headers(context), address_of(context.peer()), scope)
        served.project, served.key = caller.project, caller.key
        return Admitted(caller, self._admission.place(caller.project))

    @contextlib.asynccontextmanager
    async def _watched(self, served: Served, context: Context) -> AsyncIterator[list[Admitted]]:
        """What the call enters is left at its end."""
        self._under_way += 1
        self._idle.clear()
        status, failure = StatusCode.OK, None
        entered: list[Admitted] = []
        try:
            yield entered
        except asyncio.CancelledError:  # the client left, its deadline passed, or the server stops
            left_s = context.time_remaining()
            status = StatusCode.CANCELLED if left_s is None or left_s > 0 else StatusCode.DEADLINE_EXCEEDED
            raise
        except BatchmillError as error:
            failure, status = error, grpc_status_of(error)
        except Exception as error:  # the edge: whoever asked is told that it is not their fault, and no more
            log.error("request %s failed", served.id, exc_info=error)
            failure = BatchmillError(f"the server failed to answer; its log has more under request {served.id}")
            status = StatusCode.INTERNAL
        finally:
            for each in entered:
                each.place.leave()
            self._under_way -= 1
            served.seconds = self._clock.monotonic() - served.started
            served.status, served.code = HTTP_STATUS[status], failure.code if failure is not None else None
            for watcher in self._watchers:
                watcher(served)
            if not self._under_way:
                self._idle.set()
        if failure is not None:
            await self._refuse(served, context, status, failure)

    async def _refuse(self, served: Served, context: Context, status: StatusCode, error: BatchmillError) -> None:
        if served.status >= 500:
            detail = error.message if error.blame == "system" else "see the reply"  # a model's words may hold a row's
            log.warning("request %s: %s: %s", served.id, error.code, detail)
        metadata = [(ID, served.id), ("batchmill-code", error.code)]
        if isinstance(error, RateLimited):
            metadata.append(("grpc-retry-pushback-ms", str(max(1, round(error.retry_after_s * 1000)))))
        await context.abort(status, details_of(self.message_of(error)), tuple(metadata))


async def _write(context: Context, data: bytes) -> None:
    try:
        await context.write(data)
    except grpc.aio.InternalError:  # all that it says where the client has left
        raise asyncio.CancelledError from None


def parse(method: Method, data: bytes) -> Any:
    """A request. Raises: InvalidInput."""
    try:
        return method.request.FromString(data)
    except DecodeError:
        raise InvalidInput(f"the message is no {method.request.DESCRIPTOR.name}") from None


def address_of(peer: str) -> str:
    """Where a call comes from, without its port: "ipv4:10.0.0.1:5000", "ipv6:%5B::1%5D:5000"."""
    kind, _, rest = peer.partition(":")
    return unquote(rest).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else peer


def _headers(context: Context) -> list[tuple[bytes, bytes]]:
    found = context.invocation_metadata() or ()
    return [(name.encode(), value.encode("latin-1")) for name, value in found if isinstance(value, str)]
