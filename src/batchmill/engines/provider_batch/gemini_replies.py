"""Translates Gemini's replies to chat completions and embeddings. Pure.

Source: as `gemini_chat`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from batchmill.types import Usage
from batchmill.wire.rows.forms import counted

_FILTERS = (
    "SAFETY", "RECITATION", "LANGUAGE", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII",
    "IMAGE_SAFETY", "IMAGE_PROHIBITED_CONTENT", "IMAGE_RECITATION",
)  # fmt: skip
_FINISHES = {"STOP": "stop", "MAX_TOKENS": "length"} | dict.fromkeys(_FILTERS, "content_filter")


def to_completion(reply: Mapping[str, Any], *, model: str, id: str, created: int) -> dict[str, Any] | None:
    """The chat completion for a GenerateContentResponse; None if it has neither a candidate nor a reason for none.

    Args:
        model, id: for a reply that does not tell its own.
        created: seconds since the epoch.
    """
    id = _text_or(reply.get("responseId"), id)
    choices = [_choice(candidate, index, id) for index, candidate in enumerate(_dicts(reply.get("candidates")))]
    if not choices:
        match reply.get("promptFeedback"):
            case {"blockReason": str(reason)}:
                choices = [_blocked(reason)]
            case _:
                return None
    return {
        "id": id,
        "object": "chat.completion",
        "created": created,
        "model": _text_or(reply.get("modelVersion"), model),
        "choices": choices,
        "usage": _completion_usage(reply),
    }


def to_embeddings(reply: Mapping[str, Any], *, model: str) -> dict[str, Any] | None:
    """OpenAI's embeddings object for an EmbedContentResponse; None if it has no vector."""
    match reply.get("embedding"):
        case {"values": [*vector]} if vector and all(type(each) in (int, float) for each in vector):
            pass
        case _:
            return None
    answer: dict[str, Any] = {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": vector}],
        "model": model,
    }
    usage = usage_of(reply)
    if usage is not None:
        answer["usage"] = {"prompt_tokens": usage.input_tokens, "total_tokens": usage.input_tokens}
    return answer


def usage_of(reply: Mapping[str, Any]) -> Usage | None:
    """The tokens of a reply. Thoughts count as output, results of tools as input."""
    counts = reply.get("usageMetadata")
    if isinstance(counts, Mapping):
        given = _count(counts, "promptTokenCount") + _count(counts, "toolUsePromptTokenCount")
        made = _count(counts, "candidatesTokenCount") + _count(counts, "thoughtsTokenCount")
        return counted(given, _count(counts, "cachedContentTokenCount"), made)
    return counted(_count(reply, "tokenCount"), 0, 0) if "tokenCount" in reply else None


def count_of(value: Any) -> int:
    """A count; Google's JSON writes those of 64 bits as texts. 0 for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 19:
        return int(value)
    return value if type(value) is int and value > 0 else 0


def _count(counts: Mapping[str, Any], name: str) -> int:
    return count_of(counts.get(name))


def _choice(candidate: dict[str, Any], index: int, id: str) -> dict[str, Any]:
    texts, thoughts, calls, images = list[str](), list[str](), list[dict[str, Any]](), list[dict[str, Any]]()
    for part in _parts_of(candidate):
        match part:
            case {"functionCall": {"name": str(name), **call}}:
                calls.append(_tool_call(name, call, part, f"call_{id}_{index}_{len(calls)}"))
            case {"thought": True, "text": str(text)}:
                thoughts.append(text)
            case {"text": str(text)}:
                texts.append(text)
            case {"inlineData": {"mimeType": str(kind), "data": str(data)}}:
                images.append({"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}})
    answer: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    answer["refusal"] = None
    further = {"reasoning_content": "".join(thoughts), "tool_calls": calls, "images": images}
    answer |= {name: value for name, value in further.items() if value}
    reason = _text_or(candidate.get("finishReason"), "")
    finish = _FINISHES.get(reason, "stop")
    return {
        "index": index,
        "message": answer,
        "logprobs": _read_logprobs(candidate.get("logprobsResult")),
        "finish_reason": "tool_calls" if calls and finish == "stop" else finish,
        "native_finish_reason": reason or None,
    }


def _blocked(reason: str) -> dict[str, Any]:
    """The choice of a reply whose prompt was blocked."""
    return {
        "index": 0,
        "message": {"role": "assistant", "content": None, "refusal": None},
        "logprobs": None,
        "finish_reason": "content_filter",
        "native_finish_reason": reason,
    }


def _tool_call(name: str, call: dict[str, Any], part: dict[str, Any], id: str) -> dict[str, Any]:
    written = msgspec.json.encode(call.get("args") or {}).decode()
    answer = {
        "id": _text_or(call.get("id"), id),
        "type": "function",
        "function": {"name": name, "arguments": written},
    }
    signature = part.get("thoughtSignature")
    if isinstance(signature, str):  # models that think need it with the call in the next turn
        answer["extra_content"] = {"google": {"thought_signature": signature}}
    return answer


def _read_logprobs(result: Any) -> dict[str, Any] | None:
    if not isinstance(result, dict):
        return None
    tops = result.get("topCandidates")
    top_steps = tops if isinstance(tops, list) else []
    content = []
    for index, chosen in enumerate(_dicts(result.get("chosenCandidates"))):
        step = top_steps[index] if index < len(top_steps) else None
        alternatives = _dicts(step.get("candidates")) if isinstance(step, dict) else []
        content.append(_token(chosen) | {"top_logprobs": [_token(each) for each in alternatives]})
    return {"content": content, "refusal": None}


def _token(candidate: dict[str, Any]) -> dict[str, Any]:
    token = _text_or(candidate.get("token"), "")
    # Google's JSON leaves out a number that is 0.
    return {"token": token, "logprob": candidate.get("logProbability", 0.0), "bytes": list(token.encode())}


def _completion_usage(reply: Mapping[str, Any]) -> dict[str, Any] | None:
    usage, counts = usage_of(reply), reply.get("usageMetadata")
    if usage is None or not isinstance(counts, Mapping):
        return None
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": _count(counts, "thoughtsTokenCount")},
    }


def _parts_of(candidate: dict[str, Any]) -> Iterator[dict[str, Any]]:
    content = candidate.get("content")
    yield from _dicts(content.get("parts")) if isinstance(content, dict) else []


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _text_or(value: Any, other: str) -> str:
    return value if isinstance(value, str) and value else other
