"""What a service's error says, in whichever of the known envelopes it comes: one decoder for every caller of services.

| envelope | who sends it |
| --- | --- |
| `{"error": {"message", "type", "code", "param"}}` | OpenAI, vLLM, Azure, Anthropic (around it `{"type": "error"}`) |
| `{"message", "type", "code"}`, `{"detail"}` | older vLLM, FastAPI, Mistral |
| `{"error": "text"}` | LoRAX, Triton, Cohere |
| `{"__type", "message"}` or `{"Message"}` | AWS, whose XML only `engines/provider_batch/aws.py` meets |

Knows bytes and JSON; what an error means for a row or a job is `engines/retry.py`'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from batchmill.wire.json_bytes import decode, shallow


class UpstreamError(Struct, frozen=True):
    """What an envelope says; texts are empty where it says nothing."""

    message: str = ""
    code: str = ""  # never a number: some services put the HTTP status there
    type: str = ""
    param: str | None = None
    status: int | None = None  # the HTTP status that `code` or `status` names
    request_id: str | None = None
    has_envelope: bool = False  # a member `error`, and not only a message

    @property
    def name(self) -> str:
        """The first of `code` and `type` that is one."""
        return self.code or self.type


NO_ERROR = UpstreamError()


def decode_error(data: bytes) -> UpstreamError:
    """What the body of a reply says. It never raises: what has no known envelope says nothing."""
    try:
        reply = decode(shallow(data))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return NO_ERROR
    return error_in(reply) if isinstance(reply, dict) else NO_ERROR


def error_in(reply: Mapping[str, Any]) -> UpstreamError:
    """What a reply says that is decoded already, or one member of its list of errors."""
    request_id = _text(reply.get("request_id")) or None
    inner = reply.get("error")
    if isinstance(inner, str):
        return UpstreamError(inner, request_id=request_id, has_envelope=True)
    source: Mapping[str, Any] = inner if isinstance(inner, dict) else reply
    code, kind = _name(source.get("code")) or _aws_name(source.get("__type")), _name(source.get("type"))
    message = next((source[each] for each in ("message", "Message", "detail") if source.get(each)), "")
    return UpstreamError(
        message if isinstance(message, str) else msgspec.json.encode(message).decode(),
        code,
        kind,
        _text(source.get("param")) or None,
        _status(source.get("code")) or _status(source.get("status")),
        request_id,
        "error" in reply,
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _name(value: Any) -> str:
    return value if isinstance(value, str) and not value.isdigit() else ""


def _aws_name(value: Any) -> str:
    """`com.amazonaws.service#Name:http://…` as `Name`."""
    return _text(value).partition(":")[0].rpartition("#")[2]


def _status(value: Any) -> int | None:
    number = int(value) if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()) else 0
    return number if 400 <= number <= 599 else None
