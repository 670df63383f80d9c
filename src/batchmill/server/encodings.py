"""Bodies that are compressed on their way: gzip, and deflate as HTTP means it (zlib). Nothing grows past its limit.

Source: RFC 9110 sections 8.4 (Content-Encoding) and 12.5.3 (Accept-Encoding).
"""

from __future__ import annotations

import asyncio
import io
import zlib
from collections.abc import Callable, Iterator

from starlette.responses import Response

from batchmill.errors import TooLarge
from batchmill.server.bodies import SHOWN_CHARS, Refusal

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
        raise Refusal(
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
    view, reader, members, told = memoryview(body), None, 0, 0
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
                if whole.tell() >= told + STEP_BYTES:
                    told = whole.tell()
                    yield told
    except zlib.error as error:
        raise Refusal(
            f"the body is not {name}, as its Content-Encoding says: {error}", code="invalid_encoding"
        ) from None
    if reader is not None:
        raise Refusal(f"the {name} body ends in the middle", code="invalid_encoding")


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
