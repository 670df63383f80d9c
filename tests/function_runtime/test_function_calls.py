"""What a function is called with and what comes back, through a real process."""

# ruff: noqa: E501

import json

import pytest

LAYOUTS = [
    ("def f(foo): return 2*foo", "with_ids", [[1, 10], [2, 11], [3, 12]], [20, 22, 24]),
    ("def f(foo): return 2*foo", "with_ids", [[{"any": ["id"]}, 10]], [20]),
    ("def f(foo): return 2*foo", "positional", [["ab"], [1.5]], ["abab", 3.0]),
    ("def f(foo): return 2*foo", "named", [{"foo": 1}, {"foo": 2}], [2, 4]),
    ("def f(foo): return 2*foo", "columns", {"foo": [1, 2]}, [2, 4]),
    ("def f(a, b, c): return [a, b, c]", "with_ids", [[1, 1, "two", 3.0], [2, 4, "five", 6.0]], [[1, "two", 3.0], [4, "five", 6.0]]),
    ("def f(a, b, c): return [a, b, c]", "named", [{"c": 3, "b": 2, "a": 1}], [[1, 2, 3]]),
    ("def f(a, b, c): return [a, b, c]", "columns", {"c": [3], "a": [1], "b": [2]}, [[1, 2, 3]]),
    ("def f(a, b=7): return [a, b]", "positional", [[1], [1, 2]], [[1, 7], [1, 2]]),
    ("def f(a, b=7): return [a, b]", "named", [{"a": 1}, {"a": 1, "b": 2}], [[1, 7], [1, 2]]),
    ("def f(a, *, b=7): return [a, b]", "positional", [[1]], [[1, 7]]),
    ("def f(): return 5", "with_ids", [[1]], [5]),
    ("def f(): return 5", "named", [{}], [5]),
    ("def f(d): return d['my_key']", "with_ids", [[1, {"my_key": 25}], [2, {"my_key": 30}]], [25, 30]),
    ("def f(a, **more): return [a, more]", "named", [{"a": 1, "z": 2}], [[1, {"z": 2}]]),
    ("async def f(a): return a + 1", "positional", [[1], [2]], [2, 3]),
    ("def f(n):\n  for i in range(n): yield i", "positional", [[3], [0]], [[0, 1, 2], []]),
    ("async def f(n):\n  for i in range(n): yield i", "positional", [[3]], [[0, 1, 2]]),
    ("def f(x): return x", "positional", [[2**63 - 1], [10**30], [-(2**70)]], [2**63 - 1, 10**30, -(2**70)]),
    ("import batchmill\n@batchmill.batched(2)\ndef f(a, b=0): return [x + y for x, y in zip(a, b)]", "positional", [[1], [2, 5], [3]], [1, 7, 3]),
    ("import batchmill\n@batchmill.batched(2)\ndef f(a): return [[len(a), x] for x in a]", "columns", {"a": [1, 2, 3]}, [[2, 1], [2, 2], [1, 3]]),
    ("from batchmill import batched\n@batched(9)\ndef f(rows): return [r.get('a') for r in rows]", "named", [{"a": 1}, {"b": 2}], [1, None]),
    ("import batchmill\n@batchmill.batched(4)\nasync def f(a): return [2 * x for x in a]", "positional", [[1], [2]], [2, 4]),
    ("import batchmill\n@batchmill.batched(4)\ndef f(a): return tuple(a)", "positional", [[1], [2]], [1, 2]),
]  # fmt: skip


@pytest.mark.parametrize(("code", "layout", "calls", "values"), LAYOUTS)
def test_layouts(drive, code, layout, calls, values):
    """Every layout reaches every form of function, and results come back row by row."""
    process = drive(code)
    process.ready()
    assert process.values(calls, layout=layout, rows=len(values)) == values


