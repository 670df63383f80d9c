"""Stands in for vLLM where a figure is about the size of answers: each is as long as LONG_ANSWER_BYTES says."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from aiohttp import web

TEXT = "ten bytes. " * (int(os.environ.get("LONG_ANSWER_BYTES", "262144")) // 11)


async def well(request: web.Request) -> web.Response:
    return web.Response()


async def metrics(request: web.Request) -> web.Response:
    return web.Response(text="vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n")


async def answer(request: web.Request) -> web.Response:
    asked: dict[str, Any] = json.loads(await request.read())
    message = {"role": "assistant", "content": TEXT}
    usage = {"prompt_tokens": 10, "completion_tokens": len(TEXT) // 4, "total_tokens": 10 + len(TEXT) // 4}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return web.json_response(
        {"id": "chatcmpl-1", "object": "chat.completion", "model": asked["model"], "choices": choices, "usage": usage}
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", required=True)
    options, _ = parser.parse_known_args()
    app = web.Application(client_max_size=2**30)
    app.add_routes([web.get("/health", well), web.get("/metrics", metrics), web.post("/v1/chat/completions", answer)])
    web.run_app(app, path=options.uds, print=None)


if __name__ == "__main__":
    main()
