"""What a schema may cost, what a request says of it, and where an answer holds its JSON."""

import json

import msgspec
import pytest

from batchmill.errors import InvalidInput, InvalidRow
from batchmill.types import EarlierAnswer, OutputSchema, Usage
from batchmill.wire.json_bytes import encode
from batchmill.wire.replies import text_and_flaws_of, with_text
from batchmill.wire.schemas.output_schema import (
    ANSWER_TOOL,
    CHAT,
    MESSAGES,
    RESPONSES,
    WORDS_BYTES_MAX,
    asked_again,
    is_strict,
    names_of,
    read_json,
    with_schema,
    words_of,
)
from batchmill.wire.schemas.schema_validation import MISFIT, SchemaValidator, check_schema

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def schema(document):
    return OutputSchema(json.dumps(document))


def chain(links, link):
    """Definitions of which each refers to the next one in this way."""
    found = {f"n{at}": link({"$ref": f"#/$defs/n{at + 1}"}) for at in range(links)}
    return {"$ref": "#/$defs/n0", "$defs": {**found, f"n{links}": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (chain(40, lambda ref: {"allOf": [ref, ref]}), "more than 10,000 nodes"),
        (chain(40, lambda ref: {"anyOf": [{"properties": {"c": ref}}, {"properties": {"c": ref}}]}), "nodes"),
        ({"allOf": [{"minimum": 1}] * 6000}, "nodes"),
        ({"anyOf": [{"pattern": "a"}] * 65}, "65 patterns"),
        ({"patternProperties": {f"{at}": {} for at in range(65)}}, "65 patterns"),
        ({"$defs": {f"d{at}": {"pattern": "a"} for at in range(65)}}, "65 patterns"),
        ({"pattern": r"\pL{1000}" * 50}, "regex"),
        ({"properties": {"a": {"$anchor": "x"}}}, r"\$anchor"),
        ({"properties": {"a": {"$id": "x"}}}, r"\$id"),
        ({"type": "string", "minLength": -1}, "/minLength"),
    ],
)
def test_what_costs_too_much_is_refused(document, message):
    """Before anything is compiled or checked."""
    with pytest.raises(InvalidInput, match=message):
        check_schema(schema(document))


