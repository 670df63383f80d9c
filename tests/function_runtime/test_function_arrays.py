"""Tensors in and out: arrays as bytes, scalars exact, data frames; through a real process where numpy is installed."""

# ruff: noqa: E501

import json

import numpy as np
import pytest
from function_driver import has_packages

HEAD = "import numpy as np, batchmill\nfrom typing import Annotated\n"


def send(process, columns, rows, *, exact=True):
    """Ask with columns of arrays; returns the meta and the columns or values that came back."""
    expected, buffers = {}, []
    for name, array in columns.items():
        if isinstance(array, np.ndarray):
            expected[name] = {"$array": [len(buffers), DATATYPES[array.dtype.name], list(array.shape)]}
            buffers.append(array.tobytes())
        else:
            expected[name] = array
    process.ask(expected, layout="columns", rows=rows, exact=exact, buffers=buffers)
    meta, got = process.receive()
    return meta, arrays_in(json.loads(bytes(got[0])), got[1:])


DATATYPES = {
    "float32": "FP32",
    "float64": "FP64",
    "int64": "INT64",
    "uint8": "UINT8",
    "bool": "BOOL",
    "float16": "FP16",
}
TYPES = {name: kind for kind, name in DATATYPES.items()}


def arrays_in(value, buffers):
    if isinstance(value, list):
        return [arrays_in(each, buffers) for each in value]
    if isinstance(value, dict) and list(value) == ["$array"]:
        number, datatype, shape, *_ = value["$array"]
        if datatype == "BYTES":
            return ("BYTES", shape, bytes(buffers[number]))
        return np.frombuffer(buffers[number], TYPES[datatype]).reshape(shape)
    if isinstance(value, dict):
        return {name: arrays_in(each, buffers) for name, each in value.items()}
    return value


@pytest.mark.parametrize("kind", sorted(TYPES.values()))
def test_arrays_through_a_row_function(drive, kind):
    """A row function gets its array with its own shape and type, and returns one just so."""
    process = drive(HEAD + "def f(a: np.ndarray): return a[::-1]")
    process.ready()
    array = np.arange(6).astype(kind).reshape(1, 2, 3)
    meta, [back] = send(process, {"a": array}, 1)
    assert meta["errors"] == {}
    assert back.dtype == array.dtype
    assert (back == array[0, ::-1]).all()


def test_arrays_through_a_batch(drive):
    """A batched function gets one array of all rows and returns one; each ask has its part of it as columns."""
    process = drive(
        HEAD + "@batchmill.batched(64)\ndef f(a: np.ndarray):\n  assert type(a) is np.ndarray\n  return a * 2"
    )
    process.ready()
    array = np.random.default_rng(1).random((64, 1024), dtype=np.float32)
    meta, columns = send(process, {"a": array}, 64)
    assert (meta["layout"], meta["ran"][0][:2]) == ("columns", [64, 1])
    assert (columns["output"] == array * 2).all()
    assert columns["output"].dtype == np.float32


def test_an_oversized_array_is_cut_and_joined(drive):
    """More rows than a batch holds go in parts and come back as one array."""
    process = drive(
        HEAD + "@batchmill.batched(8)\ndef f(a: np.ndarray): return {'x': a + 1, 'n': np.full(len(a), len(a))}"
    )
    process.ready()
    meta, columns = send(process, {"a": np.arange(20.0)}, 20)
    assert meta["layout"] == "columns"
    assert (columns["x"] == np.arange(20.0) + 1).all()
    assert columns["n"].tolist() == [8] * 16 + [4] * 4


def test_shapes_do_not_mix(drive):
    """Asks of different shapes are answered by calls of their own."""
    process = drive(HEAD + "@batchmill.batched(8)\ndef f(a: np.ndarray): return [list(a.shape)] * len(a)")
    process.ready()
    with process.together():
        ids = [process.ask([[[1, 2]]]), process.ask([[[1, 2, 3]]]), process.ask([[[3, 4]]]), process.ask([[5]])]
    came = {}
    for _ in ids:
        meta, buffers = process.receive()
        came[meta["id"]] = json.loads(bytes(buffers[0]))
    assert [came[each] for each in ids] == [[[2, 2]], [[1, 3]], [[2, 2]], [[1]]]


