"""HTTP replies with the results of functions: whole or as server-sent events, compressed if the client accepts it.

It knows no dialect's envelope.
"""

from __future__ import annotations

import asyncio
import io
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct
from starlette.responses import Response

from batchmill.errors import BatchmillError, TooLarge
from batchmill.server.bodies import SHOWN_CHARS, InvalidField, parse_json
from batchmill.server.fast_path import Cancel, Headers, Reply
from batchmill.server.operations import BODY_BYTES_MAX, Call
from batchmill.server.replies import EVENTS, PieceReply, run_until_disconnect
from batchmill.wire.messages import FunctionReply

if TYPE_CHECKING:
    from batchmill.services.functions.calls import FunctionCalls, VersionTarget
    from batchmill.types import Caller


WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
OFFERED = ("gzip", "deflate")
LEVEL = 1  # fast: tensors compress little, and the client waits
MEMBERS_MAX = 1000  # of a gzip body: an empty member costs a client only 20 bytes
PIECE_BYTES = 64 * 1024  # input per step: the rest of a piece after a member's end is copied for the next member
STEP_BYTES = 1024 * 1024  # of decompressed output between two updates of the memory count
INLINE_BYTES_MAX = 32 * 1024  # a larger body is compressed or decompressed in a thread


async def unpacked(body: bytes, encoding: str | None, bytes_max: int, hold: Callable[[int], None]) -> bytes:
    """Decompress a body.

    Args: hold: is called with the size so far before each further step.

    Raises: InvalidInput for an unknown encoding or a body that does not match it; TooLarge; what `hold` raises.
    """
    name = (encoding or "").strip().lower()
    if name in ("", "identity"):
        return body
    if name not in WINDOWS:
        raise InvalidField(
            f"the Content-Encoding {name[:SHOWN_CHARS]!r} is not supported: use gzip, deflate or none",
            code="unsupported_media_type",
        )
    output = io.BytesIO()
    steps = _inflate(body, name, bytes_max, output)
    size = next(steps, None) if len(body) <= INLINE_BYTES_MAX else 0
    while size is not None:
        hold(size + STEP_BYTES)
        size = await asyncio.to_thread(next, steps, None)
    return output.getvalue()


def _inflate(body: bytes, name: str, bytes_max: int, output: io.BytesIO) -> Iterator[int]:
    """Write the decompressed body to `whole`; yields its size after about every STEP_BYTES. gzip may have several
    members, one after the other.
    """
    view, reader, members, size = memoryview(body), None, 0, 0
    try:
        for at in range(0, len(view), PIECE_BYTES):
            rest: bytes | memoryview = view[at : at + PIECE_BYTES]
            while rest:
                if reader is None:
                    reader, members = zlib.decompressobj(WINDOWS[name]), members + 1
                room = min(bytes_max + 1 - output.tell(), STEP_BYTES)
                output.write(reader.decompress(rest, room))
                if output.tell() > bytes_max:
                    raise TooLarge(f"the body is longer than {bytes_max:,} bytes", code="request_too_large")
                if members > MEMBERS_MAX:
                    raise TooLarge(f"the {name} body has more than {MEMBERS_MAX:,} members", code="request_too_large")
                rest, reader = (reader.unused_data, None) if reader.eof else (reader.unconsumed_tail, reader)
                if output.tell() >= size + STEP_BYTES:
                    size = output.tell()
                    yield size
    except zlib.error as error:
        raise InvalidField(
            f"the body is not {name}, as its Content-Encoding says: {error}", code="invalid_encoding"
        ) from None
    if reader is not None:
        raise InvalidField(f"the {name} body ends in the middle", code="invalid_encoding")


async def packed(response: Response, accepted: str | None) -> Response:
    """Compress the reply in an encoding that the client accepts; without one the reply is unchanged."""
    name = _choose_encoding(accepted)
    if name is None or not response.body:
        return response
    body = bytes(response.body)
    deflated = await asyncio.to_thread(_deflate, body, name) if len(body) > INLINE_BYTES_MAX else _deflate(body, name)
    response.body = deflated
    response.headers["content-length"] = str(len(deflated))
    response.headers["content-encoding"] = name
    response.headers["vary"] = "accept-encoding"
    return response


def _deflate(body: bytes, name: str) -> bytes:
    writer = zlib.compressobj(LEVEL, zlib.DEFLATED, WINDOWS[name])
    return writer.compress(body) + writer.flush()


def _choose_encoding(accepted: str | None) -> str | None:
    """Return the first supported encoding that the client accepts; `q=0` means that it does not."""
    is_accepted = {}
    for part in (accepted or "").lower().split(","):
        name, _, weight = part.partition(";")
        is_accepted[name.strip()] = weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return next((name for name in OFFERED if is_accepted.get(name)), None)


