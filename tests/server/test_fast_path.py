"""The fast path: the same answers as the normal way, in less time; what is unusual never takes it."""

from __future__ import annotations

import asyncio
import re
import socket

import pytest
from fakes.terms import SetTerm
from small_api import HeldKeys, SmallDialect, small_api
from starlette.responses import Response

from batchmill.errors import InvalidRow, Unavailable
from batchmill.server.connection import Connection
from batchmill.server.fast_path import Cancel, Headers, Reply
from batchmill.server.operations import Call, Content, Operation
from batchmill.types import Caller, Scope

KEY = "bm_key"
CALLER = Caller("one", Scope.SUBMIT, "k1")
JSON = b"application/json"
HOST = b"Host: localhost\r\n"
AUTHORIZATION = f"Authorization: {KEY}\r\n".encode()
STEP = 12 * 1024 * 1024
MUCH = bytes(4 * STEP)  # more than the machine itself takes for a client that does not read


class Hot(SmallDialect):
    """Says a body again, by the one way or the other; what the body says decides how."""

    def __init__(self) -> None:
        super().__init__()
        self.short: list[bytes] = []  # bodies that took the fast path
        self.long: list[bytes] = []
        self.replies: list[Reply] = []  # that wait for `answer_all`
        self.cancelled = 0

    def operations(self) -> list[Operation]:
        hot = Operation(
            "infer", "POST", "/hot/{model}/infer", "Hot", Scope.SUBMIT, self.infer, body=Content("*/*"),
            body_bytes_max=None, fast_handler=self,
        )  # fmt: skip
        known = Operation("known", "GET", "/hot/{model}", "Known", Scope.READ, self.infer, fast_handler=self)
        return [*super().operations(), hot, known]

    async def infer(self, call: Call):
        raw = await call.request.body()
        self.long.append(raw)
        if raw.startswith(b"bad"):
            raise InvalidRow("no good", code="invalid_field")
        if raw.startswith(b"much"):
            return Response(MUCH, media_type=JSON.decode())
        return Response(raw, media_type=JSON.decode())

    def begin(self, path: dict[str, str], headers: Headers, body: bytes, caller: Caller, reply: Reply) -> Cancel | None:
        assert path == {"model": "m"} and caller == CALLER
        if body.startswith(b"long"):
            return None
        self.short.append(body)
        if body.startswith(b"raises"):
            raise RuntimeError("secret")
        if body.startswith(b"wait"):
            self.replies.append(reply)
        elif body.startswith(b"much"):
            reply(200, [(b"content-type", JSON)], MUCH)
        elif body.startswith(b"bad"):
            reply.refuse(InvalidRow("no good", code="invalid_field"))
        else:
            reply(200, [(b"content-type", JSON)], body)
        return self._cancel

    def _cancel(self) -> None:
        self.cancelled += 1


def post(body: bytes, *more: bytes, path: bytes = b"/hot/m/infer") -> bytes:
    head = b"POST %b HTTP/1.1\r\n%b%bContent-Length: %d\r\nX-Request-Id: r1\r\n" % (
        path,
        HOST,
        AUTHORIZATION,
        len(body),
    )
    return head + b"".join(line + b"\r\n" for line in more) + b"\r\n" + body


def api(dialect: Hot, **options):
    return small_api(keys=HeldKeys(**{KEY: CALLER}), dialect=dialect, **options)


async def talk_kept(small, data: bytes, replies: int) -> list[bytes]:
    """What comes for requests on a connection that stays open, cut into replies."""
    reader, writer = await asyncio.open_connection(*small.address)
    try:
        writer.write(data)
        return [await read_reply(reader) for _ in range(replies)]
    finally:
        writer.close()


