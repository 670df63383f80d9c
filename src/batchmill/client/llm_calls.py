"""Deployed language models over the SDK: every operation as a request and what its reply is read as."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from batchmill.client.messages import Ask, Request
from batchmill.errors import InvalidInput
from batchmill.wire.native import PREFIX
from batchmill.wire.native_llms import LlmChange, LlmEvents, LlmInfo, LlmList, NewLlm, QuarantinedRequests

T = TypeVar("T", bound=Struct)

LLMS = f"{PREFIX}/llms"
QUARANTINE = f"{PREFIX}/quarantine"
JSON = {"content-type": "application/json"}


def _one(name: str, *more: str) -> str:
    return "/".join([LLMS, quote(name, safe=""), *more])


def filled(kind: type[T], told: dict[str, Any], **own: Any) -> T:
    """A body with these fields. Raises: InvalidInput for one that nobody knows."""
    known = [each.name for each in fields(kind) if each.name not in own]
    for name in told:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise InvalidInput(f"there is no field {name!r}; {hint}", code="unknown_field")
    try:
        return msgspec.convert(told | own, kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(str(error), code="invalid_field") from None


def create(asked: NewLlm) -> Ask[LlmInfo]:
    body = msgspec.json.encode(asked)
    return Ask(Request("POST", LLMS, headers=JSON, body=body, is_repeatable=False), LlmInfo)


def llms() -> Ask[LlmList]:
    return Ask(Request("GET", LLMS), LlmList)


def llm(name: str) -> Ask[LlmInfo]:
    return Ask(Request("GET", _one(name)), LlmInfo)


def change(name: str, asked: LlmChange) -> Ask[LlmInfo]:
    """Setting the same values twice is setting them once."""
    return Ask(Request("PATCH", _one(name), headers=JSON, body=msgspec.json.encode(asked)), LlmInfo)


def remove(name: str) -> Ask[LlmInfo]:
    return Ask(Request("DELETE", _one(name), is_repeatable=False), LlmInfo)


def events(name: str, after: float | None = None) -> Ask[LlmEvents]:
    return Ask(Request("GET", _one(name, "events"), {} if after is None else {"after": repr(after)}), LlmEvents)


def start(name: str) -> Ask[LlmInfo]:
    """To start what has started changes nothing; nor does stopping what has stopped."""
    return Ask(Request("POST", _one(name, "start")), LlmInfo)


def stop(name: str) -> Ask[LlmInfo]:
    return Ask(Request("POST", _one(name, "stop")), LlmInfo)


def quarantine() -> Ask[QuarantinedRequests]:
    return Ask(Request("GET", QUARANTINE), QuarantinedRequests)


def clear_quarantine(digest: str | None = None) -> Ask[QuarantinedRequests]:
    path = QUARANTINE if digest is None else f"{QUARANTINE}/{quote(digest, safe='')}"
    return Ask(Request("DELETE", path, is_repeatable=False), QuarantinedRequests)
