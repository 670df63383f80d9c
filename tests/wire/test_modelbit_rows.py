"""Modelbit's bodies: the cases M* of the reference that are about bodies."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill.errors import BatchmillError, InvalidInput, ModelFailed, TooLarge
from batchmill.types import Interface, Tensor
from batchmill.wire.calls import CALL_FORMS, NAMED, POSITIONAL, WITH_IDS, CallError, FunctionResults
from batchmill.wire.json_bytes import DEPTH_MAX
from batchmill.wire.rows import modelbit_rows

ROWS = CALL_FORMS["rows"]
ONE = Interface([Tensor("foo")])
THREE = Interface([Tensor("a"), Tensor("b"), Tensor("c")])
NOTHING = Interface()
FRAME = Interface([Tensor("a"), Tensor("b")], calls="frame")
APP = Interface([Tensor("prompt", "STRING"), Tensor("n", "INT8", required=False)], takes="dict", has_schema=True)


def read(data: bytes, interface: Interface = ONE, more: bytes = b"") -> Any:
    return ROWS.read(b'{"data":' + data + more + b"}", b"", interface)


@pytest.mark.parametrize(
    ("data", "values", "expected"),
    [
        (b"[[1,10],[2,11],[3,12]]", b"[20,22,24]", b"[[1,20],[2,22],[3,24]]"),  # M1
        (b'[["a",10]]', b"[20]", b'[["a",20]]'),  # M5
        (b"[[3,1],[1,2]]", b"[2,4]", b"[[3,2],[1,4]]"),  # M7: in request order
        (b"[[1]]", b"[5]", b"[[1,5]]"),  # M17
        (b"[[1.50,1],[1e2,2]]", b"[2,4]", b"[[1.50,2],[1e2,4]]"),  # byte for byte
        (b'[[{"k": [1]},1],[null,2],[null,2]]', b"[2,4,4]", b'[[{"k": [1]},2],[null,4],[null,4]]'),
        (b' [ [ "a" , 1 ] ] ', b" [ 2 ] ", b'[["a",2]]'),
    ],
)
def test_a_batch_gives_ids_and_results(data: bytes, values: bytes, expected: bytes):
    """Any id comes back as it was written, in the request's order, however often it is there."""
    request = read(data)
    assert (request.layout, request.rows) == (WITH_IDS, len(json.loads(data)))
    assert json.loads(request.calls) == json.loads(data)
    assert ROWS.write(request, FunctionResults(values), "m", "1") == (b'{"data":' + expected + b"}", b"")


@pytest.mark.parametrize(
    ("data", "interface", "layout", "calls"),
    [
        (b"10", ONE, POSITIONAL, [[10]]),  # M9
        (b"[1,10]", ONE, POSITIONAL, [[[1, 10]]]),  # M11
        (b"[]", ONE, POSITIONAL, [[[]]]),
        (b'{"k":1}', ONE, POSITIONAL, [[{"k": 1}]]),
        (b'[{"k":1}]', ONE, POSITIONAL, [[[{"k": 1}]]]),
        (b'[1,"two",3.0]', THREE, POSITIONAL, [[1, "two", 3.0]]),
        (b'{"a":1,"b":2,"c":3}', THREE, NAMED, [{"a": 1, "b": 2, "c": 3}]),
        (b"7", Interface([Tensor("a"), Tensor("b", required=False)]), POSITIONAL, [[7]]),
        (b"null", NOTHING, POSITIONAL, [[]]),
        (b"[]", NOTHING, POSITIONAL, [[]]),
        (b"{}", NOTHING, NAMED, [{}]),
        (b'{"a":1,"b":"x"}', FRAME, POSITIONAL, [[{"a": 1, "b": "x"}]]),
        (b'{"prompt":"p"}', APP, NAMED, [{"prompt": "p"}]),
    ],
)
def test_anything_else_is_one_call(data: bytes, interface: Interface, layout: str, calls: Any):
    """One parameter gets the value as it is; several get a list of them or an object."""
    request = read(data, interface)
    assert (request.layout, request.rows, json.loads(request.calls)) == (layout, 1, calls)
    assert ROWS.write(request, FunctionResults(b"[20]"), "m", "1") == (b'{"data":20}', b"")