async def read_reply(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    size = re.search(rb"content-length: (\d+)", head)
    assert size is not None
    return re.sub(rb"date: [^\r]+", b"date: now", head) + await reader.readexactly(int(size[1]))


@pytest.mark.parametrize("body", [b'{"data": 1}', b"x" * 900, b"bad"])
async def test_the_same_bytes_as_the_normal_way(body):
    """A reply of the fast path and one of the normal way differ in nothing, errors included."""
    short, long = Hot(), Hot()
    async with api(short) as small:
        by_fast_path = await talk_kept(small, post(body), 1)
    async with api(long, has_fast_path=False) as small:
        normally = await talk_kept(small, post(body), 1)
    assert by_fast_path == normally
    assert (short.short, short.long, long.short, long.long) == ([body], [], [], [body])


def get(*more: bytes, path: bytes = b"/hot/m") -> bytes:
    lines = b"".join(line + b"\r\n" for line in more)
    return b"GET %b HTTP/1.1\r\n%b%bX-Request-Id: r1\r\n%b\r\n" % (path, HOST, AUTHORIZATION, lines)


async def test_a_get_of_what_is_known_takes_the_fast_path():
    """Its reply has the same bytes; one with a body, another method or an unknown name takes the normal path."""
    short, long = Hot(), Hot()
    async with api(short) as small:
        (by_fast_path,) = await talk_kept(small, get(), 1)
        await talk_kept(small, get(b"Content-Length: 0") + get(path=b"/hot/m?"), 2)
        (refused,) = await talk_kept(small, get().replace(HOST, b"Host: evil.test\r\n"), 1)
        await talk_kept(small, get().replace(b"GET", b"HEAD"), 1)
    async with api(long, has_fast_path=False) as small:
        (normally,) = await talk_kept(small, get(), 1)
    assert by_fast_path == normally and refused.startswith(b"HTTP/1.1 400 ")
    assert (short.short, len(short.long), long.long) == ([b""], 3, [b""])


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post(b"long way"), 200),
        (post(b"a", b"Expect: 100-continue"), 100),
        (post(b"a", b"Transfer-Encoding: identity"), 400),
        (post(b"a", b"Connection: close"), 200),
        (post(b"a", b"Origin: http://localhost"), 200),
        (post(b"a", b"Origin: http://evil.test"), 403),
        (post(b"a", b"Sec-Fetch-Site: cross-site"), 403),
        (post(b"a", b"Content-Encoding: gzip"), 415),
        (post(b"a", b"X-Request-Id: r2"), 200),
        (post(b"a", path=b"/hot/m/infer?x=1"), 400),
        (post(b"a", path=b"/hot/%6D/infer"), 200),
        (post(b"x" * 1001), 413),
        (post(b"a").replace(HOST, b"Host: evil.test\r\n"), 400),
        (post(b"a").replace(HOST, b""), 400),
        (post(b"a").replace(AUTHORIZATION, b"Authorization: other\r\n"), 401),
        (post(b"a").replace(AUTHORIZATION, b""), 401),
        (post(b"a").replace(b"HTTP/1.1", b"HTTP/1.0"), 200),
        (post(b"").replace(b"Content-Length: 0\r\n", b""), 200),
        (post(b"a").replace(b"POST", b"PUT"), 405),
        (post(b"a").replace(b"Content-Length: 1", b"Transfer-Encoding: chunked")[:-1] + b"1\r\na\r\n0\r\n\r\n", 200),
    ],
)
async def test_what_is_unusual_goes_the_normal_way(data, status):
    """Whatever the fast path does not know is answered as it always was."""
    dialect = Hot()
    async with api(dialect) as small:
        reader, writer = await asyncio.open_connection(*small.address)
        writer.write(data)
        first = await reader.readline()
        writer.close()
    assert (int(first.split()[1]), dialect.short) == (status, [])


async def test_a_key_without_the_scope_is_refused():
    """The fast path lets nobody in whom the normal way refuses."""
    dialect = Hot()
    async with small_api(keys=HeldKeys(**{KEY: Caller("one", Scope.READ, "k1")}), dialect=dialect) as small:
        (reply,) = await talk_kept(small, post(b"a"), 1)
    assert reply.startswith(b"HTTP/1.1 403 ") and not dialect.short


@pytest.mark.parametrize("has_fast_path", [True, False])
async def test_a_server_that_may_be_replaced_answers_no_key(has_fast_path):
    """Once its term as owner is over, another owner may have revoked a key that this server still knows."""
    dialect, terms = Hot(), [3.0]
    async with api(dialect, term=SetTerm(lambda: terms[-1]), has_fast_path=has_fast_path) as small:
        replies = await talk_kept(small, post(b"a"), 1)
        terms.append(0.0)
        replies += await talk_kept(small, post(b"a"), 1)
        terms.append(3.0)
        replies += await talk_kept(small, post(b"a"), 1)
    assert [reply.split()[1] for reply in replies] == [b"200", b"503", b"200"]
    assert b"retry-after: " in replies[1]
    assert len(dialect.short + dialect.long) == 2


