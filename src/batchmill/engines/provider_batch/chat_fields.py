"""What the translations of chat completions share. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

_DATA_URL = re.compile(r"data:([a-z]+/[a-z0-9.+-]+);base64,", re.IGNORECASE)


def read_data_url(url: str, types: Collection[str]) -> tuple[str, str] | None:
    """The media type and the base64 text of a `data:` URL; None if it is none, or of another type."""
    found = _DATA_URL.match(url)
    if found is None or found[1].lower() not in types:
        return None
    return found[1].lower(), url[found.end() :]


def asks_for_nothing(name: str, value: Any, quiet: Mapping[str, tuple[Any, ...]]) -> bool:
    """Whether a field has one of the values without effect. A number is not a truth value."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in quiet.get(name, ()))


def first_given(*values: Any) -> Any:
    """The first value that is not null."""
    return next((value for value in values if value is not None), None)
