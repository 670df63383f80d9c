"""Reads and checks the fields of ML Commons' remote models: interface schemas, details and rate limits.

`ModelRates` enforces the field `rate_limiter`, with a token bucket for each model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from batchmill.children.programs import Programs
from batchmill.errors import InvalidInput, RateLimited, TooComplex
from batchmill.ports.clock import Clock
from batchmill.services.remote.stored import ModelDetails, RateLimiter
from batchmill.services.token_buckets import TokenBuckets
from batchmill.wire.json_bytes import decode

MODULE = "batchmill.services.remote.model_fields"
SIDES = ("input", "output")
SCHEMA_BYTES_MAX = 64 * 1024  # of each side
DEPTH_MAX = 32
INLINE_MAX = 4 * 1024 * 1024  # schema bytes times value bytes; a larger check runs in a child process
STEPS_MAX = 2_000_000  # of one check
SCHEMA_SHOWN_CHARS = 200
# Keywords that need other documents or state between steps. No known interface uses them.
REFUSED_KEYWORDS = (
    "$ref", "$dynamicRef", "$recursiveRef", "$dynamicAnchor", "unevaluatedProperties", "unevaluatedItems",
    "dependentSchemas", "dependencies",
)  # fmt: skip
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # objects with schemas as values
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SUBSCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
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
    "minimum": (lambda value: value if _is_number(value) else None, lambda measured, bound: measured >= bound),
    "maximum": (lambda value: value if _is_number(value) else None, lambda measured, bound: measured <= bound),
    "exclusiveMinimum": (lambda value: value if _is_number(value) else None, lambda measured, bound: measured > bound),
    "exclusiveMaximum": (lambda value: value if _is_number(value) else None, lambda measured, bound: measured < bound),
    "minLength": (
        lambda value: len(value) if isinstance(value, str) else None,
        lambda measured, bound: measured >= bound,
    ),
    "maxLength": (
        lambda value: len(value) if isinstance(value, str) else None,
        lambda measured, bound: measured <= bound,
    ),
    "minItems": (
        lambda value: len(value) if isinstance(value, list) else None,
        lambda measured, bound: measured >= bound,
    ),
    "maxItems": (
        lambda value: len(value) if isinstance(value, list) else None,
        lambda measured, bound: measured <= bound,
    ),
    "minProperties": (
        lambda value: len(value) if isinstance(value, dict) else None,
        lambda measured, bound: measured >= bound,
    ),
    "maxProperties": (
        lambda value: len(value) if isinstance(value, dict) else None,
        lambda measured, bound: measured <= bound,
    ),
}


def read_interface(value: Any) -> dict[str, str] | None:
    """Read the field `interface`: a JSON schema for each side, as text; None if it is empty. Raises: InvalidInput."""
    if value in (None, {}):
        return None
    if not isinstance(value, Mapping) or set(value) - set(SIDES):
        raise InvalidInput('interface is an object of schemas: {"input": {…}, "output": {…}}', code="invalid_interface")
    schemas = {}
    for side in SIDES:
        if (schema := value.get(side)) is None:
            continue
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        if len(text.encode(errors="replace")) > SCHEMA_BYTES_MAX:
            raise InvalidInput(f"interface.{side} is longer than {SCHEMA_BYTES_MAX:,} bytes", code="invalid_interface")
        try:
            schema = msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
            raise InvalidInput(f"interface.{side} is not JSON: {error}", code="invalid_interface") from None
        _check_schema(schema, f"interface.{side}", 0)
        schemas[side] = text
    return schemas or None


def _check_schema(schema: Any, path: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict) or depth > DEPTH_MAX:
        message = (
            f"nests deeper than {DEPTH_MAX}" if depth > DEPTH_MAX else "is not a schema: write an object, true or false"
        )
        raise InvalidInput(f"{path[:SCHEMA_SHOWN_CHARS]} {message}", code="invalid_interface")
    for name, value in schema.items():
        child_path, is_wrong = f"{path}.{name}", False
        if name in REFUSED_KEYWORDS:
            raise InvalidInput(
                f"{child_path[:SCHEMA_SHOWN_CHARS]} is not supported: write it out", code="invalid_interface"
            )
        if name in _SCHEMA_MAPS or name in _SCHEMA_LISTS:
            kind, parts = (dict, dict.items) if name in _SCHEMA_MAPS else (list, enumerate)
            is_wrong = not isinstance(value, kind)
            for key, each in () if is_wrong else parts(value):
                _check_schema(each, f"{child_path}.{key}", depth + 1)
        elif name in _SUBSCHEMAS:
            _check_schema(value, child_path, depth + 1)
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
            _check_patterns([value] if name == "pattern" else list(value), child_path)
        if is_wrong:
            shown = str(value)[:SCHEMA_SHOWN_CHARS]
            raise InvalidInput(f"{child_path[:SCHEMA_SHOWN_CHARS]} cannot be {shown}", code="invalid_interface")


def _check_patterns(patterns: list[Any], path: str) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            message = f"{path[:SCHEMA_SHOWN_CHARS]} is not a regular expression: {error}"
            raise InvalidInput(message, code="invalid_interface") from None


async def check(side: str, schema: str, value: bytes, programs: Programs, project: str) -> None:
    """Check a value against a schema. Raises: InvalidInput, TooComplex, RateLimited."""
    if "attern" not in schema and len(schema) * len(value) <= INLINE_MAX:
        try:
            decoded = decode(value)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the {side} is not JSON: {error}", code="invalid_json") from None
        mismatch = violation(msgspec.json.decode(schema), decoded)
    else:
        order = msgspec.json.encode([schema, Raw(value)])
        mismatch = (
            await programs.run(f"{MODULE}:check_apart", order, who=project, work="the interface's schema",
                               program=schema.encode())
        ).decode()  # fmt: skip
    if mismatch:
        hint = "" if side == "input" else ", if you think this is expected, please update your 'output' field in the "
        more = "" if side == "input" else "'interface' field for this model"
        raise InvalidInput(f"Error validating {side} schema{hint}{more}: {mismatch}", code=f"{side}_schema_mismatch")


def check_apart(order: bytes, progress: Callable[[float], None]) -> bytes:
    schema, value = msgspec.json.decode(order)
    return violation(msgspec.json.decode(schema), value).encode()


def violation(schema: Any, value: Any) -> str:
    """The first mismatch of a value with a schema, as a sentence; empty if it matches. Raises: TooComplex."""
    return _Walk().check(schema, value, "$")


class _Walk:
    def __init__(self) -> None:
        self._steps = 0

    def check(self, schema: Any, value: Any, path: str) -> str:
        self._steps += 1
        if self._steps > STEPS_MAX:
            raise TooComplex(f"the interface's schema takes more than {STEPS_MAX:,} steps: make it simpler")
        if isinstance(schema, bool):
            return "" if schema else f"{path}: the schema allows no value here"
        return (
            _scalar(schema, value, path)
            or self._object(schema, value, path)
            or self._array(schema, value, path)
            or self._combined(schema, value, path)
        )

    def _object(self, schema: dict[str, Any], value: Any, path: str) -> str:
        if not isinstance(value, dict):
            return ""
        for name in schema.get("required", ()):
            if name not in value:
                return f"{path}: required property '{_short(name)}' not found"
        for name, needed in schema.get("dependentRequired", {}).items():
            if name in value and (missing := [each for each in needed if each not in value]):
                return f"{path}: property '{_short(missing[0])}' is required with '{_short(name)}'"
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        additional, names = schema.get("additionalProperties", True), schema.get("propertyNames", True)
        for name, each in value.items():
            child_path = f"{path}.{_short(name)}"
            mismatch = "" if names is True else self.check(names, name, child_path)
            schemas = [properties[name]] if name in properties else []
            schemas += [inner for pattern, inner in patterns.items() if re.search(pattern, name)]
            for inner in schemas:
                mismatch = mismatch or self.check(inner, each, child_path)
            if not schemas and additional is not True:
                message = f"{path}: property '{_short(name)}' is not defined in the schema"
                mismatch = mismatch or (message if additional is False else self.check(additional, each, child_path))
            if mismatch:
                return mismatch
        return ""

    def _array(self, schema: dict[str, Any], value: Any, path: str) -> str:
        if not isinstance(value, list):
            return ""
        first, items = schema.get("prefixItems", []), schema.get("items", True)
        for index, each in enumerate(value):
            inner = first[index] if index < len(first) else items
            if inner is not True and (mismatch := self.check(inner, each, f"{path}[{index}]")):
                return mismatch
        if "contains" in schema and all(self.check(schema["contains"], each, path) for each in value):
            return f"{path}: no element matches `contains`"
        if schema.get("uniqueItems") is True:
            seen = {msgspec.json.encode(each, order="sorted") for each in value}
            if len(seen) < len(value):
                return f"{path}: elements are not unique"
        return ""

    def _combined(self, schema: dict[str, Any], value: Any, path: str) -> str:
        for each in schema.get("allOf", ()):
            if mismatch := self.check(each, value, path):
                return mismatch
        if "anyOf" in schema and all(self.check(each, value, path) for each in schema["anyOf"]):
            return f"{path}: matches no schema of anyOf"
        if "oneOf" in schema:
            matches = sum(not self.check(each, value, path) for each in schema["oneOf"])
            if matches != 1:
                return f"{path}: matches {matches} schemas of oneOf and must match one"
        if "not" in schema and not self.check(schema["not"], value, path):
            return f"{path}: matches the schema of `not`"
        if "if" in schema:
            branch = "else" if self.check(schema["if"], value, path) else "then"
            return self.check(schema.get(branch, True), value, path)
        return ""


def _scalar(schema: dict[str, Any], value: Any, path: str) -> str:
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_TYPES[each](value) for each in kinds):
        return f"{path}: {_kind(value)} found, {' or '.join(kinds)} expected"
    if "const" in schema and not _same(schema["const"], value):
        return f"{path}: must be the constant value {_preview(schema['const'])}"
    if "enum" in schema and not any(_same(each, value) for each in schema["enum"]):
        return f"{path}: does not have a value in the enumeration {_preview(schema['enum'])}"
    for name, (measure, holds) in _BOUNDS.items():
        if name in schema and (measured := measure(value)) is not None and not holds(measured, schema[name]):
            return f"{path}: {name} is {schema[name]}, not {measured}"
    if "multipleOf" in schema and _is_number(value) and value % schema["multipleOf"]:
        return f"{path}: must be a multiple of {schema['multipleOf']}"
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        return f"{path}: does not match the pattern {_short(schema['pattern'])}"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal. true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _kind(value: Any) -> str:
    return next((name for name, fits in _TYPES.items() if name != "number" and fits(value)), "number")


def _short(text: str) -> str:
    return text[:SCHEMA_SHOWN_CHARS]


def _preview(value: Any) -> str:
    return msgspec.json.encode(value).decode()[:SCHEMA_SHOWN_CHARS]


REMOTE = "REMOTE"
NAME_CHARS_MAX = 256
TEXT_CHARS_MAX = 10_000
SHOWN_CHARS = 80
LIMIT_MIN, LIMIT_MAX = 0.001, 1e9
LIMIT_SHOWN_CHARS = 40
UNITS = {
    "NANOSECONDS": 1e-9, "MICROSECONDS": 1e-6, "MILLISECONDS": 1e-3, "SECONDS": 1.0, "MINUTES": 60.0,
    "HOURS": 3600.0, "DAYS": 86_400.0,
}  # fmt: skip
# Fields without an effect here -> the reason. They are refused, because a client would rely on them.
_UNSUPPORTED = {
    "guardrails": "nothing checks what goes into a model or comes out of it",
}
_ACCESS_FIELDS = ("backend_roles", "add_all_backend_roles")


def name_of(fields: Mapping[str, Any]) -> str:
    """The name of a model. Raises: InvalidInput."""
    name = fields.get("name")
    if name is None:
        raise InvalidInput("model name is null", code="missing_name")
    if not isinstance(name, str) or not 0 < len(name.strip()) <= NAME_CHARS_MAX or not name.isprintable():
        raise InvalidInput(f"a model's name is 1 to {NAME_CHARS_MAX} printable characters", code="invalid_name")
    return name


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Raises: InvalidInput for a field that is not supported."""
    kind = fields.get("function_name")
    if kind is not None and str(kind).upper() != REMOTE:
        raise InvalidInput(
            f"function_name must be remote, not {str(kind)[:SHOWN_CHARS]!r}: use `batchmill deploy` for models that "
            "are loaded from files",
            code="not_remote",
        )
    for name, why in _UNSUPPORTED.items():
        if fields.get(name) not in (None, {}):
            raise InvalidInput(f"{name} is not supported here: {why}; leave it out", code="unsupported_field")
    if any(fields.get(name) not in (None, False, []) for name in _ACCESS_FIELDS):
        raise InvalidInput(
            "You cannot specify model access control parameters because the Security plugin or model access control "
            "is disabled on your cluster.",
            code="no_access_control",
        )


