"""Translates chat completions to Anthropic's Messages and back. Pure.

What has no counterpart is refused by its name; fields whose value asks for nothing (null, n=1) are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from batchmill.engines.provider_batch.chat_fields import asks_for_nothing, first_given, read_data_url
from batchmill.errors import InvalidRow
from batchmill.types import Usage
from batchmill.wire.rows.forms import counted
from batchmill.wire.schemas.output_schema import ANSWER_TOOL, answer_tool

_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_PDF = "application/pdf"

Block = dict[str, Any]


def refuse(what: str, why: str, *, code: str = "unsupported_parameter") -> InvalidRow:
    """The error of a row that cannot be translated."""
    detail = (
        f"{what} is wrong: {why}" if code == "invalid_row" else f"{what} is not supported by Anthropic's models: {why}"
    )
    return InvalidRow(detail, code=code)


def blocks_of(message: dict[str, Any], place: str) -> tuple[str, list[Block]]:
    """The role and the content of a message. Raises: InvalidRow for what has no counterpart."""
    match message.get("role"):
        case "user":
            _refuse_further(message, ("role", "content"), place)
            return "user", _parts(message.get("content"), place, _user_part)
        case "assistant":
            return "assistant", _assistant(message, place)
        case "tool":
            _refuse_further(message, ("role", "content", "tool_call_id"), place)
            result: Block = {"type": "tool_result", "tool_use_id": message.get("tool_call_id")}
            content = _parts(message.get("content"), place, _user_part)
            return "user", [result | {"content": content} if content else result]
        case role:
            raise refuse(
                f"the role {str(role)[:40]!r} of {place}", "it must be system, developer, user, assistant or tool"
            )


def text_blocks_of(message: dict[str, Any], place: str) -> list[Block]:
    """The content of a message that may have only text, such as a system prompt."""
    _refuse_further(message, ("role", "content"), place)
    return _parts(message.get("content"), place, _text_part)


def _assistant(message: dict[str, Any], place: str) -> list[Block]:
    _refuse_further(message, ("role", "content", "refusal", "tool_calls"), place)
    blocks = _parts(message.get("content"), place, _assistant_part)
    if message.get("refusal"):
        blocks.append({"type": "text", "text": message["refusal"]})
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise refuse(f"`tool_calls` of {place}", "it is a list", code="invalid_row")
    return blocks + [_tool_use(call, place) for call in calls]


def _tool_use(call: Any, place: str) -> Block:
    match call:
        case {"id": str(id), "type": "function", "function": {"name": str(name), "arguments": str(arguments)}}:
            try:
                values = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
            except msgspec.MsgspecError:
                why = f"the arguments {arguments[:100]!r} are not a JSON object"
                raise refuse(f"the call of {name!r} in {place}", why, code="invalid_row") from None
            return {"type": "tool_use", "id": id, "name": name, "input": values}
    why = 'it is {"id":…,"type":"function","function":{"name":…,"arguments":"…"}}'
    raise refuse(f"a tool call in {place}", why, code="invalid_row")


def _parts(content: Any, place: str, read: Any) -> list[Block]:
    """The content blocks of a text or a list of parts. Empty texts are dropped: Anthropic refuses them."""
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise refuse(f"`content` of {place}", "it is a text or a list of parts", code="invalid_row")
    return [block for part in content if (block := read(part, place)).get("text") != ""]


def _text_part(part: Any, place: str) -> Block:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
    raise _strange(part, place)


def _assistant_part(part: Any, place: str) -> Block:
    match part:
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
    return _text_part(part, place)


def _user_part(part: Any, place: str) -> Block:
    match part:
        case {"type": "image_url", "image_url": {"url": str(url), **rest}}:
            if rest.get("detail") not in (None, "auto", "high"):
                raise refuse(
                    f"`detail` {str(rest['detail'])[:40]!r} of an image in {place}",
                    "the models read images in full resolution",
                )
            return {"type": "image", "source": _image_source(url, place)}
        case {"type": "file", "file": {"file_data": str(data), **rest}}:
            title = {"title": rest["filename"]} if rest.get("filename") else {}
            return {"type": "document", "source": _base64_source(data, (_PDF,), place), **title}
    return _text_part(part, place)


def _image_source(url: str, place: str) -> Block:
    if url.startswith(("https://", "http://")):
        return {"type": "url", "url": url}
    return _base64_source(url, _IMAGES, place)


def _base64_source(url: str, types: tuple[str, ...], place: str) -> Block:
    found = read_data_url(url, types)
    if found is None:
        raise refuse(f"{url[:40]!r} in {place}", f"it is not a data: URL in base64 of {', '.join(types)}")
    return {"type": "base64", "media_type": found[0], "data": found[1]}


def _strange(part: Any, place: str) -> InvalidRow:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str):
        return refuse(f"a part of type {kind[:40]!r} in {place}", "it has no counterpart")
    return refuse(
        f"a part in {place}", 'it is {"type":"text","text":…} or another of the known parts', code="invalid_row"
    )


def _refuse_further(message: dict[str, Any], known: tuple[str, ...], place: str) -> None:
    for name, value in message.items():
        if name not in known and value is not None and value != []:
            raise refuse(f"`{name[:40]}` of {place}", "it has no counterpart")


MAX_TOKENS = 4096  # of an answer without a limit in its row; Messages requires one
TEMPERATURE_MAX = 1.0

_WAY_OUT = "leave it out, or write the row for /v1/messages with Anthropic's own fields"

# Fields without effect for these values; other values are not supported.
_QUIET: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "stream_options": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "seed": (),
    "modalities": (["text"],),
    "audio": (),
    "store": (False, True),  # storing an answer does not change it
    "metadata": ({},),
    "service_tier": ("auto",),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": (),
    "prompt_cache_key": (),
}
_AS_THEY_ARE = ("temperature", "top_p", "top_k", "thinking")

_FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


def to_messages(body: Mapping[str, Any], *, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """The Messages body for a chat completion's body; `model` is unchanged.

    Raises: InvalidRow, code `unsupported_parameter`, naming what cannot be asked for; `invalid_row` for a wrong shape.
    """
    params: dict[str, Any] = {"max_tokens": max_tokens}
    others = [name for name in ("tools", "tool_choice", "thinking") if body.get(name)]
    if others and _response_format(body.get("response_format")):
        raise refuse(f"`response_format` with a schema beside `{others[0]}`", "a schema is a tool that must be called")
    for name, value in body.items():
        if value is None or name in ("messages", "max_tokens", "max_completion_tokens", "parallel_tool_calls"):
            continue
        if name in _AS_THEY_ARE or name == "model":
            params[name] = value
        elif name in _TRANSLATED:
            params |= _TRANSLATED[name](value)
        elif not asks_for_nothing(name, value, _QUIET):
            raise refuse(f"`{name}`", _WAY_OUT)
    limit = first_given(body.get("max_completion_tokens"), body.get("max_tokens"))
    if limit is not None:
        params["max_tokens"] = limit
    _check_temperature(params.get("temperature"))
    if body.get("parallel_tool_calls") is False and params.get("tools"):
        params["tool_choice"] = {"disable_parallel_tool_use": True, **params.get("tool_choice", {"type": "auto"})}
    system, params["messages"] = _conversation(body.get("messages"))
    if system:
        params["system"] = system
    return params


def to_completion(message: Mapping[str, Any], *, created: int) -> dict[str, Any]:
    """The chat completion for a Messages reply. `created` in seconds since the epoch."""
    texts, calls, thoughts, is_answered = [], [], [], False
    content = message.get("content")
    for block in content if isinstance(content, list) else []:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_use", "name": str(name), "input": answered} if name == ANSWER_TOOL:
                texts, calls, is_answered = [msgspec.json.encode(answered).decode()], [], True
                break
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": arguments}:
                written = msgspec.json.encode(arguments).decode()
                calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": written}})
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
    answer: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    answer["refusal"] = None
    if thoughts:
        answer["reasoning_content"] = "".join(thoughts)
    if calls:
        answer["tool_calls"] = calls
    finish = _FINISHES.get(str(message.get("stop_reason")), "stop")
    choice = {
        "index": 0,
        "message": answer,
        "logprobs": None,
        "finish_reason": "stop" if is_answered and finish == "tool_calls" else finish,
        "stop_reason": message.get("stop_sequence"),
    }
    return {
        "id": message.get("id"),
        "object": "chat.completion",
        "created": created,
        "model": message.get("model"),
        "choices": [choice],
        "usage": _completion_usage(usage_of(message)),
    }


def usage_of(message: Mapping[str, Any]) -> Usage | None:
    """The tokens of a Messages reply; its `input_tokens` exclude tokens read from or written to a cache."""
    usage = message.get("usage")
    if not isinstance(usage, Mapping):
        return None
    fresh, written, read, output = (
        value if type(value := usage.get(name)) is int else 0
        for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    )
    return counted(max(fresh, 0) + max(written, 0) + max(read, 0), read, output)


def _completion_usage(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _conversation(messages: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The system blocks, and turns with alternating roles: consecutive messages of one role are joined."""
    if not isinstance(messages, list) or not messages:
        raise refuse("`messages`", "it must be a list with at least one message", code="invalid_row")
    system: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        place = f"`messages[{index}]`"
        if not isinstance(message, dict):
            raise refuse(place, "a message is a JSON object", code="invalid_row")
        if message.get("role") in ("system", "developer"):
            system += text_blocks_of(message, place)
            continue
        role, blocks = blocks_of(message, place)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    return system, turns


