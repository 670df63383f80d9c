"""A remote service that tells whoever asks everything it was sent, credentials first, in every way an answer can."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

from aiohttp import web

# What the text of a request may ask for.
WAYS = ("answer", "refuse", "unauthorized", "limited", "break", "redirect", "html", "garbage", "cut", "reset", "packed")


class EchoingService:
    """Use it as an async context manager. Answers `/v1/chat/completions` and anything else alike.

    The last word of the text in a request's last message, or its member `way`, says how.
    """

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []  # headers of each call
        self.failed = 0  # calls that were told to come again

    async def __aenter__(self) -> EchoingService:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        try:
            body = json.loads(data)
        except ValueError:
            body = {}
        self.seen.append(dict(request.headers))
        reply = json.dumps(dict(request.headers)) + f" {request.path_qs} " + data.decode(errors="replace")
        key = request.headers.get("Authorization", "")
        extra = {"x-request-id": key, "X-Echo": key, "Set-Cookie": f"k={quote(key)}"}
        way = body.get("way") or (body.get("messages") or [{"content": "answer"}])[-1]["content"].split()[-1]
        if body.get("stream"):
            return await self._stream(request, reply)
        return self._reply(request, way, reply, extra)

    def _reply(self, request: web.Request, way: str, received: str, extra: dict[str, str]) -> web.Response:
        error = json.dumps({"error": {"message": f"bad key: {received}", "type": "x", "code": "bad"}}).encode()
        match way:
            case "refuse" | "unauthorized":
                status = 400 if way == "refuse" else 401
                return web.Response(status=status, body=error, content_type="application/json", headers=extra)
            case "limited" | "break" if self.failed < 4:
                self.failed += 1
                status = 429 if way == "limited" else 500
                headers = {**extra, "Retry-After": "0"}
                return web.Response(status=status, body=error, content_type="application/json", headers=headers)
            case "redirect":
                return web.Response(status=307, headers={**extra, "Location": f"{request.url}?{quote(received)}"})
            case "html":
                return web.Response(body=f"<html>{received}".encode(), content_type="text/html", headers=extra)
            case "garbage":
                return web.Response(
                    body=f'{{"half": "{received}'.encode(), content_type="application/json", headers=extra
                )
            case "cut":
                return web.Response(body=received.encode(), headers={**extra, "Content-Encoding": "gzip"})
            case "reset":
                assert request.transport is not None
                request.transport.abort()
            case "packed":
                received = " ".join(
                    base64.b64encode(f"{user}:{value}".encode()).decode() + quote(value)
                    for user in ("", "a", "ab") for value in request.headers.values()
                )  # fmt: skip
        message = {"role": "assistant", "content": received}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        whole = {
            "id": extra["x-request-id"], "object": "chat.completion", "created": 1, "model": "m", "usage": usage,
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        }  # fmt: skip
        return web.json_response(whole, headers=extra)

    async def _stream(self, request: web.Request, received: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunk = {"choices": [{"index": 0, "delta": {"content": received}}]}
        data = b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n"
        for at in range(0, len(data), 7):  # a secret lies across many pieces
            await response.write(data[at : at + 7])
        return response