def require_remote(fields: Mapping[str, Any]) -> None:
    """Raises: InvalidInput without a function_name, which means a model loaded from files to ML Commons."""
    if fields.get("function_name") is None:
        raise InvalidInput(
            'model format is null: a model without function_name is loaded from files; write "function_name": "remote"',
            code="not_remote",
        )


def details_of(fields: Mapping[str, Any], old: ModelDetails) -> ModelDetails:
    """Read the fields of a model other than its name and connector. Raises: InvalidInput."""
    changed: dict[str, Any] = {}
    if (description := fields.get("description")) is not None:
        if not isinstance(description, str) or len(description) > TEXT_CHARS_MAX:
            raise InvalidInput(f"a description is a text of at most {TEXT_CHARS_MAX:,} characters", code="invalid_text")
        changed["description"] = description
    if (enabled := fields.get("is_enabled")) is not None:
        changed["is_enabled"] = _flag("is_enabled", enabled)
    if "rate_limiter" in fields:
        changed["rate_limiter"] = read_limiter(fields["rate_limiter"])
    if "interface" in fields:
        changed["interface"] = read_interface(fields["interface"])
    setting = fields.get("deploy_setting")
    if setting is not None:
        if not isinstance(setting, Mapping):
            raise InvalidInput('deploy_setting is an object: {"is_auto_deploy_enabled": false}', code="invalid_field")
        is_auto_deploy = setting.get("is_auto_deploy_enabled")
        changed["is_auto_deploy"] = None if is_auto_deploy is None else _flag("is_auto_deploy_enabled", is_auto_deploy)
    return replace(old, **changed)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} is true or false, not {str(value)[:SHOWN_CHARS]!r}", code="invalid_field")
    return value


