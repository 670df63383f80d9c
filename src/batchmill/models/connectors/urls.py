"""The URL of an action, with its placeholders.

What a connector says of itself stands as it was written. What a caller or a remote job says is percent-encoded, so
that it can add no segment and no query, and it never has a word in where the URL leads: up to the end of the host and
port, only the connector's own parameters count.
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
from batchmill.wire.json_templates import DEPTH_MAX, PARAMETERS, Hole, loop_message, split

URL_CHARS_MAX = 8192
VALUE_CHARS_MAX = 2048
SHOWN_CHARS = 100
STEPS_MAX = 1000  # parameters that one URL leads to
# Bedrock's ARN as ML Commons hands it on: its slashes are encoded already.
ENCODED = frozenset({"processedJobArn"})

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_AUTHORITY = re.compile(r"https?://[^/?#]*[/?#]", re.IGNORECASE)
_URL = re.compile(
    r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?(?:/[!-\x22$-;=?-\[\]-~]*)?"
    r"(?:\?[!-\x22$-;=?-\[\]-~]*)?",
    re.IGNORECASE,
)


class UrlTemplate:
    """The URL of one action, and the parameters of its connector."""

    def __init__(self, url: str, own: Mapping[str, str]) -> None:
        self._url = url
        self._own = own
        pieces = split(url)
        texts = [piece for piece in pieces if isinstance(piece, str)]
        self._fixed = _checked("".join(texts)) if len(texts) == len(pieces) else None
        self._own_url: str | None = None  # as it was for a call that said nothing of `_names`
        self._names: frozenset[str] = frozenset()

    def fill(self, values: Mapping[str, Any]) -> str:
        """The URL of one call.

        Raises: InvalidInput, `missing_parameter`, `placeholder_loop`, `invalid_url`, or `invalid_parameter` for a
        value that would lead elsewhere.
        """
        if self._fixed is not None:
            return self._fixed
        if self._own_url is not None and self._names.isdisjoint(values):
            return self._own_url
        filling = _Filling(self._own, values)
        filling.write(self._url, ())
        if filling.missing:
            names = ", ".join(dict.fromkeys(filling.missing))
            raise InvalidInput(f"Some parameter placeholder not filled in url: {names}", code="missing_parameter")
        url = filling.result()
        if filling.names.isdisjoint(values):
            self._own_url, self._names = url, frozenset(filling.names)
        return url


def own_url(url: str, own: Mapping[str, str]) -> str:
    """A URL with the connector's own parameters in it; what nobody has filled stays as it is written."""
    filling = _Filling(own, {})
    filling.write(url, ())
    return "".join(filling.out)


def has_open_host(url: str) -> bool:
    """Whether a URL, as `own_url` returns it, does not say where it leads."""
    found = _AUTHORITY.match(url)
    return any(isinstance(piece, Hole) for piece in split(found[0] if found else url.partition("?")[0]))


class _Filling:
    """One URL while it is put together."""

    def __init__(self, own: Mapping[str, str], values: Mapping[str, Any]) -> None:
        self._own = own
        self._values = values
        self._is_past_host = False
        self.out: list[str] = []
        self._shape: list[str] = []  # the same, with a letter for each value of a caller
        self.missing: list[str] = []
        self.names: set[str] = set()  # of parameters that were looked for
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
                self._write_hole(piece, path)

    def _count(self, path: tuple[str, ...]) -> None:
        self._steps += 1
        if len(path) > DEPTH_MAX or self._steps > STEPS_MAX:
            raise InvalidInput("the parameters of a URL refer to too many others", code="template_too_large")

    def _write_hole(self, hole: Hole, path: tuple[str, ...]) -> None:
        self._count(path)
        self.names.add(hole.name)
        value = self._values.get(hole.name)
        if value is not None and self._is_past_host:
            self._add(_encoded(hole.name, value), "x")
            return
        if hole.name in path:
            raise InvalidInput(loop_message((*path[path.index(hole.name) :], hole.name)), code="placeholder_loop")
        written = self._own.get(hole.name, hole.default)
        if written is None:
            self.missing.append(hole.name)
            self._add(hole.text, "x")
        else:
            self.write(written, (*path, hole.name))

    def _add(self, text: str, shape: str) -> None:
        self.out.append(text)
        self._shape.append(shape)
        self._length += len(text)
        if self._length > URL_CHARS_MAX:
            raise InvalidInput(f"a URL is longer than {URL_CHARS_MAX} characters", code="invalid_url")
        if not self._is_past_host:
            self._is_past_host = _AUTHORITY.match("".join(self.out)) is not None

    def result(self) -> str:
        """Raises: InvalidInput."""
        url = "".join(self.out)
        segments = url.partition("?")[0].split("/")
        for segment, shape in zip(segments, "".join(self._shape).partition("?")[0].split("/"), strict=True):
            if segment != shape and _leads_elsewhere(segment):
                raise InvalidInput(
                    f"a parameter that is {unquote(segment)[:SHOWN_CHARS]!r} cannot be a part of the URL's path",
                    code="invalid_parameter",
                )
        return _checked(url)


def _leads_elsewhere(segment: str) -> bool:
    """Whether a server could read a segment with a caller's value as another path, however often it decodes it."""
    text = unquote(segment)
    if not text or unquote(text) != text or _CONTROL.search(text):
        return True
    steps = re.split(r"[/\\]", unicodedata.normalize("NFKC", text))
    return any(step.partition(";")[0].strip() in (".", "..") for step in steps)


def _encoded(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else encode(value).decode()
    if len(text) > VALUE_CHARS_MAX:
        raise InvalidInput(
            f"the parameter {name!r} has {len(text)} characters; in a URL there may be {VALUE_CHARS_MAX}",
            code="invalid_parameter",
        )
    try:
        return quote(unquote(text) if name in ENCODED else text, safe="")
    except UnicodeEncodeError:
        raise InvalidInput(f"the parameter {name!r} is no text", code="invalid_parameter") from None


def _checked(url: str) -> str:
    if _URL.fullmatch(url) is None or len(url) > URL_CHARS_MAX:
        raise InvalidInput(
            "Encountered error when trying to create uri from endpoint in ml connector. "
            f"Please update the endpoint in connection configuration: {url[:200]}",
            code="invalid_url",
        )
    return url


_PROVIDERS = ("sagemaker", "openai", "bedrock", "cohere")  # the first whose name is in the URL
_BY_OPENAI = {"azure": "openai"}  # who speaks as another does
_TRANSFORM_JOB = '{ "TransformJobName" : "${parameters.TransformJobName}"}'


def find_action(connector: Connector, kind: str) -> Action:
    """The action of a type or name, with the headers of `predict` where it has none of its own.

    Raises: InvalidInput, `unknown_action`: there is none, and none follows from the others.
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
    """Whose batch API a connector calls, as `parameters.provider` or else its URL says; None: nobody knows."""
    batch = connector.action(BATCH_PREDICT)
    if batch is None:
        return None
    said = connector.parameters.get("provider", "").lower()
    said = _BY_OPENAI.get(said, said)
    url = own_url(batch.url, connector.parameters)
    return said if said in _PROVIDERS else next((each for each in _PROVIDERS if each in url), None)


def remote_parameters(remote_job: Mapping[str, Any]) -> dict[str, str]:
    """What a remote job says of itself, as parameters of the calls about it: its members that are text.

    Beside them `TransformJobName`, `processedJobArn` and `id` where another member says the same.
    """
    found = {name: value for name, value in remote_job.items() if isinstance(value, str)}
    if "TransformJobArn" in found:
        found.setdefault("TransformJobName", found["TransformJobArn"].rpartition("/")[2])
    if "jobArn" in found:
        found.setdefault("processedJobArn", found["jobArn"].replace("/", "%2F"))
    if "job_id" in found:
        found.setdefault("id", found["job_id"])  # Cohere's name for it
    return found


def _derive(connector: Connector, kind: str) -> Action:
    batch = connector.action(BATCH_PREDICT)
    if batch is None:
        raise InvalidInput("no BATCH_PREDICT action found", code="unknown_action")
    is_cancel = kind == CANCEL_BATCH_PREDICT
    url = own_url(batch.url, connector.parameters)
    match provider_of(connector):
        case "sagemaker":
            verb = "StopTransformJob" if is_cancel else "DescribeTransformJob"
            there = url.replace("CreateTransformJob", verb)
            return Action(kind, "POST", there, headers=batch.headers, request_body=_TRANSFORM_JOB)
        case "openai" | "cohere":
            path = "/${parameters.id}" + ("/cancel" if is_cancel else "")
        case "bedrock":
            path = "/${parameters.processedJobArn}" + ("/stop" if is_cancel else "")
        case _:
            what = "to cancel the batch job" if is_cancel else "to get the batch job details"
            raise InvalidInput(f"Please configure the action type {what} in the connector", code="unknown_action")
    head, mark, query = url.partition("?")
    there = f"{head.rstrip('/')}{path}{mark}{query}"
    return Action(kind, "POST" if is_cancel else "GET", there, headers=batch.headers)
