"""Fills the placeholders in the URL of an action, and derives actions for batches.

The connector's own parameters are inserted unchanged. Values of callers and remote jobs are percent-encoded, so that
they cannot add a path segment or a query. Up to the end of the host and port, only the connector's own parameters are
used.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from msgspec.structs import replace

from batchmill.errors import InvalidInput
from batchmill.types.connectors import (
    BATCH_PREDICT,
    BATCH_PREDICT_STATUS,
    CANCEL_BATCH_PREDICT,
    PREDICT,
    Action,
    Connector,
)
from batchmill.wire.json_bytes import encode
from batchmill.wire.rows.json_templates import DEPTH_MAX, PARAMETERS, Placeholder, loop_message, split

URL_CHARS_MAX = 8192
VALUE_CHARS_MAX = 2048
SHOWN_CHARS = 100
STEPS_MAX = 1000  # parameters that one URL refers to, directly or not
# Bedrock's ARN as ML Commons passes it on: its slashes are already encoded.
ENCODED = frozenset({"processedJobArn"})

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_AUTHORITY = re.compile(r"https?://[^/?#]*[/?#]", re.IGNORECASE)
_URL = re.compile(
    r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?(?:/[!-\x22$-;=?-\[\]-~]*)?"
    r"(?:\?[!-\x22$-;=?-\[\]-~]*)?",
    re.IGNORECASE,
)


class UrlTemplate:
    """The URL template of one action, with the parameters of its connector."""

    def __init__(self, url: str, own: Mapping[str, str]) -> None:
        self._url = url
        self._own = own
        pieces = split(url)
        texts = [piece for piece in pieces if isinstance(piece, str)]
        self._fixed = _check_url("".join(texts)) if len(texts) == len(pieces) else None
        self._own_url: str | None = None  # the URL of a call without any of `_names`
        self._names: frozenset[str] = frozenset()

    def fill(self, values: Mapping[str, Any]) -> str:
        """The URL of one call.

        Raises: InvalidInput, `missing_parameter`, `placeholder_loop`, `invalid_url`, or `invalid_parameter` for a
        value that would change the path.
        """
        if self._fixed is not None:
            return self._fixed
        if self._own_url is not None and self._names.isdisjoint(values):
            return self._own_url
        filling = _UrlFilling(self._own, values)
        filling.write(self._url, ())
        if filling.missing:
            names = ", ".join(dict.fromkeys(filling.missing))
            raise InvalidInput(f"Some parameter placeholder not filled in url: {names}", code="missing_parameter")
        url = filling.result()
        if filling.names.isdisjoint(values):
            self._own_url, self._names = url, frozenset(filling.names)
        return url


def own_url(url: str, own: Mapping[str, str]) -> str:
    """A URL with the connector's own parameters filled in. Other placeholders stay."""
    filling = _UrlFilling(own, {})
    filling.write(url, ())
    return "".join(filling.out)


def has_open_host(url: str) -> bool:
    """Whether a URL from `own_url` has a placeholder in its host or port."""
    match = _AUTHORITY.match(url)
    return any(isinstance(piece, Placeholder) for piece in split(match[0] if match else url.partition("?")[0]))


class _UrlFilling:
    """Fills the template of one URL."""

    def __init__(self, own: Mapping[str, str], values: Mapping[str, Any]) -> None:
        self._own = own
        self._values = values
        self._is_past_host = False
        self.out: list[str] = []
        self._shape: list[str] = []  # as `out`, with "x" for each value of a caller
        self.missing: list[str] = []
        self.names: set[str] = set()  # of the parameters in the template
        self._steps = 0
        self._length = 0

    def write(self, text: str, path: tuple[str, ...]) -> None:
        self._count(path)
        for piece in split(text):
            if isinstance(piece, str):
                self._add(piece, piece)
            elif piece.scope != PARAMETERS:
                self._add(piece.text, piece.text)
            else:
                self._write_placeholder(piece, path)

    def _count(self, path: tuple[str, ...]) -> None:
        self._steps += 1
        if len(path) > DEPTH_MAX or self._steps > STEPS_MAX:
            raise InvalidInput("the parameters of a URL refer to too many others", code="template_too_large")

    def _write_placeholder(self, placeholder: Placeholder, path: tuple[str, ...]) -> None:
        self._count(path)
        self.names.add(placeholder.name)
        value = self._values.get(placeholder.name)
        if value is not None and self._is_past_host:
            self._add(_encode_value(placeholder.name, value), "x")
            return
        if placeholder.name in path:
            raise InvalidInput(
                loop_message((*path[path.index(placeholder.name) :], placeholder.name)), code="placeholder_loop"
            )
        template = self._own.get(placeholder.name, placeholder.default)
        if template is None:
            self.missing.append(placeholder.name)
            self._add(placeholder.text, "x")
        else:
            self.write(template, (*path, placeholder.name))

    def _add(self, text: str, shape: str) -> None:
        self.out.append(text)
        self._shape.append(shape)
        self._length += len(text)
        if self._length > URL_CHARS_MAX:
            raise InvalidInput(f"a URL is longer than {URL_CHARS_MAX} characters", code="invalid_url")
        if not self._is_past_host:
            self._is_past_host = _AUTHORITY.match("".join(self.out)) is not None

    def result(self) -> str:
        """The filled URL. Raises: InvalidInput."""
        url = "".join(self.out)
        segments = url.partition("?")[0].split("/")
        for segment, shape in zip(segments, "".join(self._shape).partition("?")[0].split("/"), strict=True):
            if segment != shape and _changes_path(segment):
                raise InvalidInput(
                    f"a parameter that is {unquote(segment)[:SHOWN_CHARS]!r} cannot be a part of the URL's path",
                    code="invalid_parameter",
                )
        return _check_url(url)


