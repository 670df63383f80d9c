"""Translates the bodies of chat completions and embeddings to Gemini's generateContent and embedContent. Pure.

What has no counterpart is refused by its name. The types of numbers and texts are checked, because Gemini reads the
lines of a batch as messages with typed fields: one wrong line could fail the whole batch.
Source: the Gemini API's reference (v1beta), "Generating content" and "Embeddings"; the types of google-genai.
"""

from __future__ import annotations

import binascii
import mimetypes
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from batchmill.engines.provider_batch.chat_fields import asks_for_nothing, first_given, read_data_url
from batchmill.errors import InvalidRow

API_NAME, GOOGLE = "generativelanguage", ".googleapis.com"  # in the hosts of the Gemini API
IMAGES = ("image/png", "image/jpeg", "image/webp", "image/heic", "image/heif")
DOCUMENTS = ("application/pdf",)
AUDIO = {"wav": "audio/wav", "mp3": "audio/mp3"}

TASK_TYPES = (
    "SEMANTIC_SIMILARITY", "CLASSIFICATION", "CLUSTERING", "RETRIEVAL_DOCUMENT", "RETRIEVAL_QUERY",
    "CODE_RETRIEVAL_QUERY", "QUESTION_ANSWERING", "FACT_VERIFICATION",
)  # fmt: skip
THINKING_LEVELS = ("MINIMAL", "LOW", "MEDIUM", "HIGH")
THRESHOLDS = ("BLOCK_LOW_AND_ABOVE", "BLOCK_MEDIUM_AND_ABOVE", "BLOCK_ONLY_HIGH", "BLOCK_NONE", "OFF")

_WAY_OUT = "leave it out"
_CATEGORY = re.compile(r"HARM_CATEGORY_[A-Z_]{1,60}")

# Fields without effect for these values; other values are not supported.
_QUIET: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "parallel_tool_calls": (True,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "store": (False, True),  # storing an answer does not change it
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "functions": ([],),
    "top_logprobs": (0,),
}
_NUMBERS = {
    "temperature": "temperature",
    "top_p": "topP",
    "frequency_penalty": "frequencyPenalty",
    "presence_penalty": "presencePenalty",
}
_WHOLE_NUMBERS = {"top_k": "topK", "seed": "seed", "n": "candidateCount"}
_TOGETHER = ("messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice")

Part = dict[str, Any]


def refuse(what: str, why: str = _WAY_OUT, *, code: str = "unsupported_parameter") -> InvalidRow:
    """The error of a row that cannot be translated."""
    is_wrong = code == "invalid_row"
    return InvalidRow(f"{what} is wrong: {why}" if is_wrong else f"{what} is not supported by Gemini: {why}", code=code)


def _wrong(what: str, why: str) -> InvalidRow:
    return refuse(what, why, code="invalid_row")


def to_content_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """The GenerateContentRequest for a chat completion's body, without its model.

    Raises: InvalidRow, code `unsupported_parameter`, naming what cannot be asked for; `invalid_row` for a wrong shape.
    """
    request: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name == "model" or name in _TOGETHER:
            continue
        if name in _NUMBERS:
            config[_NUMBERS[name]] = _number(name, value)
        elif name in _WHOLE_NUMBERS:
            config[_WHOLE_NUMBERS[name]] = _whole(name, value)
        elif name in _TRANSLATED:
            config |= _TRANSLATED[name](value)
        elif name == "safety_settings":
            request["safetySettings"] = _safety_settings(value)
        elif not asks_for_nothing(name, value, _QUIET):
            raise refuse(f"`{name[:100]}`", _WAYS_OUT.get(name, _WAY_OUT))
    if config.get("candidateCount") == 1:
        del config["candidateCount"]
    limit = first_given(body.get("max_completion_tokens"), body.get("max_tokens"))
    if limit is not None:
        config["maxOutputTokens"] = _whole("max_tokens", limit)
    config |= _logprobs(body.get("logprobs"), body.get("top_logprobs"))
    request |= _tools(body.get("tools"), body.get("tool_choice"))
    system, contents = _conversation(body.get("messages"))
    request["contents"] = contents
    if system:
        request["systemInstruction"] = {"parts": system}
    if config:
        request["generationConfig"] = config
    return request


