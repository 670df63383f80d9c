"""The `interface` of ML Commons' models: schemas that what a model is asked, and what it answers, must fit.

Pure, but for a child process that long values and patterns are checked in: what callers write may take its time.
Source: ML Commons, "Model APIs, the interface parameter"; JSON Schema 2020-12, of which REFUSED is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from batchmill.children.programs import Programs
from batchmill.errors import InvalidInput, TooComplex
from batchmill.wire.json_bytes import decode

MODULE = "batchmill.services.remote.interfaces"
SIDES = ("input", "output")
SCHEMA_BYTES_MAX = 64 * 1024  # of each side
DEPTH_MAX = 32
INLINE_MAX = 4 * 1024 * 1024  # bytes of a schema times bytes of a value that are checked in place
STEPS_MAX = 2_000_000  # of one check
SHOWN_CHARS = 200
# What would need another document, or what a validator remembers; nobody's interface is known to hold it.
REFUSED = (
    "$ref", "$dynamicRef", "$recursiveRef", "$dynamicAnchor", "unevaluatedProperties", "unevaluatedItems",
    "dependentSchemas", "dependencies",
)  # fmt: skip
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # of schemas
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: _is_number(value),
    "integer": lambda value: _is_number(value) and (isinstance(value, int) or value.is_integer()),
}
_BOUNDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], bool]]] = {
    "minimum": (lambda value: value if _is_number(value) else None, lambda told, bound: told >= bound),
    "maximum": (lambda value: value if _is_number(value) else None, lambda told, bound: told <= bound),
    "exclusiveMinimum": (lambda value: value if _is_number(value) else None, lambda told, bound: told > bound),
    "exclusiveMaximum": (lambda value: value if _is_number(value) else None, lambda told, bound: told < bound),
    "minLength": (lambda value: len(value) if isinstance(value, str) else None, lambda told, bound: told >= bound),
    "maxLength": (lambda value: len(value) if isinstance(value, str) else None, lambda told, bound: told <= bound),
    "minItems": (lambda value: len(value) if isinstance(value, list) else None, lambda told, bound: told >= bound),
    "maxItems": (lambda value: len(value) if isinstance(value, list) else None, lambda told, bound: told <= bound),
    "minProperties": (lambda value: len(value) if isinstance(value, dict) else None, lambda told, bound: told >= bound),
    "maxProperties": (lambda value: len(value) if isinstance(value, dict) else None, lambda told, bound: told <= bound),
}


def read_interface(value: Any) -> dict[str, str] | None:
    """The schemas as ML Commons keeps them, each a text; empty: none. Raises: InvalidInput."""
    if value in (None, {}):
        return None
    if not isinstance(value, Mapping) or set(value) - set(SIDES):
        raise InvalidInput('interface is an object of schemas: {"input": {…}, "output": {…}}', code="invalid_interface")
    found = {}
    for side in SIDES:
        if (told := value.get(side)) is None:
            continue
        text = told if isinstance(told, str) else msgspec.json.encode(told).decode()
        if len(text.encode(errors="replace")) > SCHEMA_BYTES_MAX:
            raise InvalidInput(f"interface.{side} is longer than {SCHEMA_BYTES_MAX:,} bytes", code="invalid_interface")
        try:
            schema = msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
            raise InvalidInput(f"interface.{side} is no JSON: {error}", code="invalid_interface") from None
        _check_schema(schema, f"interface.{side}", 0)
        found[side] = text
    return found or None


def _check_schema(schema: Any, place: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict) or depth > DEPTH_MAX:
        told = f"nests deeper than {DEPTH_MAX}" if depth > DEPTH_MAX else "is no schema: an object, true or false"
        raise InvalidInput(f"{place[:SHOWN_CHARS]} {told}", code="invalid_interface")
    for name, value in schema.items():
        here, is_wrong = f"{place}.{name}", False
        if name in REFUSED:
            raise InvalidInput(f"{here[:SHOWN_CHARS]} is not supported: write it out", code="invalid_interface")
        if name in _NAMED or name in _LISTED:
            kind, parts = (dict, dict.items) if name in _NAMED else (list, enumerate)
            is_wrong = not isinstance(value, kind)
            for key, each in () if is_wrong else parts(value):
                _check_schema(each, f"{here}.{key}", depth + 1)
        elif name in _SINGLE:
            _check_schema(value, here, depth + 1)
        elif name == "type":
            kinds = value if isinstance(value, list) else [value]
            is_wrong = not all(isinstance(each, str) and each in _TYPES for each in kinds)
        elif name in _BOUNDS or name == "multipleOf":
            is_wrong = not _is_number(value) or (name == "multipleOf" and value <= 0)
        elif name == "required":
            is_wrong = not isinstance(value, list) or not all(isinstance(each, str) for each in value)
        elif name in ("enum", "dependentRequired"):
            is_wrong = not isinstance(value, list if name == "enum" else dict)
        if name in ("pattern", "patternProperties"):
            _check_patterns([value] if name == "pattern" else list(value), here)
        if is_wrong:
            shown = str(value)[:SHOWN_CHARS]
            raise InvalidInput(f"{here[:SHOWN_CHARS]} cannot be {shown}", code="invalid_interface")


def _check_patterns(patterns: list[Any], place: str) -> None:
    for each in patterns:
        try:
            re.compile(each)
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            told = f"{place[:SHOWN_CHARS]} is no regular expression: {error}"
            raise InvalidInput(told, code="invalid_interface") from None


async def check(side: str, schema: str, value: bytes, programs: Programs, project: str) -> None:
    """Refuse a value that does not fit. Raises: InvalidInput, TooComplex, RateLimited."""
    if "attern" not in schema and len(schema) * len(value) <= INLINE_MAX:
        try:
            told = decode(value)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the {side} is no JSON: {error}", code="invalid_json") from None
        wrong = violation(msgspec.json.decode(schema), told)
    else:
        order = msgspec.json.encode([schema, Raw(value)])
        wrong = (
            await programs.run(f"{MODULE}:check_apart", order, who=project, work="the interface's schema",
                               program=schema.encode())
        ).decode()  # fmt: skip
    if wrong:
        hint = "" if side == "input" else ", if you think this is expected, please update your 'output' field in the "
        more = "" if side == "input" else "'interface' field for this model"
        raise InvalidInput(f"Error validating {side} schema{hint}{more}: {wrong}", code=f"{side}_schema_mismatch")


def check_apart(order: bytes, progress: Callable[[float], None]) -> bytes:
    schema, value = msgspec.json.decode(order)
    return violation(msgspec.json.decode(schema), value).encode()


def violation(schema: Any, value: Any) -> str:
    """What is wrong with a value, in a sentence; empty: it fits. Raises: TooComplex for too many steps."""
    return _Walk().check(schema, value, "$")


class _Walk:
    def __init__(self) -> None:
        self._steps = 0

    def check(self, schema: Any, value: Any, place: str) -> str:
        self._steps += 1
        if self._steps > STEPS_MAX:
            raise TooComplex(f"the interface's schema takes more than {STEPS_MAX:,} steps: make it simpler")
        if isinstance(schema, bool):
            return "" if schema else f"{place}: nothing may be there"
        return (
            _scalar(schema, value, place)
            or self._object(schema, value, place)
            or self._array(schema, value, place)
            or self._combined(schema, value, place)
        )

    def _object(self, schema: dict[str, Any], value: Any, place: str) -> str:
        if not isinstance(value, dict):
            return ""
        for name in schema.get("required", ()):
            if name not in value:
                return f"{place}: required property '{_short(name)}' not found"
        for name, needed in schema.get("dependentRequired", {}).items():
            if name in value and (missing := [each for each in needed if each not in value]):
                return f"{place}: property '{_short(missing[0])}' is needed beside '{_short(name)}'"
        known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        rest, names = schema.get("additionalProperties", True), schema.get("propertyNames", True)
        for name, each in value.items():
            here = f"{place}.{_short(name)}"
            wrong = "" if names is True else self.check(names, name, here)
            fitting = [known[name]] if name in known else []
            fitting += [inner for pattern, inner in patterns.items() if re.search(pattern, name)]
            for inner in fitting:
                wrong = wrong or self.check(inner, each, here)
            if not fitting and rest is not True:
                told = f"{place}: property '{_short(name)}' is not defined in the schema"
                wrong = wrong or (told if rest is False else self.check(rest, each, here))
            if wrong:
                return wrong
        return ""

    def _array(self, schema: dict[str, Any], value: Any, place: str) -> str:
        if not isinstance(value, list):
            return ""
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        for at, each in enumerate(value):
            inner = first[at] if at < len(first) else rest
            if inner is not True and (wrong := self.check(inner, each, f"{place}[{at}]")):
                return wrong
        if "contains" in schema and all(self.check(schema["contains"], each, place) for each in value):
            return f"{place}: no element is as `contains` says"
        if schema.get("uniqueItems") is True:
            seen = {msgspec.json.encode(each, order="sorted") for each in value}
            if len(seen) < len(value):
                return f"{place}: elements are not unique"
        return ""

    def _combined(self, schema: dict[str, Any], value: Any, place: str) -> str:
        for each in schema.get("allOf", ()):
            if wrong := self.check(each, value, place):
                return wrong
        if "anyOf" in schema and all(self.check(each, value, place) for each in schema["anyOf"]):
            return f"{place}: fits none of anyOf"
        if "oneOf" in schema:
            fitting = sum(not self.check(each, value, place) for each in schema["oneOf"])
            if fitting != 1:
                return f"{place}: fits {fitting} of oneOf, and must fit one"
        if "not" in schema and not self.check(schema["not"], value, place):
            return f"{place}: is what `not` excludes"
        if "if" in schema:
            branch = "else" if self.check(schema["if"], value, place) else "then"
            return self.check(schema.get(branch, True), value, place)
        return ""


def _scalar(schema: dict[str, Any], value: Any, place: str) -> str:
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_TYPES[each](value) for each in kinds):
        return f"{place}: {_kind(value)} found, {' or '.join(kinds)} expected"
    if "const" in schema and not _same(schema["const"], value):
        return f"{place}: must be the constant value {_shown(schema['const'])}"
    if "enum" in schema and not any(_same(each, value) for each in schema["enum"]):
        return f"{place}: does not have a value in the enumeration {_shown(schema['enum'])}"
    for name, (measure, holds) in _BOUNDS.items():
        if name in schema and (told := measure(value)) is not None and not holds(told, schema[name]):
            return f"{place}: {name} is {schema[name]}, and it is {told}"
    if "multipleOf" in schema and _is_number(value) and value % schema["multipleOf"]:
        return f"{place}: must be a multiple of {schema['multipleOf']}"
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        return f"{place}: does not match the pattern {_short(schema['pattern'])}"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(one: Any, other: Any) -> bool:
    """Equal, where true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _kind(value: Any) -> str:
    return next((name for name, fits in _TYPES.items() if name != "number" and fits(value)), "number")


def _short(text: str) -> str:
    return text[:SHOWN_CHARS]


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()[:SHOWN_CHARS]