@pytest.mark.parametrize(
    ("data", "interface", "calls"),
    [
        (b'[[1,{"prompt":"a"}],[2,{"prompt":"b","n":2}]]', APP, [{"prompt": "a"}, {"prompt": "b", "n": 2}]),
        (b'[[1,"a",1],[2,"b"]]', APP, [{"prompt": "a", "n": 1}, {"prompt": "b"}]),
        (b'[[1,"a"]]', Interface([Tensor("prompt")], takes="dict"), [{"prompt": "a"}]),
    ],
)
def test_a_function_of_one_dict_gets_dicts(data: bytes, interface: Interface, calls: Any):
    """Rows for an app are its inputs by name, or by position."""
    request = read(data, interface)
    assert (request.layout, json.loads(request.calls)) == (NAMED, calls)
    assert ROWS.write(request, FunctionResults(b"[1,1]"[: 2 * len(calls)] + b"]"), "m", "1")[0].startswith(
        b'{"data":[[1,1]'
    )


def test_rows_of_a_frame_keep_their_ids():
    """A data-frame function gets the rows with their ids, which become its index (M25)."""
    request = read(b'[[10,{"a":1,"b":"x"}],[11,{"a":2,"b":"y"}]]', FRAME)
    assert request.layout == WITH_IDS
    assert [row[0] for row in json.loads(request.calls)] == [10, 11]


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b'{"data":[[1,2],3]}', "invalid_field", "row 2 must be a list"),
        (b'{"data":[[1,2],[]]}', "invalid_field", "row 2 must be a list"),
        (b'{"data":[[]]}', "invalid_field", "row 1 must be a list"),
        (b"{}", "invalid_field", '"data"'),
        (b'{"dota":1}', "unknown_field", "did you mean 'data'"),
        (b'{"data":1,"zzz":1}', "unknown_field", "there are data"),
        (b'{"data":1,"response_webhook":"https://x"}', "unsupported_parameter", "response_webhook"),
        (b'{"data":1,"timeout_seconds":0}', "invalid_field", "positive integer"),
        (b'{"data":1,"timeout_seconds":1.5}', "invalid_field", "positive integer"),
        (b'{"data":1,"row_errors":"yes"}', "invalid_field", "row_errors"),
        (b"[]", "invalid_field", "object"),
        (b"{", "invalid_json", "not JSON"),
        (b"", "invalid_json", "not JSON"),
        (b'{"data":"\xff"}', "invalid_encoding", "UTF-8"),
        (b'{"data":' + b"[" * DEPTH_MAX + b"]" * DEPTH_MAX + b"}", "nesting_too_deep", "500 levels"),
        (b'{"data":' + b"[" * 5000 + b"]" * 5000 + b"}", "nesting_too_deep", "deep"),
    ],
)
def test_wrong_bodies_are_refused(body: bytes, code: str, words: str):
    """The error names the field or the row, and the nearest field for one nobody knows."""
    with pytest.raises(InvalidInput) as caught:
        ROWS.read(body, b"", ONE)
    assert caught.value.code == code
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("data", "interface"), [(b"7", THREE), (b"7", NOTHING), (b"7", APP), (b'[[1,"a",1,2]]', APP), (b"[[1]]", APP)]
)
def test_what_fits_no_parameter_is_refused(data: bytes, interface: Interface):
    """A value that cannot be told to be one argument of several is the caller's error; so are too many."""
    if data == b"[[1]]":  # inputs that are missing are named by what calls the function
        assert json.loads(read(data, interface).calls) == [{}]
        return
    with pytest.raises(InvalidInput) as caught:
        read(data, interface)
    assert caught.value.code == "invalid_argument"


