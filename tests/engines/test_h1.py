"""Connections: used again while they may be, dropped when anything is odd, encrypted and checked where asked for."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from batchmill.engines import h1
from batchmill.engines.h1_reply import BadReply

CERTIFICATE = Path(__file__).parent.parent / "fakes" / "tls" / "localhost.pem"
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Answer = Callable[[asyncio.StreamWriter, int], Awaitable[None]]


class Peer:
    """A server that answers the n-th call as it is told. `connections` counts those that were accepted."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.connections = 0
        self.calls = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.rpartition(b"Content-Length: ")[2]))
                self.calls += 1
                await self._answer(writer, self.calls)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def write(*pieces: bytes, close: bool = False) -> Answer:
    """Answer every call with these bytes, each sent by itself."""

    async def answer(writer: asyncio.StreamWriter, _: int) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            writer.close()

    return answer


@asynccontextmanager
async def connected(
    answer: Answer, *, tls: ssl.SSLContext | None = None, idle_timeout_s: float = 5.0
) -> AsyncIterator[tuple[h1.Client, Peer]]:
    peer = Peer(answer)
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    client = h1.Client(
        h1.Service("localhost" if tls else "127.0.0.1", port, tls is not None, 5.0, idle_timeout_s, 1000)
    )
    try:
        yield client, peer
    finally:
        client.close()
        await asyncio.sleep(0)
        server.close()
        await server.wait_closed()


async def test_connection_is_used_again() -> None:
    """Calls one after another share a connection; calls at one time have one each."""
    async with connected(write(OK)) as (client, peer):
        for _ in range(5):
            assert (await client.post(HEAD, b"{}")).body == b"ok"
        assert peer.connections == 1
        await asyncio.gather(*(client.post(HEAD, b"{}") for _ in range(4)))
        assert peer.connections == 4


@pytest.mark.parametrize(
    "reply",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 2\r\n\r", b"\no", b"k"],
        [b"HTTP/1.1 100 Continue\r\n\r\n", OK],
        [b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n", b"1\r\nk\r\n0\r\n\r\n"],
    ],
)
async def test_replies_in_pieces(reply: list[bytes]) -> None:
    """A reply is read whole, however it is cut and whatever is said before it."""
    async with connected(write(*reply)) as (client, peer):
        for _ in range(2):
            assert (await client.post(HEAD, b"{}")).body == b"ok"
        assert peer.connections == 1


async def test_reply_that_ends_with_the_connection() -> None:
    """A reply without a length is everything until the end."""
    async with connected(write(b"HTTP/1.1 200 OK\r\n\r\no", b"k", close=True)) as (client, peer):
        for _ in range(2):
            assert (await client.post(HEAD, b"{}")).body == b"ok"
        assert peer.connections == 2


async def test_closed_connection_is_not_used() -> None:
    """A service that closes after each reply is connected to anew, without an error."""
    async with connected(write(OK, close=True)) as (client, peer):
        for _ in range(3):
            await client.post(HEAD, b"{}")
            while client._all:
                await asyncio.sleep(0)
        assert peer.connections == 3


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"", h1.Disconnected),
        (b"HTTP/1.1 200 O", BadReply),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", BadReply),
        (b"220 smtp ready\r\n\r\n", BadReply),
        (OK + b"more", BadReply),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, BadReply),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nnot", BadReply),
    ],
    ids=["nothing", "half a head", "cut", "smtp", "too much", "long head", "gzip to the end"],
)
async def test_broken_replies(reply: bytes, error: type[OSError]) -> None:
    """What is no whole reply is an error of the call, and its connection is not used again."""
    async with connected(write(reply, close=True)) as (client, peer):
        for _ in range(2):
            with pytest.raises(error):
                await client.post(HEAD, b"{}")
        assert peer.connections == 2


async def test_unasked_bytes_end_the_connection() -> None:
    """Bytes that come while no call is out are never taken for the next reply."""
    async with connected(write(OK)) as (client, peer):
        await client.post(HEAD, b"{}")
        (connection,) = client._all
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        assert (await client.post(HEAD, b"{}")).body == b"ok"
        assert peer.connections == 2


async def test_silence_half_way() -> None:
    """A reply that stops half way is given up after the idle time."""
    async with connected(write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok"), idle_timeout_s=0.05) as (client, _):
        with pytest.raises(TimeoutError):
            await client.post(HEAD, b"{}")


async def test_cancelling_drops_the_connection() -> None:
    """The reply to a call that was cancelled is never given to another."""
    release = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter, n: int) -> None:
        if n == 1:
            await release.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % n)

    async with connected(answer) as (client, peer):
        first = asyncio.create_task(client.post(HEAD, b"{}"))
        while peer.calls < 1:
            await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        release.set()
        assert (await client.post(HEAD, b"{}")).body == b"2"


async def test_tls_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that a known authority signed is taken; another one means that no call is made."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTIFICATE)
    async with connected(write(OK), tls=tls) as (client, peer):
        with pytest.raises(h1.Unreachable, match="certificate"):
            await client.post(HEAD, b"{}")
        assert peer.calls == 0
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    async with connected(write(OK), tls=tls) as (client, peer):
        for _ in range(2):
            assert (await client.post(HEAD, b"{}")).body == b"ok"
        assert peer.connections == 1


async def test_nobody_there(unused_tcp_port: int) -> None:
    """A refused connection and an unknown name say that the service saw nothing."""
    for host in ("127.0.0.1", "nowhere.invalid"):
        client = h1.Client(h1.Service(host, unused_tcp_port, False, 5.0, 5.0, 1000))
        with pytest.raises(h1.Unreachable):
            await client.post(HEAD, b"{}")
