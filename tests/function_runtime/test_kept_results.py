"""What a function returned is what its row gets, whatever the function does to it later."""

from __future__ import annotations

import json
import struct

import pytest

from batchmill.function_runtime import kept_results
from batchmill.function_runtime.kept_results import ResultSerializer, texts_of
from batchmill.function_runtime.loading import row_error
from batchmill.function_runtime.requests import PendingRequest
from batchmill.function_runtime.row_lines import TABLE, read_lines

ROWS = 200
SHARED = """
import batchmill, datetime
try:
    import numpy as np
except ImportError:
    np = None
kept, inner, items, dicts = {}, [0], [], [{} for _ in range(8)]
array = None if np is None else np.zeros(8)

def same_dict(n):
    kept["n"] = n
    return kept
def same_inside(n):
    inner[0] = n
    return {"n": [inner]}
def odd_at_times(n):
    kept["n"] = n if n % 9 else datetime.date(2026, 1, 1) + datetime.timedelta(n)
    return kept
def arguments(n, rest):
    rest["n"] = n
    kept.update(rest)
    return kept
def same_array(n):
    array[0] = n
    return array[:1]
async def awaited(n):
    kept["n"] = n
    return kept
@batchmill.batched(8)
def list_of_same(n):
    for each, value in zip(dicts, n): each["n"] = value
    return dicts[:len(n)]
@batchmill.batched(8)
def same_list(n):
    items[:] = n
    return items
@batchmill.batched(8)
async def awaited_list(n):
    for each, value in zip(dicts, n): each["n"] = value
    return dicts[:len(n)]
@batchmill.batched(8)
def array_of_all(n):
    array[: len(n)] = n
    return array[: len(n)]
"""
FUNCTIONS = {
    "same_dict": lambda n: {"n": n},
    "same_inside": lambda n: {"n": [[n]]},
    "odd_at_times": lambda n: {"n": n} if n % 9 else None,
    "arguments": lambda n: {"n": n, "a": 1},
    "same_array": lambda n: [n],
    "awaited": lambda n: {"n": n},
    "list_of_same": lambda n: {"n": n},
    "same_list": lambda n: n,
    "awaited_list": lambda n: {"n": n},
    "array_of_all": lambda n: n,
}


def send(process, layout, name):
    rest = {"rest": {"a": 1}} if name == "arguments" else {}
    rows = [{"n": n} | rest for n in range(ROWS)]
    if layout == "arrow":
        pa = pytest.importorskip("pyarrow")
        table, sink = pa.table({name: [row[name] for row in rows] for name in rows[0]}), pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        process.ask(sink.getvalue().to_pybytes(), layout=layout, rows=ROWS, from_job=True)
    elif layout == TABLE:
        text = b"".join([json.dumps(row).encode() + b"\n" for row in rows])
        process.ask(text, layout=layout, rows=ROWS, from_job=True)
    else:
        process.ask(rows, layout=layout, from_job=True)


def results(process, layout):
    """The result of every row."""
    found = []
    while len(found) < ROWS:
        meta, buffers = process.receive()
        assert meta["errors"] == {}
        if layout == "arrow":
            pa = pytest.importorskip("pyarrow")
            column = pa.ipc.open_stream(pa.py_buffer(buffers[0])).read_next_batch()
            is_json = column.schema.names[0] == "json"
            found += [json.loads(each) if is_json else each for each in column.column(0).to_pylist()]
        elif layout == TABLE:
            found += [json.loads(line)["output"] for line in bytes(buffers[0]).splitlines()]
        else:
            found += json.loads(buffers[0])
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_may_reuse_what_it_returns(drive, name):
    """Every row has the result of its own call, where the function returns the same dict, list or array each time."""
    if "array" in name:
        pytest.importorskip("numpy")
    process = drive(SHARED, source=f"app.py:{name}")
    process.ready()
    expected = list(map(FUNCTIONS[name], range(ROWS)))
    for layout in (TABLE, "named", "arrow"):
        if layout == "arrow" and not process.ready_meta["reads_arrow"]:
            continue
        send(process, layout, name)
        found = results(process, layout)
        if name == "odd_at_times":
            assert found[9] == {"n": "2026-01-10"}
            found = [each if n % 9 else None for n, each in enumerate(found)]
        assert found == expected, layout


def test_arrays_that_leave_as_tensors(drive):
    """Arrays of a body of several rows are those of their own rows too."""
    pytest.importorskip("numpy")
    process = drive(SHARED, source="app.py:same_array")
    process.ready()
    id_ = process.ask([[n] for n in range(3)], exact=True)
    meta, buffers = process.receive()
    assert (meta["id"], [struct.unpack("<d", bytes(each)) for each in buffers[1:]]) == (id_, [(0,), (1,), (2,)])


DEADLY = """
import batchmill, os
class Late:
    def tolist(self): os._exit(3)
def one(n): return Late() if n == 5 else {"n": n}
async def awaited(n): return Late() if n == 5 else {"n": n}
@batchmill.batched(4)
def many(n): return [Late() if each == 5 else each for each in n]
@batchmill.batched(4)
def whole(n): return Late() if 5 in n else n
"""


