"""Clients that are slow, broken or hostile."""

import asyncio
import contextlib
import socket
import struct

import pytest
from small_api import small_api

from batchmill.server.connection import HEAD_BYTES_MAX, HEADERS_MAX, Connection

HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"


class Hasty(Connection):
    head_s = 0.05
    linger_s = anonymous_linger_s = 0.05


@pytest.mark.parametrize(
    "data",
    [
        b"GET /small/open HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /small/things HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST /small/things HTTP/1.1\r\n" + HOST + b"Content-Length: -3\r\n\r\nabcd",
        b"POST /small/things HTTP/1.1\r\n" + HOST + b"Content-Length: +3\r\n\r\nabc",
        b"POST /small/things HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /small/things HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"GET /small/open HTTP/1.1\r\n" + HOST + b"X : y\r\n\r\n",
        b"GET /small/open HTTP/1.1\r\n" + HOST + b"X: a\r\n b\r\n\r\n",
        b"GET /small/\x00 HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /small/\xff HTTP/1.1\r\n" + HOST + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"CONNECT a:1 HTTP/1.1\r\n" + HOST + b"\r\n",
    ],
)
async def test_a_request_that_cannot_be_read(data):
    """Ambiguous framing and broken heads are refused as any other request, and the connection closed."""
    async with small_api() as small:
        seen = []
        small.root.watch(seen.append)
        reply = await small.talk(data)
    assert reply.startswith(b"HTTP/1.1 400 ") and reply.count(b"HTTP/1.1") == 1
    assert b'"by":"other"' in reply and b"connection: close\r\n" in reply and b"x-request-id: req_" in reply
    assert [each.status for each in seen if each.code == "invalid_http"] or b"Transfer-Encoding" in data


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"X: " + b"y" * HEAD_BYTES_MAX + b"\r\n", 431, b"head_too_large"),
        (b"X: " + b"y" * HEAD_BYTES_MAX + b"\r\n\r\n", 431, b"head_too_large"),
        (b"X: " + b"y" * HEAD_BYTES_MAX, 431, b"head_too_large"),
        (b"X: y\r\n" * HEADERS_MAX + b"\r\n", 431, b"head_too_large"),
        (b"X: y\r\n" * (HEADERS_MAX - 1) + b"Connection: close\r\n\r\n", 431, b"head_too_large"),
        (b"X: y\r\n" * (HEADERS_MAX - 2) + b"Connection: close\r\n\r\n", 200, b"null"),
        (b"X: " + b"y" * (HEAD_BYTES_MAX - 500) + b"\r\nConnection: close\r\n\r\n", 200, b"null"),
    ],
)
async def test_heads_that_are_too_long(data, status, code):
    """A head may have so many bytes and headers, whether it has an end and comes in one read or not."""
    async with small_api() as small:
        reply = await small.talk(b"GET /small/open HTTP/1.1\r\n" + HOST + data)
    assert reply.startswith(b"HTTP/1.1 %d " % status) and code in reply


async def test_empty_lines_without_an_end():
    """What may stand before a request counts for its head."""
    async with small_api() as small:
        assert (await small.talk(b"\r\n" * HEAD_BYTES_MAX)).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("end", [b"", b" HTTP/1.1\r\n" + HOST + b"\r\n"])
async def test_a_url_that_is_too_long(end):
    """A URL that fills the head by itself is named as what is too long."""
    async with small_api() as small:
        reply = await small.talk(b"GET /" + b"y" * HEAD_BYTES_MAX + end)
    assert reply.startswith(b"HTTP/1.1 414 ") and b"uri_too_long" in reply


@pytest.mark.parametrize("tail", [b"0\r\nX: " + b"y" * 90_000, b"1;" + b"y" * 90_000, b"0\r\n" + b"X: y\r\n" * 15_000])
async def test_what_comes_with_a_body_and_is_none_of_it(tail):
    """Trailers and extensions of chunks without an end are not read for ever."""
    head = b"POST /small/things HTTP/1.1\r\n" + HOST + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
    async with small_api() as small:
        reader, writer = await asyncio.open_connection(*small.address)
        writer.write(head)
        await writer.drain()
        while not small.root.under_way:
            await asyncio.sleep(0)
        writer.write(tail)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


