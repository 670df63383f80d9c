"""The http engine against peers that speak HTTP oddly, wrongly, or not at all."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from contract.engine_suite import PATIENCE_S, ListSink, OpenFeed, chat_row, run_all
from fakes.held_clock import HeldClock

from batchmill.engines.remote.http import HttpEngine
from batchmill.errors import JobPaused
from batchmill.types import Limits, ModelSpec, Outcome

CERTIFICATE = Path(__file__).parent.parent / "fakes" / "tls" / "localhost.pem"
OK = b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"ok":1}'
Answer = Callable[[asyncio.StreamWriter, int], Awaitable[None]]


class Peer:
    """A server that answers the n-th call as it is told. `connections` counts those that were accepted."""

    def __init__(self, answer: Answer, base_url: str) -> None:
        self._answer = answer
        self.base_url = base_url
        self.connections = 0
        self.calls = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
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
async def serving(answer: Answer, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Peer]:
    peer = Peer(answer, "")
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    peer.base_url = f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}"
    try:
        yield peer
    finally:
        server.close()
        for writer in peer.writers:
            writer.close()
        await server.wait_closed()


@asynccontextmanager
async def started(base_url: str, limits: Limits | None = None) -> AsyncIterator[HttpEngine]:
    spec = ModelSpec(name="m", engine="http", source="remote", base_url=base_url, limits=limits or Limits())
    engine = HttpEngine(spec, Path(), clock=HeldClock(), jitter=lambda: 0.99)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def run_one(engine: HttpEngine) -> Outcome:
    return (await run_all(engine, [chat_row(0, "a")])).outcomes[0]


async def test_connections_are_used_again() -> None:
    """Calls one after another share a connection; calls at one time have one each."""
    async with serving(write(OK)) as peer, started(peer.base_url) as engine:
        for _ in range(5):
            assert (await run_one(engine)).body == b'{"ok":1}'
        assert peer.connections == 1
        await run_all(engine, [chat_row(n, "a") for n in range(4)])
        assert peer.connections == 4


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 8\r\n\r", b'\n{"ok"', b":1}"],
        [b"HTTP/1.1 100 Continue\r\n\r\n", OK],
        [b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK],
        [b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"ok"\r\n', b"3\r\n:1}\r\n0\r\n\r\n"],
    ],
    ids=["cut", "continue", "hints", "chunks"],
)
async def test_replies_in_pieces(pieces: list[bytes]) -> None:
    """A reply is read whole, however it is cut and whatever is said before it."""
    async with serving(write(*pieces)) as peer, started(peer.base_url) as engine:
        for _ in range(2):
            assert (await run_one(engine)).body == b'{"ok":1}'
        assert (peer.connections, peer.calls) == (1, 2)


async def test_reply_that_ends_with_the_connection() -> None:
    """A reply without a length is everything until the end."""
    answer = write(b'HTTP/1.1 200 OK\r\n\r\n{"ok"', b":1}", close=True)
    async with serving(answer) as peer, started(peer.base_url) as engine:
        for _ in range(2):
            assert (await run_one(engine)).body == b'{"ok":1}'
        assert (peer.connections, peer.calls) == (2, 2)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (b"", "connection_failed"),
        (b"HTTP/1.1 200 O", "connection_failed"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"ok":1}', "bad_response"),
        (b"220 smtp ready\r\n\r\n", "bad_response"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, "bad_response"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nnot", "bad_response"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nnot", "bad_response"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", "bad_response"),
        (b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"ok":1}\r\n0\r\n\r\n', "bad_response"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\nContent-Length: 9\r\n\r\n{"ok":1}', "bad_response"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: -8\r\n\r\n{"ok":1}', "bad_response"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\nTransfer-Encoding: chunked\r\n\r\n{"ok":1}', "bad_response"),
    ],
    ids=[
        *("nothing", "half a head", "short", "smtp", "long head", "gzip to the end", "gzip", "chunk size"),
        *("long chunk", "two lengths", "negative length", "length and chunks"),
    ],
)
async def test_broken_replies(reply: bytes, code: str) -> None:
    """What is not a whole reply is a failed attempt of its row, and its connection is not used again."""
    async with serving(write(reply, close=True)) as peer, started(peer.base_url, Limits(attempts_max=2)) as engine:
        error = (await run_one(engine)).error
        assert error is not None
        assert error.code == code
        assert (peer.calls, peer.connections) == (2, 2)


async def test_chunks_that_break_after_the_head() -> None:
    """A reply whose head was read already and whose body turns out to be garbage fails at once."""
    answer = write(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"ok"\r\n', b"zz\r\n")
    async with serving(answer) as peer, started(peer.base_url, Limits(attempts_max=2)) as engine:
        error = (await run_one(engine)).error
        assert error is not None
        assert error.code == "bad_response"


async def test_bytes_after_a_reply_are_nobodys() -> None:
    """A second reply that nobody asked for is never taken for the answer to the next row."""
    unasked = b'HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{"evil":1}'
    async with serving(write(OK + unasked)) as peer, started(peer.base_url) as engine:
        for _ in range(3):
            assert (await run_one(engine)).body == b'{"ok":1}'
        assert (peer.connections, peer.calls) == (3, 3)


async def test_cancelled_call_leaves_its_reply_to_nobody() -> None:
    """The reply to a call that was cancelled is never given to another."""
    release = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter, n: int) -> None:
        if n == 1:
            await release.wait()
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{"n":%d}' % n)

    async with serving(answer) as peer, started(peer.base_url) as engine:
        sink = ListSink()
        running = asyncio.create_task(engine.run(OpenFeed(sink, [chat_row(0, "a")]), sink))
        async with asyncio.timeout(PATIENCE_S):
            while peer.calls < 1:
                await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        release.set()
        assert (await run_one(engine)).body == b'{"n":2}'
    assert sink.outcomes == []


@pytest.fixture
def tls() -> ssl.SSLContext:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTIFICATE)
    return tls


async def test_unknown_certificate_is_refused(tls: ssl.SSLContext) -> None:
    """A certificate that no known authority signed means that no call is made, and the job pauses."""
    async with serving(write(OK), tls=tls) as peer, started(peer.base_url) as engine:
        with pytest.raises(JobPaused, match="certificate"):
            await run_one(engine)
        assert peer.calls == 0


CALLER = """
import asyncio, sys
from test_http_wire import run_one, started
async def main():
    async with started(sys.argv[1]) as engine:
        print((await run_one(engine)).body.decode())
asyncio.run(main())
"""


async def test_known_certificate_is_taken(tls: ssl.SSLContext) -> None:
    """A service is called over TLS where its certificate is signed by an authority the machine knows."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    env = {**os.environ, "SSL_CERT_FILE": str(CERTIFICATE), "PYTHONPATH": os.pathsep.join(folders)}
    async with serving(write(OK), tls=tls) as peer:
        command = [sys.executable, "-c", CALLER, peer.base_url]
        caller = await asyncio.create_subprocess_exec(*command, env=env, stdout=subprocess.PIPE)
        output, _ = await caller.communicate()
    assert (output, peer.calls) == (b'{"ok":1}\n', 1)