@pytest.mark.parametrize(("name", "first", "rows"), [("one", 5, 1), ("awaited", 5, 1), ("many", 4, 4), ("whole", 4, 4)])
def test_code_of_a_result_that_kills_is_blamed_on_its_row(drive, name, first, rows):
    """A result's own code runs as a part of its call: its row, or the rows of its call, are those that are named."""
    process = drive(DEADLY, source=f"app.py:{name}")
    process.ready()
    id_ = process.ask([[n] for n in range(8)], from_job=True)
    with pytest.raises(EOFError):
        while True:
            process.receive()
    assert (id_, first, rows) in process.blamed()


def test_validators_that_kill_are_blamed_on_what_is_read(drive):
    """Code that makes an object of a row's dict counts as running too."""
    pytest.importorskip("pydantic")
    code = """
import os, pydantic
class Model(pydantic.BaseModel):
    a: int
    @pydantic.field_validator("a")
    def check(cls, value): os._exit(3)
def f(n: Model): return 1
"""
    process = drive(code)
    process.ready()
    id_ = process.ask([[{"a": 1}], [{"a": 2}]], from_job=True)
    with pytest.raises(EOFError):
        process.receive()
    assert process.blamed() == [(id_, 0, 2)]


def serializer_of(count=2):
    """(a serializer, a request of so many rows)."""
    rows, _, writer = read_lines({"layout": TABLE, "rows": count}, b"{}\n" * count)

    class BoundStub:
        pass

    bound = BoundStub()
    bound.calls, bound.errors, bound.writer = rows, {}, writer
    return ResultSerializer(row_error), PendingRequest(
        {"id": 1, "rows": count, "from_job": True, "staged": True, "exact": False}, bound
    )


def test_a_result_has_a_largest_size(monkeypatch):
    """A result of the largest size is kept, and one byte more is an error of its row."""
    monkeypatch.setattr(kept_results, "RESULT_BYTES_MAX", 6)
    serializer, ask = serializer_of()
    assert serializer.keep_all(ask, 0, ["1234", "12345"]) == [b'"1234"', None]
    assert ask.errors == {1: ["bad_return", "the result has 7 bytes, and may have 6", ""]}


def test_what_memory_is_refused_for_fails_alone():
    """A result for whose text there is no memory is an error of its row."""

    class Large:
        def tolist(self):
            raise MemoryError

    serializer, ask = serializer_of()
    assert serializer.keep_all(ask, 0, [Large(), {"a": 1}]) == [None, b'{"a":1}']
    assert ask.errors[0][0] == "MemoryError"


def test_texts_of_values_that_nobody_else_holds():
    """Values that were never text are written; one without a form has an error, and the others keep their rows."""
    errors = {1: ["KeyError", "", ""]}
    rows, texts = texts_of([1, None, b"[2]", "\ud800", (3,)], errors, range(10, 15))
    assert errors.keys() == {1, 13}
    assert (list(rows), texts) == ([10, 11, 12, 14], [b"1", b"null", b"[2]", b"[3]"])


CHANGING = """
import batchmill
kept, items, dicts = {}, [0], [{}, {}]
def odd_from_50(n):
    kept["n"] = n if n < 50 else (n,)
    return kept
def same_dict(n):
    kept["n"] = n
    return kept
def same_list(n):
    items[0] = n
    return items
def same_inside(n):
    items[0] = n
    return {"n": [items]}
@batchmill.batched(2)
def dicts_of_same(n):
    for each, value in zip(dicts, n): each["n"] = value
    return dicts[:len(n)]
"""


def test_a_result_that_becomes_odd_and_is_reused(drive):
    """A function whose plain results become odd ones keeps the value of each row, though it fills one dict again."""
    process = drive(CHANGING, source="app.py:odd_from_50")
    process.ready()
    for rows in (30, ROWS):  # the first results are plain: then the next ones are written before they are looked at
        text = b"".join([json.dumps({"n": n}).encode() + b"\n" for n in range(rows)])
        process.ask(text, layout=TABLE, rows=rows, from_job=True)
        found = []
        while len(found) < rows:
            _, buffers = process.receive()
            found += [json.loads(line)["output"]["n"] for line in bytes(buffers[0]).splitlines()]
    assert found == [n if n < 50 else [n] for n in range(ROWS)]


@pytest.mark.parametrize("name", ["same_dict", "same_list", "same_inside", "dicts_of_same"])
def test_exact_results_are_kept_too(drive, name):
    """The rows of one request for tensors have the results of their own calls, whatever is filled again."""
    process = drive(CHANGING, source=f"app.py:{name}")
    process.ready()
    process.ask([{"n": n} for n in range(4)], layout="named", exact=True)
    _, buffers = process.receive()
    form = {"same_list": lambda n: [n], "same_inside": lambda n: {"n": [[n]]}}.get(name, lambda n: {"n": n})
    assert json.loads(buffers[0]) == [form(n) for n in range(4)]


def test_a_reused_object_that_is_no_longer_plain():
    """Where plain results are followed by others in one object, the rows before keep what was theirs."""
    serializer, ask = serializer_of(4)
    _, carefully = serializer.how(ask)
    ask.values[0] = carefully({"n": 0})
    serializer.end_run(ask, 0, 1, [{"n": 0}])
    _, quickly = serializer.how(ask)
    assert quickly is not carefully, "what follows plain results is written without a look"
    reused = {}
    for row, value in enumerate([1, 2, (3, 4)], 1):
        reused["n"] = value
        ask.values[row] = quickly(reused)
    serializer.end_run(ask, 1, 4, [reused] * 3)
    assert [json.loads(text)["n"] for text in ask.values] == [0, 1, 2, [3, 4]]
    assert serializer.how(ask)[1] is carefully
