"""Answers of functions as HTTP replies: whole, by the fast path, or event by event. Knows no dialect's envelope."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct
from starlette.responses import Response

from batchmill.errors import BatchmillError
from batchmill.server.bodies import Refusal, parse_json
from batchmill.server.encodings import is_wanted, packed, unpacked
from batchmill.server.fast_path import Cancel, Headers, Reply
from batchmill.server.operations import BODY_BYTES_MAX, Call
from batchmill.server.piece_reply import EVENTS, PieceReply, unless_gone
from batchmill.services.functions.paths import locate
from batchmill.wire.messages import Answer

if TYPE_CHECKING:
    from batchmill.services.functions.calls import FunctionCalls, Target
    from batchmill.types import Caller

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
    told = call.request.headers.get(LENGTH)
    if told is None:
        return b""
    head = told.strip().encode("latin-1")
    if not head:
        raise Refusal("the header Inference-Header-Content-Length holds no number", code="invalid_header")
    return head


async def json_of(call: Call, wanted: type[S]) -> S:
    """The body of a raw operation as its struct, which nothing fills where there is none. Raises: InvalidInput."""
    if isinstance(call.body, wanted):  # of a call that did not come over HTTP
        return call.body
    raw = await body_of(call, BODY_BYTES_MAX)
    return parse_json(raw, wanted) if raw.strip() else wanted()


async def answer(
    call: Call, functions: FunctionCalls, target: Target, form: str, sent: tuple[bytes, bytes]
) -> Response:
    """What a function answers to a body and its head, in the body's form; ended early where the client leaves.

    Raises: what `FunctionCalls.ask` raises.
    """
    body, head = sent
    answered = await unless_gone(call, functions.ask(call.caller, target, form, body, head=head))
    return Response(status_code=CLIENT_LEFT) if answered is None else reply_of(answered)


def reply_of(answered: Answer) -> Response:
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
    call: Call, functions: FunctionCalls, target: Target, form: str, sent: tuple[bytes, bytes], *,
    say: Say, told: Callable[[Pieces], Pieces] = lambda pieces: pieces,
) -> Response:  # fmt: skip
    """What a function answers event by event; `told` makes of its events what a client gets. Raises as `answer`."""
    body, head = sent
    begun = await unless_gone(call, functions.stream(call.caller, target, form, body, head))
    return Response(status_code=CLIENT_LEFT) if begun is None else Events(told(begun[1]), say)


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

        def hear(answered: Answer) -> None:
            if answered.raised is not None:
                reply.refuse(answered.raised.error())
            elif answered.head:
                reply(200, [(b"content-type", OCTETS.encode()), (_LENGTH, answered.head)], answered.body)
            else:
                reply(200, [(b"content-type", JSON.encode())], answered.body)

        return self._functions.ask_now(caller, target, self._form, body, head, hear)
