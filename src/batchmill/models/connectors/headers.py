"""The headers of an action: the only part of a call that may contain a credential."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from batchmill.errors import InvalidInput
from batchmill.wire.json_bytes import encode
from batchmill.wire.rows.json_templates import (
    CREDENTIAL,
    DEPTH_MAX,
    Placeholder,
    find_placeholders,
    loop_message,
    split,
)

HEADER_BYTES_MAX = 8192
HEADERS_BYTES_MAX = 65_536
HEADERS_MAX = 100
STEPS_MAX = 1000  # parameters that one header refers to, directly or not

# These headers identify the caller, the client or the target, so callers' parameters may not set them.
BLOCKED = frozenset(
    {
        "authorization",
        "proxy-authorization",
        "cookie",
        "x-api-key",
        "x-auth-token",
        "x-auth-header",
        "x-forwarded-for",
        "x-real-ip",
        "x-client-ip",
        "cf-connecting-ip",
        "true-client-ip",
        "x-originating-ip",
        "host",
        "x-forwarded-host",
        "x-forwarded-server",
        "forwarded",
    }
)
# Headers of the connection, which the HTTP client sets.
CONNECTION_HEADERS = frozenset(
    {"connection", "content-length", "expect", "keep-alive", "proxy-connection", "te", "trailer", "upgrade"}
    | {"transfer-encoding"}
)

_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,200}")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def check_headers(headers: Mapping[str, str]) -> None:
    """Raises: InvalidInput, `invalid_header`, for invalid names and forbidden placeholders."""
    if len(headers) > HEADERS_MAX:
        raise InvalidInput(f"an action has more than {HEADERS_MAX} headers", code="invalid_header")
    seen: set[str] = set()
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name):
            raise InvalidInput(f"{name[:100]!r} is not a name of a header", code="invalid_header")
        lower = name.lower()
        if lower in seen:
            raise InvalidInput(f"the header {name!r} appears twice", code="invalid_header")
        seen.add(lower)
        if lower in CONNECTION_HEADERS:
            raise InvalidInput(
                f"the header {name!r} belongs to the connection: leave it out, it is set automatically",
                code="invalid_header",
            )
        if lower in BLOCKED and any(placeholder.scope != CREDENTIAL for placeholder in find_placeholders(value)):
            raise InvalidInput(
                f"Header '{name}' cannot use ${{parameters.*}} placeholders for security reasons. "
                "Use ${credential.*} instead.",
                code="invalid_header",
            )


class HeaderTemplates:
    """The header templates of one action, with the parameters of its connector."""

    def __init__(self, headers: Mapping[str, str], own: Mapping[str, str]) -> None:
        self._own = own
        parts_by_name = {name: split(value) for name, value in headers.items()}
        self._templates = {
            name: each for name, each in parts_by_name.items() if any(isinstance(piece, Placeholder) for piece in each)
        }
        fixed = {name: "".join(map(str, each)) for name, each in parts_by_name.items() if name not in self._templates}
        self._fixed = {name: _check_value(name, value) for name, value in fixed.items()}
        _check_size(self._fixed)
        all_placeholders = [placeholder for value in headers.values() for placeholder in find_placeholders(value)]
        self._uses_parameters = any(placeholder.scope != CREDENTIAL for placeholder in all_placeholders)
        self._credentials = [placeholder.name for placeholder in all_placeholders if placeholder.scope == CREDENTIAL]
        # Without parameters, the headers are the same for every row until a credential changes: (credentials, headers).
        self._last: tuple[list[str | None], dict[str, str]] | None = None

    def names(self) -> set[str]:
        """The names of the headers in lower case."""
        return {name.lower() for name in (*self._fixed, *self._templates)}

    def fill(self, values: Mapping[str, Any], credentials: Mapping[str, str]) -> dict[str, str]:
        """The headers of one call, as a new dict.

        Raises: InvalidInput, `missing_parameter`, `placeholder_loop` or `invalid_header`.
        """
        if not self._templates:
            return dict(self._fixed)
        current = [credentials.get(name) for name in self._credentials]
        if self._last is not None and self._last[0] == current:
            return dict(self._last[1])
        filled = dict(self._fixed)
        for name, pieces in self._templates.items():
            filled[name] = _check_value(name, _HeaderFilling(name, self._own, values, credentials).text(pieces, ()))
        _check_size(filled)
        if not self._uses_parameters:
            self._last = (current, filled)
        return dict(filled)


class _HeaderFilling:
    """Fills the template of one header."""

    def __init__(
        self, name: str, own: Mapping[str, str], values: Mapping[str, Any], credentials: Mapping[str, str]
    ) -> None:
        self._name = name
        self._own = own
        self._values = values
        self._credentials = credentials
        self._steps = 0

    def text(self, pieces: list[str | Placeholder], path: tuple[str, ...]) -> str:
        self._steps += 1
        if len(path) > DEPTH_MAX or self._steps > STEPS_MAX:
            raise InvalidInput("the parameters of a header refer to too many others", code="template_too_large")
        return "".join(piece if isinstance(piece, str) else self._value(piece, path) for piece in pieces)

    def _value(self, placeholder: Placeholder, path: tuple[str, ...]) -> str:
        if placeholder.scope == CREDENTIAL:
            value, text = self._credentials.get(placeholder.name), placeholder.default
        else:
            value, text = self._values.get(placeholder.name), self._own.get(placeholder.name, placeholder.default)
        if value is not None:
            return value if isinstance(value, str) else encode(value).decode()
        if text is None:
            raise InvalidInput(
                f"Header '{self._name}' contains unresolved placeholder. Required parameter is missing. "
                f"({placeholder.text})",
                code="missing_parameter",
            )
        if placeholder.scope != CREDENTIAL and placeholder.name in path:
            raise InvalidInput(
                loop_message((*path[path.index(placeholder.name) :], placeholder.name)), code="placeholder_loop"
            )
        return self.text(split(text), path if placeholder.scope == CREDENTIAL else (*path, placeholder.name))


def _check_value(name: str, value: str) -> str:
    if _CONTROL.search(value):
        raise InvalidInput(f"Header value contains invalid control character ({name})", code="invalid_header")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidInput(f"the header {name!r} has characters that are not text", code="invalid_header") from None
    if size > HEADER_BYTES_MAX:
        raise InvalidInput(f"the header {name!r} has more than {HEADER_BYTES_MAX} bytes", code="invalid_header")
    return value


def _check_size(headers: Mapping[str, str]) -> None:
    if sum(len(name) + len(value.encode()) for name, value in headers.items()) > HEADERS_BYTES_MAX:
        raise InvalidInput(f"the headers have more than {HEADERS_BYTES_MAX} bytes", code="invalid_header")
