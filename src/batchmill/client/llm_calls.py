"""Deployed language models over the SDK: every operation as a request and what its reply is read as."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from batchmill.client.calls import typed_request
from batchmill.client.messages import TypedRequest
from batchmill.errors import InvalidInput
from batchmill.wire import operations as table
from batchmill.wire.native_models import LlmChange, LlmEvents, LlmInfo, LlmList, NewLlm, QuarantinedRequests

T = TypeVar("T", bound=Struct)


def filled(kind: type[T], values: Mapping[str, Any], **own: Any) -> T:
    """A body with these fields. Raises: InvalidInput for an unknown field."""
    known = [each.name for each in fields(kind) if each.name not in own]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise InvalidInput(f"there is no field {name!r}; {hint}", code="unknown_field")
    try:
        return msgspec.convert({**values, **own}, kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(str(error), code="invalid_field") from None


def create(request: NewLlm) -> TypedRequest[LlmInfo]:
    return typed_request(table.DEPLOY_LLM, body=request)


def llms() -> TypedRequest[LlmList]:
    return typed_request(table.LIST_LLMS)


def llm(name: str) -> TypedRequest[LlmInfo]:
    return typed_request(table.SHOW_LLM, name)


def change(name: str, request: LlmChange) -> TypedRequest[LlmInfo]:
    return typed_request(table.CHANGE_LLM, name, body=request)


def remove(name: str) -> TypedRequest[LlmInfo]:
    return typed_request(table.REMOVE_LLM, name)


def events(name: str, after: float | None = None) -> TypedRequest[LlmEvents]:
    return typed_request(table.LLM_EVENTS, name, after=after)


def start(name: str) -> TypedRequest[LlmInfo]:
    return typed_request(table.START_LLM, name)


def stop(name: str) -> TypedRequest[LlmInfo]:
    return typed_request(table.STOP_LLM, name)


def quarantine() -> TypedRequest[QuarantinedRequests]:
    return typed_request(table.LIST_QUARANTINE)


def clear_quarantine(digest: str | None = None) -> TypedRequest[QuarantinedRequests]:
    return typed_request(table.CLEAR_QUARANTINE) if digest is None else typed_request(table.CLEAR_QUARANTINED, digest)