def test_the_longest_batch(monkeypatch: pytest.MonkeyPatch):
    """A batch of the most rows is taken, one row more is not."""
    monkeypatch.setattr(modelbit_rows, "ROWS_MAX", 3)
    assert read(b"[[1,1],[2,2],[3,3]]").rows == 3
    with pytest.raises(TooLarge):
        read(b"[[1,1],[2,2],[3,3],[4,4]]")


def test_a_body_may_limit_its_time():
    """timeout_seconds is the caller's limit; the fields of an address are no one's business here."""
    assert read(b"1", more=b',"timeout_seconds":7,"model":"m","stream":false').timeout_s == 7
    assert read(b"1").timeout_s is None


TRACE = 'Traceback (most recent call last):\n  File "app.py", line 2, in f\nValueError: no'


@pytest.mark.parametrize(
    ("error", "kind", "lines"),
    [
        (
            CallError("ValueError", "no", TRACE),
            ModelFailed,
            ['in row 2 of 2 (id "b")', *TRACE.split("\n")],
        ),
        (CallError("ValueError", "two\nlines", "T\nValueError: two\nlines"), ModelFailed, ["ValueError: two lines"]),
        (CallError("missing_argument", "needs b"), InvalidInput, ['row 2 of 2 (id "b"): needs b']),
        (CallError("timeout", "too slow"), ModelFailed, ['row 2 of 2 (id "b"): too slow']),
    ],
)
def test_one_bad_row_fails_the_request(error: CallError, kind: Any, lines: list[str]):
    """The text names the row and its id, and ends with `Type: message` in one line (M13, M15)."""
    with pytest.raises(kind) as caught:
        ROWS.write(read(b'[["a",1],["b",2]]'), FunctionResults(b"[1,null]", errors={1: error}), "m", "1")
    assert caught.value.message.split("\n")[-len(lines) :] == lines


def test_errors_of_rows_if_they_are_wanted():
    """With row_errors the other rows are answered, and one that failed has null and its error in its place."""
    request = read(b"[[1,1],[2,2],[3,3]]", more=b',"row_errors":true')
    errors = {1: CallError("ValueError", "no\nway", TRACE), 2: CallError("missing_argument", "needs b")}
    body, _ = ROWS.write(request, FunctionResults(b"[2,null,null]", errors=errors), "m", "1")
    assert json.loads(body) == {
        "data": [[1, 2], [2, None, {"error": "ValueError: no way"}], [3, None, {"error": "InvalidInput: needs b"}]]
    }
    body, _ = ROWS.write(
        read(b"1", more=b',"row_errors":true'), FunctionResults(b"[null]", errors={0: errors[1]}), "m", "1"
    )
    assert json.loads(body) == {"data": None, "error": "ValueError: no way"}


def test_an_event_is_data():
    """An event of a stream is an answer of its own."""
    assert ROWS.event(read(b"1"), b'{"a":1}', []) == b'{"data":{"a":1}}'


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.lists(st.tuples(JSON_VALUES, JSON_VALUES), min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_ids_and_values_of_any_kind_survive(rows: list[Any]):
    """Whatever an id and a value are, they come back as they are."""
    request = read(json.dumps(rows).encode())
    body, _ = ROWS.write(request, FunctionResults(json.dumps([row[1] for row in rows]).encode()), "m", "1")
    assert json.dumps(json.loads(body)["data"]) == json.dumps(rows)


@given(st.binary(max_size=60) | JSON_VALUES.map(lambda each: json.dumps({"data": each}).encode()))
@settings(max_examples=500, deadline=None)
def test_any_body_is_read_or_refused(body: bytes):
    """Whatever comes, the form raises nothing but an error of ours."""
    for interface in (ONE, THREE, NOTHING, FRAME, APP):
        try:
            request = ROWS.read(body, b"", interface)
        except BatchmillError:
            continue
        assert len(json.loads(request.calls)) == request.rows