def test_a_json_ask_and_a_tensor_ask_meet(drive):
    """Calls of different dialects share a batch, and each is answered in its own way."""
    process = drive(HEAD + "@batchmill.batched(2)\ndef f(a: np.ndarray): return a + len(a)")
    process.ready()
    data = np.array([2.5])
    with process.together():
        plain = process.ask([[1.5]])
        exact = process.ask(
            {"a": {"$array": [0, "FP64", [1]]}}, layout="columns", rows=1, exact=True, buffers=[data.tobytes()]
        )
    came = {
        meta["id"]: (meta["layout"], bytes(buffers[0]), buffers[1:])
        for meta, buffers in (process.receive(), process.receive())
    }
    assert came[plain][:2] == ("rows", b"[3.5]")
    assert came[exact][0] == "columns"
    assert np.frombuffer(came[exact][2][0]).tolist() == [4.5]


def test_a_raising_row_of_arrays_fails_alone(drive):
    """Beside a row that failed, the results of the others come row by row."""
    process = drive(
        HEAD + "@batchmill.batched(8)\ndef f(a: np.ndarray):\n  if (a == 3).any(): raise ValueError(3)\n  return a * 2"
    )
    process.ready()
    meta, values = send(process, {"a": np.arange(6.0)}, 6)
    assert (meta["layout"], list(meta["errors"])) == ("rows", ["3"])
    assert [float(each) for row, each in enumerate(values) if row != 3] == [0, 2, 4, 8, 10]


EXACT = [
    ("float('nan')", np.array(np.nan)), ("[1.0, float('inf')]", np.array([1, np.inf])), ("[[1.0], [float('nan')]]", np.array([[1.0], [np.nan]])),
    ("np.float32(1.5)", np.float32(1.5)), ("np.int64(3)", np.int64(3)), ("np.bool_(True)", np.bool_(True)),
    ("np.zeros((2, 0), np.float32)", np.zeros((2, 0), np.float32)), ("np.arange(6.0).reshape(2, 3).T", np.arange(6.0).reshape(2, 3).T),
    ("np.arange(3).astype('>i8')", np.arange(3)),
]  # fmt: skip


@pytest.mark.parametrize(("result", "array"), EXACT)
def test_results_that_json_lacks(drive, result, array):
    """In an answer to tensors, numpy's values and numbers that JSON lacks keep type and shape."""
    process = drive(HEAD + f"def f(a): return {{'x': {result}}}")
    process.ready()
    process.ask([[1]], exact=True)
    _, buffers = process.receive()
    [row] = arrays_in(json.loads(bytes(buffers[0])), buffers[1:])
    assert row["x"].dtype == array.dtype
    assert row["x"].shape == array.shape
    assert row["x"].tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ("b'\\xff\\x00'", ("BYTES", [], b"\x02\0\0\0\xff\0")),
        ("np.array(['é', 'b'])", ("BYTES", [2], b"\x02\0\0\0\xc3\xa9\x01\0\0\0b")),
        ("{'$x': 1, 'y': {'$z': 2}}", {"$object": {"$x": 1, "y": {"$object": {"$z": 2}}}}),
        ("2**63 + 1", 2**63 + 1), ("[1.5, 2]", [1.5, 2]), ("'text'", "text"), ("[True, None]", [True, None]),
    ],
)  # fmt: skip
def test_texts_and_objects_in_an_answer_to_tensors(drive, result, expected):
    """Bytes are arrays, keys that begin with a dollar are wrapped, everything else is JSON."""
    process = drive(HEAD + f"def f(a): return {result}")
    process.ready()
    process.ask([[1]], exact=True)
    _, buffers = process.receive()
    assert arrays_in(json.loads(bytes(buffers[0])), buffers[1:]) == [expected]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ("np.int64(3)", 3), ("np.bool_(True)", True), ("np.array([1, 2])", [1, 2]), ("np.float64('nan')", None),
        ("(np.float32(0.5), np.array([[np.nan, 1.0]]))", [0.5, [[None, 1.0]]]), ("np.datetime64('2024-01-02')", "2024-01-02"),
        ("np.array(['2024-01-02'], 'M8[D]')", ["2024-01-02"]), ("np.array([1+2j])", ["(1+2j)"]), ("np.str_('x')", "x"), ("{np.int64(1): np.half(2)}", {"1": 2.0}),
    ],
)  # fmt: skip
def test_numpy_as_json(drive, result, expected):
    """Elsewhere numpy's values are plain JSON."""
    process = drive(HEAD + f"def f(a): return {result}")
    process.ready()
    assert process.values([[1]]) == [expected]


