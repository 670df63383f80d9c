"""Completions and classes of the fake engine server, in vLLM's words: a part of `engine_server`.

A token is a character, and its id the character's number; a prompt begins with <s>, which is 1, and an answer ends with
</s>, which is 2. The window is WINDOW tokens: who asks for more is refused as vLLM refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

WINDOW = 2048
BEGIN, END = 1, 2
LOGPROB, END_LOGPROB, OTHER_LOGPROB = -0.5, -0.25, -3.0
SPECIAL = {BEGIN: "<s>", END: "</s>"}
Say = Callable[[str], str]


def text_of(token: int) -> str:
    return SPECIAL.get(token) or chr(token)


def tokens_of(prompt: str | list[int]) -> list[int]:
    return list(prompt) if isinstance(prompt, list) else [BEGIN, *map(ord, prompt)]


def wrong(body: dict[str, Any]) -> str | None:
    """What vLLM says of a body that it does not take."""
    most, count = body.get("max_tokens") or 16, len(tokens_of(body["prompt"]))
    if most > WINDOW:
        return f"max_tokens={most} cannot be greater than max_model_len={WINDOW}. Please request fewer output tokens."
    if count > WINDOW:
        return f"This model's maximum context length is {WINDOW} tokens. However, you requested {count} input tokens."
    return None


def ending(answer: str, body: dict[str, Any], prompt: int) -> tuple[list[int], str, str | None]:
    """The tokens of an answer, why it ends, and the stop string that ended it."""
    for stop in body.get("stop") or ():
        if stop in answer:
            kept = answer[: answer.index(stop) + len(stop) * bool(body.get("include_stop_str_in_output"))]
            return [*map(ord, kept)], "stop", stop
    most = min(body.get("max_tokens") or 16, WINDOW - prompt)
    tokens = [*map(ord, answer), END]
    return (tokens, "stop", None) if len(tokens) <= most else (tokens[:most], "length", None)


def logprobs_of(tokens: list[int]) -> dict[str, Any]:
    known = [None if each == BEGIN else END_LOGPROB if each == END else LOGPROB for each in tokens]
    return {"tokens": [*map(text_of, tokens)], "token_logprobs": known, "top_logprobs": [], "text_offset": []}


def prompted(token: int, count: int) -> dict[str, Any] | None:
    """What else a token of a prompt might have been."""
    if token == BEGIN:
        return None
    others = {str(ord("A") + n): {"logprob": OTHER_LOGPROB - n, "rank": n + 2, "decoded_token": chr(ord("A") + n)}
              for n in range(count)}  # fmt: skip
    return {str(token): {"logprob": LOGPROB, "rank": 1, "decoded_token": text_of(token)}} | others


def choice(index: int, body: dict[str, Any], say: Say) -> dict[str, Any]:
    ids = tokens_of(body["prompt"])
    text = "".join(map(chr, ids[1:]))
    tokens, finish, stop = ending(say(text) + "!" * index, body, len(ids))
    shown = "".join(text_of(token) for token in tokens if token != END)
    found = {"index": index, "text": shown, "finish_reason": finish, "stop_reason": stop}
    if body.get("logprobs") is not None:
        found["logprobs"] = logprobs_of([*(ids if body.get("echo") else ()), *tokens])
    if (count := body.get("prompt_logprobs")) is not None:
        found["prompt_logprobs"] = [prompted(each, count) for each in ids]
    return found | {"prompt_token_ids": ids, "token_ids": tokens}


async def answer(request: web.Request, body: dict[str, Any], model: str, say: Say) -> web.StreamResponse:
    """The reply to a completion whose body is good."""
    choices = [choice(number, body, say) for number in range(body.get("n") or 1)]
    result = len(choices[0]["prompt_token_ids"]), sum(len(each["token_ids"]) for each in choices)
    usage = {"prompt_tokens": result[0], "completion_tokens": result[1], "total_tokens": sum(result)}
    if not body.get("stream"):
        return web.json_response({"id": "cmpl-1", "model": model, "choices": choices, "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for piece in pieces(choices[0]):
        await response.write(b"data: " + json.dumps({"model": model, "choices": [piece]}).encode() + b"\n\n")
    await response.write(b"data: " + json.dumps({"model": model, "choices": [], "usage": usage}).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def pieces(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """An answer token by token; the prompt's come with the first."""
    tokens, found = whole["token_ids"], []
    for number, token in enumerate(tokens):
        piece = {
            "index": 0,
            "text": "" if token == END else text_of(token),
            "finish_reason": None,
            "token_ids": [token],
        }
        if "logprobs" in whole:
            piece["logprobs"] = logprobs_of([token])
        if number == 0:
            piece["prompt_token_ids"] = whole["prompt_token_ids"]
        if number == len(tokens) - 1:
            piece |= {"finish_reason": whole["finish_reason"], "stop_reason": whole["stop_reason"]}
        found.append(piece)
    return found


def classes(body: dict[str, Any], model: str) -> web.Response:
    """A text is loud or not."""
    texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
    data = [
        {"index": n, "label": "loud" if text.isupper() else "quiet", "probs": [0.25, 0.75], "num_classes": 2}
        for n, text in enumerate(texts)
    ]
    usage = {"prompt_tokens": len(texts), "total_tokens": len(texts), "completion_tokens": 0}
    reply = {"id": "classify-1", "object": "list", "created": 1, "model": model, "data": data, "usage": usage}
    return web.json_response(reply)
