"""The JSON Schema that a class describes, and what it checks beyond it: pydantic models, dataclasses, Structs.

The packages that classes are made with are those of the environment that this runs in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing

from .installed import installed

REFERENCES = "#/$defs/"
CLASSES_MAX = 1_000  # that one class refers to


class NoSchema(Exception):
    """A class has no JSON Schema; the text says why."""


def schema_of(source):
    """The schema of a pydantic model, a dataclass, a `msgspec.Struct` or a TypedDict. Raises: NoSchema."""
    make = getattr(source, "model_json_schema", None)  # of pydantic
    if isinstance(source, type) and make is not None:
        try:
            return _closed(_inlined(make()))
        except Exception as error:  # of the user's model
            raise NoSchema(f"{source!r} has no JSON Schema: {error}") from None
    if _is_struct(source) or dataclasses.is_dataclass(source) or hasattr(source, "__total__"):
        try:
            return _closed(_inlined(_msgspec(source).json.schema(source)))
        except TypeError as error:
            raise NoSchema(f"{source!r} has no JSON Schema: {error}") from None
    raise NoSchema(f"{source!r} is no pydantic model, dataclass, msgspec.Struct or TypedDict")


def _msgspec(source):
    found = installed("msgspec")
    if found is None:
        raise NoSchema(
            f"{source!r} is read with the package msgspec, which its environment lacks: add msgspec to the requirements"
        )
    return found


def has_validators(source):
    """Whether a class checks its values in Python: validators and types of pydantic, or a `__post_init__`.

    Call it after `schema_of`, which completes models whose annotations name later classes.
    """
    if not isinstance(source, type):
        return False
    core = getattr(source, "__pydantic_core_schema__", None)
    if core is not None:
        return _has_functions(core)
    return any("__post_init__" in vars(base) for each in _classes_of(source) for base in each.__mro__)


def _has_functions(core):
    """Whether a core schema of pydantic calls functions when it validates."""
    waiting = [core]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            kind = part.get("type")
            is_called = isinstance(kind, str) and (kind.startswith("function-") or kind in ("is-instance", "call"))
            if is_called or part.get("post_init") or part.get("custom_init"):
                return True
            waiting += [value for name, value in part.items() if name not in ("serialization", "metadata")]
        elif isinstance(part, (list, tuple)):
            waiting += part
    return False


def _classes_of(source):
    """The dataclasses and Structs that a class is made of."""
    waiting = [source]
    met = {}
    while waiting and len(met) < CLASSES_MAX:
        each = waiting.pop()
        waiting += typing.get_args(each)
        if isinstance(each, type) and each not in met and (dataclasses.is_dataclass(each) or _is_struct(each)):
            met[each] = None
            yield each
            with contextlib.suppress(Exception):  # of the user's annotations: what is none has no schema either
                waiting += typing.get_type_hints(each, include_extras=True).values()


def _is_struct(source):
    msgspec = installed("msgspec")
    return msgspec is not None and isinstance(source, type) and issubclass(source, msgspec.Struct)


def checker_of(source):
    """What checks JSON (bytes) with a class: it returns what is wrong, in the words of the class. Runs its code.

    It raises what the code raises, apart from errors of validation.
    """
    if hasattr(source, "__pydantic_core_schema__"):
        return _pydantic_checker(source)
    msgspec = _msgspec(source)
    decoder, failure = msgspec.json.Decoder(source), msgspec.ValidationError

    def check(text):
        try:
            decoder.decode(text)
        except failure as error:
            return [str(error)]
        return []

    return check


def _pydantic_checker(source):
    validator = source.__pydantic_validator__
    validate = type(validator).validate_json  # it is found before the first answer comes

    def check(text):
        try:
            validate(validator, text)
        except ValueError as error:  # pydantic's own is one
            listed = getattr(error, "errors", None)
            if listed is None:
                raise
            return [_in_words(each) for each in listed(include_url=False, include_context=False, include_input=False)]
        return []

    return check


def _in_words(error):
    place = "".join(f"/{part}" for part in error["loc"])
    return f"{place}: {error['msg']}" if place else str(error["msg"])


def _inlined(schema):
    """The same schema with the fields of its object at the top, where their columns are seen."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith(REFERENCES):
        return schema
    definitions = schema["$defs"]
    name = reference[len(REFERENCES) :]
    others = {key: value for key, value in definitions.items() if key != name or _names(definitions, reference)}
    return {**definitions[name], **({"$defs": others} if others else {})}


def _names(document, reference):
    """Whether a part of a schema refers to a definition."""
    if isinstance(document, dict):
        return document.get("$ref") == reference or any(_names(each, reference) for each in document.values())
    return isinstance(document, list) and any(_names(each, reference) for each in document)


def _closed(document):
    """The same schema, whose objects have no other fields: then a service can hold its model to them."""
    if isinstance(document, list):
        return [_closed(each) for each in document]
    if not isinstance(document, dict):
        return document
    closed = {name: _closed(value) for name, value in document.items()}
    if closed.get("type") == "object" and isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed
