"""What an OpenAI-style service replied, read once: the JSON that may be kept, its usage, its error.

Knows bytes and JSON; nothing of connections, retries or pacing.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.models.redaction import mask
from batchmill.types import Outcome, Row, RowError, Usage
from batchmill.wire.forms import counted, usage_of
from batchmill.wire.json_bytes import DEPTH_MAX, is_too_deep
from batchmill.wire.json_oddities import oddity
from batchmill.wire.upstream_errors import decode_error, error_in

REPLY_BYTES_MAX = 64 * 1024 * 1024  # decoded
MESSAGE_BYTES_MAX = 2048

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Reply(Struct, frozen=True, gc=False):
    """A reply that was received in full."""

    status: int
    body: bytes | None = None  # one JSON object on one line; None: the bytes were no such thing
    usage: Usage | None = None
    error: RowError | None = None  # what its error envelope says, where it has one
    text: str = ""  # the beginning of a body that is no JSON object
    flaw: str = ""  # of JSON that could be read and is not to be kept
    is_half_text: bool = False  # it would be one, but for an escape of half a character

    def ok(self, row: Row, request_id: str | None = None) -> Outcome:
        """The outcome of a row that was answered."""
        return Outcome(row, self.body, None, self.status, self.usage, request_id)

    def refused(self, row: Row, request_id: str | None = None) -> Outcome:
        """The outcome of a row that the service will not answer however often it is asked."""
        return Outcome(row, self.body, self.row_error(), self.status, self.usage, request_id)

    def row_error(self) -> RowError:
        """The reply as an error: its own code where it has one, else `http_STATUS`."""
        error = self.error or RowError("", self.text)
        message = redact(error.message) or f"the service answered with HTTP status {self.status} and no reason"
        return RowError(error.code or f"http_{self.status}", message)


class _Details(Struct, gc=False):
    cached_tokens: int | None = None


class _Tokens(Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Skim(Struct, gc=False):
    """The two members of a reply that matter here; the decoder checks the rest and keeps none of it."""

    usage: _Tokens | None = None
    error: Raw = Raw(b"null")


_skim = msgspec.json.Decoder(_Skim)
_object = msgspec.json.Decoder(dict[str, Any])
_EMPTY = (b"null", b"false", b'""', b"{}", b"[]", b"0")


def read_reply(status: int, data: bytes) -> Reply:
    """Read a reply's bytes. A body that is not strict JSON (or no object) is told by `body` being None."""
    if is_too_deep(data, DEPTH_MAX):
        return Reply(status, text=_start_of(data))
    try:
        if not data.isascii():
            data.decode()
        skim = _skim.decode(data)
        has_error = status >= 400 or bytes(skim.error) not in _EMPTY
        error = _error_of(_object.decode(data)) if has_error else None
    except msgspec.ValidationError:
        return _read_odd(status, data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Reply(status, text=_start_of(data), is_half_text=_is_half_text(data))
    usage = None if skim.usage is None else _usage(skim.usage)
    return _kept(status, data, usage, error)


def _kept(status: int, data: bytes, usage: Usage | None, error: RowError | None) -> Reply:
    """What of a reply may stand in a result: nothing that its readers would choke on, or read otherwise."""
    odd = oddity(data)
    if odd is not None:
        return Reply(status, None, usage, error, flaw=f"the reply cannot be kept: {odd}")
    return Reply(status, _one_line(data), usage, error)


def redact(message: str) -> str:
    """A message that may be kept: without keys and what looks like one, and no longer than 2 KiB."""
    message = mask(message)
    data = message.encode(errors="replace")
    return message if len(data) <= MESSAGE_BYTES_MAX else data[: MESSAGE_BYTES_MAX - 3].decode(errors="ignore") + "…"


def _read_odd(status: int, data: bytes) -> Reply:
    """A reply that is no object, or whose usage has an unexpected shape."""
    try:
        reply = _object.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return Reply(status, text=_start_of(data))
    failed = status >= 400 or bool(reply.get("error"))
    return _kept(status, data, usage_of(reply), _error_of(reply) if failed else None)


def _is_half_text(data: bytes) -> bool:
    """Whether bytes that are no strict JSON object would be one if halves of surrogate pairs were characters.

    A model that is cut off within a character brings such a reply, and brings it again as long as it is asked the same.
    """
    if _SURROGATE.search(data) is None:
        return False
    try:
        return isinstance(json.loads(data, parse_constant=_refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _one_line(data: bytes) -> bytes:
    if b"\n" in data or b"\r" in data:
        return msgspec.json.format(data, indent=-1)
    return data.strip()


def _usage(tokens: _Tokens) -> Usage:
    details = tokens.prompt_tokens_details or tokens.input_tokens_details
    return counted(
        tokens.prompt_tokens or tokens.input_tokens or 0,
        (details.cached_tokens or 0) if details is not None else 0,
        tokens.completion_tokens or tokens.output_tokens or 0,
    )


def _error_of(reply: dict[str, Any]) -> RowError:
    error = error_in(reply)
    return RowError(error.name[:100], error.message)


def status_named(body: bytes) -> int | None:
    """The HTTP status that an error names in its body, as proxies do in a reply of status 200."""
    return decode_error(body).status


def _start_of(data: bytes) -> str:
    return data[:200].decode(errors="replace").strip()
