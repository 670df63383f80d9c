"""What the reply of a language model says of itself: whether it is whole, and if not, why.

Understood are the replies of /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages, by their shape.
Sources: OpenAI's API reference (`finish_reason`, `refusal`, `incomplete_details`), Anthropic's (`stop_reason`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from batchmill.types import RowError
from batchmill.wire.schemas.output_schema import ANSWER_TOOL

TRUNCATED, FILTERED, REFUSED = "truncated", "filtered", "refused"
EMPTY, REPEATING = "empty", "repeating"
ASKED_AGAIN = "asked_again"
MISMATCH = "schema_mismatch"  # the code of rows none of whose answers fits
FLAWS = {
    TRUNCATED: "the reply ended at its limit of output tokens: raise max_tokens",
    FILTERED: "the service's content filter cut the reply off",
    REFUSED: "the model refused to answer",
    EMPTY: "the reply has no text and no tool call",
    REPEATING: "the reply repeats itself until its limit of output tokens",
}
WARNINGS = {**FLAWS, ASKED_AGAIN: "an earlier answer did not fit the schema"}
TEXTS = ("text", "output_text")  # types of parts
TAIL_CHARS = 1024  # of a truncated text, which are searched for a repeated part
REPEATS_MIN = 4  # of that part
REPEATED_CHARS_MIN = 200

_MARKS = (b'"finish_reason"', b'"stop_reason"', b'"incomplete_details"')  # no other reply is decoded
_OF_REASON = {
    "length": TRUNCATED, "max_tokens": TRUNCATED, "max_output_tokens": TRUNCATED,
    "model_context_window_exceeded": TRUNCATED, "content_filter": FILTERED, "refusal": REFUSED,
}  # fmt: skip


class _Message(Struct, gc=False):
    content: str | list[dict] | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    function_call: msgspec.Raw = msgspec.Raw(b"null")
    images: list[msgspec.Raw] | None = None  # that the model made


class _Choice(Struct, gc=False):
    """One of the answers of /v1/chat/completions or /v1/completions."""

    finish_reason: str | None = None
    message: _Message | None = None
    text: str | None = None


class _Part(Struct, gc=False):
    """A part of a message, or an item of /v1/responses."""

    type: str = ""
    text: str | None = None
    refusal: str | None = None
    content: list[_Part] | None = None
    name: str | None = None  # of the tool that is called
    input: msgspec.Raw = msgspec.Raw(b"")


class _Incomplete(Struct, gc=False):
    reason: str | None = None


class _Reply(Struct, gc=False):
    choices: list[_Choice] | None = None
    stop_reason: str | None = None  # of /v1/messages, with `content`
    content: list[_Part] | None = None
    incomplete_details: _Incomplete | None = None  # of /v1/responses, with `output`
    output: list[_Part] | None = None


_decoder = msgspec.json.Decoder(_Reply)


def flaws_of(body: bytes) -> tuple[str, ...]:
    """What is wrong with a reply, as names of FLAWS in their order; most often nothing."""
    if not any(mark in body for mark in _MARKS):
        return ()
    return _flaws(_decoded(body))


def text_and_flaws_of(body: bytes) -> tuple[str, tuple[str, ...]]:
    """The text of a reply's only answer, empty if it has none, and what is wrong with it."""
    reply = _decoded(body)
    return _text(reply), _flaws(reply)


