"""An HTTP reply is read the same in whatever pieces it comes, and what is none is refused."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.engines.h1_reply import HEAD_BYTES_MAX, BadReply, Incoming, Received, body_length, inflate, read_head


def read(head: bytes, pieces: list[bytes], body_bytes_max: int = 1000) -> Received | None:
    """The reply, or None while it is not complete."""
    status, headers, keeps = read_head(head)
    reply = Incoming(status, headers, keeps, body_bytes_max)
    whole = [reply.take(piece) for piece in [b"", *pieces]]
    assert not any(whole[:-1]) or len(pieces) == 0 or whole.index(True) == len(whole) - 1
    return reply.received() if whole[-1] else None


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % len(data) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in zip(ends, ends[1:], strict=False)]


@given(st.lists(st.binary(min_size=1, max_size=30), max_size=6), st.lists(st.integers(0, 500), max_size=8))
def test_chunks_in_any_pieces(chunks: list[bytes], places: list[int]) -> None:
    """A chunked body is its chunks' content, wherever the network cuts it."""
    coded = b"".join(b"%x;a=b\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\nTrailer: x\r\n\r\n"
    received = read(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", cut(coded, places))
    assert received is not None
    assert received.body == b"".join(chunks)


@given(st.binary(min_size=1, max_size=60), st.lists(st.integers(0, 500), max_size=8))
def test_length_in_any_pieces(body: bytes, places: list[int]) -> None:
    """A body of known length is complete with its last byte and not before."""
    received = read(b"HTTP/1.1 200 OK\r\nContent-Length: %d" % len(body), cut(body, places))
    assert received is not None
    assert received.body == body


def test_empty_bodies() -> None:
    """A length of nothing and a status that has no body are complete at once."""
    for head in (b"HTTP/1.1 200 OK\r\nContent-Length: 0", b"HTTP/1.1 204 No Content"):
        assert read(head, []) is not None


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("chunked", [False, True])
def test_size_limit(over: int, chunked: bool) -> None:
    """A body of exactly the limit is kept; of one with a byte more only that is known."""
    body = b"x" * (1000 + over)
    if chunked:
        head, data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    else:
        head, data = b"HTTP/1.1 200 OK\r\nContent-Length: %d" % len(body), body
    status, headers, keeps = read_head(head)
    reply = Incoming(status, headers, keeps, 1000)
    assert reply.take(data)
    assert reply.received().body == (None if over else body)


@pytest.mark.parametrize(
    ("head", "keeps"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1", True),
        (b"HTTP/1.1 200\r\nContent-Length: 1", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: Close", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\nConnection: keep-alive", True),
        (b"HTTP/1.1 200 OK", False),
    ],
)
def test_keeping_the_connection(head: bytes, keeps: bool) -> None:
    """A connection is used again only when the reply's end is known and nobody objects."""
    status, headers, allowed = read_head(head)
    assert Incoming(status, headers, allowed, 10).keeps_connection is keeps


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/2 200 OK",
        b"SSH-2.0-OpenSSH",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\nname : value",
        b"HTTP/1.1 200 OK\r\n folded: value",
        b"HTTP/1.1 200 OK\r\n: value",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked",
    ],
)
def test_bad_heads(head: bytes) -> None:
    """What is no head of a reply, or an ambiguous one, is refused."""
    with pytest.raises(BadReply):
        read_head(head)


@pytest.mark.parametrize("length", ["-1", "1.5", "", "+1", "0x1", "²", "9" * 30])
def test_bad_lengths(length: str) -> None:
    """A length that is no number is refused."""
    with pytest.raises(BadReply):
        body_length(200, {"content-length": length})


@pytest.mark.parametrize(
    "data",
    [
        b"x\r\n",
        b"-1\r\n",
        b"\r\n",
        b"1\r\nab\r\n",
        b"1\r\na\n\n0\r\n\r\n",
        b"0\r\n\r\nmore",
        b"f" * 16 + b"\r\n",
        b"1" * (HEAD_BYTES_MAX + 1),
    ],
)
def test_bad_chunks(data: bytes) -> None:
    """A chunked body that breaks its own rules is refused, not guessed at."""
    with pytest.raises(BadReply):
        read(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", [data])


def test_more_than_the_length() -> None:
    """Bytes after the end of a reply are not taken for part of another."""
    with pytest.raises(BadReply):
        read(b"HTTP/1.1 200 OK\r\nContent-Length: 1", [b"ab"])


def test_inflate() -> None:
    """gzip and deflate are unpacked, up to a size, and cut or unknown ones refused."""
    assert inflate(gzip.compress(b"x" * 10), "gzip", 10) == b"x" * 10
    assert inflate(zlib.compress(b"x" * 10), "deflate", 10) == b"x" * 10
    assert inflate(gzip.compress(b"x" * 11), "gzip", 10) is None
    for body, encoding in ((gzip.compress(b"x")[:-5], "gzip"), (b"x", "gzip"), (b"x", "br")):
        with pytest.raises(BadReply):
            inflate(body, encoding, 10)
