"""Answers of functions as HTTP replies, compressed where that is asked for: whole, or event by event.

Knows no dialect's envelope.
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
from batchmill.server.replies import EVENTS, PieceReply, unless_gone
from batchmill.services.functions.names import locate
from batchmill.wire.messages import FunctionReply

if TYPE_CHECKING:
    from batchmill.services.functions.calls import FunctionCalls, VersionTarget
    from batchmill.types import Caller


WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
OFFERED = ("gzip", "deflate")
LEVEL = 1  # tensors compress little, and somebody waits
MEMBERS_MAX = 1000  # of a gzip body: empty ones cost a client 20 bytes each
PIECE_BYTES = 64 * 1024  # what is behind the end of a member is copied for the next one
STEP_BYTES = 1024 * 1024  # of a body that is being inflated, before it is counted again
INLINE_BYTES_MAX = 32 * 1024  # of a body that is handled on the loop; a larger one goes to a thread


async def unpacked(body: bytes, encoding: str | None, bytes_max: int, hold: Callable[[int], None]) -> bytes:
    """The body as it was before it was compressed.

    Args: hold: is told how long it has become, again and again, before it becomes longer.

    Raises: Refusal for an encoding we do not read or a body that is none of its kind; TooLarge; what `hold` raises.
    """
    name = (encoding or "").strip().lower()
    if name in ("", "identity"):
        return body
    if name not in WINDOWS:
        raise InvalidField(
            f"the Content-Encoding {name[:SHOWN_CHARS]!r} is not read: gzip, deflate or none",
            code="unsupported_media_type",
        )
    whole = io.BytesIO()
    steps = _inflate(body, name, bytes_max, whole)
    size = next(steps, None) if len(body) <= INLINE_BYTES_MAX else 0
    while size is not None:
        hold(size + STEP_BYTES)
        size = await asyncio.to_thread(next, steps, None)
    return whole.getvalue()


def _inflate(body: bytes, name: str, bytes_max: int, whole: io.BytesIO) -> Iterator[int]:
    """Fill `whole`; yields how long it is whenever it is about STEP_BYTES longer. gzip may be several members, one
    behind the other."""
    view, reader, members, size = memoryview(body), None, 0, 0
    try:
        for at in range(0, len(view), PIECE_BYTES):
            rest: bytes | memoryview = view[at : at + PIECE_BYTES]
            while rest:
                if reader is None:
                    reader, members = zlib.decompressobj(WINDOWS[name]), members + 1
                room = min(bytes_max + 1 - whole.tell(), STEP_BYTES)
                whole.write(reader.decompress(rest, room))
                if whole.tell() > bytes_max:
                    raise TooLarge(f"the body is longer than {bytes_max:,} bytes", code="request_too_large")
                if members > MEMBERS_MAX:
                    raise TooLarge(f"the {name} body has more than {MEMBERS_MAX:,} members", code="request_too_large")
                rest, reader = (reader.unused_data, None) if reader.eof else (reader.unconsumed_tail, reader)
                if whole.tell() >= size + STEP_BYTES:
                    size = whole.tell()
                    yield size
    except zlib.error as error:
        raise InvalidField(
            f"the body is not {name}, as its Content-Encoding says: {error}", code="invalid_encoding"
        ) from None
    if reader is not None:
        raise InvalidField(f"the {name} body ends in the middle", code="invalid_encoding")


async def packed(response: Response, accepted: str | None) -> Response:
    """The reply in an encoding that its client accepts, or as it is where there is none."""
    name = _chosen(accepted)
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


def _chosen(accepted: str | None) -> str | None:
    """The first of ours that is accepted; one with `q=0` is not."""
    wanted = {}
    for part in (accepted or "").lower().split(","):
        name, _, weight = part.partition(";")
        wanted[name.strip()] = weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return next((name for name in OFFERED if wanted.get(name)), None)


def is_wanted(accepted: bytes) -> bool:
    """Some encoding of ours may be accepted: enough to leave the shorter way."""
    return any(name.encode() in accepted.lower() for name in OFFERED)


CLIENT_LEFT = 499  # nobody sees it but the log
JSON, OCTETS = "application/json", "application/octet-stream"
LENGTH = "inference-header-content-length"
_LENGTH = LENGTH.encode()

S = TypeVar("S", bound=Struct)
Pieces = AsyncGenerator[bytes]
Say = Callable[[BatchmillError], bytes]  # the JSON of an error, in the envelope of a dialect


async def body_of(call: Call, bytes_max: int) -> bytes:
    """The body of a raw operation, as it was before it was compressed."""
    encoding = call.request.headers.get("content-encoding")
    return await unpacked(await call.request.body(), encoding, bytes_max, call.hold)


def head_of(call: Call) -> bytes:
    """What the header says of where the JSON of a body ends; empty where all of it is JSON.

    Raises: Refusal for a header without anything in it.
    """
    length = call.request.headers.get(LENGTH)
    if length is None:
        return b""
    head = length.strip().encode("latin-1")
    if not head:
        raise InvalidField("the header Inference-Header-Content-Length holds no number", code="invalid_header")
    return head


async def json_of(call: Call, wanted: type[S]) -> S:
    """The body of a raw operation as its struct, which nothing fills where there is none. Raises: InvalidInput."""
    if isinstance(call.body, wanted):  # of a call that did not come over HTTP
        return call.body
    raw = await body_of(call, BODY_BYTES_MAX)
    return parse_json(raw, wanted) if raw.strip() else wanted()


async def answer(
    call: Call, functions: FunctionCalls, target: VersionTarget, form: str, sent: tuple[bytes, bytes]
) -> Response:
    """What a function answers to a body and its head, in the body's form; ended early where the client leaves.

    Raises: what `FunctionCalls.ask` raises.
    """
    body, head = sent
    answered = await unless_gone(call, functions.ask(call.caller, target, form, body, head=head))
    return Response(status_code=CLIENT_LEFT) if answered is None else reply_of(answered)


def reply_of(answered: FunctionReply) -> Response:
    """A body with a head is tensors in binary behind their JSON."""
    if answered.head:
        return Response(answered.body, headers={LENGTH: answered.head.decode()}, media_type=OCTETS)
    return Response(answered.body, media_type=JSON)


async def as_accepted(call: Call, response: Response) -> Response:
    """The reply in an encoding that its client asks for."""
    return await packed(response, call.request.headers.get("accept-encoding"))


class Events(PieceReply):
    """Server-sent events. An error after the first is one of them: its status can no longer be sent."""

    def __init__(self, pieces: AsyncGenerator[bytes], say: Say) -> None:
        self._say = say
        super().__init__(pieces, media=EVENTS)

    def late(self, error: BatchmillError) -> bytes:
        return b"data: " + self._say(error) + b"\n\n"


async def stream(
    call: Call, functions: FunctionCalls, target: VersionTarget, form: str, sent: tuple[bytes, bytes], *,
    say: Say, encode_pieces: Callable[[Pieces], Pieces] = lambda pieces: pieces,
) -> Response:  # fmt: skip
    """What a function answers event by event; `told` makes of its events what a client gets. Raises as `answer`."""
    body, head = sent
    begun = await unless_gone(call, functions.stream(call.caller, target, form, body, head))
    return Response(status_code=CLIENT_LEFT) if begun is None else Events(encode_pieces(begun[1]), say)


class FastCalls:
    """The fast path of calls that are answered in one piece. See `server.fast_path.FastHandler`."""

    def __init__(self, functions: FunctionCalls, form: str, *, packs: bool = False) -> None:
        self._functions, self._form, self._packs = functions, form, packs

    def begin(self, path: dict[str, str], headers: Headers, body: bytes, caller: Caller, reply: Reply) -> Cancel | None:
        """As `FastHandler.begin`: whatever is wrong with a request is told by its handler."""
        head = b""
        for name, value in headers:
            if name == b"content-encoding" or (self._packs and name == b"accept-encoding" and is_wanted(value)):
                return None
            if name == _LENGTH:
                head = value.strip()
                if not head:
                    return None
        try:
            target = locate(self._functions, caller, path["model"], path.get("version"))
        except BatchmillError:
            return None
        if target.interface.streams:
            return None

        def on_reply(answered: FunctionReply) -> None:
            if answered.raised is not None:
                reply.refuse(answered.raised.error())
            elif answered.head:
                reply(200, [(b"content-type", OCTETS.encode()), (_LENGTH, answered.head)], answered.body)
            else:
                reply(200, [(b"content-type", JSON.encode())], answered.body)

        return self._functions.ask_now(caller, target, self._form, body, head, on_reply)
