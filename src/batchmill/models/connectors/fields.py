"""Members of a JSON object, read as ML Commons reads them: numbers stand for their text, null for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchmill.errors import InvalidInput
from batchmill.wire.json_bytes import encode


def invalid(message: str) -> InvalidInput:
    """What is wrong with a connector as a whole."""
    return InvalidInput(message, code="invalid_connector")


def text_of(value: Any) -> str:
    """A JSON value as a parameter: text as it is, everything else as its JSON."""
    return value if isinstance(value, str) else encode(value).decode()


def read_text(fields: Mapping[str, Any], name: str) -> str | None:
    """Raises: InvalidInput for an object or a list."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, Mapping | list):
        raise invalid(f"`{name}` is text")
    return _whole(name, text_of(value))


def read_flag(fields: Mapping[str, Any], name: str) -> bool:
    """True or false, as itself or as text; false where it is missing. Raises: InvalidInput."""
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    if value in ("true", "false"):
        return value == "true"
    raise invalid(f"`{name}` is true or false")


def read_texts(fields: Mapping[str, Any], name: str) -> dict[str, str]:
    """An object whose members are text; empty where it is missing. Raises: InvalidInput."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise invalid(f"`{name}` is an object")
    found = {key: read_text(value, key) for key in value}
    return {key: text for key, text in found.items() if text is not None}


def read_parameters(fields: Mapping[str, Any], name: str = "parameters") -> dict[str, str]:
    """An object of parameters, each as text. Raises: InvalidInput."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise invalid(f"`{name}` is an object")
    return {key: _whole(key, text_of(each)) for key, each in value.items()}


def _whole(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(f"`{name}` holds half of a surrogate pair") from None
    return text
