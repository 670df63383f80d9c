"""A service with the chat APIs of OpenAI and Anthropic in this process whose replies a test writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any]], dict[str, Any]]  # the body of a call -> the message of its reply, perhaps more


def choice(text: str | None, finish: str = "stop", **message: Any) -> dict[str, Any]:
    """A choice of a reply."""
    shown = {"role": "assistant", "content": text, **message}
    return {"index": 0, "message": shown, "finish_reason": finish}


class AnsweringService:
    """Use it as an async context manager. Each reply has one choice, 10 input tokens and 5 output tokens.

    At /v1/messages the choice is a message whose text is the input of the tool that the request forces, if any.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.bodies: list[dict[str, Any]] = []  # of all calls
        self.headers: list[dict[str, str]] = []

    async def __aenter__(self) -> AnsweringService:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", self._handle)
        app.router.add_post("/v1/messages", self._handle_messages)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        head = {"id": f"chat-{len(self.bodies)}", "object": "chat.completion", "created": 1, "model": body["model"]}
        return web.json_response({**head, "choices": [self._answer(body)], "usage": usage})

    async def _handle_messages(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        found = self._answer(body)["message"]["content"]
        block: dict[str, Any] = {"type": "text", "text": found}
        if (forced := body.get("tool_choice")) is not None:
            block = {"type": "tool_use", "id": "toolu_1", "name": forced["name"], "input": json.loads(found)}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "content": [block]}
        message |= {"stop_reason": "tool_use" if forced else "end_turn", "stop_sequence": None}
        return web.json_response({**message, "usage": {"input_tokens": 10, "output_tokens": 5}})

    async def _read(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        return body
