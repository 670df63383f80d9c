"""JSON bodies filled with what callers give."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.errors import InvalidInput
from batchmill.wire.rows.json_templates import DEPTH_MAX, Filling, JsonTemplate, is_payload

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def fill(text, values=None, own=None, **options):
    filling = Filling(**options)
    body = JsonTemplate(text, own or {}).fill(values or {}, filling)
    return body.decode(), filling


# Template, values of a caller, values of the author, body.
CASES = {
    "text in quotes": ('{"a": "${parameters.x}"}', {"x": 'say "hi"\n\t\\'}, {}, r'{"a": "say \"hi\"\n\t\\"}'),
    "json in quotes is text": ('{"a": "${parameters.x}"}', {"x": '{"b": 1}'}, {}, r'{"a": "{\"b\": 1}"}'),
    "no way out of quotes": ('{"a": "${parameters.x}"}', {"x": '", "b": "1'}, {}, r'{"a": "\", \"b\": \"1"}'),
    "a list in quotes": ('{"a": "${parameters.x}"}', {"x": ["b"]}, {}, r'{"a": "[\"b\"]"}'),
    "a number in quotes": ('{"a": "${parameters.x}"}', {"x": 5}, {}, '{"a": "5"}'),
    "a list": ('{"a": ${parameters.x}}', {"x": ["b", 1]}, {}, '{"a": ["b",1]}'),
    "the text of a list": ('{"a": ${parameters.x}}', {"x": '["b", 1]'}, {}, '{"a": ["b", 1]}'),
    "the text of a number": ('{"a": ${parameters.x}}', {"x": "0.5"}, {}, '{"a": 0.5}'),
    "a default": ('{"a": ${parameters.x:-3}}', {}, {}, '{"a": 3}'),
    "a default that is not needed": ('{"a": ${parameters.x:-3}}', {"x": 4}, {}, '{"a": 4}'),
    "an object as default": ('{"a": ${parameters.x:-{"b": 1}}}', {}, {}, '{"a": {"b": 1}}'),
    "a default that refers": ('{"a": "${parameters.x:-${parameters.y}}"}', {"y": '"'}, {}, r'{"a": "\""}'),
    "null for nothing": ('{"a": "${parameters.x:-null}"}', {}, {}, '{"a": null}'),
    "null for null": ('{"a": "${parameters.x:-null}", "b": 1}', {"x": None}, {}, '{"a": null, "b": 1}'),
    "null not needed": ('{"a": "${parameters.x:-null}"}', {"x": 'b"'}, {}, r'{"a": "b\""}'),
    "null, the author's": ('{"a": "${parameters.x:-null}"}', {}, {"x": "b"}, '{"a": "b"}'),
    "null, behind a quote": ('{"a": "\\"${parameters.x:-null}"}', {}, {}, '{"a": "\\"null"}'),
    "null, as text of more": ('{"a": " ${parameters.x:-null}"}', {}, {}, '{"a": " null"}'),
    "two nulls": ('{"a":"${parameters.x:-null}","b":"${parameters.y:-null}"}', {"y": "c"}, {}, '{"a":null,"b":"c"}'),
    "the author's as written": ('{"a": ${parameters.x}}', {}, {"x": "[1, 2]"}, '{"a": [1, 2]}'),
    "the author's escapes": ('{"a": "${parameters.x}"}', {}, {"x": r"b\nc"}, r'{"a": "b\nc"}'),
    "the author's quotes": ('{"a": "${parameters.x}"}', {}, {"x": 'say "hi"'}, r'{"a": "say \"hi\""}'),
    "the author's object in quotes": ('{"a": "${parameters.x}"}', {}, {"x": '{"b":1}'}, r'{"a": "{\"b\":1}"}'),
    "a caller goes first": ('{"a": "${parameters.x}"}', {"x": "c"}, {"x": "b"}, '{"a": "c"}'),
    "a caller's null counts not": ('{"a": "${parameters.x}"}', {"x": None}, {"x": "b"}, '{"a": "b"}'),
    "recursion": (
        '{"m": ${parameters.m}}',
        {"x": 'a"b'},
        {"m": '[{"content": "Q: ${parameters.x}"}]'},
        r'{"m": [{"content": "Q: a\"b"}]}',
    ),
    "recursion into a string": (
        '{"m": "${parameters.m}"}',
        {"x": 'a"b'},
        {"m": '[{"content": "${parameters.x}"}]'},
        r'{"m": "[{\"content\": \"a\\\"b\"}]"}',
    ),
    "a prompt that looks like a list": (
        '{"p": "${parameters.p}"}',
        {"x": 'a"b'},
        {"p": '[INST] "${parameters.x}" [/INST]'},
        r'{"p": "[INST] \"a\"b\" [/INST]"}'.replace('a"b', r"a\"b"),
    ),
    "a caller's placeholders are text": (
        '{"a": "${parameters.x}"}',
        {"x": "${parameters.y} ${credential.k}", "y": "z"},
        {},
        '{"a": "${parameters.y} ${credential.k}"}',
    ),
    "toString of a list": ('{"a": "${parameters.x.toString()}"}', {"x": ["b"]}, {}, r'{"a": "[\"b\"]"}'),
    "toString within the author's": (
        '{"p": "${parameters.p}"}',
        {"x": {"b": 'c"'}},
        {"p": "Given ${parameters.x.toString()}."},
        r'{"p": "Given {\"b\":\"c\\\"\"}."}',
    ),
    "toString of the author's": ('{"a": "${parameters.x.toString()}"}', {}, {"x": r"b\n"}, r'{"a": "b\\n"}'),
    "an escaped placeholder": ('{"a": "$${parameters.x}"}', {"x": "b"}, {}, '{"a": "${parameters.x}"}'),
    "other placeholders": ('{"a": "${HOME} ${credential.k}"}', {"k": "b"}, {}, '{"a": "${HOME} ${credential.k}"}'),
    "a placeholder alone": ("${parameters.x}", {"x": {"a": 1}}, {}, '{"a":1}'),
    "lines": ('{"a": "${parameters.x}"}\n{"b": 1}\n', {"x": "1\n2"}, {}, '{"a": "1\\n2"}\n{"b": 1}\n'),
    "in a key": ('{"${parameters.x}": 1}', {"x": '"'}, {}, r'{"\"": 1}'),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bodies_are_filled(case):
    """A body has each value where its placeholder stood, and is JSON."""
    text, values, own, expected = case
    body, filling = fill(text, values, own)
    assert (body, filling.missing, filling.is_broken) == (expected, [], False)
    assert is_payload(body.encode())


@pytest.mark.parametrize(
    "value",
    ["hello", '1, "b": 2', "1, 2", '1}, {"b": 2', "{", "nul", "[1,]", "", " ", "NaN", "1 2", '"', "\\u0031"],
)
def test_what_stands_bare_is_one_value(value):
    """Text outside of quotes must be the JSON of one value, whatever it would make of what stands around it."""
    assert fill('{"a": [${parameters.x}]}', {"x": value})[1].is_broken


def test_typed_text_is_a_string_everywhere():
    """Where values are meant as they are, a str is a JSON string outside of quotes too."""
    values = {"x": "5", "y": "[1]", "z": 'a"'}
    body, filling = fill("[${parameters.x}, ${parameters.y}, ${parameters.z}]", values, is_typed=True)
    assert json.loads(body) == ["5", "[1]", 'a"']
    assert not filling.is_broken


def test_missing_values_are_named_and_stay():
    """What nobody fills stays as it is written, and its name is told."""
    body, filling = fill('{"a": "${parameters.x}", "b": ${parameters.y}, "c": "${parameters.z.toString()}"}', {"y": 1})
    assert body == '{"a": "${parameters.x}", "b": 1, "c": "${parameters.z.toString()}"}'
    assert filling.missing == ["x", "z"]


def test_raw_values_go_in_as_they_are():
    """A name on the list of those that are not escaped is not."""
    body, _ = fill('{"a": "${parameters.x}", "b": "${parameters.y}"}', {"x": r"\n", "y": r"\n"}, raw={"x"})
    assert body == r'{"a": "\n", "b": "\\n"}'


@pytest.mark.parametrize(
    ("own", "path"),
    [
        ({"a": "${parameters.a}"}, "parameters.a->parameters.a"),
        ({"a": "1 ${parameters.b}", "b": "2 ${parameters.a}"}, "parameters.a->parameters.b->parameters.a"),
    ],
)
def test_loops_are_named(own, path):
    """Parameters that refer to themselves are told with the way round; a caller's value breaks the loop."""
    with pytest.raises(InvalidInput, match="^Infinite loop in property interpolation of parameters.a: ") as caught:
        fill('{"x": "${parameters.a}"}', {}, own)
    assert caught.value.code == "placeholder_loop"
    assert caught.value.message.endswith(path)
    assert fill('{"x": "${parameters.a}"}', {"a": "b"}, own)[0] == '{"x": "b"}'


