"""A dialect of a few operations, and an HTTP root of it that listens on a free port of loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from msgspec import Struct
from starlette.responses import Response

from batchmill.children.programs import Programs
from batchmill.config import ServerEntry
from batchmill.engines.clock import SystemClock
from batchmill.errors import BatchmillError, InvalidInput, RateLimited, TooLarge, Unauthenticated, UnknownName
from batchmill.owner_term import ENDLESS, Term
from batchmill.server.admission_control import Admission
from batchmill.server.auth import ANYBODY, Gate, Hosts
from batchmill.server.connection import Connection, Listener, bind
from batchmill.server.fast_path import FastPath
from batchmill.server.http import HttpRoot
from batchmill.server.operations import Call, Content, Operation, json_reply
from batchmill.types import Caller, Scope

KEY = "bm_0123456789abcdef_" + "x" * 43
READER = Caller("one", Scope.READ, "0123456789abcdef")


class Inner(Struct, frozen=True, forbid_unknown_fields=True):
    depth: int = 0


class Body(Struct, forbid_unknown_fields=True):
    name: str
    count: int = 1
    inner: Inner = Inner()
    more: Any = None


class Query(Struct, forbid_unknown_fields=True):
    limit: int = 20
    after: str | None = None
    tags: list[str] = []
    most: int | None = None


class HeldKeys:
    """Keys of a test: a token and whom it stands for."""

    def __init__(self, **callers: Caller) -> None:
        self.callers = callers

    async def any_exist(self) -> bool:
        return bool(self.callers)

    async def authenticate(self, token: str) -> Caller:
        if token not in self.callers:
            raise Unauthenticated("the API key is not valid")
        return self.callers[token]

    def cached_caller(self, token: str | None) -> Caller | None:
        return self.callers.get(token or "") if self.callers else ANYBODY

    def valid_caller(self, key_id: str) -> Caller | None:
        return next((caller for caller in self.callers.values() if caller.key == key_id), None)


class SmallDialect:
    """`name` prefixes its paths; its envelope says which dialect spoke."""

    def __init__(self, name: str = "small") -> None:
        self.name = name
        self.delivered: list[str] = []
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        self.gone = asyncio.Event()

    def operations(self) -> list[Operation]:
        at, read = f"/{self.name}", Scope.READ
        stream = Content("application/octet-stream")
        return [
            Operation("list", "GET", f"{at}/things", "List", read, self.show, query=Query, reply=Query),
            Operation("create", "POST", f"{at}/things", "Create", Scope.SUBMIT, self.show, body=Body, reply=Body),
            Operation("get", "GET", f"{at}/things/{{thing_id}}", "Get", read, self.show_path),
            Operation("cancel", "POST", f"{at}/things/{{thing_id}}/cancel", "Cancel", read, self.show_path),
            Operation("model", "GET", f"{at}/models/{{model:path}}", "Get a model", read, self.show_path),
            Operation("any", "POST", f"{at}/{{rest:path}}", "Anything else", read, self.show_path),
            Operation("upload", "POST", f"{at}/upload", "Up", read, self.upload, body=stream, body_bytes_max=10_000),
            Operation("fail", "GET", f"{at}/fail", "Fail", read, self.fail),
            Operation("break", "GET", f"{at}/break", "Break off", read, self.break_off),
            Operation("wait", "POST", f"{at}/wait", "Wait", read, self.wait, body=Body),
            Operation("gone", "GET", f"{at}/gone", "Wait for the client to leave", read, self.until_gone),
            Operation("open", "GET", f"{at}/open", "Open", None, self.show),
        ]  # fmt: skip

    def refusal(self, error: BatchmillError) -> Response:
        status = {UnknownName: 404, TooLarge: 413, RateLimited: 429, Unauthenticated: 401}.get(type(error))
        if status is None:
            status = 400 if isinstance(error, InvalidInput) else 403 if error.blame == "caller" else 500
        return json_reply({"by": self.name, "code": error.code, "message": error.message}, status)

    def error_schema(self) -> dict[str, Any]:
        return {"type": "object"}

    async def show(self, call: Call) -> Response:
        return json_reply(call.body if call.body is not None else call.query)

    async def show_path(self, call: Call) -> Response:
        return json_reply(call.path)

    async def upload(self, call: Call) -> Response:
        size = 0
        async for piece in call.request.stream():
            size += len(piece)
        return json_reply({"bytes": size})

    async def fail(self, call: Call) -> Response:
        raise RuntimeError("secret /etc/passwd SELECT")

    async def break_off(self, call: Call) -> Response:
        return _Broken()

    async def wait(self, call: Call) -> Response:
        async def note() -> None:
            self.delivered.append(call.body.name)

        call.on_delivered(note)
        self.reached.set()
        await self.go_on.wait()
        return json_reply(call.body)

    async def until_gone(self, call: Call) -> Response:
        self.reached.set()
        await call.wait_for_disconnect()
        self.gone.set()
        return Response()


class _Broken(Response):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("in the middle")


class Small:
    """A root that listens."""

    def __init__(self, root: HttpRoot, dialect: SmallDialect, listener: Listener, address: tuple[str, int]) -> None:
        self.root, self.dialect, self.listener, self.address = root, dialect, listener, address
        self.url = f"http://{address[0]}:{address[1]}"

    async def talk(self, data: bytes) -> bytes:
        """Send bytes as they are, and read until the server closes the connection."""
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            writer.write(data)
            return await reader.read()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def free_admission(body_bytes_max: int = 1000, files: int = 10_000, **settings: Any) -> Admission:
    entry = ServerEntry(body_bytes_max=body_bytes_max, **settings)
    return Admission(entry, files=files, clock=asyncio.get_running_loop().time)


@contextlib.asynccontextmanager
async def small_api(
    *,
    keys: HeldKeys | None = None,
    requests_per_minute: int | None = None,
    connection: type[Connection] = Connection,
    body_bytes_max: int = 1000,
    dialect: SmallDialect | None = None,
    has_fast_path: bool = True,
    admission: Admission | None = None,
    term: Term = ENDLESS,
) -> AsyncIterator[Small]:
    sock = bind("127.0.0.1", 0)
    small, other = dialect or SmallDialect(), SmallDialect("other")
    clock, admission = SystemClock(), admission or free_admission(body_bytes_max)
    programs = Programs(clock)
    root = HttpRoot(
        [small, other],
        fallback=other,
        gate=Gate(keys or HeldKeys(), clock, requests_per_minute, admission.proxies, term=term),
        hosts=Hosts("127.0.0.1", ["my.test"]),
        clock=clock,
        admission=admission,
        programs=programs,
    )
    listener = Listener(
        root, sock, root=root, drain_s=1, connection=connection, fast_path=FastPath(root) if has_fast_path else None
    )
    await listener.open()
    address = sock.getsockname()[:2]
    try:
        yield Small(root, small, listener, address)
    finally:
        await listener.close(at_once=True)
        await root.close()
        await programs.close()