async def test_nothing_is_answered_out_of_turn():
    """What cannot be read behind a request that is under way gets no reply, which would be taken for that request's."""
    async with small_api() as small:
        reader, writer = await asyncio.open_connection(*small.address)
        writer.write(b"GET /small/gone HTTP/1.1\r\n" + HOST + b"\r\n")
        await small.dialect.reached.wait()
        writer.write(b"nonsense\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


async def test_what_follows_a_body_changes_nothing():
    """Trailers are not headers."""
    data = (
        b"POST /small/things HTTP/1.1\r\n" + HOST + JSON + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        b'c\r\n{"name":"a"}\r\n0\r\nHost: evil.test\r\nAuthorization: Bearer x\r\n\r\n'
    )
    async with small_api() as small:
        assert b"HTTP/1.1 200 " in await small.talk(data)


async def test_many_small_pieces():
    """A body in thousands of pieces of a byte is read, and counted."""
    head = (
        b"POST /small/upload HTTP/1.1\r\n" + HOST + b"Content-Type: application/octet-stream\r\nConnection: close\r\n"
    )
    async with small_api() as small:
        chunks = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 9000 + b"0\r\n\r\n"
        assert b'{"bytes":9000}' in await small.talk(chunks)


@pytest.mark.parametrize(
    "data", [b"", b"GET /small/open HT", b"\r\n", b"GET /small/open HTTP/1.1\r\nHost: localhost\r\nX:"]
)
async def test_a_head_that_does_not_come(data):
    """A client that connects and does not ask is left after a while."""
    async with small_api(connection=Hasty) as small:
        with contextlib.suppress(ConnectionResetError):
            assert await small.talk(data) == b""


async def test_a_body_that_goes_on_after_its_refusal():
    """A client that goes on sending what was refused is left after a while, and read no further."""
    async with small_api(connection=Hasty) as small:
        reader, writer = await asyncio.open_connection(*small.address)
        writer.write(b"POST /small/things HTTP/1.1\r\n" + HOST + b"Content-Length: 500\r\n\r\nabc")
        assert b"415" in await reader.readline()
        assert b"connection: close\r\n" in await reader.readuntil(b"\r\n\r\n")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(100_000)
        writer.close()


async def test_a_refused_body_that_ends_leaves_the_connection_usable():
    """A refused body that ends is read past, and the next request on the connection answered."""
    head = b"POST /small/things HTTP/1.1\r\n" + HOST + b"Content-Length: 500\r\n\r\n"
    last = b"GET /small/open HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n"
    async with small_api() as small:
        reply = await small.talk(head + b"x" * 500 + last)
    assert reply.count(b"HTTP/1.1 415 ") == 1 and reply.count(b"HTTP/1.1 200 ") == 1


async def test_expectations():
    """A body that will be refused is not even asked for; another one is."""
    head = b"POST /small/things HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: "
    async with small_api() as small:
        refused = await small.talk(head + b"99999\r\n" + JSON + b"\r\n")
        assert refused.startswith(b"HTTP/1.1 413 ")
        reader, writer = await asyncio.open_connection(*small.address)
        writer.write(head + b"12\r\n" + JSON + b"\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b'{"name":"a"}')
        assert b"200 OK" in await reader.read()
        writer.close()


async def test_a_truncated_body():
    """A client that leaves in the middle of its body is answered nothing, and nothing is done."""
    async with small_api() as small:
        seen = asyncio.Queue()
        small.root.watch(seen.put_nowait)
        reader, writer = await asyncio.open_connection(*small.address)
        writer.write(b"POST /small/things HTTP/1.1\r\n" + HOST + JSON + b'Content-Length: 50\r\n\r\n{"name"')
        await writer.drain()
        writer.close()
        assert (await seen.get()).status == 499


async def test_requests_in_a_row_are_answered_in_order():
    """Pipelined requests are answered one after the other."""
    first = b"POST /small/things HTTP/1.1\r\n" + HOST + JSON + b'Content-Length: 12\r\n\r\n{"name":"a"}'
    last = b"GET /small/open HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n"
    async with small_api() as small:
        reply = await small.talk(first + last)
    assert reply.index(b'"name":"a"') < reply.index(b"null") and reply.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade"])
async def test_a_body_behind_an_offer_of_another_protocol(name):
    """A client that offers HTTP/2 with a body, as Java's does, is answered in this protocol, and its body is read."""
    offer = (
        name + b": h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\nConnection: Upgrade, HTTP2-Settings, close\r\n"
    )
    body = b'{"name":"an upgrade: it is text"}'
    data = b"POST /small/things HTTP/1.1\r\n" + HOST + JSON + offer + b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with small_api() as small:
        reply = await small.talk(data)
    assert reply.startswith(b"HTTP/1.1 200 ") and b"an upgrade: it is text" in reply


async def test_offers_of_another_protocol(caplog):
    """A client that would like another protocol is answered in this one."""
    offer = b"Upgrade: websocket\r\nConnection: Upgrade, close\r\nSec-WebSocket-Key: x\r\n"
    async with small_api() as small:
        assert b"HTTP/1.1 200 " in await small.talk(b"GET /small/open HTTP/1.1\r\n" + HOST + offer + b"\r\n")
    assert not [each for each in caplog.records if each.name.startswith("uvicorn")]


async def test_a_refused_client_that_resets_its_connection(caplog):
    """A client that is gone when its refusal has been written is no error of the server's."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    class Reset(Connection):
        def _end_soon(self):
            client.close()
            super()._end_soon()

    async with small_api(connection=Reset) as small:
        client.connect(small.address)
        client.send(b"POST /small/things HTTP/1.1\r\n" + HOST + b"Content-Length: 500\r\n\r\nabc")
        while client.fileno() != -1 or small.listener._server.server_state.connections:
            await asyncio.sleep(0)
    assert not [each for each in caplog.records if each.name.startswith("uvicorn")]
