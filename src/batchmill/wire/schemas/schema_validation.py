"""Validates JSON against a JSON Schema, which callers wrote: nothing is fetched for it, and no check takes long."""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import Any
from urllib.parse import unquote

import jsonschema_rs
from jsonschema_rs.canonical import Satisfiability

from batchmill.errors import InvalidInput
from batchmill.types import OutputSchema
from batchmill.wire.json_bytes import DEPTH_MAX, decode, is_too_deep

SCHEMA_BYTES_MAX = 256 * 1024
PROBLEMS_MAX = 5  # that are named of one value
PROBLEM_CHARS_MAX = 300
# A hundred short patterns can take gigabytes when they are compiled.
PATTERNS_MAX, PATTERN_BYTES_MAX = 64, 1024 * 1024  # of each, compiled
# Checking a value takes time for each node of the schema and of the value, where each $ref counts as all that it means:
# a chain of definitions that each refer to the next one twice doubles with each link.
NODES_MAX = 10_000
_DEFINITIONS = ("$defs", "definitions")
_ELSEWHERE = ("$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor", "$id")
INVALID, MISFIT = "invalid_schema", "it does not fit the schema"


class SchemaValidator:
    """A compiled schema. Concurrency: any thread."""

    def __init__(self, document: Any) -> None:
        """Raises: InvalidInput (`invalid_schema`), which says what is wrong with the schema."""
        shape = _Shape(document)
        patterns = jsonschema_rs.RegexOptions(size_limit=PATTERN_BYTES_MAX)  # they take linear time
        try:
            self._validator = jsonschema_rs.validator_for(document, offline=True, pattern_options=patterns)
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
            raise InvalidInput(f"the schema cannot be used: {_reason(error)}", code=INVALID) from None
        # Whether a value fits a schema that refers to itself is remembered for each part; what is wrong with it is not.
        self._is_explained = not shape.is_recursive

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


class _Shape:
    """What a schema costs. Raises: InvalidInput beyond what a shared process can bear."""

    def __init__(self, document: Any) -> None:
        self._root, self._known, self._path = document, dict[str, int](), list[str]()
        self.patterns, self.is_recursive = 0, False
        try:
            nodes = self._count(document)
        except RecursionError:
            nodes = NODES_MAX + 1
        if nodes > NODES_MAX:
            raise InvalidInput(
                f"the schema has more than {NODES_MAX:,} nodes, when each $ref counts as all that it means",
                code=INVALID,
            )
        if self.patterns > PATTERNS_MAX:
            raise InvalidInput(f"the schema has {self.patterns} patterns; at most {PATTERNS_MAX}", code=INVALID)

    def _count(self, node: Any) -> int:
        if isinstance(node, list):
            return 1 + sum(map(self._count, node))
        if not isinstance(node, dict):
            return 1
        for name in _ELSEWHERE:
            if isinstance(node.get(name), str) and node is not self._root:
                raise InvalidInput(f"the schema has a {name}: refer to parts as #/$defs/NAME", code=INVALID)
        self.patterns += isinstance(node.get("pattern"), str)
        self.patterns += len(named) if isinstance(named := node.get("patternProperties"), dict) else 0
        total = 1
        for name, value in node.items():
            if node is self._root and name in _DEFINITIONS and isinstance(value, dict):
                for key, meant in value.items():  # they cost nothing until a $ref names them
                    self._meant(f"#/{name}/{key.replace('~', '~0').replace('/', '~1')}", meant)
            else:
                total += self._count(value)
        if isinstance(reference := node.get("$ref"), str):
            if reference.startswith("#/"):
                total += self._meant(reference, self._resolved(reference))
            else:
                self.is_recursive = True  # the whole schema; the validator refuses what lies elsewhere
        return min(total, 10 * NODES_MAX)

    def _meant(self, reference: str, node: Any) -> int:
        """The nodes of what a reference means; of one that is being counted, one."""
        if reference in self._path:
            self.is_recursive = True
            return 1
        if reference not in self._known:
            self._path.append(reference)
            self._known[reference] = self._count(node)
            self._path.pop()
        return self._known[reference]

    def _resolved(self, reference: str) -> Any:
        """What a reference names; None where the validator will say that it is nothing."""
        found = self._root
        for part in reference.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                return None
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