BAD_ROWS = [
    ("def f(a, b): return 1", "positional", [[1]], "missing_argument", "the function needs b"),
    ("def f(a, b): return 1", "positional", [[1, 2, 3]], "invalid_argument", "got 3 arguments"),
    ("def f(a, b): return 1", "named", [{"a": 1}], "missing_argument", "the function needs b, and the row has a"),
    ("def f(a, b): return 1", "named", [{"a": 1, "b": 2, "c": 3}], "unknown_argument", "does not take c; it takes a, b"),
    ("def f(a, *, b): return 1", "positional", [[1]], "missing_argument", "the function needs b"),
    ("def f(a): return 1", "named", [5], "invalid_argument", "an object of arguments by name, not int"),
    ("def f(a): return 1", "positional", [3], "invalid_json", "cannot be read"),
    ("def f(a): return 1/a", "positional", [[0]], "ZeroDivisionError", "division by zero"),
    ("def f(a): raise SystemExit('no')", "positional", [[0]], "SystemExit", "no"),
    ("def f(a): raise KeyboardInterrupt", "positional", [[0]], "KeyboardInterrupt", ""),
    ("def f(a): raise StopIteration(4)", "positional", [[0]], "StopIteration", "4"),
    ("class E(Exception):\n  def __str__(self): return 1\ndef f(a): raise E", "positional", [[0]], "E", "cannot be read"),
    ("def f(a): return f(a)", "positional", [[0]], "RecursionError", "maximum recursion depth"),
    ("async def f(a):\n  import asyncio; asyncio.current_task().cancel(); await asyncio.sleep(0)", "positional", [[0]], "CancelledError", ""),
    ("def f(a): return object()", "positional", [[0]], "bad_return", "TypeError: Object of type object"),
    ("def f(a): import sys; return sys", "positional", [[0]], "bad_return", "TypeError: Object of type module"),
    ("def f(a):\n  x = []; x.append(x); return x", "positional", [[0]], "bad_return", "Cannot serialize result: circular reference detected."),
    ("def f(a):\n  x = 1\n  for _ in range(600): x = [x]\n  return x", "positional", [[0]], "bad_return", "nested deeper than 500"),
    ("def f(a): return chr(0xd800)", "positional", [[0]], "bad_return", "surrogates not allowed"),
    ("async def g(): ...\ndef f(a): return g()", "positional", [[0]], "bad_return", "must be awaited"),
    ("import batchmill\n@batchmill.batched(8)\ndef f(a): return a[1:]", "positional", [[0]], "bad_return", "returned 0 results for 1 rows"),
    ("import batchmill\n@batchmill.batched(8)\ndef f(a): return {}", "positional", [[0]], "bad_return", "a dict for a list of 1 rows, not a list"),
    ("import batchmill\n@batchmill.batched(8)\ndef f(a): return [ValueError('mine')]", "positional", [[0]], "ValueError", "mine"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "layout", "calls", "error", "message"), BAD_ROWS)
def test_rows_that_fail(drive, code, layout, calls, error, message):
    """A row that fails has its own error and takes nothing with it: the next call works."""
    process = drive(code)
    process.ready()
    for _ in range(2):
        values, errors = process.call(calls, layout=layout, rows=1)
        assert values == [None]
        assert errors[0][0] == error
        assert message in errors[0][1]


def test_a_raising_row_has_its_traceback(drive):
    """The traceback begins in user code and ends with `Type: message`."""
    process = drive("def g(a):\n    raise ValueError(f'no {a}')\n\n\ndef f(a):\n    return g(a)")
    process.ready()
    _, errors = process.call([[7], [8]])
    lines = errors[1][2].splitlines()
    assert errors[1][:2] == ["ValueError", "no 8"]
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith("line 6, in f")
    assert lines[-1] == "ValueError: no 8"
    assert "function_runtime" not in errors[1][2]


def test_chained_errors_are_told_whole(drive):
    """The cause of an error stands in its traceback."""
    process = drive("def f(a):\n  try: 1/0\n  except Exception as e: raise KeyError(a) from e")
    process.ready()
    _, errors = process.call([[7]])
    assert "ZeroDivisionError" in errors[0][2]
    assert errors[0][2].splitlines()[-1] == "KeyError: 7"


@pytest.mark.parametrize("size", [1, 3, 8, 64])
def test_only_the_raising_rows_of_a_batch_fail(drive, size):
    """A batch that raises is cut until only the rows that raise by themselves have failed."""
    bad = {3, 4, 17, 40, 41, 63}
    process = drive(
        f"import batchmill\n@batchmill.batched({size})\ndef f(a):\n"
        f"    for x in a:\n        if x in {bad}: raise ValueError(x)\n    return [2*x for x in a]"
    )
    process.ready()
    for _ in range(5):
        values, errors = process.call([[i] for i in range(64)])
        assert set(errors) == bad
        assert [errors[row][:2] for row in sorted(bad)] == [["ValueError", str(row)] for row in sorted(bad)]
        assert all(values[row] == 2 * row for row in range(64) if row not in bad)