def to_embed_request(body: Mapping[str, Any], *, task_type: str = "") -> dict[str, Any]:
    """The EmbedContentRequest for the body of an embeddings row, without its model. Raises: as `to_content_request`."""
    request: dict[str, Any] = {}
    for name, value in body.items():
        match name, value:
            case ("model" | "input", _) | (_, None) | ("encoding_format", "float"):
                pass
            case "dimensions", _:
                request["outputDimensionality"] = _whole(name, value)
            case "task_type", str() if value in TASK_TYPES:
                task_type = value
            case "task_type", _:
                raise _wrong("`task_type`", f"it is one of {', '.join(TASK_TYPES)}, not {_shown(value)}")
            case "encoding_format", _:
                raise refuse("`encoding_format`", "it must be float")
            case _:
                raise refuse(f"`{name[:100]}`")
    text = body.get("input")
    if isinstance(text, list) and len(text) == 1:
        text = text[0]
    if not isinstance(text, str) or not text:
        raise _wrong("`input`", "in Gemini's batches a row has one text: write a row for each of several")
    if task_type:
        request["taskType"] = task_type
    return {"content": {"parts": [{"text": text}]}, **request}


# -- fields -----------------------------------------------------------------------------------------------------------


def _number(name: str, value: Any) -> int | float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(f"`{name}`", f"it is a number, not {_shown(value)}")
    return value


def _whole(name: str, value: Any) -> int:
    if type(value) is not int or not -(2**31) <= value < 2**31:
        raise _wrong(f"`{name}`", f"it is a whole number of 32 bits, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode(errors="replace")[:100]


def _stop(value: Any) -> dict[str, Any]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _wrong("`stop`", "it is a text or a list of texts")
    return {"stopSequences": stops} if stops else {}


def _response_format(value: Any) -> dict[str, Any]:
    match value:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"responseMimeType": "application/json"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **rest}}:
            about = rest.get("description")
            if isinstance(about, str) and "description" not in schema:
                schema = {"description": about, **schema}
            return {"responseMimeType": "application/json", "responseJsonSchema": schema}
        case {"type": "json_schema"}:
            raise _wrong("`response_format`", 'it is {"type":"json_schema","json_schema":{"name":…,"schema":{…}}}')
    raise refuse(f"`response_format` {_shown(value)}", "its type is text, json_object or json_schema")


def _thinking_config(value: Any) -> dict[str, Any]:
    """Gemini's own field, in either of the two spellings that its API reads."""
    config: dict[str, Any] = {}
    for name, each in value.items() if isinstance(value, dict) else [("", None)]:
        match name, each:
            case "include_thoughts" | "includeThoughts", bool():
                config["includeThoughts"] = each
            case "thinking_budget" | "thinkingBudget", int() if not isinstance(each, bool):
                config["thinkingBudget"] = _whole("thinking_config", each)
            case "thinking_level" | "thinkingLevel", str() if each.upper() in THINKING_LEVELS:
                config["thinkingLevel"] = each.upper()
            case _:
                levels = ", ".join(THINKING_LEVELS)
                why = f"it has include_thoughts, thinking_budget or thinking_level ({levels}), not {_shown(value)}"
                raise _wrong("`thinking_config`", why)
    return {"thinkingConfig": config} if config else {}


def _safety_settings(value: Any) -> list[dict[str, str]]:
    for each in value if isinstance(value, list) else [None]:
        match each:
            case {"category": str(category), "threshold": str(threshold), **rest} if not rest:
                if _CATEGORY.fullmatch(category) and threshold in THRESHOLDS:
                    continue
        why = f'it is a list of {{"category":"HARM_CATEGORY_…","threshold":…}}, with {", ".join(THRESHOLDS)}'
        raise _wrong("`safety_settings`", why)
    return value


def _logprobs(wanted: Any, top: Any) -> dict[str, Any]:
    if wanted is not None and not isinstance(wanted, bool):
        raise _wrong("`logprobs`", f"it is true or false, not {_shown(wanted)}")
    if not wanted:
        if top:
            raise _wrong("`top_logprobs`", "it needs `logprobs`: true")
        return {}
    return {"responseLogprobs": True} | ({"logprobs": _whole("top_logprobs", top)} if top else {})


_TRANSLATED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "stop": _stop,
    "response_format": _response_format,
    "thinking_config": _thinking_config,
}
_WAYS_OUT = {
    "reasoning_effort": "its meaning differs between the models; write Gemini's own `thinking_config`",
    "web_search_options": "its tools are not available in rows",
}

# -- tools ------------------------------------------------------------------------------------------------------------


