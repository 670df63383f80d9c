"""Compressed bodies: read within limits, written as a client accepts them."""

import gzip
import random
import zlib

import pytest
from starlette.responses import Response

from batchmill.errors import InvalidInput, TooLarge, Unavailable
from batchmill.server import function_replies
from batchmill.server.function_replies import INLINE_BYTES_MAX, MEMBERS_MAX, PIECE_BYTES, STEP_BYTES, packed

SMALL, LARGE = b'{"inputs":[]}', random.Random(7).randbytes(4 * INLINE_BYTES_MAX)
MAX = 1024 * 1024
MANY = 4 * STEP_BYTES
READ = {"gzip": gzip.decompress, "deflate": zlib.decompress}


async def unpacked(body: bytes, name: str | None, most: int) -> bytes:
    return await function_replies.unpacked(body, name, most, lambda _: None)


async def test_a_body_is_counted_while_it_grows():
    """What little bytes become is counted before they have become it, and no further than there is room."""
    held = []

    def hold(size: int) -> None:
        held.append(size)
        if size > 2 * STEP_BYTES:
            raise Unavailable("no room")

    with pytest.raises(Unavailable):
        await function_replies.unpacked(gzip.compress(bytes(MANY)), "gzip", MANY, hold)
    assert len(held) == 2


@pytest.mark.parametrize("body", [SMALL, LARGE, b""], ids=["small", "large", "empty"])
@pytest.mark.parametrize(
    ("name", "write"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP ", gzip.compress)]
)
async def test_a_compressed_body_is_read(body, name, write):
    """What was compressed comes back as it was, however large."""
    assert await unpacked(write(body), name, MAX) == body


@pytest.mark.parametrize("name", [None, "", "identity", " Identity"])
async def test_a_plain_body_is_left_alone(name):
    """Without an encoding nothing is read as one."""
    assert await unpacked(SMALL, name, MAX) is SMALL


async def test_members_of_gzip_follow_each_other():
    """A gzip body may be several, one behind the other."""
    assert await unpacked(gzip.compress(b"a", mtime=0) + gzip.compress(b"b", mtime=0), "gzip", MAX) == b"ab"


async def test_a_body_of_countless_members_is_refused():
    """Members that hold nothing cost a client next to nothing, and the server no more than so many."""
    assert await unpacked(gzip.compress(b"", mtime=0) * MEMBERS_MAX, "gzip", MAX) == b""
    with pytest.raises(TooLarge, match="more than 1,000 members"):
        await unpacked(gzip.compress(b"", mtime=0) * (MEMBERS_MAX + 1), "gzip", MAX)


async def test_a_member_may_end_anywhere_in_a_long_body():
    """Where the pieces that a body is read in end makes no difference."""
    parts = [random.Random(n).randbytes(n * PIECE_BYTES // 3 + n) for n in range(6)]
    assert await unpacked(b"".join(gzip.compress(each, mtime=0) for each in parts), "gzip", MAX) == b"".join(parts)


@pytest.mark.parametrize("size", [MAX, MAX + 1])
async def test_a_body_grows_no_further_than_its_limit(size):
    """What would become larger than a body may be is refused before it is; exactly as large is taken."""
    body = gzip.compress(bytes(size))
    if size == MAX:
        assert len(await unpacked(body, "gzip", MAX)) == MAX
        return
    with pytest.raises(TooLarge, match="longer than 1,048,576 bytes"):
        await unpacked(body, "gzip", MAX)


@pytest.mark.parametrize(
    ("body", "name", "code"),
    [
        (SMALL, "gzip", "invalid_encoding"),
        (SMALL, "deflate", "invalid_encoding"),
        (gzip.compress(SMALL, mtime=0)[:-5], "gzip", "invalid_encoding"),
        (gzip.compress(SMALL, mtime=0) + b"x", "gzip", "invalid_encoding"),
        (SMALL, "br", "unsupported_media_type"),
        (SMALL, "gzip, gzip", "unsupported_media_type"),
    ],
)
async def test_what_cannot_be_read_is_refused(body, name, code):
    """A body that is not what it says, is cut short, or is in an encoding of others, is the caller's error."""
    with pytest.raises(InvalidInput) as refused:
        await unpacked(body, name, MAX)
    assert refused.value.code == code


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        ("gzip", "gzip"), ("deflate", "deflate"), ("gzip, deflate, br", "gzip"), ("gzip;q=0, deflate", "deflate"),
        ("GZIP", "gzip"),
    ],
)  # fmt: skip
async def test_a_reply_is_written_as_its_client_accepts_it(body, accepted, chosen):
    """The first encoding of ours that is accepted is used, and the headers say so."""
    reply = await packed(Response(body), accepted)
    assert reply.headers["content-encoding"] == chosen
    assert int(reply.headers["content-length"]) == len(reply.body)
    assert READ[chosen](reply.body) == body


@pytest.mark.parametrize("accepted", [None, "", "identity", "br", "gzip;q=0", "gzip; q=0.0"])
async def test_a_reply_stays_as_it_is(accepted):
    """Where nothing of ours is accepted the reply is not touched."""
    reply = await packed(Response(SMALL), accepted)
    assert reply.body == SMALL and "content-encoding" not in reply.headers
