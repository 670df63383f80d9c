"""What the fakes of batch APIs share: a server on loopback whose next calls can go wrong, and jobs that a test ends."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

HANG = "hang"  # nothing comes before the fake lets go
PATIENCE_S = 20.0  # for calls that a test waits for
RESET = "reset"  # the connection is aborted without a byte, once the call has had its effect


@dataclass(frozen=True)
class Wrong:
    """What happens to a call instead of its answer. `keeps` False: it has no effect either."""

    status: int = 500
    body: Any = field(default_factory=lambda: {"error": {"type": "api_error", "message": "broken"}})
    headers: dict[str, str] = field(default_factory=dict)
    act: str = ""
    keeps: bool = False


LOST_REPLY = Wrong(act=RESET, keeps=True)


@dataclass
class FakeJob:
    """A batch at the fake: the rows it was given, and how far it is."""

    id: str
    name: str
    rows: list[dict[str, Any]]
    state: str
    created: float = 0.0
    outcomes: dict[int, str] = field(default_factory=dict)  # row of the upload -> ok, error or undone
    details: dict[str, Any] = field(default_factory=dict)


def answer_to(texts: list[str]) -> str:
    """The text of a reply to these turns of a user: an echo of the last one.

    To "late N" it is JSON, once the row was asked for N % 4 + 1 times.
    """
    first, *again = texts
    if not first.startswith("late "):
        return f"echo {texts[-1]}"
    number, times = int(first.removeprefix("late ")), sum("does not fit the JSON Schema" in text for text in again)
    return json.dumps({"n": number}) if times >= number % 4 else f"not {number} yet"


class ProviderFake:
    """Use it as an async context manager. `fail` makes calls go wrong; with `fates` jobs end by themselves.

    `fates` are used up job by job, each the outcomes of `finish`; a job without one ends well. A job ends with the
    second call that comes after its making.
    """

    key = "a-key-of-the-tests"  # that it is called with

    def __init__(self) -> None:
        self.jobs: dict[str, FakeJob] = {}
        self.calls: list[tuple[str, str, dict[str, str]]] = []  # method, path, headers
        self.fates: list[dict[int, str]] | None = None
        self.let_go = asyncio.Event()
        self._called = asyncio.Event()  # set once a call is done
        self._ages: Counter[str] = Counter()
        self._wrong: list[tuple[str, str, Wrong]] = []

    async def __aenter__(self) -> ProviderFake:
        app = web.Application(client_max_size=64 * 1024 * 1024, middlewares=[self._middle])
        self.add_routes(app)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add_routes(self, app: web.Application) -> None:
        raise AssertionError("override add_routes")

    def fail(self, method: str, path: str, wrong: Wrong) -> None:
        """The next call of this method whose path (or target) contains `path` goes wrong."""
        self._wrong.append((method, path, wrong))

    def finish(self, outcomes: dict[int, str] | None = None, *, expired: bool = False) -> None:
        """Every running job ends: rows of its upload by index as `outcomes` says, the others as ok."""
        for job in self.jobs.values():
            if not self.is_ended(job):
                job.outcomes = {index: (outcomes or {}).get(index, "ok") for index in range(len(job.rows))}
                self.end(job, expired=expired)

    @property
    def running(self) -> list[str]:
        return [job.id for job in self.jobs.values() if not self.is_ended(job)]

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until calls have made it so."""
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():
                self._called.clear()
                await self._called.wait()

    def _age(self) -> None:
        """Time passes, with every call."""
        for job in self.jobs.values():
            self._ages[job.id] += 1
            if self._ages[job.id] == 2 and not self.is_ended(job):
                fate = self.fates.pop(0) if self.fates else {}
                job.outcomes = {index: fate.get(index, "ok") for index in range(len(job.rows))}
                self.end(job, expired="undone" in fate.values())

    def is_ended(self, job: FakeJob) -> bool:
        raise AssertionError("override is_ended")

    def end(self, job: FakeJob, *, expired: bool) -> None:
        raise AssertionError("override end")

    @web.middleware
    async def _middle(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await self._answer(request, handler)
        finally:
            self._called.set()

    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        target = request.headers.get("X-Amz-Target", "")
        self.calls.append((request.method, request.path_qs, dict(request.headers)))
        if self.fates is not None:
            self._age()
        wrong = self._take(request.method, f"{request.path_qs} {target}")
        if wrong is None:
            return await handler(request)
        if wrong.keeps:
            await handler(request)
        else:
            await request.read()
        if wrong.act == HANG:
            await self.let_go.wait()
        if wrong.act == RESET:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(0)
        data = wrong.body if isinstance(wrong.body, bytes) else json.dumps(wrong.body).encode()
        return web.Response(
            status=wrong.status, body=data, headers={"Content-Type": "application/json"} | wrong.headers
        )

    def _take(self, method: str, place: str) -> Wrong | None:
        for index, (of_method, part, wrong) in enumerate(self._wrong):
            if of_method == method and part in place:
                del self._wrong[index]
                return wrong
        return None


def refused(status: int, kind: str, message: str) -> web.Response:
    """An error as most services write it."""
    body = {"type": "error", "error": {"type": kind, "message": message}}
    return web.json_response(body, status=status)