async def test_the_rate_is_counted_once():
    """A request on the fast path costs one of the minute's, and the one too many is told when to come again."""
    dialect = Hot()
    async with api(dialect, requests_per_minute=2) as small:
        replies = await talk_kept(small, post(b"a") * 1, 1)
        replies += await talk_kept(small, post(b"long"), 1)
        replies += await talk_kept(small, post(b"a"), 1)
    assert [reply.split()[1] for reply in replies] == [b"200", b"200", b"429"] and b"retry-after: " in replies[2]


async def test_a_body_of_several_reads_stays_on_the_lane():
    """A body that is larger than one read of the socket, and comes without a pause, is as short a way."""
    dialect, body = Hot(), b"x" * 700_000
    async with api(dialect, body_bytes_max=1_000_000) as small:
        replies = [(await talk_kept(small, post(body), 1))[0] for _ in range(2)]
    assert all(reply.endswith(body) for reply in replies)
    assert (dialect.short, dialect.long) == ([body, body], [])


async def test_a_body_in_pieces_goes_the_normal_way():
    """A body that takes its time after its headers is waited for where waiting has its limits."""
    dialect, data = Hot(), post(b"abcdef")
    async with api(dialect) as small:
        reader, writer = await asyncio.open_connection(*small.address)
        writer.write(data[:-3])
        await writer.drain()
        while not small.root.under_way:
            await asyncio.sleep(0)
        writer.write(data[-3:])
        reply = await read_reply(reader)
        writer.close()
    assert reply.endswith(b"\r\n\r\nabcdef") and (dialect.short, dialect.long) == ([], [b"abcdef"])


async def test_replies_come_in_the_order_of_requests():
    """Requests that were sent together are answered in turn, whichever way each goes."""
    dialect = Hot()
    async with api(dialect) as small:
        reader, writer = await asyncio.open_connection(*small.address)
        writer.write(post(b"wait") + post(b"long") + post(b"last"))
        while not dialect.replies:
            await asyncio.sleep(0)
        assert not dialect.long
        dialect.replies[0](200, [(b"content-type", JSON)], b"first")
        bodies = [(await read_reply(reader)).rpartition(b"\r\n\r\n")[2] for _ in range(3)]
        writer.write(post(b"again"))
        bodies.append((await read_reply(reader)).rpartition(b"\r\n\r\n")[2])
        writer.close()
    assert bodies == [b"first", b"long", b"last", b"again"] and dialect.short == [b"wait", b"again"]


async def test_a_client_that_leaves_ends_the_call():
    """Nobody computes for a client that is gone; the log says that it left."""
    dialect, results = Hot(), []
    async with api(dialect) as small:
        small.root.watch(results.append)
        _, writer = await asyncio.open_connection(*small.address)
        writer.write(post(b"wait"))
        while not dialect.replies:
            await asyncio.sleep(0)
        writer.close()
        while not results:
            await asyncio.sleep(0)
        dialect.replies[0](200, [], b"late")
    assert (dialect.cancelled, results[0].status, small.root.under_way) == (1, 499, 0)


class Impatient(Connection):
    """Looks soon whether its client still reads; `looks` counts how often that was the case."""

    looks = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.timeout_keep_alive = 0.05

    def _has_reply_progress(self):
        taken = super()._has_reply_progress()
        type(self).looks += taken
        return taken


@pytest.mark.parametrize("has_fast_path", [True, False])
@pytest.mark.parametrize("more", [(), (b"Connection: close",)])
async def test_who_reads_slowly_gets_the_whole_reply(has_fast_path, more):
    """A long reply may take longer than a connection may idle, as long as some of it is taken."""
    dialect, loop = Hot(), asyncio.get_running_loop()
    async with api(dialect, has_fast_path=has_fast_path, connection=Impatient) as small:
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, small.address)
            await loop.sock_sendall(client, post(b"much", *more))
            taken, looks = 0, Impatient.looks
            while taken < len(MUCH):
                if taken % STEP == 0 and taken < 3 * STEP:  # it reads no further until it was looked at
                    while Impatient.looks == looks:
                        await asyncio.sleep(0)
                    looks = Impatient.looks
                piece = await loop.sock_recv(client, STEP - taken % STEP)
                assert piece
                taken += len(piece)


