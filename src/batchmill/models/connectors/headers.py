"""The headers of an action: the only place where a credential may stand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from batchmill.errors import InvalidInput
from batchmill.wire.json_bytes import encode
from batchmill.wire.json_templates import CREDENTIAL, DEPTH_MAX, Hole, holes, loop_message, split

HEADER_BYTES_MAX = 8192
HEADERS_BYTES_MAX = 65_536
HEADERS_MAX = 100
STEPS_MAX = 1000  # parameters that one header leads to

# Whoever may say these says who calls, for whom, or where to.
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
# Those of the connection itself: whoever sends says them.
OF_CONNECTION = frozenset(
    {"connection", "content-length", "expect", "keep-alive", "proxy-connection", "te", "trailer", "upgrade"}
    | {"transfer-encoding"}
)

_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,200}")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def check_headers(headers: Mapping[str, str]) -> None:
    """Raises: InvalidInput, `invalid_header`, for names and placeholders that no connector may have."""
    if len(headers) > HEADERS_MAX:
        raise InvalidInput(f"an action has more than {HEADERS_MAX} headers", code="invalid_header")
    seen: set[str] = set()
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name):
            raise InvalidInput(f"{name[:100]!r} is no name of a header", code="invalid_header")
        lower = name.lower()
        if lower in seen:
            raise InvalidInput(f"the header {name!r} is there twice", code="invalid_header")
        seen.add(lower)
        if lower in OF_CONNECTION:
            raise InvalidInput(
                f"the header {name!r} belongs to the connection: leave it out, it is set as it must be",
                code="invalid_header",
            )
        if lower in BLOCKED and any(hole.scope != CREDENTIAL for hole in holes(value)):
            raise InvalidInput(
                f"Header '{name}' cannot use ${{parameters.*}} placeholders for security reasons. "
                "Use ${credential.*} instead.",
                code="invalid_header",
            )


class HeaderTemplates:
    """The headers of one action, and the parameters of its connector."""

    def __init__(self, headers: Mapping[str, str], own: Mapping[str, str]) -> None:
        self._own = own
        pieces = {name: split(value) for name, value in headers.items()}
        self._open = {name: each for name, each in pieces.items() if any(isinstance(piece, Hole) for piece in each)}
        closed = {name: "".join(map(str, each)) for name, each in pieces.items() if name not in self._open}
        self._fixed = {name: _checked(name, value) for name, value in closed.items()}
        _check_size(self._fixed)
        found = [hole for value in headers.values() for hole in holes(value)]
        self._asks_caller = any(hole.scope != CREDENTIAL for hole in found)
        self._credentials = [hole.name for hole in found if hole.scope == CREDENTIAL]
        # What these credentials came to, where nothing else counts: the same for every row until one of them changes.
        self._last: tuple[list[str | None], dict[str, str]] | None = None

    def names(self) -> set[str]:
        """In lower case."""
        return {name.lower() for name in (*self._fixed, *self._open)}

    def fill(self, values: Mapping[str, Any], credentials: Mapping[str, str]) -> dict[str, str]:
        """A new dict of the headers of one call.

        Raises: InvalidInput, `missing_parameter`, `placeholder_loop` or `invalid_header`.
        """
        if not self._open:
            return dict(self._fixed)
        known = [credentials.get(name) for name in self._credentials]
        if self._last is not None and self._last[0] == known:
            return dict(self._last[1])
        filled = dict(self._fixed)
        for name, pieces in self._open.items():
            filled[name] = _checked(name, _Filling(name, self._own, values, credentials).text(pieces, ()))
        _check_size(filled)
        if not self._asks_caller:
            self._last = (known, filled)
        return dict(filled)


class _Filling:
    """One header while it is put together."""

    def __init__(
        self, name: str, own: Mapping[str, str], values: Mapping[str, Any], credentials: Mapping[str, str]
    ) -> None:
        self._name = name
        self._own = own
        self._values = values
        self._credentials = credentials
        self._steps = 0

    def text(self, pieces: list[str | Hole], path: tuple[str, ...]) -> str:
        self._steps += 1
        if len(path) > DEPTH_MAX or self._steps > STEPS_MAX:
            raise InvalidInput("the parameters of a header refer to too many others", code="template_too_large")
        return "".join(piece if isinstance(piece, str) else self._value(piece, path) for piece in pieces)

    def _value(self, hole: Hole, path: tuple[str, ...]) -> str:
        if hole.scope == CREDENTIAL:
            value, written = self._credentials.get(hole.name), hole.default
        else:
            value, written = self._values.get(hole.name), self._own.get(hole.name, hole.default)
        if value is not None:
            return value if isinstance(value, str) else encode(value).decode()
        if written is None:
            raise InvalidInput(
                f"Header '{self._name}' contains unresolved placeholder. Required parameter is missing. ({hole.text})",
                code="missing_parameter",
            )
        if hole.scope != CREDENTIAL and hole.name in path:
            raise InvalidInput(loop_message((*path[path.index(hole.name) :], hole.name)), code="placeholder_loop")
        return self.text(split(written), path if hole.scope == CREDENTIAL else (*path, hole.name))


def _checked(name: str, value: str) -> str:
    if _CONTROL.search(value):
        raise InvalidInput(f"Header value contains invalid control character ({name})", code="invalid_header")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidInput(f"the header {name!r} holds what is no text", code="invalid_header") from None
    if size > HEADER_BYTES_MAX:
        raise InvalidInput(f"the header {name!r} has more than {HEADER_BYTES_MAX} bytes", code="invalid_header")
    return value


def _check_size(headers: Mapping[str, str]) -> None:
    if sum(len(name) + len(value.encode()) for name, value in headers.items()) > HEADERS_BYTES_MAX:
        raise InvalidInput(f"the headers have more than {HEADERS_BYTES_MAX} bytes", code="invalid_header")
