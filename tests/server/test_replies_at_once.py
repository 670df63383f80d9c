"""Replies that are whole in memory: one write, around ASGI."""

from __future__ import annotations

import re

import pytest
from server.small_api import HeldKeys, small_api

from batchmill.engines.clock import SystemClock
from batchmill.server.connection import Connection
from batchmill.server.reply_heads import HEADS_MAX, LONG_BYTES, ReplyHeads

END = b"Host: localhost\r\nX-Request-Id: r1\r\nConnection: close\r\n\r\n"
KEPT = b"Host: localhost\r\nX-Request-Id: r1\r\n\r\n"
BODY = b'{"name":"a"}'


def post(body: bytes, *more: bytes, path: bytes = b"/small/things") -> bytes:
    lines = b"".join(each + b"\r\n" for each in (b"Content-Type: application/json", *more))
    return b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n%b%b" % (path, lines, len(body), END, body)


class Counting(Connection):
    """Counts the replies that are sent at once."""

    sent: list[bytes]

    def send_at_once(self, cycle, data):
        self.sent.append(data)
        super().send_at_once(cycle, data)


async def talk(data: bytes, *, has_fast_path: bool = True) -> tuple[bytes, int]:
    """(what the server answers, how many replies of it were sent at once)."""
    connection = type("Fresh", (Counting,), {"sent": []})
    async with small_api(has_fast_path=has_fast_path, connection=connection, keys=HeldKeys()) as small:
        answer = await small.talk(data)
    return re.sub(rb"date: [^\r]+", b"date: now", answer), len(connection.sent)


@pytest.mark.parametrize(
    ("data", "at_once"),
    [
        (b"GET /small/things HTTP/1.1\r\n" + END, 1),
        (b"GET /small/things HTTP/1.0\r\n" + KEPT, 1),
        (b"GET /small/things?limit=x HTTP/1.1\r\n" + END, 1),
        (b"PUT /small/things HTTP/1.1\r\n" + END, 1),
        (b"GET /nothing HTTP/1.1\r\n" + END, 1),
        (b"GET /small/fail HTTP/1.1\r\n" + END, 1),
        (b"GET /small/things HTTP/1.1\r\n" + KEPT + b"GET /small/things/1 HTTP/1.1\r\n" + END, 2),
        (post(BODY), 1),
        (post(BODY, b"Expect: 100-continue"), 1),
        (post(b"{" * 2000), 1),
        (post(b"{" * 2000)[:-1000], 0),  # refused while its body arrives
        (b"HEAD /small/things HTTP/1.1\r\n" + END, 0),
        (b"GET /small/break HTTP/1.1\r\n" + END, 0),
    ],
)  # fmt: skip
async def test_the_same_bytes_as_through_asgi(data, at_once):
    """A reply that is sent at once and one that goes through ASGI differ in nothing, errors included."""
    answer, count = await talk(data)
    through_asgi, none = await talk(data, has_fast_path=False)
    assert (answer, none) == (through_asgi, 0) and answer
    assert count == at_once


async def test_who_tracks_a_reply_learns_that_it_is_delivered():
    """A reply with a callback that is sent at once counts as delivered once its client has it."""
    async with small_api(keys=HeldKeys()) as small:
        small.dialect.go_on.set()
        assert (await small.talk(post(BODY, path=b"/small/wait"))).endswith(b"}")
        for _ in range(200):
            await small.root.deliveries.check()
            if small.root.deliveries.is_idle and small.dialect.delivered:
                break
    assert small.dialect.delivered == ["a"]


def test_heads_are_remembered_and_checked():
    """Heads of the same headers are made once, as many as HEADS_MAX; a header that would split a reply is refused."""
    heads = ReplyHeads(SystemClock())
    for number in range(HEADS_MAX + 1):
        (reply,) = heads.render(200, [(b"x-n", b"%d" % number), (b"content-length", b"9")], b"ab", "r1", is_last=False)
        assert reply.startswith(b"HTTP/1.1 200 OK\r\nx-n: %d\r\ncontent-length: 2\r\n" % number)
        assert reply.endswith(b"x-request-id: r1\r\n\r\nab")
    head, body = heads.render(200, [], b"x" * LONG_BYTES, "r1", is_last=True)
    assert head.endswith(b"connection: close\r\n\r\n") and len(body) == LONG_BYTES
    with pytest.raises(ValueError, match="cannot be sent"):
        heads.render(200, [(b"x", b"a\r\nb: c")], b"", "r1", is_last=False)