@pytest.mark.parametrize("has_fast_path", [True, False])
@pytest.mark.parametrize("more", [(), (b"Connection: close",)])
async def test_who_reads_nothing_is_left(has_fast_path, more):
    """A client that takes nothing of its reply keeps it in memory no longer than a connection may idle."""
    dialect = Hot()
    async with api(dialect, has_fast_path=has_fast_path, connection=Impatient) as small:
        with socket.create_connection(small.address) as client:
            client.sendall(post(b"much", *more))
            connections = small.listener._server.server_state.connections
            while not dialect.short and not dialect.long:
                await asyncio.sleep(0)
            while connections:
                await asyncio.sleep(0)


async def test_our_own_fault_is_hidden():
    """What the fast handler of an operation raises is told as any other failure of ours."""
    dialect = Hot()
    async with api(dialect) as small:
        (reply,) = await talk_kept(small, post(b"raises"), 1)
    assert reply.startswith(b"HTTP/1.1 500 ") and b"secret" not in reply and b"r1" in reply


async def test_it_is_told_as_the_others_are():
    """Route, status, sizes, project and key of a request on the fast path are those of the normal way."""
    fields = {}
    for has_fast_path in (True, False):
        dialect = Hot()
        async with api(dialect, has_fast_path=has_fast_path) as small:
            served = fields[has_fast_path] = []
            small.root.watch(served.append)
            await talk_kept(small, post(b"abc"), 1)
            await talk_kept(small, post(b"bad"), 1)
            while len(served) < 2:
                await asyncio.sleep(0)
            for each in served:
                assert each.seconds > 0
                each.seconds = each.started = 0.0
    assert fields[True] == fields[False]


async def test_requests_under_way_may_end_when_the_server_stops():
    """A request on the fast path is answered while the server drains, and its connection closed behind it."""
    dialect = Hot()
    async with api(dialect) as small:
        reader, writer = await asyncio.open_connection(*small.address)
        writer.write(post(b"wait"))
        while not dialect.replies:
            await asyncio.sleep(0)
        closing = asyncio.create_task(small.listener.close())
        while dialect.replies[0].keep_alive:
            await asyncio.sleep(0)
        dialect.replies[0](200, [], b"done")
        whole = await reader.read()
        writer.close()
        await closing
    assert whole.endswith(b"\r\n\r\ndone") and b"connection: close\r\n" in whole


async def test_a_stop_without_time_answers_what_is_under_way():
    """A request on the fast path whose time is over hears that the server is stopping."""
    dialect = Hot()
    async with api(dialect) as small:
        reader, writer = await asyncio.open_connection(*small.address)
        writer.write(post(b"wait"))
        while not dialect.replies:
            await asyncio.sleep(0)
        await small.listener.close()
        whole = await reader.read()
        writer.close()
    assert b"the server is stopping" in whole and dialect.cancelled == 1


async def test_deliveries_are_looked_at_first():
    """While somebody waits to hear of a reply, requests go the way on which that is looked at."""
    dialect = Hot()
    async with api(dialect) as small:
        small.root.deliveries._open.add(_Pending())
        await talk_kept(small, post(b"a"), 1)
        small.root.deliveries._open.clear()
        await talk_kept(small, post(b"b"), 1)
    assert (dialect.short, dialect.long) == ([b"b"], [b"a"])


class _Pending:
    async def check(self) -> None:
        """It is still on its way."""


async def test_a_header_that_cannot_be_sent():
    """A reply with a line end in a header is our fault, and never written."""
    dialect = Hot()
    async with api(dialect) as small:
        reader, writer = await asyncio.open_connection(*small.address)
        writer.write(post(b"wait"))
        while not dialect.replies:
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="cannot be sent"):
            dialect.replies[0](200, [(b"x-a", b"a\r\nx-b: b")], b"")
        dialect.replies[0].refuse(Unavailable("not now"))
        assert b"x-b" not in await read_reply(reader)
        writer.close()