def _decoded(body: bytes) -> _Reply:
    """The reply; an empty one for those of another API."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Reply()


def _flaws(reply: _Reply) -> tuple[str, ...]:
    found = set(_found(reply))
    return tuple(name for name in FLAWS if name in found) if found else ()


def error_of(flaw: str) -> RowError:
    """The error of a row whose reply is not accepted because of a flaw."""
    return RowError(f"reply_{flaw}", FLAWS[flaw])


def _text(reply: _Reply) -> str:
    if reply.choices is not None:
        message = reply.choices[0].message if reply.choices else None
        content = "" if message is None else message.content or ""
        return content if isinstance(content, str) else ""
    parts = reply.content if reply.stop_reason is not None else list(_flat(reply.output or []))
    for part in parts or []:
        if part.type == "tool_use" and part.name == ANSWER_TOOL:
            return bytes(part.input).decode(errors="replace")
    return "".join(part.text or "" for part in parts or [] if part.type in TEXTS)


def with_text(body: bytes, text: str) -> bytes:
    """The same reply with another text; as it is, where its text lies in a place that is not known."""
    reply = msgspec.json.decode(body)
    match reply:
        case {"choices": [{"message": {"content": str()} as message}, *_]}:
            message["content"] = text
        case {"output": list(items)}:
            _set_text([part for item in items for part in _parts_in(item)], text)
        case {"content": list(parts)}:
            _set_text(parts, text)
        case _:
            return body
    return msgspec.json.encode(reply)


def _parts_in(item: Any) -> list[Any]:
    content = item.get("content") if isinstance(item, dict) else None
    return content if isinstance(content, list) else []


def _set_text(parts: list[Any], text: str) -> None:
    """Put a text into the first part of text, and nothing into the others."""
    for part in parts:
        if isinstance(part, dict) and part.get("type") in TEXTS and isinstance(part.get("text"), str):
            part["text"], text = text, ""


def _found(reply: _Reply) -> Iterator[str]:
    if reply.choices is not None:
        for choice in reply.choices:
            yield from _of_choice(choice)
    elif reply.stop_reason is not None and reply.content is not None:
        yield from _of_parts(reply.content, reply.stop_reason)
    elif reply.output is not None:
        reason = None if reply.incomplete_details is None else reply.incomplete_details.reason
        yield from _of_parts(list(_flat(reply.output)), reason)


def _flat(items: list[_Part]) -> Iterator[_Part]:
    """The parts of the messages of /v1/responses, and its other items, such as calls of tools."""
    for item in items:
        if item.type == "message":
            yield from item.content or []
        elif item.type != "reasoning":
            yield item


def _of_choice(choice: _Choice) -> Iterator[str]:
    message = choice.message
    if message is None:
        text, has_other, is_refused = choice.text or "", False, False
    else:
        is_refused = bool(message.refusal)
        has_call = bool(message.tool_calls) or bytes(message.function_call) not in (b"null", b"")
        has_other = has_call or bool(message.images) or is_refused
        text = message.content or ""
        if isinstance(text, list):
            text, has_other = "", has_other or bool(text)
    yield from _of_text(text, choice.finish_reason, has_other=has_other)
    if is_refused:
        yield REFUSED


def _of_parts(parts: list[_Part], reason: str | None) -> Iterator[str]:
    text = "".join(part.text or "" for part in parts if part.type in TEXTS)
    is_refused = any(part.type == "refusal" for part in parts)
    has_other = any(part.type not in (*TEXTS, "thinking", "redacted_thinking") for part in parts)
    yield from _of_text(text, reason, has_other=has_other)
    if is_refused:
        yield REFUSED


def _of_text(text: str, reason: str | None, *, has_other: bool) -> Iterator[str]:
    warning = _OF_REASON.get(reason or "")
    if warning is not None:
        yield warning
    if not has_other and warning not in (FILTERED, REFUSED) and not text.strip():
        yield EMPTY
    if warning == TRUNCATED and is_repeating(text):
        yield REPEATING


def is_repeating(text: str) -> bool:
    """Whether the end of a text is the same part again and again."""
    tail = text[-TAIL_CHARS:]
    if len(tail) < REPEATED_CHARS_MIN:
        return False
    return _period(tail) * REPEATS_MIN <= len(tail)


def _period(text: str) -> int:
    """The smallest n > 0 with text[n:] == text[:-n], in linear time: by the prefix function of Knuth, Morris, Pratt."""
    border = [0] * len(text)
    for at in range(1, len(text)):
        length = border[at - 1]
        while length and text[at] != text[length]:
            length = border[length - 1]
        border[at] = length + (text[at] == text[length])
    return len(text) - border[-1]
