"""One call of an action: its templates filled with the parameters of a row, a request or a remote job.

Compiled once for each action. Nothing is sent from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.errors import InvalidInput
from batchmill.models.connectors.headers import HeaderTemplates
from batchmill.models.connectors.urls import UrlTemplate
from batchmill.optional import require
from batchmill.types.connectors import CANCEL_BATCH_PREDICT, Action, Connector
from batchmill.wire.json_bytes import encode, split_object
from batchmill.wire.json_templates import Filling, JsonTemplate, is_payload

SHOWN_CHARS = 2000
AWS_SIGV4 = "aws_sigv4"
SIGNING = "batchmill.models.connectors.signing:sign_connector"  # needs botocore
NOVA = "amazon.nova-2-multimodal-embeddings-v1:0"
OPENAI_CHAT = "openai/v1/chat/completions"
STRUCTURES = ("response_format", "generationConfig", "toolConfig")  # of OpenAI, Gemini, Bedrock


class Rendered(Struct, frozen=True):
    """A call, ready to be made. Its URL is encoded as it must be sent: no client may encode or normalise it again."""

    method: str
    url: str
    headers: dict[str, str]
    body: bytes | None


class Renderer:
    """Renders the calls of one action of one connector.

    `is_typed`: parameters are values as they are meant (rows of JSON): a str is a JSON string wherever it stands.
    Otherwise, as ML Commons has it, text outside of quotes must be the text of a JSON value.
    """

    def __init__(self, connector: Connector, action: Action, *, is_typed: bool = False) -> None:
        """Raises: InvalidInput for templates that can never be filled; InvalidConfig where botocore is missing."""
        own = connector.parameters
        self._connector = connector
        self._action = action
        self._own = own
        self._is_typed = is_typed
        self._url = UrlTemplate(action.url, own)
        self._headers = HeaderTemplates(action.headers, own)
        self._body = None if action.request_body is None else JsonTemplate(action.request_body, own)
        self._adds_type = "content-type" not in self._headers.names()
        self._sign = (
            require(SIGNING, "a connector with the protocol aws_sigv4") if connector.protocol == AWS_SIGV4 else None
        )

    def render(
        self, parameters: Mapping[str, Any], credentials: Mapping[str, str], at: datetime | None = None
    ) -> Rendered:
        """The call that these parameters make, signed where the protocol signs; `at`: when, if not now.

        Raises: InvalidInput that says what is missing or wrong; its message may hold values of `parameters`.
        """
        return self.sign(self.compose(parameters, credentials), credentials, at)

    def compose(self, parameters: Mapping[str, Any], credentials: Mapping[str, str]) -> Rendered:
        """The same call, not signed yet: it can be signed anew for each attempt."""
        body = self._render_body(parameters)
        if not body and self._action.method == "POST" and self._action.action_type != CANCEL_BATCH_PREDICT:
            raise InvalidInput("Content length is 0. Aborting request to remote model", code="empty_payload")
        headers = self._headers.fill(parameters, credentials)
        if body is not None and self._adds_type:
            headers["Content-Type"] = "application/json"
        return Rendered(self._action.method, self._url.fill(parameters), headers, body)

    def sign(self, rendered: Rendered, credentials: Mapping[str, str], at: datetime | None = None) -> Rendered:
        """The call with a signature of now (or `at`), where the protocol signs; else as it is.

        Raises: InvalidInput when the keys are missing.
        """
        if self._sign is None:
            return rendered
        return self._sign(rendered, self._own, credentials, at)

    def parameter(self, parameters: Mapping[str, Any], name: str) -> str | None:
        """What a call says of one parameter: the caller's word, else the connector's."""
        value = parameters.get(name)
        if value is None:
            return self._own.get(name)
        return value if isinstance(value, str) else encode(value).decode()

    def _render_body(self, parameters: Mapping[str, Any]) -> bytes | None:
        if self._body is None:
            text = self.parameter(parameters, "http_body")
            return None if text is None else self._with_charset(text.encode(errors="replace"), parameters)
        listed = self.parameter(parameters, "no_escape_params")
        raw = frozenset(map(str.strip, listed.split(","))) if listed else ()
        filling = Filling(raw, self._is_typed)
        body = self._body.fill(parameters, filling)
        if filling.is_broken or not is_payload(body):
            raise _invalid_payload(body, filling.missing)
        if filling.missing and self.parameter(parameters, "skip_validating_missing_parameters") != "true":
            names = ", ".join(dict.fromkeys(filling.missing))
            raise InvalidInput(f"Some parameter placeholder not filled in payload: {names}", code="missing_parameter")
        if self._action.supports_structured_output:
            body = self._with_structure(body, parameters)
        body = _for_interface(body, self.parameter(parameters, "stream"), self._interface(parameters))
        if self._own.get("model") == NOVA:
            body = _without_absent(body)
        return self._with_charset(body, parameters)

    def _with_structure(self, body: bytes, parameters: Mapping[str, Any]) -> bytes:
        """A body that says how the answer is to be formed, where `_X_json` or `_X_additions_json` do."""
        given = {
            (name, suffix): text
            for name in STRUCTURES
            for suffix in ("json", "additions_json")
            if (text := self.parameter(parameters, f"_{name}_{suffix}")) is not None
        }
        if not given:
            return body
        members: dict[str, Any] = _members(body, "the request_body")
        for (name, suffix), text in given.items():
            value = _members(text.encode(), f"the parameter _{name}_{suffix}")
            if suffix == "additions_json" and name in members:
                value = {**_members(encode(members[name]), f"`{name}` of the request_body"), **value}
            members[name] = value
        return encode(members)

    def _interface(self, parameters: Mapping[str, Any]) -> str:
        return (self.parameter(parameters, "_llm_interface") or "").strip().lower()

    def _with_charset(self, body: bytes, parameters: Mapping[str, Any]) -> bytes:
        charset = self.parameter(parameters, "charset")
        if charset is None or charset.lower() in ("utf-8", "utf8"):
            return body
        try:
            return body.decode().encode(charset)
        except (LookupError, ValueError):
            raise InvalidInput(
                f"the body cannot be written in the charset {charset[:50]!r}", code="invalid_charset"
            ) from None


def _invalid_payload(body: bytes, missing: list[str]) -> InvalidInput:
    text = body.decode(errors="replace")
    if len(text) > SHOWN_CHARS:
        open_names = f" (not filled: {', '.join(dict.fromkeys(missing))})" if missing else ""
        text = f"{text[:SHOWN_CHARS]}…{open_names}"
    return InvalidInput(f"Invalid payload: {text}", code="invalid_payload")


def _members(data: bytes, place: str) -> dict[str, Raw]:
    try:
        return split_object(data)
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidInput(f"{place} is no JSON object", code="invalid_payload") from None


def _for_interface(body: bytes, stream: str | None, interface: str) -> bytes:
    """A body that asks for a stream, where its parameters do."""
    if stream is None or stream.lower() == "false" or interface != OPENAI_CHAT or body.lstrip()[:1] != b"{":
        return body
    return encode({**split_object(body), "stream": True})


def _without_absent(body: bytes) -> bytes:
    """A request of Nova's embeddings without the kinds of input that were not given."""
    try:
        request = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return body  # lines of JSON
    params = request.get("singleEmbeddingParams") if isinstance(request, dict) else None
    if not isinstance(params, dict):
        return body
    for kind in ("text", "image", "video", "audio"):
        part = params.get(kind)
        holder = part if kind == "text" else (part or {}).get("source") if isinstance(part, dict) else None
        member = "value" if kind == "text" else "bytes"
        if isinstance(holder, dict) and member in holder and holder[member] is None:
            del params[kind]
    return encode(request)
