"""A remote API in this process that fails in every way a service does, by a seed: each call of a text has its fate."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

FAULTS = (
    *("throttled", "throttled until", "broken", "unavailable", "slow", "hung", "reset", "truncated", "cut"),
    *("page", "empty"),
)
SLOW_S = 0.01


@dataclass(frozen=True)
class Received:
    """One call as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    data: bytes


class FaultyService:
    """Use it as an async context manager. It embeds the member `input` of a call's body, but for its faults.

    A text's first calls may fail, at most `failures_max` of them; then it is answered. Texts that begin with "bad" are
    refused whatever is tried.
    """

    def __init__(self, seed: int, *, share: float = 0.5, failures_max: int = 3, faults: Sequence[str] = FAULTS) -> None:
        self._seed = seed
        self._share = share
        self._failures_max = failures_max
        self._faults = faults
        self._closing = asyncio.Event()
        self._seen: Counter[str] = Counter()
        self.calls: list[Received] = []
        self.fates: Counter[str] = Counter()

    async def __aenter__(self) -> FaultyService:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        await self._runner.cleanup()

    def _fate(self, text: str) -> str:
        number = self._seen[text]
        self._seen[text] += 1
        if text.startswith("bad"):
            return "refused"
        draw = random.Random(f"{self._seed}:{text}:{number}")
        return draw.choice(self._faults) if number < self._failures_max and draw.random() < self._share else "answered"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        self.calls.append(Received(request.method, request.path_qs, dict(request.headers), data))
        text = json.dumps(json.loads(data).get("input")) if data else request.path_qs
        fate = self._fate(text.strip('"'))
        self.fates[fate] += 1
        return await self._act(request, fate, text)

    async def _act(self, request: web.Request, fate: str, text: str) -> web.StreamResponse:
        assert request.transport is not None
        whole = json.dumps(embedding_of(text)).encode()
        match fate:
            case "throttled":
                return web.json_response({"error": {"message": "slow down"}}, status=429)
            case "throttled until":
                return web.json_response({"error": "slow down"}, status=429, headers={"Retry-After": "2"})
            case "broken" | "unavailable":
                return web.json_response({"error": "oops"}, status=500 if fate == "broken" else 503)
            case "refused":
                return web.json_response({"error": {"message": f"no {text}", "code": "bad_thing"}}, status=400)
            case "reset":
                request.transport.abort()
            case "hung":
                await self._closing.wait()
            case "slow":
                await asyncio.sleep(SLOW_S)
            case "truncated":
                return web.Response(body=whole[:-10], content_type="application/json")
            case "page":
                return web.Response(text="<html>please log in</html>", content_type="text/html")
            case "empty":
                return web.Response(content_type="application/json")
            case "cut":
                return await self._cut(request, whole)
        return web.Response(body=whole, content_type="application/json")

    async def _cut(self, request: web.Request, whole: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(whole)), "Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(whole[: len(whole) // 2])
        assert request.transport is not None
        request.transport.close()
        return response


def embedding_of(text: str) -> dict[str, object]:
    """What it answers, in OpenAI's shape."""
    data = [{"object": "embedding", "index": 0, "embedding": [float(len(text)), 0.5]}]
    return {"object": "list", "data": data, "model": "e", "usage": {"prompt_tokens": 5, "total_tokens": 5}}