def test_bytes_that_are_no_text_come_as_bytes(drive):
    """An input that is not UTF-8 is bytes to the function."""
    process = drive("def f(a): return [type(a).__name__, len(a)]")
    process.ready()
    data = b"\x02\0\0\0\xff\xfe\x01\0\0\0b"
    process.ask({"a": {"$array": [0, "BYTES", [2]]}}, layout="columns", rows=2, buffers=[data])
    _, buffers = process.receive()
    assert json.loads(buffers[0]) == [["bytes", 2], ["bytes", 1]]


def test_lists_become_arrays_where_the_function_takes_them(drive):
    """JSON lists are converted to the declared type; lists of different lengths are the caller's error."""
    process = drive(
        HEAD + "def f(a: Annotated[np.ndarray, batchmill.tensor('FP32', [-1])]): return [a.dtype.name, a.sum()]"
    )
    process.ready()
    values, errors = process.call([[[1, 2]], [[[1], [2, 3]]], [["x"]]])
    assert values[0] == ["float32", 3.0]
    assert [errors[row][0] for row in (1, 2)] == ["invalid_argument", "invalid_argument"]


needs_pandas = pytest.mark.skipif(not has_packages("pandas"), reason="needs pandas")
FRAMES = [
    ("(df['a'] * 2).tolist()", [2, 4]), ("df['a'] * 2", [2, 4]), ("(df['a'] * 2).to_numpy()", [2, 4]), ("df.index", [10, 11]),
    ("df.assign(c=df.a / 0)", [{"a": 1, "b": "x", "c": None}, {"a": 2, "b": "y", "c": None}]), ("[len(df), list(df.columns)]", [2, ["a", "b"]]),
]  # fmt: skip


@needs_pandas
@pytest.mark.parametrize(("result", "values"), FRAMES)
def test_data_frames(drive, result, values):
    """A batch of rows by id is one call with one data frame, whose index are the ids."""
    process = drive(f"import pandas as pd\ndef f(df: pd.DataFrame): return {result}", frame_columns=["a", "b"])
    expected = process.ready()
    assert (expected["calls"], [each["name"] for each in expected["inputs"]]) == ("frame", ["a", "b"])
    rows = [[10, {"a": 1, "b": "x"}], [11, {"a": 2, "b": "y"}]]
    assert process.values(rows, layout="with_ids") == values
    assert process.last["ran"][0][:2] == [2, 1]


@needs_pandas
def test_data_frames_from_any_layout(drive):
    """Rows by name and columns make the same frame; a result of another length is an error naming both numbers."""
    process = drive("def f(df): return (df['a'] * 2).tolist()[: 2 if len(df) < 3 else 1]", frame_columns=["a", "b"])
    process.ready()
    assert process.values([{"a": 1, "b": 2}], layout="named") == [2]
    assert process.values({"a": [1, 2], "b": [3, 4]}, layout="columns", rows=2) == [2, 4]
    assert process.values([[{"a": 5}]]) == [10]
    _, errors = process.call([{"a": 1}] * 3, layout="named")
    assert errors[0][1] == "the function returned 1 results for 3 rows"


def test_a_data_frame_function_has_one_parameter(drive):
    """More than one is refused in Modelbit's words."""
    expected = drive("def f(a, b): ...", frame_columns=["x"]).refused()
    assert "Deployments using DataFrame Mode can only have one argument." in expected
