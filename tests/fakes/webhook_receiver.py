"""Somebody who is told by webhook: an HTTP server in this process that takes what comes, or what a test says."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass

from aiohttp import web


@dataclass(frozen=True)
class Delivery:
    """One POST as it came in."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


class WebhookReceiver:
    """Use it as an async context manager. `answers[path]` is used up POST by POST; after it each one is taken.

    An answer is a status, or a (status, headers). POSTs to a path of `held` wait until `release` is set.
    """

    def __init__(self) -> None:
        self.answers: dict[str, list[int | tuple[int, dict[str, str]]]] = defaultdict(list)
        self.held: set[str] = set()
        self.release = asyncio.Event()
        self.deliveries: list[Delivery] = []
        self._news = asyncio.Condition()

    async def __aenter__(self) -> WebhookReceiver:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._take)
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port: int = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release.set()
        await self._runner.cleanup()

    def url(self, path: str = "/hook") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def at(self, path: str) -> list[Delivery]:
        return [each for each in self.deliveries if each.path == path]

    async def wait_for(self, n: int, path: str = "/hook") -> list[Delivery]:
        """The first `n` POSTs to a path."""
        async with self._news:
            await self._news.wait_for(lambda: len(self.at(path)) >= n)
        return self.at(path)[:n]

    async def _take(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        delivery = Delivery(request.path, headers, await request.read())
        async with self._news:
            self.deliveries.append(delivery)
            self._news.notify_all()
        if request.path in self.held:
            await self.release.wait()
        answer = self.answers[request.path].pop(0) if self.answers[request.path] else 204
        status, result = answer if isinstance(answer, tuple) else (answer, {})
        return web.Response(status=status, headers=result)
