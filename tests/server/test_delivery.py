"""Whether a reply has arrived."""

import asyncio
import socket
import struct

import pytest
from small_api import small_api

BODY = b'{"name":"a"}'
HEAD = b"POST /small/wait HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 12\r\n"
OPEN = b"GET /small/open HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def begin(small, more=b""):
    reader, writer = await asyncio.open_connection(*small.address)
    writer.write(HEAD + more + b"\r\n" + BODY)
    await small.dialect.reached.wait()
    return reader, writer


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
async def test_a_reply_that_arrives(more):
    """Whoever answered hears of it before any later request is looked at."""
    async with small_api() as small:
        reader, writer = await begin(small, more)
        small.dialect.go_on.set()
        await reader.readuntil(BODY[:8])
        await small.talk(OPEN)
        assert small.dialect.delivered == ["a"]
        writer.close()


async def test_a_client_that_left_before():
    """A client that closed its connection before the reply was written has not got it."""
    async with small_api() as small:
        seen = asyncio.Queue()
        small.root.watch(seen.put_nowait)
        _, writer = await begin(small)
        writer.close()
        await writer.wait_closed()
        small.dialect.go_on.set()
        await seen.get()
        await small.talk(OPEN)
        assert small.dialect.delivered == []


async def test_a_client_that_was_killed():
    """A connection that was reset has not got it."""
    async with small_api() as small:
        seen = asyncio.Queue()
        small.root.watch(seen.put_nowait)
        _, writer = await begin(small)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        small.dialect.go_on.set()
        await seen.get()
        await small.talk(OPEN)
        assert small.dialect.delivered == []


async def test_a_client_whose_leaving_was_not_noticed_yet():
    """A client that left while the server was about to write has not got it, although nobody had told the server."""
    async with small_api() as small:
        seen = asyncio.Queue()
        small.root.watch(seen.put_nowait)
        sock = socket.create_connection(small.address)
        sock.sendall(HEAD + b"\r\n" + BODY)
        await small.dialect.reached.wait()
        sock.close()  # and not one turn of the loop between this and the reply
        small.dialect.go_on.set()
        await seen.get()
        await small.talk(OPEN)
        assert small.dialect.delivered == []


async def test_a_refusal_is_no_reply():
    """Of a request that was refused nobody hears."""
    async with small_api() as small:
        small.dialect.go_on.set()
        bad = HEAD.replace(b"12", b"13") + b"Connection: close\r\n\r\n" + BODY + b"x"
        assert b"400" in await small.talk(bad)
        assert small.dialect.delivered == []