def _changes_path(segment: str) -> bool:
    """Whether a server could read a segment with a caller's value as another path, however often it decodes it.

    Examples are "..", and a value that is still percent-encoded after one decoding.
    """
    text = unquote(segment)
    if not text or unquote(text) != text or _CONTROL.search(text):
        return True
    steps = re.split(r"[/\\]", unicodedata.normalize("NFKC", text))
    return any(step.partition(";")[0].strip() in (".", "..") for step in steps)


def _encode_value(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else encode(value).decode()
    if len(text) > VALUE_CHARS_MAX:
        raise InvalidInput(
            f"the parameter {name!r} has {len(text)} characters; the maximum in a URL is {VALUE_CHARS_MAX}",
            code="invalid_parameter",
        )
    try:
        return quote(unquote(text) if name in ENCODED else text, safe="")
    except UnicodeEncodeError:
        raise InvalidInput(f"the parameter {name!r} is not text", code="invalid_parameter") from None


def _check_url(url: str) -> str:
    if _URL.fullmatch(url) is None or len(url) > URL_CHARS_MAX:
        raise InvalidInput(
            "Encountered error when trying to create uri from endpoint in ml connector. "
            f"Please update the endpoint in connection configuration: {url[:200]}",
            code="invalid_url",
        )
    return url


_PROVIDERS = ("sagemaker", "openai", "bedrock", "cohere")  # the first whose name is in the URL
_COMPATIBLE = {"azure": "openai"}  # provider -> the one with the same API
_TRANSFORM_JOB = '{ "TransformJobName" : "${parameters.TransformJobName}"}'


def find_action(connector: Connector, kind: str) -> Action:
    """The action of a type or name. Without headers of its own, it gets those of `predict`.

    Raises: InvalidInput, `unknown_action`, if it does not exist and cannot be derived from other actions.
    """
    action = connector.action(kind)
    if action is None and kind in (BATCH_PREDICT_STATUS, CANCEL_BATCH_PREDICT):
        action = _derive(connector, kind)
    if action is None:
        raise InvalidInput(f"no {kind} action found", code="unknown_action")
    if action.headers or action.action_type == PREDICT:
        return action
    predict = connector.action(PREDICT)
    return action if predict is None else replace(action, headers=predict.headers)


def provider_of(connector: Connector) -> str | None:
    """The provider of a connector's batch API, from `parameters.provider` or else its URL; None if it is unknown."""
    batch = connector.action(BATCH_PREDICT)
    if batch is None:
        return None
    provider = connector.parameters.get("provider", "").lower()
    provider = _COMPATIBLE.get(provider, provider)
    url = own_url(batch.url, connector.parameters)
    return provider if provider in _PROVIDERS else next((each for each in _PROVIDERS if each in url), None)


def remote_parameters(remote_job: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of calls about a remote job: its members that are text.

    `TransformJobName`, `processedJobArn` and `id` are derived from other members if they are missing.
    """
    parameters = {name: value for name, value in remote_job.items() if isinstance(value, str)}
    if "TransformJobArn" in parameters:
        parameters.setdefault("TransformJobName", parameters["TransformJobArn"].rpartition("/")[2])
    if "jobArn" in parameters:
        parameters.setdefault("processedJobArn", parameters["jobArn"].replace("/", "%2F"))
    if "job_id" in parameters:
        parameters.setdefault("id", parameters["job_id"])  # Cohere's name for it
    return parameters


def _derive(connector: Connector, kind: str) -> Action:
    batch = connector.action(BATCH_PREDICT)
    if batch is None:
        raise InvalidInput("no BATCH_PREDICT action found", code="unknown_action")
    is_cancel = kind == CANCEL_BATCH_PREDICT
    url = own_url(batch.url, connector.parameters)
    match provider_of(connector):
        case "sagemaker":
            verb = "StopTransformJob" if is_cancel else "DescribeTransformJob"
            action_url = url.replace("CreateTransformJob", verb)
            return Action(kind, "POST", action_url, headers=batch.headers, request_body=_TRANSFORM_JOB)
        case "openai" | "cohere":
            path = "/${parameters.id}" + ("/cancel" if is_cancel else "")
        case "bedrock":
            path = "/${parameters.processedJobArn}" + ("/stop" if is_cancel else "")
        case _:
            purpose = "to cancel the batch job" if is_cancel else "to get the batch job details"
            raise InvalidInput(f"Please configure the action type {purpose} in the connector", code="unknown_action")
    head, mark, query = url.partition("?")
    action_url = f"{head.rstrip('/')}{path}{mark}{query}"
    return Action(kind, "POST" if is_cancel else "GET", action_url, headers=batch.headers)
