"""From a request to exactly one reply, over a real socket."""

import asyncio
import json
import logging

import httpx2
import pytest
from small_api import HeldKeys, small_api

from batchmill.server import access_log
from batchmill.types import Caller, Scope

READER = Caller("one", Scope.READ, "k1")


async def ask(small, method, path, **options):
    async with httpx2.AsyncClient(base_url=small.url) as client:
        return await client.request(method, path, **options)


async def test_a_request_and_its_reply():
    """A body becomes its struct, and the reply has an id and the headers that protect whoever shows it."""
    async with small_api() as small:
        reply = await ask(small, "POST", "/small/things", json={"name": "a"})
    assert (reply.status_code, reply.json()) == (200, {"name": "a", "count": 1, "inner": {"depth": 0}, "more": None})
    assert reply.headers["x-request-id"].startswith("req_")
    assert reply.headers["x-content-type-options"] == "nosniff" and reply.headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in reply.headers and "server" not in reply.headers


@pytest.mark.parametrize(("sent", "is_kept"), [("abc-1", True), ("a b", False), ("x" * 200, False)])
async def test_a_callers_request_id(sent, is_kept):
    """A sane id of the caller's is kept, another replaced."""
    async with small_api() as small:
        reply = await ask(small, "GET", "/small/open", headers={"x-request-id": sent})
    assert (reply.headers["x-request-id"] == sent) is is_kept


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "owner"),
    [
        ("GET", "/small/nothing", 404, "unknown_url", "small"),
        ("DELETE", "/small/things", 405, "method_not_allowed", "small"),
        ("GET", "/small/things/a/b", 404, "unknown_url", "small"),
        ("GET", "/small/things/a/cancel", 405, "method_not_allowed", "small"),
        ("GET", "/", 404, "unknown_url", "other"),
        ("GET", "/elsewhere", 404, "unknown_url", "other"),
        ("OPTIONS", "/small/things", 405, "method_not_allowed", "small"),
        ("GET", "/small/things/..%2f..%2fetc", 404, "unknown_url", "small"),
        ("GET", "/small/things/" + "a" * 10_000, 404, "unknown_url", "small"),
        ("GET", "/small/things?x=1", 400, "unknown_parameter", "small"),
        ("GET", "/small/things?limit=1&limit=2", 400, "repeated_parameter", "small"),
        ("GET", "/other/things?x=1", 400, "unknown_parameter", "other"),
    ],
)
async def test_refusals_in_the_words_of_their_dialect(method, path, status, code, owner):
    """What is wrong with a request is said by the dialect whose path it is."""
    async with small_api() as small:
        reply = await ask(small, method, path)
    assert (reply.status_code, reply.json()["code"], reply.json()["by"]) == (status, code, owner)
    assert ("allow" in reply.headers) is (status == 405)


async def test_names_in_paths_are_decoded_once():
    """A name keeps what was encoded twice, and may hold slashes only where its path takes them."""
    async with small_api() as small:
        assert (await ask(small, "GET", "/small/things/a%252Fb")).json() == {"thing_id": "a%2Fb"}
        assert (await ask(small, "GET", "/small/models/org%2Fm")).json() == {"model": "org/m"}


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"content": b"a=1", "headers": {"content-type": "application/x-www-form-urlencoded"}}, 415, None),
        ({"content": b'{"name":"a"}', "headers": {"content-type": "text/plain"}}, 415, None),
        ({"content": b'{"name":"a"}'}, 415, "unsupported_media_type"),
        ({"content": b'{"name":"a"}', "headers": {"content-type": "application/json; charset=utf-8"}}, 200, None),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "invalid_json"),
        ({"json": {"name": "a", "nmae": 1}}, 400, "unknown_parameter"),
        ({"json": {"name": "a" * 2000}}, 413, "request_too_large"),
        ({"content": b"x", "headers": {"content-type": "application/json", "content-encoding": "gzip"}}, 415, None),
    ],
)
async def test_bodies(options, status, code):
    """A body must be JSON, say so, fit its struct and be no longer than is taken."""
    async with small_api() as small:
        reply = await ask(small, "POST", "/small/things", **options)
    assert reply.status_code == status
    assert code is None or reply.json()["code"] == code


async def test_a_body_is_counted_as_it_arrives():
    """A body without a length, or with one that lies, is measured by what arrives."""

    async def pieces():
        for _ in range(300):
            yield b"x" * 100

    async with small_api() as small:
        json_type = {"content-type": "application/json"}
        assert (await ask(small, "POST", "/small/things", content=pieces(), headers=json_type)).status_code == 413
        octets = {"content-type": "application/octet-stream"}
        assert (await ask(small, "POST", "/small/upload", content=pieces(), headers=octets)).status_code == 413
        reply = await ask(small, "POST", "/small/upload", content=b"x" * 10_000, headers=octets)
    assert reply.json() == {"bytes": 10_000}