def read_limiter(value: Any) -> RateLimiter | None:
    """Read the field `rate_limiter`: {"limit": "4", "unit": "MINUTES"}; None if it is empty. Raises: InvalidInput."""
    if value in (None, {}):
        return None
    if not isinstance(value, Mapping):
        raise InvalidInput('rate_limiter is an object: {"limit": "4", "unit": "MINUTES"}', code="invalid_rate_limiter")
    unit = str(value.get("unit")).upper()
    if unit not in UNITS:
        raise InvalidInput(
            f"rate_limiter.unit must be one of {', '.join(UNITS)}, not {unit[:LIMIT_SHOWN_CHARS]!r}",
            code="invalid_rate_limiter",
        )
    try:
        limit = float(str(value.get("limit")))
    except ValueError:
        limit = 0.0
    if not LIMIT_MIN <= limit <= LIMIT_MAX:
        raise InvalidInput(
            f"rate_limiter.limit must be at least {LIMIT_MIN} and at most {LIMIT_MAX:,.0f}, not "
            f"{str(value.get('limit'))[:LIMIT_SHOWN_CHARS]!r}",
            code="invalid_rate_limiter",
        )
    return RateLimiter(limit, unit)


def per_minute(limiter: RateLimiter | None) -> int | None:
    """The limit as `requests_per_minute` of `types.Limits`; None for no limit."""
    return None if limiter is None else max(1, min(round(limiter.limit * 60 / UNITS[limiter.unit]), 10**9))


class ModelRates:
    """Rate limits of remote models. A bucket holds the calls of one unit of time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets = TokenBuckets()

    def admit(self, model_id: str, limiter: RateLimiter | None) -> None:
        """Count a call. Raises: RateLimited."""
        if limiter is None:
            return
        capacity, rate = max(1.0, limiter.limit), limiter.limit / UNITS[limiter.unit]
        wait_s = self._buckets.take(model_id, capacity, rate, self._clock.monotonic())
        if wait_s:
            raise RateLimited("Request is throttled at model level.", retry_after_s=wait_s)

    def forget(self, model_id: str) -> None:
        """Drop the bucket of a model that was deleted or has another limit."""
        self._buckets.forget(model_id)