def test_growth_is_bounded():
    """Parameters that double with every step are refused before they fill the memory."""
    own = {f"p{n}": f"${{parameters.p{n + 1}}}${{parameters.p{n + 1}}}" for n in range(30)} | {"p30": "x"}
    with pytest.raises(InvalidInput) as caught:
        JsonTemplate('["${parameters.p0}"]', own)
    assert caught.value.code == "template_too_large"


@pytest.mark.parametrize(("steps", "fits"), [(DEPTH_MAX, True), (DEPTH_MAX + 1, False)])
def test_depth_is_bounded(steps, fits):
    """Parameters may refer to one another over DEPTH_MAX steps, and no more."""
    own = {f"p{n}": f"${{parameters.p{n + 1}}}" for n in range(1, steps)} | {f"p{steps}": "x"}
    if fits:
        assert fill('["${parameters.p1}"]', {}, own)[0] == '["x"]'
    else:
        with pytest.raises(InvalidInput):
            JsonTemplate('["${parameters.p1}"]', own)


@pytest.mark.parametrize(("text", "fits"), [('["\\', False), ('["\\\\', True), ('["\\\\\\', False)])
def test_no_backslash_swallows_a_value(text, fits):
    """A template whose backslash would escape the beginning of a value is refused."""
    if fits:
        assert json.loads(fill(text + '${parameters.x}"]', {"x": '"'})[0]) == ['\\"']
    else:
        with pytest.raises(InvalidInput) as caught:
            JsonTemplate(text + '${parameters.x}"]', {})
        assert caught.value.code == "invalid_template"