async def test_no_body_where_none_belongs():
    """An operation without a body refuses one, but for the empty ones that clients send."""
    async with small_api() as small:
        path = "/small/things/a/cancel"
        for empty in (b"", b"{}", b" \n"):
            assert (await ask(small, "POST", path, content=empty)).status_code == 200
        assert (await ask(small, "POST", path, content=b"abc")).json()["code"] == "unexpected_body"


async def test_an_error_of_ours_tells_nothing(caplog):
    """What nobody expected becomes an error of the server that names the request, and no stack, path or SQL."""
    async with small_api() as small:
        reply = await ask(small, "GET", "/small/fail")
    assert (reply.status_code, reply.json()["code"]) == (500, "internal_error")
    assert "passwd" not in reply.text and reply.headers["x-request-id"] in reply.text
    assert "RuntimeError" in caplog.text


async def test_a_reply_that_breaks_off_is_seen_as_one(caplog):
    """An error in the middle of a reply closes the connection: nobody takes the half for the whole."""
    async with small_api() as small:
        with pytest.raises(httpx2.RemoteProtocolError):
            await ask(small, "GET", "/small/break")


async def test_keys_and_scopes():
    """Once keys exist, each request but the open ones needs one, with the scope of the operation."""
    async with small_api(keys=HeldKeys(good=READER)) as small:
        key = {"authorization": "Bearer good"}
        results = [
            (await ask(small, "GET", "/small/open")).status_code,
            (await ask(small, "GET", "/small/things")).status_code,
            (await ask(small, "GET", "/small/things", headers={"authorization": "Bearer bad"})).status_code,
            (await ask(small, "GET", "/small/things", headers=key)).status_code,
            (await ask(small, "POST", "/small/things", headers=key, json={"name": "a"})).status_code,
            (await ask(small, "GET", "/small/nothing/at/all", headers=key)).status_code,
        ]
    assert results == [200, 401, 401, 200, 403, 404]


async def test_a_rate_says_when_to_come_again():
    """More requests than a minute may have are told the seconds to wait, before anything is done."""
    async with small_api(requests_per_minute=2) as small:
        replies = [await ask(small, "GET", "/small/things") for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert 0 < int(replies[2].headers["retry-after"]) <= 31


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"host": "evil.test"}, 400), ({"origin": "http://evil.test"}, 403), ({"host": "my.test"}, 200)],
)
async def test_foreign_names_and_pages(headers, status):
    """A rebound name and a page of another site are refused."""
    async with small_api() as small:
        assert (await ask(small, "POST", "/small/things", json={"name": "a"}, headers=headers)).status_code == status


async def test_a_client_that_leaves_is_noticed():
    """An operation can wait for its client to leave; the log has 499 for it."""
    async with small_api() as small:
        seen = asyncio.Queue()
        small.root.watch(seen.put_nowait)
        reader, writer = await asyncio.open_connection(*small.address)
        writer.write(b"GET /small/gone HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await small.dialect.reached.wait()
        writer.close()
        await small.dialect.gone.wait()
        await writer.wait_closed()
        assert (await seen.get()).route == "/small/gone"


async def test_a_line_for_each_request(capsys, caplog, monkeypatch):
    """The log has who asked for what and what came of it, and neither values nor keys."""
    caplog.set_level(logging.INFO, "batchmill.access")
    lines = access_log.RequestLogHandler()
    monkeypatch.setattr(access_log.access, "handlers", [lines])
    async with small_api(keys=HeldKeys(good=READER)) as small:
        await ask(small, "GET", "/small/things?after=private", headers={"authorization": "Bearer good"})
    lines.flush()
    output = json.loads(capsys.readouterr().err)
    assert {name: output[name] for name in ("method", "route", "status", "project", "key", "bytes_in")} == {
        "method": "GET", "route": "/small/things", "status": 200, "project": "one", "key": "k1", "bytes_in": 0,
    }  # fmt: skip
    assert "private" not in json.dumps(output) and "good" not in json.dumps(output)


async def test_requests_that_take_too_long_at_the_end(caplog):
    """When the server stops, a request that does not end in time is told to come again."""
    async with small_api() as small:
        asking = asyncio.create_task(ask(small, "POST", "/small/wait", json={"name": "a"}))
        await small.dialect.reached.wait()
        await small.listener.close()
        reply = await asking
    assert (reply.status_code, reply.json()["code"], reply.headers["connection"]) == (500, "unavailable", "close")
    assert "Traceback" not in caplog.text


async def test_stopping_at_once_waits_for_nobody():
    """When the server stops at once, connections are cut."""
    async with small_api() as small:
        asking = asyncio.create_task(ask(small, "POST", "/small/wait", json={"name": "a"}))
        await small.dialect.reached.wait()
        await small.listener.close(at_once=True)
        with pytest.raises(httpx2.HTTPError):
            await asking
