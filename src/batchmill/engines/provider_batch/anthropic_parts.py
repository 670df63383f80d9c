"""The messages of a chat as turns and content blocks of Anthropic's Messages. Pure."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from batchmill.errors import InvalidRow

_DATA_URL = re.compile(r"data:([a-z]+/[a-z0-9.+-]+);base64,", re.IGNORECASE)
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_PDF = "application/pdf"

Block = dict[str, Any]


def refuse(what: str, why: str, *, code: str = "unsupported_parameter") -> InvalidRow:
    """The error of a row that cannot be written for Messages."""
    told = (
        f"{what} is wrong: {why}" if code == "invalid_row" else f"{what} cannot be asked of Anthropic's models: {why}"
    )
    return InvalidRow(told, code=code)


def blocks_of(message: dict[str, Any], place: str) -> tuple[str, list[Block]]:
    """Whose turn a message is, and its content. Raises: InvalidRow, naming what has no counterpart."""
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
                f"the role {str(role)[:40]!r} of {place}", "there are system, developer, user, assistant, tool"
            )


def text_blocks_of(message: dict[str, Any], place: str) -> list[Block]:
    """The content of a message that may hold nothing but text: a system prompt."""
    _refuse_further(message, ("role", "content"), place)
    return _parts(message.get("content"), place, _text_part)


def _assistant(message: dict[str, Any], place: str) -> list[Block]:
    _refuse_further(message, ("role", "content", "refusal", "tool_calls"), place)
    blocks = _parts(message.get("content"), place, _assistant_part)
    if message.get("refusal"):
        blocks.append({"type": "text", "text": message["refusal"]})
    return blocks + [_tool_use(call, place) for call in message.get("tool_calls") or []]


def _tool_use(call: Any, place: str) -> Block:
    match call:
        case {"id": str(id), "type": "function", "function": {"name": str(name), "arguments": str(arguments)}}:
            try:
                values = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
            except msgspec.MsgspecError:
                why = f"the arguments {arguments[:100]!r} are no JSON object"
                raise refuse(f"the call of {name!r} in {place}", why, code="invalid_row") from None
            return {"type": "tool_use", "id": id, "name": name, "input": values}
    why = 'it is {"id":…,"type":"function","function":{"name":…,"arguments":"…"}}'
    raise refuse(f"a tool call in {place}", why, code="invalid_row")


def _parts(content: Any, place: str, read: Any) -> list[Block]:
    """Blocks of a content that is a text or a list of parts. Empty texts are left out: they are refused there."""
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
                raise refuse(f"`detail` {str(rest['detail'])[:40]!r} of an image in {place}", "images are seen in full")
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
    found = _DATA_URL.match(url)
    if found is None or found[1].lower() not in types:
        raise refuse(f"{url[:40]!r} in {place}", f"it is no data: URL in base64 of {', '.join(types)}")
    return {"type": "base64", "media_type": found[1].lower(), "data": url[found.end() :]}


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
