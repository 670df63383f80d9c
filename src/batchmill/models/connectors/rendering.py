"""Renders one call of an action: fills its templates with the parameters of a row, a request or a remote job.

Templates are compiled once for each action. This module sends nothing.
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
from batchmill.wire.rows.json_templates import Filling, JsonTemplate, is_payload

SHOWN_CHARS = 2000
AWS_SIGV4 = "aws_sigv4"
SIGNING = "batchmill.models.connectors.signing:sign_connector"  # needs botocore
NOVA = "amazon.nova-2-multimodal-embeddings-v1:0"
OPENAI_CHAT = "openai/v1/chat/completions"
STRUCTURES = ("response_format", "generationConfig", "toolConfig")  # of OpenAI, Gemini, Bedrock


class Rendered(Struct, frozen=True):
    """A call that is ready to send. Its URL is already encoded: a client may not encode or normalise it again."""

    method: str
    url: str
    headers: dict[str, str]
    body: bytes | None


class Renderer:
    """Renders the calls of one action of one connector.

    Args:
        is_typed: parameters are typed values (rows of JSON), so that a str always becomes a JSON string. Otherwise, as
            in ML Commons, text outside of quotes must be the text of a JSON value.
    """

    def __init__(self, connector: Connector, action: Action, *, is_typed: bool = False) -> None:
        """Raises: InvalidInput for templates that can never be filled; InvalidConfig if botocore is missing."""
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
        """Render a call, and sign it if the protocol requires that. `at` is the time of the signature, by default now.

        Raises: InvalidInput for a missing or wrong parameter. Its message may contain values of `parameters`.
        """
        return self.sign(self.compose(parameters, credentials), credentials, at)

    def compose(self, parameters: Mapping[str, Any], credentials: Mapping[str, str]) -> Rendered:
        """Render a call without a signature, so that `sign` can sign each attempt."""
        body = self._render_body(parameters)
        if not body and self._action.method == "POST" and self._action.action_type != CANCEL_BATCH_PREDICT:
            raise InvalidInput("Content length is 0. Aborting request to remote model", code="empty_payload")
        headers = self._headers.fill(parameters, credentials)
        if body is not None and self._adds_type:
            headers["Content-Type"] = "application/json"
        return Rendered(self._action.method, self._url.fill(parameters), headers, body)

    def sign(self, rendered: Rendered, credentials: Mapping[str, str], at: datetime | None = None) -> Rendered:
        """Sign a call with the time `at`, by default now; unchanged if the protocol has no signatures.

        Raises: InvalidInput if the keys are missing.
        """
        if self._sign is None:
            return rendered
        return self._sign(rendered, self._own, credentials, at)

    def parameter(self, parameters: Mapping[str, Any], name: str) -> str | None:
        """The value of a parameter as text: the caller's, or else the connector's."""
        value = parameters.get(name)
        if value is None:
            return self._own.get(name)
        return value if isinstance(value, str) else encode(value).decode()

    def _render_body(self, parameters: Mapping[str, Any]) -> bytes | None:
        if self._body is None:
            text = self.parameter(parameters, "http_body")
            return None if text is None else self._with_charset(text.encode(errors="replace"), parameters)
        unescaped = self.parameter(parameters, "no_escape_params")
        raw = frozenset(map(str.strip, unescaped.split(","))) if unescaped else ()
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
        """The body with the structured-output settings of the parameters `_X_json` and `_X_additions_json`."""
        structures = {
            (name, suffix): text
            for name in STRUCTURES
            for suffix in ("json", "additions_json")
            if (text := self.parameter(parameters, f"_{name}_{suffix}")) is not None
        }
        if not structures:
            return body
        members: dict[str, Any] = _members(body, "the request_body")
        for (name, suffix), text in structures.items():
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
                f"the body cannot be encoded in the charset {charset[:50]!r}", code="invalid_charset"
            ) from None


def _invalid_payload(body: bytes, missing: list[str]) -> InvalidInput:
    text = body.decode(errors="replace")
    if len(text) > SHOWN_CHARS:
        open_names = f" (not filled: {', '.join(dict.fromkeys(missing))})" if missing else ""
        text = f"{text[:SHOWN_CHARS]}…{open_names}"
    return InvalidInput(f"Invalid payload: {text}", code="invalid_payload")


def _members(data: bytes, subject: str) -> dict[str, Raw]:
    try:
        return split_object(data)
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidInput(f"{subject} is not a JSON object", code="invalid_payload") from None


def _for_interface(body: bytes, stream: str | None, interface: str) -> bytes:
    """The body with `stream`, if the parameters ask for a stream."""
    if stream is None or stream.lower() == "false" or interface != OPENAI_CHAT or body.lstrip()[:1] != b"{":
        return body
    return encode({**split_object(body), "stream": True})


def _without_absent(body: bytes) -> bytes:
    """A request for Nova's embeddings without the kinds of input that are null."""
    try:
        request = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return body  # lines of JSON
    params = request.get("singleEmbeddingParams") if isinstance(request, dict) else None
    if not isinstance(params, dict):
        return body
    for kind in ("text", "image", "video", "audio"):
        part = params.get(kind)
        content = part if kind == "text" else (part or {}).get("source") if isinstance(part, dict) else None
        member = "value" if kind == "text" else "bytes"
        if isinstance(content, dict) and member in content and content[member] is None:
            del params[kind]
    return encode(request)