def _tools(tools: Any, choice: Any) -> dict[str, Any]:
    if tools is not None and not isinstance(tools, list):
        raise _wrong("`tools`", "it is a list")
    declarations, is_strict = [], False
    for index, tool in enumerate(tools or []):
        declaration, strict = _declaration(tool, f"`tools[{index}]`")
        declarations.append(declaration)
        is_strict = is_strict or strict
    calling = _calling(choice)
    if is_strict and calling.get("mode", "AUTO") == "AUTO":
        calling["mode"] = "VALIDATED"  # as AUTO, and what is called keeps to its schema
    request: dict[str, Any] = {"tools": [{"functionDeclarations": declarations}]} if declarations else {}
    if calling:
        request["toolConfig"] = {"functionCallingConfig": calling}
    return request


def _declaration(tool: Any, place: str) -> tuple[dict[str, Any], bool]:
    match tool:
        case {"type": "function", "function": {"name": str(name), **rest}}:
            pass
        case {"type": str(kind)}:
            raise refuse(f"{place} of type {kind[:40]!r}", "only functions are available in rows")
        case _:
            raise _wrong(place, 'a tool is {"type":"function","function":{"name":…}}')
    strict, schema, about = rest.pop("strict", None), rest.pop("parameters", None), rest.pop("description", None)
    if rest:
        raise refuse(f"`{next(iter(rest))[:100]}` of {place}")
    if about is not None and not isinstance(about, str):
        raise _wrong(f"`description` of {place}", "it is a text")
    if schema is not None and not isinstance(schema, dict):
        raise _wrong(f"`parameters` of {place}", "it is a JSON Schema")
    declaration = {"name": name} | ({} if about is None else {"description": about})
    return declaration | ({"parametersJsonSchema": schema} if schema else {}), strict is True


def _calling(choice: Any) -> dict[str, Any]:
    match choice:
        case None:
            return {}
        case "auto" | "none":
            return {"mode": choice.upper()}
        case "required":
            return {"mode": "ANY"}
        case {"type": "function", "function": {"name": str(name)}}:
            return {"mode": "ANY", "allowedFunctionNames": [name]}
    raise refuse(f"`tool_choice` {_shown(choice)}")


# -- messages ---------------------------------------------------------------------------------------------------------


def _conversation(messages: Any) -> tuple[list[Part], list[dict[str, Any]]]:
    """The parts of the system instruction, and turns: consecutive messages of one role are joined.

    Results of tools are a turn of their own, which Gemini compares with the calls before it.
    """
    if not isinstance(messages, list) or not messages:
        raise _wrong("`messages`", "it must be a list with at least one message")
    system: list[Part] = []
    turns: list[dict[str, Any]] = []
    before = ""  # the role of the last turn, as the messages name it
    functions: dict[str, str] = {}  # id of a call -> name of its function
    for index, message in enumerate(messages):
        place = f"`messages[{index}]`"
        if not isinstance(message, dict):
            raise _wrong(place, "a message is a JSON object")
        if message.get("role") in ("system", "developer"):
            _refuse_further(message, ("role", "content"), place)
            system += _parts(message.get("content"), place, _text_part)
            continue
        role, parts = _turn(message, place, functions)
        if turns and before == message["role"]:
            turns[-1]["parts"] += parts
        elif parts:
            turns.append({"role": role, "parts": parts})
            before = message["role"]
    if not turns:
        raise _wrong("`messages`", "Gemini needs a message of a user that is not empty")
    return system, turns


def _turn(message: dict[str, Any], place: str, functions: dict[str, str]) -> tuple[str, list[Part]]:
    match message.get("role"):
        case "user":
            _refuse_further(message, ("role", "content"), place)
            return "user", _parts(message.get("content"), place, _user_part)
        case "assistant":
            return "model", _assistant(message, place, functions)
        case "tool":
            return "user", [_tool_result(message, place, functions)]
        case role:
            known = "it must be system, developer, user, assistant or tool"
            raise refuse(f"the role {str(role)[:40]!r} of {place}", known)


def _assistant(message: dict[str, Any], place: str, functions: dict[str, str]) -> list[Part]:
    _refuse_further(message, ("role", "content", "refusal", "tool_calls"), place)
    parts = _parts(message.get("content"), place, _assistant_part)
    if message.get("refusal"):
        parts.append({"text": _text(message["refusal"], f"`refusal` of {place}")})
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise _wrong(f"`tool_calls` of {place}", "it is a list")
    for call in calls:
        part = _call_part(call, place)
        functions[part["functionCall"]["id"]] = part["functionCall"]["name"]
        parts.append(part)
    return parts


