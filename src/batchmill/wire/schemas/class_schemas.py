"""The JSON Schema that a Python class or a line of fields describes."""

from __future__ import annotations

from typing import Any

from batchmill.errors import InvalidInput
from batchmill.function_runtime import class_schemas
from batchmill.wire.schemas.output_schema import schema_of_fields


def schema_of(source: Any) -> dict[str, Any]:
    """The schema of a pydantic model, a dataclass, a `msgspec.Struct`, a TypedDict, or "label: yes|no, score: float".

    A dict is a schema already. Raises: InvalidInput.
    """
    if isinstance(source, dict):
        return source
    if isinstance(source, str):
        return schema_of_fields(source)
    if not isinstance(source, type):
        raise InvalidInput(
            f"{source!r} is no schema: give a dict, a pydantic model, a dataclass, a msgspec.Struct, or a line such as "
            '"label: yes|no, score: float"',
            code="invalid_schema",
        )
    try:
        return class_schemas.schema_of(source)
    except class_schemas.NoSchema as error:
        raise InvalidInput(str(error), code="invalid_schema") from None


def has_validators(source: Any) -> bool:
    """Whether a class checks its values in Python: validators and types of pydantic, or a `__post_init__`.

    Call it after `schema_of`, which completes models whose annotations name later classes.
    """
    return class_schemas.has_validators(source)
