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

from batchmill.errors import InvalidInput
from batchmill.wire.json_bytes import encode
from batchmill.wire.json_templates import DEPTH_MAX, loop_message
from batchmill.wire.placeholders import PARAMETERS, Hole, split

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
