"""The JSON Schema that a Python class or a line of fields describes."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from batchmill.errors import InvalidInput
from batchmill.wire.output_schema import schema_of_fields

REFERENCES = "#/$defs/"


def schema_of(source: Any) -> dict[str, Any]:
    """The schema of a pydantic model, a dataclass, a `msgspec.Struct`, a TypedDict, or "label: yes|no, score: float".

    A dict is a schema already. Raises: InvalidInput.
    """
    if isinstance(source, dict):
        return source
    if isinstance(source, str):
        return schema_of_fields(source)
    make: Any = getattr(source, "model_json_schema", None)  # of pydantic
    if isinstance(source, type) and make is not None:
        try:
            return _closed(_inlined(make()))
        except Exception as error:  # of the user's model
            raise InvalidInput(f"{source!r} has no JSON Schema: {error}", code="invalid_schema") from None
    is_struct = isinstance(source, type) and issubclass(source, msgspec.Struct)
    if is_struct or dataclasses.is_dataclass(source) or hasattr(source, "__total__"):
        try:
            return _closed(_inlined(msgspec.json.schema(source)))
        except TypeError as error:
            raise InvalidInput(f"{source!r} has no JSON Schema: {error}", code="invalid_schema") from None
    raise InvalidInput(
        f"{source!r} is no schema: give a dict, a pydantic model, a dataclass, a msgspec.Struct, or a line such as "
        '"label: yes|no, score: float"',
        code="invalid_schema",
    )


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema with the fields of its object at the top, where their columns are seen."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith(REFERENCES):
        return schema
    definitions = schema["$defs"]
    name = reference.removeprefix(REFERENCES)
    others = {key: value for key, value in definitions.items() if key != name or _names(definitions, reference)}
    return {**definitions[name], **({"$defs": others} if others else {})}


def _names(document: Any, reference: str) -> bool:
    """Whether a part of a schema refers to a definition."""
    if isinstance(document, dict):
        return document.get("$ref") == reference or any(_names(each, reference) for each in document.values())
    return isinstance(document, list) and any(_names(each, reference) for each in document)


def _closed(document: Any) -> Any:
    """The same schema, whose objects have no other fields: then a service can hold its model to them."""
    if isinstance(document, list):
        return [_closed(each) for each in document]
    if not isinstance(document, dict):
        return document
    closed = {name: _closed(value) for name, value in document.items()}
    if closed.get("type") == "object" and isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed
