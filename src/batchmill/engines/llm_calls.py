"""Rows and live requests turned into calls of a managed engine server, or refused before it would ignore a part."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput, InvalidRow, UnknownName
from batchmill.types import LiveRequest, ModelSpec, Row, RowError
from batchmill.wire.fields import KNOWN_FIELDS, refusal, unknown_fields
from batchmill.wire.forms import URLS, with_model
from batchmill.wire.json_bytes import join_object, split_object

POLICY_FLAG = "scheduling-policy"
LIVE_PRIORITY = -(2**31)  # lower goes first; rows have 0, or what they say themselves


class Call:
    """One row on its way through the engine, over all of its attempts."""

    __slots__ = ("attempts", "body", "deaths", "row", "url")

    def __init__(self, row: Row, url: str, body: bytes) -> None:
        self.row = row
        self.url = url
        self.body = body
        self.attempts = 0  # failed calls that the server outlived
        self.deaths = 0  # of the server, while this row was in flight


class _Head(Struct, gc=False):
    model: str | None = None
    stream: bool | None = None


_head = msgspec.json.Decoder(_Head)


class Calls:
    """Makes the calls of one model. `known` are the fields that its server understands, by URL."""

    def __init__(self, model: ModelSpec, known: Mapping[str, frozenset[str]] = KNOWN_FIELDS) -> None:
        self._targets = model.targets()
        self._model = model.name
        self._has_priority = has_priority(model.engine_args)
        self.known = known

    def live(self, request: LiveRequest) -> bytes:
        """The body that a live request is sent with. Raises: InvalidInput for one that cannot be sent."""
        url = request.url
        if url not in URLS:
            raise UnknownName(f"no engine answers {url!r}; there are {', '.join(URLS)}", code="unknown_url")
        try:
            request.body.decode()  # the parts that are not looked into must be text too
            members = split_object(request.body)
            model = _head.decode(request.body).model or self._model
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the body cannot be read as a request: {error}", code="invalid_json") from None
        if "priority" in members:
            text = "`priority` is not the caller's to set: a live request goes ahead of every row; leave it out"
            raise InvalidInput(text, code="parameter_not_allowed")
        if unknown := [name for name in members if name not in self.known.get(url, members)]:
            raise InvalidInput(refusal(url, unknown, self.known), code="unknown_parameter")
        if model not in self._targets:
            raise self._unknown(model)
        members["model"] = msgspec.Raw(msgspec.json.encode(model))
        if self._has_priority:
            members["priority"] = msgspec.Raw(b"%d" % LIVE_PRIORITY)
        return join_object(members)

    def _unknown(self, model: str) -> UnknownName:
        served = ", ".join(sorted(self._targets))
        return UnknownName(f"the model {model!r} is not served here; there are {served}", code="model_not_found")

    def read(self, row: Row) -> Call | RowError:
        """The call that a row asks for, or why it cannot be made."""
        try:
            return self._read(row)
        except InvalidRow as error:
            return RowError(error.code, error.message)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            return RowError("invalid_row", f"the row cannot be read as a request: {error}")

    def _read(self, row: Row) -> Call:
        request = row.form.request(row)
        if request.url not in URLS:
            raise InvalidRow(f"no engine answers {request.url!r}; there are {', '.join(URLS)}", code="unknown_url")
        if unknown := unknown_fields(request.url, request.body, self.known):
            raise InvalidRow(refusal(request.url, unknown, self.known), code="unknown_parameter")
        head = _head.decode(request.body)
        if head.stream:
            raise InvalidRow("a row's answer cannot be streamed: leave `stream` out", code="invalid_parameter")
        if not head.model:
            return Call(row, request.url, with_model(request.body, self._model))
        if head.model not in self._targets:
            served = ", ".join(sorted(self._targets))
            raise InvalidRow(f"the model {head.model!r} is not served here; there are {served}", code="unknown_model")
        return Call(row, request.url, request.body)


def has_priority(engine_args: Mapping[str, object]) -> bool:
    """Whether the server orders calls by priority: it does unless the caller chose otherwise."""
    policies = [value for name, value in engine_args.items() if name.lstrip("-").replace("_", "-") == POLICY_FLAG]
    return not policies or policies[-1] == "priority"


def stable_code(code: str) -> str:
    """vLLM's error types under one spelling: "BadRequestError" and "Bad Request" are both bad_request."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", code.strip())
    return words.lower().removesuffix("_error")
