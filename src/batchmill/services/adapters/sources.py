"""Where callers of a server may have adapters fetched from; whoever runs the machine may name any place."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path

from batchmill.config import DeploymentsEntry
from batchmill.errors import Forbidden, InvalidInput
from batchmill.models.adapters.fetching import kind_of
from batchmill.models.secrets import KINDS, NAME

SHOWN_CHARS = 200
SOURCE_CHARS_MAX = 1000


def check_source(source: str, entry: DeploymentsEntry, *, is_trusted: bool) -> str:
    """The source, a folder by its real path. Raises: InvalidInput for a text that is none; Forbidden."""
    if len(source) > SOURCE_CHARS_MAX or not source.isprintable():
        raise InvalidInput(f"a source is {SOURCE_CHARS_MAX:,} printable characters at most", code="invalid_source")
    kind = kind_of(source)
    place = os.path.realpath(Path(source).expanduser()) if kind == "folder" else source
    if is_trusted:
        return place
    patterns = entry.adapter_sources + (entry.adapter_patterns if kind == "hub" else [])
    if not any(_fits(place, pattern) for pattern in patterns):
        raise Forbidden(
            f"adapters from {source[:SHOWN_CHARS]} are not taken over the API: whoever runs this server lists what is, "
            "in deployments.adapter_sources; an adapter's own folder can be uploaded (`batchmill adapters add`)"
        )
    return place


def _fits(place: str, pattern: str) -> bool:
    """A pattern, or the beginning of a place up to one of its slashes."""
    return fnmatchcase(place, pattern) or place.startswith(pattern.rstrip("/") + "/") or place == pattern.rstrip("/")


def check_token(token: str | None, *, is_trusted: bool) -> str | None:
    """A reference to a token of a model hub. The text is not repeated: it may be the token. Raises: InvalidInput."""
    if token is None:
        return None
    kind, _, name = token.partition(":")
    if (kind == "secret" and NAME.fullmatch(name)) or (is_trusted and token.startswith(KINDS) and name):
        return token
    allowed = '"secret:NAME", "env:NAME" or "file:PATH"' if is_trusted else '"secret:NAME"'
    raise InvalidInput(f"the token is given as {allowed}, never itself", code="invalid_secret")
