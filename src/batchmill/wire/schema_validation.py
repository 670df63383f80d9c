"""Validates JSON against a JSON Schema, which callers wrote: nothing is fetched for it, and no check takes long."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

import jsonschema_rs
from jsonschema_rs.canonical import Satisfiability

from batchmill.errors import InvalidInput
from batchmill.types import OutputSchema
from batchmill.wire.json_bytes import DEPTH_MAX, decode, is_too_deep

SCHEMA_BYTES_MAX = 256 * 1024
PROBLEMS_MAX = 5  # that are named of one value
PROBLEM_CHARS_MAX = 300
PATTERN_BYTES_MAX = 10 * 1024 * 1024  # of a compiled pattern
# Whether a value fits is remembered for each part of it, what is wrong is not: a schema with more nodes than this, when
# each $ref is replaced by what it means, may take a time that doubles with each level of the value.
EXPLAINED_NODES_MAX = 10_000
INVALID, MISFIT = "invalid_schema", "it does not fit the schema"


class SchemaValidator:
    """A compiled schema. Concurrency: any thread."""

    def __init__(self, document: Any) -> None:
        """Raises: InvalidInput (`invalid_schema`), which says what is wrong with the schema."""
        patterns = jsonschema_rs.RegexOptions(size_limit=PATTERN_BYTES_MAX)  # they take linear time
        try:
            self._validator = jsonschema_rs.validator_for(document, offline=True, pattern_options=patterns)
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
            raise InvalidInput(f"the schema cannot be used: {_reason(error)}", code=INVALID) from None
        self._is_explained = _is_small(document)

    def problems(self, value: Any) -> list[str]:
        """What does not fit, at most PROBLEMS_MAX sentences; empty: the value fits."""
        if self._validator.is_valid(value):
            return []
        if not self._is_explained:
            return [MISFIT]
        errors = islice(self._validator.iter_errors(value), PROBLEMS_MAX)
        return [_problem(error.instance_path, error.message) for error in errors] or [MISFIT]


@lru_cache(maxsize=64)
def validator_of(schema: OutputSchema) -> SchemaValidator:
    """The validator of a job's schema. Raises: InvalidInput (`invalid_schema`)."""
    return SchemaValidator(decode(schema.document))


def check_schema(schema: OutputSchema) -> None:
    """Raises: InvalidInput (`invalid_schema`) for a schema that is none, too large, or refers to something outside."""
    data = schema.document.encode()
    if len(data) > SCHEMA_BYTES_MAX:
        raise InvalidInput(f"the schema has {len(data):,} bytes; at most {SCHEMA_BYTES_MAX:,}", code=INVALID)
    if is_too_deep(data, DEPTH_MAX):
        raise InvalidInput(f"the schema is nested deeper than {DEPTH_MAX} levels", code=INVALID)
    if not isinstance(decode(data), dict):
        raise InvalidInput("the schema is not a JSON object", code=INVALID)
    validator_of(schema)


def admits_nothing(schema: OutputSchema) -> bool:
    """Whether it is certain that no value fits. It may take seconds: not for the process of an owner."""
    try:
        found = jsonschema_rs.canonicalize(decode(schema.document), offline=True)
    except (jsonschema_rs.canonical.CanonicalizationError, ValueError):
        return False  # not certain
    return found.satisfiability() is Satisfiability.NO


def _is_small(document: Any) -> bool:
    """Whether few nodes are left when each $ref is replaced by what it means."""
    left = EXPLAINED_NODES_MAX
    for _ in _nodes(document, document):
        left -= 1
        if not left:
            return False
    return True


def _nodes(root: Any, document: Any) -> Iterator[None]:
    """One None for each node. Endless if the schema refers to itself, or cannot be followed."""
    waiting = [document]
    while waiting:
        node = waiting.pop()
        yield
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            if any(name in node for name in ("$dynamicRef", "$recursiveRef", "$anchor", "$id")) and node is not root:
                waiting.append(node)
                continue
            waiting += [value for name, value in node.items() if name not in ("$defs", "definitions")]
            if isinstance(pointer := node.get("$ref"), str):
                waiting.append(_resolved(root, pointer, node))


def _resolved(root: Any, pointer: str, otherwise: Any) -> Any:
    """What a pointer names within the schema; `otherwise` if it is none."""
    if not pointer.startswith("#"):
        return otherwise
    found = root
    for part in pointer[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return otherwise
        found = found[name]
    return found


def _problem(path: list[str | int], message: str) -> str:
    where = "".join(f"/{part}" for part in path)
    text = f"{where}: {message}" if where else message
    return text if len(text) <= PROBLEM_CHARS_MAX else text[: PROBLEM_CHARS_MAX - 1] + "…"


def _reason(error: Exception) -> str:
    """The first line of an error, with the place in the schema."""
    path = "".join(f"/{part}" for part in getattr(error, "instance_path", ()))
    text = str(error).partition("\n")[0]
    return f"{path}: {text}" if path else text