def may_accept_encoding(accepted: bytes) -> bool:
    """Whether the client may accept a supported encoding. A quick check: the fast path does not compress."""
    return any(name.encode() in accepted.lower() for name in OFFERED)


CLIENT_LEFT = 499  # only the log shows it
JSON, OCTETS = "application/json", "application/octet-stream"
LENGTH = "inference-header-content-length"
_LENGTH = LENGTH.encode()

S = TypeVar("S", bound=Struct)
Pieces = AsyncGenerator[bytes]
Say = Callable[[BatchmillError], bytes]  # renders an error as JSON, in the envelope of a dialect


async def body_of(call: Call, bytes_max: int) -> bytes:
    """Read the body of a raw operation, decompressed."""
    encoding = call.request.headers.get("content-encoding")
    return await unpacked(await call.request.body(), encoding, bytes_max, call.hold)


def head_of(call: Call) -> bytes:
    """Return the header with the length of a body's JSON; empty if the whole body is JSON.

    Raises: InvalidInput for an empty header.
    """
    length = call.request.headers.get(LENGTH)
    if length is None:
        return b""
    head = length.strip().encode("latin-1")
    if not head:
        raise InvalidField(
            "the header Inference-Header-Content-Length is empty: it must be a number", code="invalid_header"
        )
    return head


async def json_of(call: Call, struct_type: type[S]) -> S:
    """Decode the body of a raw operation as a struct; an empty body gives the defaults. Raises: InvalidInput."""
    if isinstance(call.body, struct_type):  # a call that came over gRPC
        return call.body
    raw = await body_of(call, BODY_BYTES_MAX)
    return parse_json(raw, struct_type) if raw.strip() else struct_type()


async def answer(
    call: Call, functions: FunctionCalls, target: VersionTarget, form: str, sent: tuple[bytes, bytes]
) -> Response:
    """Call a function with a body and its head, and reply in the body's form. The call ends if the client disconnects.

    Raises: what `FunctionCalls.call` raises.
    """
    body, head = sent
    reply = await run_until_disconnect(call, functions.call(call.caller, target, form, body, head=head))
    return Response(status_code=CLIENT_LEFT) if reply is None else reply_of(reply)


def reply_of(reply: FunctionReply) -> Response:
    """Make the HTTP reply. A body with a head is JSON followed by binary tensors."""
    if reply.head:
        return Response(reply.body, headers={LENGTH: reply.head.decode()}, media_type=OCTETS)
    return Response(reply.body, media_type=JSON)


async def as_accepted(call: Call, response: Response) -> Response:
    """Compress the reply if the client accepts it."""
    return await packed(response, call.request.headers.get("accept-encoding"))


class Events(PieceReply):
    """Server-sent events. An error after the first event is sent as an event, since the status is already sent."""

    def __init__(self, pieces: AsyncGenerator[bytes], say: Say) -> None:
        self._say = say
        super().__init__(pieces, media=EVENTS)

    def render_late_error(self, error: BatchmillError) -> bytes:
        return b"data: " + self._say(error) + b"\n\n"


async def stream(
    call: Call, functions: FunctionCalls, target: VersionTarget, form: str, sent: tuple[bytes, bytes], *,
    say: Say, encode_pieces: Callable[[Pieces], Pieces] = lambda pieces: pieces,
) -> Response:  # fmt: skip
    """Call a function and reply with its events; `encode_pieces` converts them for the client. Raises as `answer`."""
    body, head = sent
    opened = await run_until_disconnect(call, functions.stream(call.caller, target, form, body, head))
    return Response(status_code=CLIENT_LEFT) if opened is None else Events(encode_pieces(opened[1]), say)


class FastCalls:
    """The fast path of calls without streaming. See `server.fast_path.FastHandler`."""

    def __init__(self, functions: FunctionCalls, form: str, *, packs: bool = False) -> None:
        self._functions, self._form, self._compresses = functions, form, packs

    def begin(self, path: dict[str, str], headers: Headers, body: bytes, caller: Caller, reply: Reply) -> Cancel | None:
        """See `FastHandler.begin`. A wrong request goes to the normal handler, which refuses it."""
        head = b""
        for name, value in headers:
            if name == b"content-encoding" or (
                self._compresses and name == b"accept-encoding" and may_accept_encoding(value)
            ):
                return None
            if name == _LENGTH:
                head = value.strip()
                if not head:
                    return None
        try:
            target = self._functions.locate(caller, path["model"], path.get("version"))
        except BatchmillError:
            return None
        if target.interface.streams:
            return None

        def on_reply(result: FunctionReply) -> None:
            if result.raised is not None:
                reply.refuse(result.raised.error())
            elif result.head:
                reply(200, [(b"content-type", OCTETS.encode()), (_LENGTH, result.head)], result.body)
            else:
                reply(200, [(b"content-type", JSON.encode())], result.body)

        return self._functions.call_nowait(caller, target, self._form, body, head, on_reply)
