"""Rows that arrive as columns: what functions see of them, and what becomes of their results."""

import datetime
import decimal
import json

import pyarrow as pa
import pytest
from function_driver import has_packages

pytestmark = pytest.mark.skipif(
    not has_packages("pyarrow", "pandas", "polars"), reason="needs pyarrow, pandas and polars"
)


def stream_of(columns):
    batch = columns if isinstance(columns, pa.RecordBatch) else pa.RecordBatch.from_pydict(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes(), batch.num_rows


def ask(process, columns):
    """(name of the column, its array, errors by row) of the results of one ask."""
    data, rows = stream_of(columns)
    process.ask(data, layout="arrow", rows=rows, from_job=True)
    arrays, errors, done = [], {}, 0
    while done < rows:
        meta, buffers = process.receive()
        assert (meta["kind"], meta["layout"], meta["first"]) == ("results", "arrow", done)
        done += meta["rows"]
        errors |= {int(row): error for row, error in meta["errors"].items()}
        if len(buffers[0]):
            batch = pa.ipc.open_stream(pa.py_buffer(buffers[0])).read_next_batch()
            arrays += [(batch.schema.names[0], batch.column(0))]
    (name,) = {name for name, _ in arrays} or {None}
    return name, pa.concat_arrays([array for _, array in arrays]) if arrays else None, errors


@pytest.fixture
def call(drive):
    def call(code, columns, **start):
        process = drive(code, **start)
        process.ready()
        assert process.ready_meta["reads_arrow"] is True
        return ask(process, columns)

    return call


VALUES = {
    "number": [1, None],
    "real": pa.array([0.5, float("nan")], pa.float32()),
    "moment": pa.array([datetime.datetime(2026, 1, 2, 3, 4, 5)] * 2, pa.timestamp("ms", "UTC")),
    "day": [datetime.date(2026, 1, 2), None],
    "money": pa.array([decimal.Decimal("1.50"), decimal.Decimal("2.00")], pa.decimal128(9, 2)),
    "blob": [b"\x00", b"ab"],
    "vector": pa.array([[1.0, None], []], pa.list_(pa.float64())),
    "nested": [{"a": [1]}, None],
    "pairs": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
}
SEEN = [
    {
        "number": 1, "real": 0.5, "moment": "2026-01-02T03:04:05.000Z", "day": "2026-01-02", "money": 1.5,
        "blob": "AA==", "vector": [1.0, None], "nested": {"a": [1]}, "pairs": {"k": 1},
    },
    {
        "number": None, "real": None, "moment": "2026-01-02T03:04:05.000Z", "day": None, "money": 2.0,
        "blob": "YWI=", "vector": [], "nested": None, "pairs": None,
    },
]  # fmt: skip


def test_a_function_of_single_rows_sees_what_json_has(call):
    code = f"seen = {SEEN!r}\ndef f(**row):\n  assert row in seen, row\n  return seen.index(row)"
    name, array, errors = call(code, VALUES)
    assert (name, array.to_pylist(), errors) == ("output", [0, 1], {})


@pytest.mark.parametrize(
    ("result", "name", "kind", "values"),
    [
        ("n * 0.5", "output", pa.float64(), [0.0, 0.5, 1.0]),
        ("n", "output", pa.int64(), [0, 1, 2]),
        ("str(n)", "output", pa.string(), ["0", "1", "2"]),
        ("n == 1", "output", pa.bool_(), [False, True, False]),
        ("None if n else 'x'", "output", pa.string(), ["x", None, None]),
        ("float('nan') if n else 1.0", "output", pa.float64(), [1.0, None, None]),
        ("[n, n]", "output", pa.list_(pa.int64()), [[0, 0], [1, 1], [2, 2]]),
        ("[n * 0.5]", "output", pa.list_(pa.float64()), [[0.0], [0.5], [1.0]]),
        ("[float('nan')]", "json", pa.binary(), [b"[null]"] * 3),
        ("{'a': n}", "json", pa.binary(), [b'{"a":0}', b'{"a":1}', b'{"a":2}']),
        ("n if n else 0.5", "json", pa.binary(), [b"0.5", b"1", b"2"]),
        ("2 ** 70", "json", pa.binary(), [b"%d" % 2**70] * 3),
        ("None", "json", pa.binary(), [b"null"] * 3),
    ],
)
def test_results_have_a_type_where_all_have_the_same(call, result, name, kind, values):
    found, array, errors = call(f"def f(n): return {result}", {"n": [0, 1, 2]})
    assert (found, array.type, array.to_pylist(), errors) == (name, kind, values, {})


def test_rows_that_fail_are_left_out_of_the_column(call):
    _, array, errors = call("def f(n):\n  if n == 1: raise ValueError('one')\n  return n", {"n": [0, 1, 2]})
    assert array.to_pylist() == [0, 2]
    assert [errors[1][:2]] == [["ValueError", "one"]]


def test_a_column_that_is_missing_and_one_that_is_not_wanted(call):
    _, array, errors = call("def f(a, b): return 1", {"a": [1, 2], "c": [1, 2]})
    assert array is None
    assert {row: error[0] for row, error in errors.items()} == {0: "missing_argument", 1: "missing_argument"}
    _, array, errors = call("def f(a, b=5): return a + b", {"a": [1, 2], "c": [1, 2]})
    assert (array.to_pylist(), errors) == ([6, 7], {})


PACKAGES = {"np": "numpy", "pd": "pandas", "pl": "polars", "pa": "pyarrow", "pc": "pyarrow.compute"}


def batched(code):
    """The code of a function that takes batches. It imports what it uses: all of these take 0.5 s."""
    imports = [f"import {package} as {name}\n" for name, package in PACKAGES.items() if f"{name}." in code]
    return f"{''.join(imports)}from batchmill import batched\n@batched(100)\n{code}"


@pytest.mark.parametrize(
    ("code", "kind", "values"),
    [
        ("def f(n: np.ndarray): return n * 2", pa.int64(), [0, 2, 4]),
        ("def f(n: np.ndarray): return (n / 2).astype('f4')", pa.float32(), [0.0, 0.5, 1.0]),
        ("def f(n: np.ndarray): return (n / 2).astype('f2')", pa.float32(), [0.0, 0.5, 1.0]),
        ("def f(n: np.ndarray): return np.stack([n, n], 1)", pa.list_(pa.int64()), [[0, 0], [1, 1], [2, 2]]),
        ("def f(v: np.ndarray): return v.sum(axis=1)", pa.float64(), [1.0, 2.0, 3.0]),
        ("def f(n: np.ndarray): return {'output': n > 0}", pa.bool_(), [False, True, True]),
        (
            "def f(n: np.ndarray): return {'a': n, 'b': n / 2}",
            pa.struct([("a", pa.int64()), ("b", pa.float64())]),
            [{"a": 0, "b": 0.0}, {"a": 1, "b": 0.5}, {"a": 2, "b": 1.0}],
        ),
        ("def f(n, s): return [f'{a}{b}' for a, b in zip(n, s)]", pa.string(), ["0a", "1b", "2c"]),
        ("def f(n: pa.Array): return pc.add(n, 1)", pa.int64(), [1, 2, 3]),
        ("def f(n: pa.ChunkedArray): return pc.add(n, 1)", pa.int64(), [1, 2, 3]),
        ("def f(n: pl.Series): return n + 1", pa.int64(), [1, 2, 3]),
        ("def f(n: pd.Series): return n + 1", pa.int64(), [1, 2, 3]),
        ("def f(t: pa.Table): return t['n']", pa.int64(), [0, 1, 2]),
        ("def f(t: pa.RecordBatch): return t.column(0)", pa.int64(), [0, 1, 2]),
        ("def f(t: pl.DataFrame): return t['n'] * 2", pa.int64(), [0, 2, 4]),
        ("def f(t: pd.DataFrame): return t['n'] * 2", pa.int64(), [0, 2, 4]),
        ("def f(t: pd.DataFrame): return t[['n']]", pa.struct([("n", pa.int64())]), [{"n": 0}, {"n": 1}, {"n": 2}]),
        (
            "def f(t: pd.DataFrame): return pd.concat([t[['s']][:1], t[['s']][1:]])",
            pa.struct([("s", pa.large_string())]),
            [{"s": "a"}, {"s": "b"}, {"s": "c"}],
        ),
        (
            "def f(t: pd.DataFrame): return pd.concat([t['s'][:1], t['s'][1:]])",
            pa.large_string(),
            ["a", "b", "c"],
        ),
        (
            "def f(t: pl.DataFrame): return t.select('n')",
            pa.struct([("n", pa.int64())]),
            [{"n": 0}, {"n": 1}, {"n": 2}],
        ),
        ("def f(rows): return [row['n'] for row in rows]", pa.int64(), [0, 1, 2]),
    ],
)
def test_functions_of_columns(call, code, kind, values):
    columns = {"n": [0, 1, 2], "s": ["a", "b", "c"], "v": [[0.5, 0.5], [1.0, 1.0], [1.5, 1.5]]}
    name, array, errors = call(batched(code), columns)
    assert (name, errors) == ("output", {})
    assert (array.type, array.to_pylist()) == (kind, values)


@pytest.mark.parametrize("hint", ["pa.Table", "pl.DataFrame", "pd.DataFrame", "pa.RecordBatch"])
def test_a_table_of_rows_that_come_one_by_one(drive, hint):
    """A live call, or a row of JSON lines, gives the same table."""
    process = drive(batched(f"def f(t: {hint}): return t['n']"))
    assert process.ready()["takes"] == "rows"
    assert process.values([[{"n": 5}], [{"n": 7}]]) == [5, 7]


@pytest.mark.parametrize("hint", ["pa.Array", "pa.ChunkedArray", "pl.Series", "pd.Series"])
def test_a_column_of_rows_that_come_one_by_one(drive, hint):
    process = drive(batched(f"def f(n: {hint}): return n"))
    process.ready()
    assert process.values([[5], [7]]) == [5, 7]


def test_what_a_function_gets_is_read_only_and_never_changes_what_it_got_before(call):
    code = batched("def f(n: np.ndarray):\n  n += 1\n  return n")
    _, array, errors = call(code, {"n": [0, 1]})
    assert array is None
    assert {error[1] for error in errors.values()} == {"output array is read-only"}


def test_results_may_be_views_of_the_arguments_and_of_what_came_before(drive):
    process = drive(batched("def f(n: np.ndarray):\n  return np.__dict__.setdefault('kept', n)[: len(n)]"))
    process.ready()
    assert ask(process, {"n": list(range(100))})[1].to_pylist() == list(range(100))
    assert ask(process, {"n": list(range(100, 200))})[1].to_pylist() == list(range(100))


def test_one_row_that_raises_among_columns_costs_only_itself(call):
    code = batched("def f(n: np.ndarray):\n  if 3 in n: raise ValueError('three')\n  return n")
    _, array, errors = call(code, {"n": list(range(10))})
    assert array.to_pylist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert errors[3][:2] == ["ValueError", "three"]


def test_a_result_of_another_length_is_refused(call):
    _, array, errors = call(batched("def f(n: pl.Series): return n.head(1)"), {"n": [1, 2, 3]})
    assert array is None
    assert {tuple(error[:2]) for error in errors.values()} == {
        ("bad_return", "the function returned 1 results for 3 rows")
    }


def test_nulls_in_columns(call):
    code = batched("def f(n: np.ndarray, s: np.ndarray): return [repr((float(a), b)) for a, b in zip(n, s)]")
    _, array, _ = call(code, {"n": [1, None], "s": ["a", None]})
    assert array.to_pylist() == ["(1.0, 'a')", "(nan, None)"]


TYPED = "import numpy as np\nfrom numpy.typing import NDArray\nfrom batchmill import batched\n@batched(100)\n"


@pytest.mark.parametrize(
    ("hint", "column", "values", "failing"),
    [
        ("int32", pa.array([1, 2**40, 3]), [1, None, 3], [1]),
        ("int64", pa.array([1, None, 3]), [1, None, 3], [1]),
        ("float32", pa.array(["1.5", "x", "2"]), [1.5, None, 2.0], [1]),
        ("float64", pa.array([1.5, None, 2.0]), [1.5, None, 2.0], []),
        ("int8", pa.array([[1, 2], [3, 4], [500, 6]]), [[1, 2], [3, 4], None], [2]),
        ("float32", pa.array([[1, 2], [3, 4], [5, 6]]), [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], []),
    ],
)
def test_a_value_that_does_not_fit_the_type_fails_its_row_alone(call, hint, column, values, failing):
    code = f"{TYPED}def f(n: NDArray[np.{hint}]):\n  assert n.dtype == '{hint}'\n  return n.tolist()"
    _, array, errors = call(code, pa.RecordBatch.from_arrays([column], ["n"]))
    assert sorted(errors) == failing
    assert {error[0] for error in errors.values()} <= {"invalid_argument"}
    kept = [value for row, value in enumerate(values) if row not in failing]
    assert str(array.to_pylist()) == str(kept) or [json.loads(text) for text in array.to_pylist()] == kept


def test_rows_that_fail_leave_the_others_their_type(call):
    code = "def f(n):\n  if n == 1: raise ValueError('one')\n  return n * 0.5 if n else float('inf')"
    name, array, errors = call(code, {"n": [0, 1, 2]})
    assert (name, array.type, array.to_pylist(), list(errors)) == ("output", pa.float64(), [None, 1.0], [1])


def test_asynchronous_functions_get_columns_too(call):
    _, array, errors = call("async def f(n): return n + 1", {"n": [0, 1, 2]})
    assert (sorted(int(v) for v in array.to_pylist()), errors) == ([1, 2, 3], {})


def test_bytes_that_are_no_stream_are_an_error_of_their_rows(drive):
    process = drive("def f(n): return n")
    process.ready()
    process.ask(b"no arrow", layout="arrow", rows=2, from_job=True)
    meta, _ = process.receive()
    assert [error[0] for error in meta["errors"].values()] == ["invalid_json"] * 2