def test_what_refers_to_itself_is_checked_but_not_explained():
    """What is wrong would take a time that doubles with each level of the value."""
    ref = {"$ref": "#/$defs/n"}
    node = {"type": "object", "properties": {"a": ref}, "required": ["a"]}
    document = {"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [node, {**node, "minProperties": 1}, {"const": 1}]}}}
    value = 2
    for _ in range(60):
        value = {"a": value}
    assert SchemaValidator(document).problems(value) == [MISFIT]
    assert SchemaValidator(document).problems({"a": 1}) == []


def test_definitions_are_explained():
    """A reference that ends costs what it means."""
    document = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x~1y"}}, "$defs": {"x/y": {"type": "string"}}}
    assert SchemaValidator(document).problems({"a": 1}) == ['/a: 1 is not of type "string"']


@pytest.mark.parametrize(
    ("document", "strict"),
    [
        (OBJECT, True),
        ({"type": "array", "items": OBJECT}, True),
        ({**OBJECT, "additionalProperties": True}, False),
        ({**OBJECT, "required": []}, False),
        ({**OBJECT, "required": True}, False),
        ({"type": "object"}, False),
        ({**OBJECT, "properties": {"a": {"type": "object", "properties": {}}}}, False),
        ({**OBJECT, "properties": {"enum": {"type": "object"}}, "required": ["enum"]}, False),
        ({**OBJECT, "properties": {"properties": {"type": "string"}}, "required": ["properties"]}, True),
        ({"allOf": [OBJECT]}, False),
        ({**OBJECT, "$defs": {"properties": {"type": "string"}, "required": True}}, False),
    ],
)
def test_strict_where_a_service_can_be(document, strict):
    """By keyword: a field may have the name of one."""
    assert is_strict(document) is strict


@pytest.mark.parametrize(
    ("document", "names"),
    [
        (OBJECT, ("a",)),
        ({"properties": {"a": {}}}, ()),
        ({"type": ["object", "null"], "properties": {"a": {}}}, ()),
        ({"type": "object", "properties": {"a": {}}, "$ref": "#/$defs/x", "$defs": {"x": {}}}, ()),
    ],
)
def test_fields_are_columns_where_every_value_has_them(document, names):
    """Any other value is one column."""
    assert names_of(schema(document)) == names


@pytest.mark.parametrize("body", [{"n": 2}, {"tools": [{"type": "function"}]}, {"response_format": {"type": "text"}}])
def test_a_row_that_cannot_have_a_schema(body):
    """It is refused, and nothing of it is passed over."""
    with pytest.raises(InvalidRow):
        with_schema(CHAT, body, schema(OBJECT))


def test_responses_are_asked_in_their_way():
    """The format stands beside what `text` has; the input keeps its exact digits."""
    told = json.loads(msgspec.json.encode(with_schema(RESPONSES, {"text": {"verbosity": "low"}}, schema(OBJECT))))
    assert told["text"]["format"]["type"] == "json_schema" and "verbosity" in told["text"]
    body = b'{"input":[{"role":"user","content":1.00000000000000000001}]}'
    again = asked_again(RESPONSES, body, [EarlierAnswer("x", ["bad"], Usage())])
    assert b"1.00000000000000000001" in again and again.count(b'"role"') == 3
    again = json.loads(asked_again(RESPONSES, b'{"input":"hi"}', [EarlierAnswer("x", ["bad"], Usage())]))
    assert [turn["role"] for turn in again["input"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": [{"message": {"content": "old"}, "finish_reason": "stop"}]},
        {"choices": None, "output": [{"type": "message", "content": [{"type": "output_text", "text": "old"}]}]},
        {"stop_reason": None, "output": [{"content": [{"text": "x"}, {"type": "output_text", "text": "old"}]}]},
        {"stop_reason": "end_turn", "content": [{"type": "text", "text": "o"}, {"type": "text", "text": "ld"}]},
        {"choices": []},
        {"output": [7, {"content": 8}], "content": [9]},
    ],
)
def test_the_text_of_any_reply_is_replaced_or_stays(reply):
    """A shape that nobody expects raises nothing."""
    body = msgspec.json.encode(reply)
    changed = with_text(body, "new")
    if b"old" in body or b'"o"' in body:
        assert b"new" in changed and b"old" not in changed and b"ld" not in changed
    text_and_flaws_of(body)


def test_many_repeated_names_are_found_at_once():
    """One pass, however long the object is."""
    members = ",".join(f'"{at}":1' for at in range(200_000))
    with pytest.raises(ValueError, match="used twice"):
        read_json("{" + members + ',"199999":2}')


LABEL = OutputSchema('{"type":"object","properties":{"label":{"type":"string"}},"required":["label"]}')


@pytest.mark.parametrize("problem", ["x" * 5_000, "ß" * 5_000, "\ud800" * 5_000])
def test_what_a_model_is_told_is_bounded_in_bytes(problem):
    """A budget reserves a token for each of them."""
    said = words_of(EarlierAnswer("{}", ["no label", problem], Usage()))
    assert len(said.encode()) <= WORDS_BYTES_MAX
    assert "- no label" in said and said.endswith("nothing else.")


def test_messages_are_asked_with_a_tool():
    """A tool that must be called, whose input is the answer; the next question has the answers so far."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "thinking": {"type": "disabled"}}
    sent = encode(with_schema(MESSAGES, body, LABEL))
    asked = json.loads(sent)
    assert asked["tool_choice"] == {"type": "tool", "name": ANSWER_TOOL}
    assert asked["tools"][0]["input_schema"] == json.loads(LABEL.document)
    again = json.loads(asked_again(MESSAGES, sent, [EarlierAnswer("{}", ["no label"], Usage())]))
    assert [message["role"] for message in again["messages"]] == ["user", "assistant", "user"]
    answered = {"type": "tool_use", "id": "t", "name": ANSWER_TOOL, "input": {"label": "good"}}
    reply = {"stop_reason": "tool_use", "content": [{"type": "text", "text": "Well:"}, answered]}
    assert text_and_flaws_of(json.dumps(reply).encode()) == ('{"label": "good"}', ())


@pytest.mark.parametrize(
    "body", [{"tools": [{"name": "t"}]}, {"tool_choice": {"type": "auto"}}, {"thinking": {"type": "enabled"}}]
)
def test_a_message_that_cannot_have_a_schema(body):
    """It is refused with the reason, as is a schema of something that is no object."""
    with pytest.raises(InvalidRow, match="own|tools|thinking"):
        with_schema(MESSAGES, body, LABEL)
    with pytest.raises(InvalidRow, match="object"):
        with_schema(MESSAGES, {}, OutputSchema('{"type":"integer"}'))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ("no", "it is plain text"),
        ("Sorry, I cannot", "it is plain text"),
        ('{"label": "x', "it ends too early"),
        ('{"label": NaN}', "invalid character (byte 10)"),
        ("[1] and more", "trailing characters (byte 5)"),
    ],
)
def test_an_answer_that_is_no_json_is_told_what_it_is(answer, problem):
    """In words for people and models, not in those of a parser."""
    with pytest.raises(ValueError) as caught:
        read_json(answer)
    assert str(caught.value) == f"it is not JSON: {problem}"
