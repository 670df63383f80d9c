"""Lines of rows in the function's process: read with msgspec or the standard library, and written as result lines."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.function_runtime import row_lines
from batchmill.function_runtime.row_lines import OPENAI, OTHER_FORM, TABLE, read_lines
from batchmill.function_runtime.values import are_plain, is_plain

URL = "/v1/chat/completions"
OPENAI_META = {"layout": OPENAI, "urls": [URL], "forms": ["data"], "drop": ["model"], "prefix": "p%_", "first": 40}


@pytest.fixture(params=["msgspec", "standard library"], autouse=True)
def decoders(request, monkeypatch):
    if request.param != "msgspec":
        monkeypatch.setattr(row_lines, "_openai_line", None)
        monkeypatch.setattr(row_lines, "_table_line", None)


def openai_text(*bodies, url=URL):
    lines = [{"custom_id": f"ü{n}", "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)]
    return b"".join([json.dumps(line).encode() + b"\n" for line in lines])


def test_openai_lines():
    """The bodies are the rows, without the fields to drop; lines carry the ids of their rows."""
    text = openai_text({"a": 1, "model": "m"}, {"a": 2})
    rows, errors, writer = read_lines(OPENAI_META | {"rows": 2}, text)
    assert (rows, errors) == ([{"a": 1}, {"a": 2}], {})
    written = [json.loads(line) for line in writer.write(["x", {"y": None}], {}, range(2)).splitlines()]
    assert [(line["id"], line["custom_id"], line["error"]) for line in written] == [
        ("p%_40", "ü0", None),
        ("p%_41", "ü1", None),
    ]
    assert [line["response"]["body"] for line in written] == ["x", {"y": None}]


def test_numbers_that_are_not_consecutive():
    """Numbers of rows may be given one by one; a part of the rows is written with its own."""
    meta = {name: value for name, value in OPENAI_META.items() if name != "first"}
    _, _, writer = read_lines(meta | {"rows": 3, "numbers": [9, 2, 5]}, openai_text({}, {}, {}))
    lines = writer.write(["b", "c"], {}, range(1, 3)).splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["p%_2", "p%_5"]
    (line,) = writer.write(["b", "c"], {1: ["KeyError", "", ""]}, range(1, 3)).splitlines()
    assert json.loads(line)["id"] == "p%_5"


def test_rows_of_live_calls_are_left_to_the_worker():
    """A row with a field of such a form, or with another URL, is not called; its neighbours are."""
    text = openai_text({"data": []}, {"a": 1}) + openai_text({"a": 2}, url="/v2/models/m/infer")
    rows, errors, _ = read_lines(OPENAI_META | {"rows": 3}, text)
    assert rows == [None, {"a": 1}, None]
    assert {row: code for row, (code, _, _) in errors.items()} == {0: OTHER_FORM, 2: OTHER_FORM}
    text = openai_text({"a": 1}, url="/mine") + openai_text({"data": 1}, url="/mine")
    rows, errors, _ = read_lines(OPENAI_META | {"rows": 2, "forms": []}, text)
    assert (rows, list(errors)) == ([{"a": 1}, None], [1])
    no_forms = OPENAI_META | {"rows": 1, "forms": []}
    assert read_lines(no_forms, openai_text({"data": []}))[:2] == ([{"data": []}], {})


@pytest.mark.parametrize("layout", [OPENAI, TABLE])
def test_lines_that_cannot_be_read(layout):
    """Each is an error of its own row."""
    good = openai_text({}) if layout == OPENAI else b"{}\n"
    text = good + b"[1]\n" + b'{"a":\n' + b'"x"\n' + good
    rows, errors, _ = read_lines(OPENAI_META | {"layout": layout, "rows": 5}, text)
    assert [row is None for row in rows] == [False, True, True, True, False]
    assert {code for code, _, _ in errors.values()} == {"invalid_json"} and sorted(errors) == [1, 2, 3]


def test_table_lines():
    """A line has the row's own columns, spelled as they came, then its output."""
    text = b'{"a":1.0, "a":2 }\n  { } \r\n'
    rows, errors, writer = read_lines({"layout": TABLE, "rows": 2}, text)
    assert (rows, errors) == ([{"a": 2}, {}], {})
    assert (
        writer.write([1, [2]], {}, range(2))
        == b'{"a":1.0, "a":2,"output":1,"error":null}\n{"output":[2],"error":null}\n'
    )


def test_results_without_a_json_form():
    """They become errors of their rows; those that only need another form get it."""
    _, _, writer = read_lines({"layout": TABLE, "rows": 4}, b"{}\n" * 4)
    errors = {}
    text = writer.write([object(), float("nan"), (1, 2), {3: 4}], errors, range(4))
    assert [json.loads(line)["output"] for line in text.splitlines()] == [None, [1, 2], {"3": 4}]
    assert errors.keys() == {0} and errors[0][0] == "bad_return"


def test_plain_values():
    """Values of JSON's own types at every depth are plain, and nothing else is."""
    nested = 1
    for _ in range(200):
        nested = [nested]
    assert all(map(is_plain, [1, "x", None, 1.5, True, [], {}, [1, {"a": [None]}], {"a": {"b": "c"}}]))
    assert not any(map(is_plain, [(1,), {1: 2}, {"a": {1}}, [b""], [[[object()]]], nested, type("D", (dict,), {})()]))


_leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=2)
_keys = st.text(max_size=2) | st.integers(0, 3)
_values = st.recursive(_leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3))


@pytest.mark.usefixtures("decoders")
def test_many_values_are_plain_if_each_is():
    """Values looked at together are plain exactly if each of them is, however deep the odd one lies."""

    @given(st.lists(_values, max_size=5))
    def check(values):
        assert are_plain(values) == all(map(is_plain, values))

    check()
    deep = []
    for _ in range(600):
        deep = [deep]
    assert not are_plain([deep]) and not is_plain(deep)
    endless = []
    endless += [endless, endless]
    assert not are_plain([1, endless])