def test_a_wrong_length_is_an_error_of_that_batch_only(drive):
    """A batch with too few results fails whole, naming both numbers; the next call works."""
    process = drive("import batchmill\n@batchmill.batched(8)\ndef f(a): return a[1:] if a[0] == 0 else a")
    process.ready()
    values, errors = process.call([[i] for i in range(16)])
    assert values[8:] == list(range(8, 16))
    assert {errors[row][1] for row in range(8)} == {"the function returned 7 results for 8 rows"}
    assert len(errors) == 8


def test_an_oversized_ask_is_cut(drive):
    """An ask of more rows than a batch holds is called in parts and answered in order."""
    process = drive("import batchmill\n@batchmill.batched(8)\ndef f(a): return [[x, len(a)] for x in a]")
    process.ready()
    values = process.values([[i] for i in range(20)])
    assert values == [[i, 8 if i < 16 else 4] for i in range(20)]
    assert sorted(each[:2] for each in process.last["ran"]) == [[4, 1], [8, 2]]


def test_a_batch_size_of_the_deployment_goes_first(drive):
    """The size given at the start replaces the mark's."""
    process = drive("import batchmill\n@batchmill.batched(8)\ndef f(a): return [len(a)] * len(a)", batch_size=3)
    process.ready()
    assert process.ready_meta["batch_size"] == 3
    assert process.values([[i] for i in range(4)]) == [3, 3, 3, 1]


def test_rows_of_a_job_may_have_more_than_the_function_takes(drive):
    """A job's table may have columns that the function does not take; a live call may not."""
    process = drive("def f(a): return a")
    process.ready()
    assert process.values([{"a": 1, "other": 2}], layout="named", from_job=True) == [1]
    assert process.call([{"a": 1, "other": 2}], layout="named")[1][0][0] == "unknown_argument"


RESULTS = [
    ("float('nan')", None), ("[float('inf'), (1.5, float('-inf'))]", [None, [1.5, None]]), ("{'a': float('nan')}", {"a": None}),
    ("__import__('datetime').datetime(2024, 1, 2)", "2024-01-02 00:00:00"), ("__import__('datetime').date(2024, 1, 2)", "2024-01-02"),
    ("__import__('datetime').timedelta(1)", "1 day, 0:00:00"), ("1+2j", "(1+2j)"), ("Thing(1)", {"x": 1}),
    ("[Thing(Thing(2))]", [{"x": {"x": 2}}]), ("b'text'", "text"), ("{1: 2, None: 3, True: 4}", {"1": 4, "null": 3}),
    ("(1, [2, (3,)])", [1, [2, [3]]]), ("10**25", 10**25), ("None", None), ("True", True), ("[{'a': [1, {'b': None}]}]", [{"a": [1, {"b": None}]}]),
    ("Colour.RED", 1), ("Number(3)", 3), ("{'$array': [1]}", {"$array": [1]}), ("{}", {}), ("'é'", "é"),
    ("[[1, 2], [1, 2]]", [[1, 2], [1, 2]]), ("(lambda a: [a, a])([1])", [[1], [1]]), ("__import__('decimal').Decimal('1.10')", "1.10"),
]  # fmt: skip
KINDS = """
import enum
class Thing:
    def __init__(self, x): self.x = x
class Colour(enum.Enum): RED = 1
class Number(int): pass
"""


@pytest.mark.parametrize(("result", "value"), RESULTS)
def test_results_as_json(drive, result, value):
    """What JSON lacks becomes what Modelbit's encoder makes of it."""
    process = drive(f"{KINDS}\ndef f(a): return {result}")
    process.ready()
    [answer] = process.values([[1]])
    assert json.dumps(answer) == json.dumps(value)


@pytest.mark.parametrize(
    ("mark", "configured", "window_s"),
    [
        ("@batchmill.batched(2)\ndef", None, 0.01),
        ("@batchmill.batched(2)\ndef", 0.0, 0.0),
        ("@batchmill.batched(2)\ndef", 0.5, 0.5),
        ("@batchmill.batched(2)\nasync def", None, 0.0),
        ("@batchmill.batched(2)\nasync def", 0.5, 0.5),
        ("def", 0.5, 0.0),
    ],
)
def test_the_window_of_a_batch(drive, mark, configured, window_s):
    """A function of many rows waits for 10 ms at most, or as configured; an async one only as configured."""
    process = drive(f"import batchmill\n{mark} f(a): return a", batch_window_s=configured)
    process.ready()
    assert process.ready_meta["batch_window_s"] == window_s
