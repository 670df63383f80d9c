"""What is judged before a body is read, over a real socket: keys, names, lengths, places and memory."""

import asyncio
import contextlib

import httpx2
import pytest
from small_api import Body, HeldKeys, SmallDialect, free_admission, small_api

from batchmill.errors import UnknownName
from batchmill.server.admission_control import Pace, Proxies, RequestLimiter
from batchmill.server.auth import base_of
from batchmill.server.operations import Operation, json_reply
from batchmill.types import Caller, Scope

HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
KEY = b"Authorization: good\r\n"
KEYS = HeldKeys(good=Caller("one", Scope.SUBMIT, "k1"), other=Caller("two", Scope.SUBMIT, "k2"))


class Named(SmallDialect):
    """Has a model whose name is judged before the body, and something that is always answered."""

    def operations(self):
        at, read = f"/{self.name}", Scope.READ
        return [
            *super().operations(),
            Operation(
                "call", "PUT", f"{at}/call/{{model}}", "Call", read, self.show, body=Body,
                check_access=self.check_access,
            ),
            Operation("well", "GET", f"{at}/well", "Well", None, self.show, is_vital=True),
        ]  # fmt: skip

    def check_access(self, caller, path):
        if path["model"] != "mine":
            raise UnknownName(f"there is no model {path['model']}", code="model_not_found")


class Linking(SmallDialect):
    """Says how links to it begin."""

    def operations(self):
        return [Operation("link", "GET", "/link", "Link", None, self.link)]

    async def link(self, call):
        return json_reply(base_of(call.request))


async def test_links_begin_as_a_trusted_proxy_says():
    """X-Forwarded-Proto is believed of a proxy that the configuration names, where it is a scheme of ours."""
    for trusted, case, scheme in (
        ([], "https", "http"),
        (["127.0.0.1"], "https", "https"),
        (["127.0.0.1"], "HTTP", "http"),
        (["127.0.0.1"], "javascript", "http"),
        (["127.0.0.1"], "", "http"),
    ):
        held = free_admission(1000)
        held.proxies = Proxies(trusted)
        async with (
            small_api(dialect=Linking(), admission=held) as small,
            httpx2.AsyncClient(base_url=small.url) as http,
        ):
            reply = await http.get("/link", headers={"x-forwarded-proto": case, "host": "my.test"})
        assert reply.json() == f"{scheme}://my.test"


async def head_only(small, line: bytes, *headers: bytes) -> bytes:
    """The reply to a request of whose body nothing comes; the server ends it."""
    reader, writer = await asyncio.open_connection(*small.address)
    writer.write(line + b" HTTP/1.1\r\n" + HOST + b"".join(headers) + b"\r\n")
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [
        (b"GET /small/open", (b"Content-Length: 100\r\n",), 400),
        (b"GET /small/well", (b"Content-Length: 65\r\n",), 400),
        (b"OPTIONS /small/open", (b"Content-Length: 100\r\n",), 405),
        (b"HEAD /small/open", (b"Content-Length: 100\r\n",), 400),
        (b"GET /small/nothing", (b"Content-Length: 100\r\n",), 404),
        (b"GET /small/nothing", (b"Transfer-Encoding: chunked\r\n",), 404),
        (b"POST /small/things", (JSON, b"Content-Length: 99999999\r\n"), 401),
        (b"POST /small/things", (JSON, b"Transfer-Encoding: chunked\r\n"), 401),
        (b"POST /small/upload", (b"Content-Length: 9999\r\n",), 401),
        (b"POST /small/things", (KEY, JSON, b"Content-Length: 99999999\r\n"), 413),
        (b"PUT /small/call/another", (KEY, JSON, b"Content-Length: 99999\r\n"), 404),
    ],
)
async def test_nothing_is_waited_for(line, headers, status):
    """What is wrong with a request is said before its body comes, and the connection is closed."""
    async with small_api(keys=KEYS, dialect=Named()) as small:
        reply = await head_only(small, line, *headers)
    assert reply.startswith(b"HTTP/1.1 %d " % status) and b"connection: close\r\n" in reply


@pytest.mark.parametrize("head", [b"POST /small/things", b"POST /small/upload"])
async def test_a_body_that_never_ends(head):
    """A body that comes more slowly than the least rate is left, whatever it is for, with the setting's name."""
    media = b"Content-Type: application/%b\r\n" % (b"octet-stream" if b"upload" in head else b"json")
    async with small_api() as small:
        small.root.admission.pace = Pace(0.05, 1000, 0.05)
        reply = await head_only(small, head, media, b"Content-Length: 50\r\n")
    assert reply.startswith(b"HTTP/1.1 408 ") and b"server.body_" in reply


async def test_memory_that_is_taken():
    """Bodies beyond the memory of a project are told to come again; once the others are answered there is room."""
    admission = free_admission(1000, body_memory_bytes_max=2000)
    async with small_api(keys=KEYS, admission=admission) as small, httpx2.AsyncClient(base_url=small.url) as client:
        body, keys = {"name": "a" * 900}, {"authorization": "good"}
        waiting = asyncio.ensure_future(client.post("/small/wait", json=body, headers=keys))
        await small.dialect.reached.wait()
        refused = await client.post("/small/things", json=body, headers=keys)
        assert (refused.status_code, refused.json()["code"]) == (503, "body_memory_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await client.post("/small/things", json=body, headers={"authorization": "other"})).status_code == 200
        small.dialect.go_on.set()
        await waiting
        assert (await client.post("/small/things", json=body, headers=keys)).status_code == 200
        while admission.memory.total:
            await asyncio.sleep(0)


async def test_places_that_are_taken():
    """A project with all its places is told to come again, another one is answered, and so is whether all is well."""
    admission = free_admission()
    admission.project_requests = RequestLimiter(1, reserve=1, floor=1)
    admission.anonymous_requests = RequestLimiter(0, 0, 0)
    async with (
        small_api(keys=KEYS, dialect=Named(), admission=admission) as small,
        httpx2.AsyncClient(base_url=small.url) as client,
    ):
        keys = {"authorization": "good"}
        waiting = asyncio.ensure_future(client.post("/small/wait", json={"name": "a"}, headers=keys))
        await small.dialect.reached.wait()
        refused = await client.get("/small/things", headers=keys)
        assert (refused.status_code, refused.json()["code"]) == (503, "too_many_requests")
        assert (await client.get("/small/things", headers={"authorization": "other"})).status_code == 200
        assert (await client.get("/small/open")).status_code == 503
        assert (await client.get("/small/well")).status_code == 200
        small.dialect.go_on.set()
        assert (await waiting).status_code == 200


async def test_a_new_connection_gets_in():
    """However many connections strangers hold, a new one is answered: theirs go for it."""
    admission = free_admission(connections_max=20)
    async with small_api(keys=KEYS, dialect=Named(), admission=admission) as small:
        async with contextlib.AsyncExitStack() as stack:
            for number in range(60):
                reader, writer = await asyncio.open_connection(*small.address)
                stack.callback(writer.close)
                writer.write(b"GET /small/well HTTP/1.1\r\nX" if number % 2 else b"")
            assert b" 200 " in await small.talk(b"GET /small/well HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n")
        assert len(admission.pool) <= 20 and admission.pool.ended >= 40
