"""Calls over kept connections: bounded, guarded, and failing in our words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from batchmill.engines.connections import PIECE_BYTES, Connections, FileRange
from batchmill.engines.retry import REPLY_BYTES_MAX, FaultKind, NoReply
from batchmill.models.addresses import EVERYWHERE, Private, read_private
from batchmill.types import Limits

Handler = Callable[[web.Request], "web.StreamResponse"]


class Service:
    """A server in this process. `answer` may be replaced; `connections` holds the peers of calls."""

    def __init__(self) -> None:
        self.answer: Callable[[web.Request], object] = lambda _: web.Response(text="ok")
        self.peers: set[object] = set()
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.hung = asyncio.Event()
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        self.headers.append(dict(request.headers))
        answer = self.answer(request)
        if asyncio.iscoroutine(answer):
            answer = await answer
        assert isinstance(answer, web.StreamResponse)
        return answer

    async def keep(self, request: web.Request) -> web.Response:
        """Take the whole body."""
        self.bodies.append(await request.read())
        return web.Response(text=f"{len(self.bodies[-1])}")

    async def hang(self, _: web.Request) -> web.Response:
        await self.hung.wait()
        return web.Response()


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    made.hung.set()
    await runner.cleanup()


@asynccontextmanager
async def opened(limits: Limits | None = None, **options: object) -> AsyncIterator[Connections]:
    connections = Connections(limits or Limits(), **options)  # type: ignore[arg-type]
    await connections.start()
    try:
        yield connections
    finally:
        await connections.stop()


async def refusal(connections: Connections, url: str) -> NoReply:
    with pytest.raises(NoReply) as lost:
        await connections.exchange("GET", url)
    return lost.value


@pytest.mark.parametrize("private", [None, EVERYWHERE, read_private(["127.0.0.1"])], ids=["free", "trusted", "listed"])
async def test_connections_are_kept(service: Service, private: Private | None) -> None:
    """Calls one after another share a connection, with the guard and without."""
    async with opened(private=private) as connections:
        for _ in range(4):
            response, body = await connections.exchange("POST", service.url + "/a", b"x")
            assert (response.status, body) == (200, b"ok")
    assert len(service.peers) == 1


async def test_a_private_address_is_not_called(service: Service) -> None:
    """Where private addresses are closed a call of one fails for good, and the reason is told."""
    async with opened(private=Private()) as connections:
        fault = (await refusal(connections, service.url)).fault
        assert (fault.kind, fault.error.code) == (FaultKind.PERMANENT, "url_not_allowed")
        assert "private" in fault.error.message
    assert service.headers == []


async def test_a_name_that_leads_inside_is_not_called(service: Service) -> None:
    """A name is judged by its addresses; where the operator named it, it is called."""
    port = service.url.rpartition(":")[2]
    async with opened(private=Private()) as connections:
        assert "private" in str((await refusal(connections, f"https://localhost:{port}/")).fault.error.message)
    async with opened(private=read_private(["localhost"])) as connections:
        assert (await connections.exchange("GET", f"http://localhost:{port}/"))[1] == b"ok"
        # The address of a name that was opened is not opened by itself.
        assert (await refusal(connections, service.url)).fault.error.code == "url_not_allowed"


@pytest.mark.parametrize("host", ["169.254.169.254", "[fe80::1]", "0.0.0.0", "100.100.100.200", "2852039166"])
@pytest.mark.parametrize("private", [EVERYWHERE, Private()], ids=["trusted", "not trusted"])
async def test_metadata_is_never_called(host: str, private: Private) -> None:
    """Where clouds keep credentials nobody is sent, not even by whoever runs the machine."""
    async with opened(private=private) as connections:
        fault = (await refusal(connections, f"http://{host}/latest/meta-data/")).fault
        assert (fault.kind, fault.error.code in ("url_not_allowed", "invalid_url")) == (FaultKind.PERMANENT, True)


@pytest.mark.parametrize(
    "url", ["http://", "ftp://127.0.0.1/", "http://127.0.0.1/a b", "http://127.0.0.1:x/", "http://h/\r\nX: y"]
)
async def test_what_is_no_url(url: str) -> None:
    """Text that is not an address fails for good, before anything is sent."""
    async with opened() as connections:
        fault = (await refusal(connections, url)).fault
        assert (fault.kind, fault.error.code) == (FaultKind.PERMANENT, "invalid_url")


async def test_redirects_are_answers(service: Service) -> None:
    """A redirect is handed over as it came; nothing else is called."""
    service.answer = lambda _: web.Response(status=307, headers={"Location": service.url + "/inside"})
    async with opened(private=EVERYWHERE) as connections:
        response, _ = await connections.exchange("POST", service.url)
        assert (response.status, len(service.headers)) == (307, 1)


async def test_headers_of_every_call_can_change(service: Service) -> None:
    """From the moment they are set, new headers go with every call and the old ones do not."""
    async with opened(headers={"X-Key": "one", "X-Old": "1"}) as connections:
        await connections.exchange("GET", service.url)
        connections.set_headers({"X-Key": "two"})
        await connections.exchange("GET", service.url, headers={"X-More": "3"})
    first, second = service.headers
    assert (first["X-Key"], first["X-Old"]) == ("one", "1")
    assert (second["X-Key"], second.get("X-Old"), second["X-More"]) == ("two", None, "3")


@pytest.mark.parametrize("extra", [0, 1])
async def test_replies_have_a_size(service: Service, extra: int) -> None:
    """A reply of the greatest size is read whole, one byte more is given up."""
    service.answer = lambda _: web.Response(body=b"x" * (REPLY_BYTES_MAX + extra))
    async with opened() as connections:
        _, body = await connections.exchange("GET", service.url)
        assert (None if body is None else len(body)) == (None if extra else REPLY_BYTES_MAX)


@pytest.mark.parametrize("options", [{"limits": Limits(attempt_timeout_s=0.05)}, {"read_timeout_s": 0.05}])
async def test_silence_ends(service: Service, options: dict[str, object]) -> None:
    """A service that says nothing has the time of a call, or the time to read, whichever is over first."""
    service.answer = service.hang
    async with opened(**options) as connections:
        fault = (await refusal(connections, service.url)).fault
        assert (fault.kind, fault.error.code) == (FaultKind.TRANSIENT, "timeout")


async def test_files_are_sent_in_pieces(service: Service, tmp_path: Path) -> None:
    """A body of bytes and stretches of files arrives as one, its length told before."""
    file = tmp_path / "rows"
    file.write_bytes(b"0123456789" + b"x" * (2 * PIECE_BYTES))
    service.answer = service.keep
    parts = [b"<", FileRange(file, 4, 3), b"|", FileRange(file, 2 * PIECE_BYTES + 10), b">"]
    async with opened() as connections:
        response, body = await connections.upload("POST", service.url, parts, {"Content-Type": "text/x"})
    expected = b"<3456|" + file.read_bytes() + b">"
    assert service.bodies == [expected]
    assert (response.status, body) == (200, str(len(expected)).encode())
    assert service.headers[0]["Content-Length"] == str(len(expected))
    assert (service.headers[0]["Content-Type"], "Transfer-Encoding" in service.headers[0]) == ("text/x", False)


async def test_an_upload_that_nobody_takes_ends(service: Service, tmp_path: Path) -> None:
    """A service that stops reading has the time between two pieces, however large the file."""
    file = tmp_path / "rows"
    file.write_bytes(b"x" * (32 * PIECE_BYTES))
    service.answer = service.hang
    async with opened(idle_timeout_s=0.1) as connections:
        with pytest.raises(NoReply) as lost:
            await connections.upload("PUT", service.url, [FileRange(file, 32 * PIECE_BYTES)])
    assert lost.value.fault.error.code == "timeout"


async def test_an_upload_may_be_refused_before_its_end(service: Service, tmp_path: Path) -> None:
    """The reply of a service that has not taken everything is the reply."""
    file = tmp_path / "rows"
    file.write_bytes(b"x" * (32 * PIECE_BYTES))
    service.answer = lambda _: web.Response(status=401, text="no")
    async with opened() as connections:
        response, body = await connections.upload("PUT", service.url, [FileRange(file, 32 * PIECE_BYTES)])
        assert (response.status, body) == (401, b"no")


async def test_a_reply_is_read_in_pieces(service: Service) -> None:
    """What has begun is taken piece by piece to its end."""
    service.answer = lambda _: web.Response(body=b"y" * 300_000)
    async with opened() as connections:
        response = await connections.begin("GET", service.url)
        total = 0
        while piece := await connections.read(response):
            total += len(piece)
        assert total == 300_000


async def test_no_proxy_is_used(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies of the environment are ignored."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with opened(private=EVERYWHERE) as connections:
        assert (await connections.exchange("GET", service.url))[1] == b"ok"


async def test_stop_is_safe() -> None:
    """Connections may be closed twice, and without having been opened."""
    connections = Connections(Limits(), private=EVERYWHERE)
    await connections.stop()
    await connections.stop()
