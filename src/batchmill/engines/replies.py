"""What a model server's HTTP reply means for a row; nothing here knows retries or which engine asked."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.types import Outcome, Row, RowError
from batchmill.wire.forms import usage_of
from batchmill.wire.json_bytes import decode

REPLY_BYTES_MAX = 64 * 1024 * 1024
MESSAGE_CHARS_MAX = 2048


class BadReply(ValueError):
    """A reply that says 200 and holds no JSON object."""


class _Skim(Struct):
    """The members of a reply that matter here; the rest is not even decoded."""

    usage: dict[str, Any] | None = None
    error: Raw = Raw(b"null")


class _Refusal(Struct):
    error: Any = None
    detail: Any = None  # FastAPI's own errors
    message: Any = None


_skim = msgspec.json.Decoder(_Skim)
_UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


def read_reply(row: Row, status: int, data: bytes, *, request_id: str | None = None) -> Outcome:
    """The outcome of a reply that is final: ok for a 2xx with a JSON object, an error for everything else.

    Raises: BadReply where a 2xx holds no JSON object, so that the caller may ask again.
    """
    if not 200 <= status < 300:
        return refused(row, status, data, request_id=request_id)
    try:
        skim = _skim.decode(data)
        data.decode()  # msgspec skips over a string it does not need without looking at its bytes
        body = one_line(data)
    except _UNREADABLE as fault:
        raise BadReply(f"the reply is not a JSON object: {fault}: {_excerpt(data)}") from None
    if bytes(skim.error) not in (b"null", b"{}"):
        return refused(row, status, data, request_id=request_id)
    usage = usage_of({"usage": skim.usage}) if skim.usage else None
    return Outcome(row, body, status=status, usage=usage, request_id=request_id)


def refused(row: Row, status: int, data: bytes, *, request_id: str | None = None) -> Outcome:
    """The error outcome of a reply; its body is kept where it is a JSON object."""
    error = error_of(status, data)
    try:
        decode(data, type=dict[str, Raw])
        body = one_line(data)
    except _UNREADABLE:
        body = None
    return Outcome(row, body, error, status=status, request_id=request_id)


def error_of(status: int, data: bytes) -> RowError:
    """Code and message out of an error reply: OpenAI's envelope, FastAPI's `detail`, or the bare text."""
    try:
        reply = decode(data, type=_Refusal)
    except _UNREADABLE:
        return RowError(f"http_{status}", f"HTTP {status}: {_excerpt(data)}")
    inner = reply.error if reply.error is not None else (reply.detail or reply.message)
    if not isinstance(inner, dict):
        text = inner if isinstance(inner, str) else _excerpt(data)
        return RowError(f"http_{status}", f"HTTP {status}: {text}"[:MESSAGE_CHARS_MAX])
    message = inner.get("message")
    text = message if isinstance(message, str) and message else _excerpt(data)
    return RowError(_code(inner, status), text[:MESSAGE_CHARS_MAX])


def one_line(data: bytes) -> bytes:
    """The same JSON on one line; digits and the order of members stay as they are."""
    data = data.strip()
    return msgspec.json.format(data, indent=-1) if b"\n" in data or b"\r" in data else data


def _code(error: dict[str, Any], status: int) -> str:
    """A stable code: the server's own where it has one, else its type ("BadRequestError" -> "bad_request")."""
    code, kind = error.get("code"), error.get("type")
    if isinstance(code, str) and re.fullmatch(r"[a-z][a-z0-9_.-]{1,63}", code):
        return code
    if isinstance(kind, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{1,63}", kind):
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
        return snake if kind.islower() else snake.removesuffix("_error")
    return f"http_{status}"


def _excerpt(data: bytes) -> str:
    text = data[:MESSAGE_CHARS_MAX].decode("utf-8", "replace").strip()
    return text if text else "an empty reply"