def _call_part(call: Any, place: str) -> Part:
    match call:
        case {"id": str(id), "type": "function", "function": {"name": str(name), "arguments": str(arguments)}}:
            pass
        case _:
            why = 'it is {"id":…,"type":"function","function":{"name":…,"arguments":"…"}}'
            raise _wrong(f"a tool call in {place}", why)
    try:
        values = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        why = f"the arguments {arguments[:100]!r} are not a JSON object"
        raise _wrong(f"the call of {name!r} in {place}", why) from None
    part: Part = {"functionCall": {"id": id, "name": name, "args": values}}
    match call.get("extra_content"):
        case {"google": {"thought_signature": str(signature)}}:
            part["thoughtSignature"] = signature
    return part


def _tool_result(message: dict[str, Any], place: str, functions: dict[str, str]) -> Part:
    _refuse_further(message, ("role", "content", "tool_call_id"), place)
    id = message.get("tool_call_id")
    if not isinstance(id, str) or id not in functions:
        raise _wrong(f"`tool_call_id` of {place}", f"no call before it has the id {_shown(id)}")
    texts = [part["text"] for part in _parts(message.get("content"), place, _text_part)]
    return {"functionResponse": {"id": id, "name": functions[id], "response": {"output": "".join(texts)}}}


def _parts(content: Any, place: str, read: Callable[[Any, str], Part]) -> list[Part]:
    """The parts of a text or a list of parts, without empty texts."""
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [{"text": content}]
    if not isinstance(content, list):
        raise _wrong(f"`content` of {place}", "it is a text or a list of parts")
    return [part for each in content if (part := read(each, place)).get("text") != ""]


def _text_part(part: Any, place: str) -> Part:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"text": text}
        case {"type": str(kind)}:
            raise refuse(f"a part of type {kind[:40]!r} in {place}", "it has no counterpart there")
    raise _wrong(f"a part in {place}", 'it is {"type":"text","text":…} or another of the known parts')


def _assistant_part(part: Any, place: str) -> Part:
    match part:
        case {"type": "refusal", "refusal": str(text)}:
            return {"text": text}
    return _text_part(part, place)


def _user_part(part: Any, place: str) -> Part:
    match part:
        case {"type": "image_url", "image_url": {"url": str(url), **rest}}:
            if rest.get("detail") not in (None, "auto"):
                raise refuse(f"`detail` {_shown(rest['detail'])} of an image in {place}")
            return _linked(url, place) if "://" in url[:10] else _inline(url, IMAGES, place)
        case {"type": "file", "file": {"file_data": str(data)}}:
            return _inline(data, DOCUMENTS, place)
        case {"type": "input_audio", "input_audio": {"data": str(data), "format": str(form)}}:
            if form not in AUDIO:
                raise refuse(f"the audio format {form[:40]!r} in {place}", f"it is one of {', '.join(AUDIO)}")
            return _data(AUDIO[form], data, place)
    return _text_part(part, place)


def _inline(url: str, types: tuple[str, ...], place: str) -> Part:
    found = read_data_url(url, types)
    if found is None:
        raise refuse(f"{url[:40]!r} in {place}", f"it is not a data: URL in base64 of {', '.join(types)}")
    return _data(*found, place)


def _data(kind: str, data: str, place: str) -> Part:
    try:
        binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:
        raise _wrong(f"the {kind} in {place}", f"its base64 cannot be read: {error}") from None
    return {"inlineData": {"mimeType": kind, "data": data}}


def _linked(url: str, place: str) -> Part:
    """An image that Gemini fetches. Files of the account are shared by all callers, so no row may name one."""
    try:
        address = urlsplit(url)
        host = (address.hostname or "").rstrip(".").lower()
    except ValueError:
        address, host = urlsplit(""), ""
    if not host or "%" in host or not host.isascii() or address.scheme.lower() != "https":
        raise refuse(f"{url[:40]!r} in {place}", "an image is a data: URL or an address that begins https://")
    if API_NAME in host and host.endswith(GOOGLE):
        raise refuse(f"{url[:80]!r} in {place}", "it is a file of the account, which all callers share")
    kind = mimetypes.guess_type(address.path)[0]
    return {"fileData": {"fileUri": url} | ({"mimeType": kind} if kind in IMAGES else {})}


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _wrong(what, "it is a text")
    return value


def _refuse_further(message: dict[str, Any], known: tuple[str, ...], place: str) -> None:
    for name, value in message.items():
        if name not in known and value is not None and value != []:
            raise refuse(f"`{name[:40]}` of {place}", "it has no counterpart")