def _stop(value: Any) -> dict[str, Any]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise refuse("`stop`", "it is a text or a list of texts", code="invalid_row")
    return {"stop_sequences": stops} if stops else {}


def _response_format(value: Any) -> dict[str, Any]:
    """A schema as the only tool, which the model has to call."""
    match value:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_schema", "json_schema": {"schema": {"type": "object"} as schema}}:
            return {"tools": [answer_tool(schema)], "tool_choice": {"type": "tool", "name": ANSWER_TOOL}}
        case {"type": "json_schema"}:
            raise refuse("the schema of `response_format`", "Anthropic's models take one of an object: type object")
    raise refuse(f"`response_format` {msgspec.json.encode(value).decode()[:100]}", _WAY_OUT)


def _tools(value: Any) -> dict[str, Any]:
    if not isinstance(value, list):
        raise refuse("`tools`", "it is a list", code="invalid_row")
    return {"tools": [_tool(tool, f"`tools[{index}]`") for index, tool in enumerate(value)]} if value else {}


def _tool(tool: Any, place: str) -> dict[str, Any]:
    match tool:
        case {"type": "function", "function": {"name": str(name), **rest}}:
            pass
        case {"type": str(kind)}:
            raise refuse(f"{place} of type {kind!r}", _WAY_OUT)
        case _:
            raise refuse(place, 'a tool is {"type":"function","function":{"name":…}}', code="invalid_row")
    if rest.pop("strict", None):
        raise refuse(f"`strict` of {place}", _WAY_OUT)
    schema = rest.pop("parameters", None) or {"type": "object", "properties": {}}
    description = rest.pop("description", None)
    if rest:
        raise refuse(f"`{next(iter(rest))}` of {place}", _WAY_OUT)
    about = {} if description is None else {"description": description}
    return {"name": name, **about, "input_schema": schema}


def _tool_choice(value: Any) -> dict[str, Any]:
    match value:
        case "auto" | "none":
            return {"tool_choice": {"type": value}}
        case "required":
            return {"tool_choice": {"type": "any"}}
        case {"type": "function", "function": {"name": str(name)}}:
            return {"tool_choice": {"type": "tool", "name": name}}
    raise refuse(f"`tool_choice` {msgspec.json.encode(value).decode()[:100]}", _WAY_OUT)


def _user(value: Any) -> dict[str, Any]:
    return {"metadata": {"user_id": value}}


_TRANSLATED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "stop": _stop,
    "response_format": _response_format,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "user": _user,
    "safety_identifier": _user,
}


def _check_temperature(value: Any) -> None:
    if isinstance(value, int | float) and value > TEMPERATURE_MAX:
        raise refuse(f"`temperature` {value:g}", f"Anthropic's models take 0 to {TEMPERATURE_MAX:g}")