def test_half_a_character_is_refused():
    """A lone surrogate is not text that could be sent."""
    with pytest.raises(InvalidInput) as caught:
        fill('["${parameters.x}"]', {"x": "\ud800"})
    assert caught.value.code == "invalid_encoding"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"a":1}', True),
        (b" [1] ", True),
        (b'{"a":1}\n{"b":2}', True),
        (b'{"a":1}\n\n{"b":2}\n', True),
        (b'{"a":1}\n2', False),
        (b"1", False),
        (b'"a"', False),
        (b"null", False),
        (b"", False),
        (b"{", False),
        (b'{"a":1} {"b":2}', False),
    ],
)
def test_payloads(data, expected):
    """A payload is a JSON object or array, or lines of them; scalars are none."""
    assert is_payload(data) is expected


@given(st.text())
def test_any_text_comes_out_as_it_went_in(text):
    """Whatever text a caller gives, the body is JSON and holds just that text."""
    body, _ = fill('{"a": "<${parameters.x}>", "b": "${parameters.x:-null}"}', {"x": text})
    assert json.loads(body) == {"a": f"<{text}>", "b": text}


@given(JSON.filter(lambda value: value is not None))
def test_any_typed_value_comes_out_as_it_went_in(value):
    """Whatever JSON a row holds, the body holds the same value outside of quotes."""
    body, filling = fill('{"a": ${parameters.x}, "b": 1}', {"x": value}, is_typed=True)
    assert json.loads(body) == {"a": value, "b": 1}
    assert not filling.is_broken


@given(st.text(alphabet='{}[],:"\\ 01eE+-.truefalsn\n$'))
def test_no_text_changes_what_stands_around_it(text):
    """A caller's text outside of quotes is refused, or is the one value that stands there."""
    body, filling = fill('{"a": ${parameters.x}, "b": 1}', {"x": text})
    if not filling.is_broken:
        assert json.loads(body) == {"a": json.loads(text), "b": 1}


@given(st.text())
def test_any_author_writes_json(text):
    """Whatever text an author gives for a place in quotes, without placeholders, the body is JSON."""
    body, _ = fill('{"a": "${parameters.x}"}', {}, {"x": text.replace("$", "")})
    assert isinstance(json.loads(body)["a"], str)
