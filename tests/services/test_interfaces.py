"""Schemas of what a model is asked and answers."""

import json

import pytest

from batchmill.children.programs import Programs
from batchmill.engines.clock import SystemClock
from batchmill.errors import InvalidInput, TooComplex
from batchmill.services.remote import model_fields
from batchmill.services.remote.model_fields import check, read_interface, violation

OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^a"},
        "size": {"type": "integer", "minimum": 1, "exclusiveMaximum": 10, "multipleOf": 3},
        "kind": {"enum": ["x", 1]},
        "list": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3, "uniqueItems": True},
        "pair": {"prefixItems": [{"type": "string"}, {"type": "boolean"}], "items": False},
        "either": {"oneOf": [{"type": "string"}, {"type": ["string", "null"]}]},
        "any": {"anyOf": [{"type": "null"}, {"const": True}]},
        "no": {"not": {"type": "string"}},
    },
    "required": ["name"],
    "additionalProperties": False,
    "if": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]},
    "then": {"required": ["size"]},
}


def test_values_are_judged_as_json_schema_does():
    """Each keyword lets pass what fits, and says where what does not fit stands."""
    for fitting in (
        {}, {"size": 9}, {"size": 3.0}, {"kind": 1}, {"kind": "x", "size": 3}, {"list": [1, 2.5]}, {"either": None},
        {"pair": ["a", True]}, {"any": True}, {"no": 1},
    ):  # fmt: skip
        assert violation(OBJECT, {"name": "ab", **fitting}) == "", fitting
    for place, wrong in (
        ("$", []), ("$", {}), ("$.name", {"name": 1}), ("$.name", {"name": "a"}), ("$.name", {"name": "abcde"}),
        ("$.name", {"name": "ba"}), ("$.size", {"size": 0}), ("$.size", {"size": 12}), ("$.size", {"size": 4}),
        ("$.size", {"size": 1.5}), ("$.size", {"size": True}), ("$.kind", {"kind": True}), ("$.list", {"list": []}),
        ("$.list[1]", {"list": [1, "x"]}), ("$.list", {"list": [1, 1]}), ("$.list", {"list": [1, 2, 3, 4]}),
        ("$.pair[1]", {"pair": ["a", 1]}), ("$.pair[2]", {"pair": ["a", True, 1]}), ("$.either", {"either": "x"}),
        ("$.any", {"any": 1}), ("$.no", {"no": "x"}), ("$", {"other": 1}), ("$", {"kind": "x"}),
    ):  # fmt: skip
        value = {"name": "ab"} | wrong if isinstance(wrong, dict) and wrong else wrong
        assert violation(OBJECT, value).startswith(f"{place}:"), (place, wrong)


def test_a_schema_is_read_once_and_refused_by_name():
    """Texts and objects are schemas; what cannot be checked here is refused where it stands."""
    assert read_interface({}) is None
    assert read_interface({"input": OBJECT, "output": "true"}) == {
        "input": json.dumps(OBJECT, separators=(",", ":")),
        "output": "true",
    }
    for wrong, words in (
        ("x", "an object of schemas"), ({"inputs": {}}, "an object of schemas"), ({"input": "{"}, "not JSON"),
        ({"input": {"properties": {"a": {"$ref": "#/x"}}}}, "interface.input.properties.a.$ref"),
        ({"input": {"type": "text"}}, "input.type cannot be text"), ({"output": {"items": 1}}, "not a schema"),
        ({"input": {"pattern": "("}}, "not a regular expression"), ({"input": "[" * 99999}, "longer than"),
        ({"input": json.dumps({"not": {}}).replace("{}", '{"not":' * 40 + "{}" + "}" * 40)}, "deeper than 32"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput) as caught:
            read_interface(wrong)
        assert words in caught.value.message, wrong


async def test_what_takes_long_is_stopped(monkeypatch):
    """A pattern is tried in a child that can be killed, and steps have an end."""
    programs = Programs(SystemClock())
    try:
        with pytest.raises(InvalidInput, match="pattern"):
            await check("input", '{"pattern": "^a"}', b'"b"', programs, "p")
        with pytest.raises(TooComplex):
            await check("input", '{"pattern": "^(a+)+$"}', json.dumps("a" * 60 + "b").encode(), programs, "p")
    finally:
        await programs.close()
    monkeypatch.setattr(model_fields, "STEPS_MAX", 10)
    with pytest.raises(TooComplex):
        violation({"items": {"type": "integer"}}, list(range(11)))
