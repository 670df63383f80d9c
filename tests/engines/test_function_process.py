"""The engine of deployed functions: live calls and rows of jobs in every form, streams, and what it counts."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from contract.engine_suite import PATIENCE_S, ListSink, OpenFeed, answer_to, run_all
from function_process_support import Answers, deployed, openai_rows, running, table_rows

from batchmill.engines.function.engine import FunctionEngine
from batchmill.errors import BatchmillError, InvalidInput, ModelFailed
from batchmill.types import Limits, LiveRequest, ModelSpec, Row
from batchmill.wire.rows.forms import TableForm

ADD = """
def f(a, b=1):
    if a == "raise": raise KeyError(b)
    return {"sum": a + b, "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
"""


@pytest.fixture
async def adder(tmp_path: Path) -> AsyncIterator[FunctionEngine]:
    async with running(deployed(tmp_path, ADD), tmp_path / "home") as engine:
        yield engine


def bodies(sink: ListSink) -> dict[int, Any]:
    return {o.row.number: json.loads(o.body) for o in sink.outcomes if o.body is not None}


def errors(sink: ListSink) -> dict[int, tuple[str, str]]:
    return {o.row.number: (o.error.code, o.error.message) for o in sink.outcomes if o.error is not None}


async def test_columns_are_arguments(adder: FunctionEngine) -> None:
    """A table's columns are arguments by name; what the function does not take is left out, what it lacks is named."""
    sink = await run_all(adder, table_rows({"a": 1, "b": 2, "note": "x"}, {"b": 2}, {"a": "raise"}))
    assert bodies(sink)[0]["sum"] == 3
    assert errors(sink)[1][0] == "missing_argument"
    assert "'a'" in errors(sink)[1][1] or "needs a" in errors(sink)[1][1]
    assert errors(sink)[2] == ("KeyError", "1")


async def test_cells_of_a_csv_have_the_types_of_the_function(tmp_path: Path) -> None:
    """Strings of a CSV are called as the types of the function's hints; a cell that is none fails its row by name."""
    code = "def f(a: int, b: float = 2.0, note: str = ''): return [a + 1, b * 2, note]"
    form = TableForm(is_text=True)
    rows = table_rows({"a": "1", "b": "0.5", "note": "7"}, {"a": "one", "b": "1"}, {"a": "3", "b": ""})
    async with running(deployed(tmp_path, code), tmp_path / "home") as engine:
        sink = await run_all(engine, [msgspec.structs.replace(row, form=form) for row in rows])
    assert bodies(sink) == {0: [2, 1.0, "7"], 2: [4, 4.0, ""]}
    [(code_, message)] = errors(sink).values()
    assert code_ == "invalid_argument" and "'a'" in message and "'one'" in message


async def test_tokens_are_counted(adder: FunctionEngine) -> None:
    """`usage` in a result counts as the row's tokens."""
    sink = await run_all(adder, table_rows({"a": 1}))
    [outcome] = sink.outcomes
    assert outcome.usage is not None
    assert (outcome.usage.input_tokens, outcome.usage.output_tokens) == (3, 4)


async def test_bodies_in_any_form(tmp_path: Path) -> None:
    """A row of an OpenAI file may hold plain arguments, Modelbit's form or tensors; the reply has the same form."""
    text = "def f(x, y=0):\n    return {'out': x + y}"
    async with running(deployed(tmp_path, text), tmp_path / "home") as engine:
        tensors = [
            {"name": "x", "datatype": "INT64", "shape": [1], "data": [5]},
            {"name": "y", "datatype": "INT64", "shape": [1], "data": [6]},
        ]
        rows = openai_rows(
            {"model": "f", "x": 1, "y": 2},
            {"model": "f", "data": [["id-1", 3, 4], ["id-2", 5]]},
            {"model": "f", "inputs": tensors},
            {"model": "f", "data": [[1, "text", 2], [2, 3]]},
        )
        sink = await run_all(engine, rows)
    found = bodies(sink)
    assert found[0] == {"out": 3}
    assert found[1] == {"data": [["id-1", {"out": 7}], ["id-2", {"out": 5}]]}
    assert found[2]["outputs"] == [{"name": "out", "datatype": "INT64", "shape": [1], "data": [11]}]
    assert errors(sink)[3] == ("TypeError", 'in row 1 of 2: can only concatenate str (not "int") to str')
    assert [o.row.custom_id is not None for o in sink.outcomes] == [True] * 4


async def test_a_body_that_is_wrong_is_that_rows_error(adder: FunctionEngine) -> None:
    """A row whose body its form refuses has the form's own code, and its neighbours run."""
    sink = await run_all(adder, openai_rows({"a": 1}, {"data": 5, "timeout_seconds": -1}, {"data": []}))
    assert bodies(sink)[0]["sum"] == 2
    assert errors(sink)[1][0] == "invalid_field"


async def test_names_of_the_models_are_no_arguments(tmp_path: Path) -> None:
    """`model` in a body says where it goes and is not an argument; in a table it is a column like any other."""
    async with running(deployed(tmp_path, "def f(**more):\n    return more"), tmp_path / "home") as engine:
        of_file = await run_all(engine, openai_rows({"model": "f", "a": 1}))
        of_table = await run_all(engine, table_rows({"model": "T", "a": 2}))
    assert (bodies(of_file), bodies(of_table)) == ({0: {"a": 1}}, {0: {"model": "T", "a": 2}})


async def test_errors_of_live_calls(adder: FunctionEngine) -> None:
    """What the caller sent wrong is the caller's error; what the function raises ends with `Type: message`."""
    answers = Answers(adder)
    with pytest.raises(InvalidInput) as refused:
        await answers.value({"c": 1})
    assert refused.value.code in ("missing_argument", "unknown_argument")
    with pytest.raises(InvalidInput):
        await answers.value(b"{", form="arguments")
    with pytest.raises(InvalidInput, match="no form of calls") as unknown:
        await answers.value({}, form="spoken")
    assert unknown.value.code == "unknown_form"
    with pytest.raises(ModelFailed) as failed:
        await answers.value({"data": "raise"}, form="rows")
    assert (failed.value.code, failed.value.message.splitlines()[-1]) == ("function_error", "KeyError: 1")


async def test_forms_of_live_calls(adder: FunctionEngine) -> None:
    """Each form answers in its own way, many rows in one body among them."""
    answers = Answers(adder)
    many = [[n, n] for n in range(500)]
    replied = (await answers.value({"data": many}, form="rows"))["data"]
    assert [(id_, value["sum"]) for id_, value in replied] == [(n, n + 1) for n in range(500)]
    assert (await answers.value({"a": 1}))["sum"] == 2


async def test_large_bodies(tmp_path: Path) -> None:
    """A body of several MiB is answered, and an abandoned one is not, while others are."""
    async with running(deployed(tmp_path, "def f(text):\n    return text"), tmp_path / "home") as engine:
        answers = Answers(engine)
        large = "x" * (3 * 1024 * 1024)
        waiting, abandoned = answers.ask("arguments", {"text": large}), answers.ask("arguments", {"text": large})
        engine.abandon(2)
        small = await answers.value({"text": "y"})
        async with asyncio.timeout(PATIENCE_S):
            assert json.loads((await waiting).body) == large
        assert (small, abandoned.done(), engine.stats().live) == ("y", False, 0)


async def test_an_abandoned_call_never_runs(tmp_path: Path) -> None:
    """A call that nobody waits for any more is not begun."""
    text = f"""
kept = []
def f(n):
    if n == 0: open({str(tmp_path / "go")!r}).read()
    kept.append(n)
    return kept
"""
    os.mkfifo(tmp_path / "go")
    async with running(deployed(tmp_path, text), tmp_path / "home") as engine:
        answers = Answers(engine)
        first = answers.ask("arguments", {"n": 0})
        answers.ask("arguments", {"n": 1})
        last = answers.ask("arguments", {"n": 2})
        engine.abandon(2)
        await asyncio.to_thread((tmp_path / "go").write_text, "go")
        async with asyncio.timeout(PATIENCE_S):
            await first
            assert json.loads((await last).body) == [0, 2]


async def test_what_is_counted(tmp_path: Path) -> None:
    """Rows, calls of user code and requests are counted, each once, and taken once."""
    text = "import batchmill\n@batchmill.batched(8)\ndef f(n):\n    return [1 / each for each in n]"
    async with running(deployed(tmp_path, text), tmp_path / "home") as engine:
        answers = Answers(engine)
        await answers.value({"n": 1})
        with pytest.raises(ModelFailed):
            await answers.value({"n": 0})
        await run_all(engine, table_rows(*({"n": n + 1} for n in range(16))))
        stats = engine.take_stats()
        assert stats is not None
        assert (stats.succeeded, stats.failed) == (17, 1)
        assert stats.rows == sum(each.batch_size * each.executions for each in stats.batches) >= 18
        assert stats.executions == sum(each.executions for each in stats.batches) < 18
        assert stats.succeeded_ns > 0 and stats.last_at > 0
        assert engine.take_stats() is None


async def test_live_calls_and_rows_meet_in_a_batch(tmp_path: Path) -> None:
    """A live call that comes while rows run goes with them in one call of the function."""
    text = f"""
import time
import batchmill
@batchmill.batched(64)
def f(n):
    if n == [0]:
        open({str(tmp_path / "go")!r}).read()
        time.sleep(0.5)  # so that what was sent meanwhile has arrived
    return [sorted(n)] * len(n)
"""
    os.mkfifo(tmp_path / "go")
    async with running(deployed(tmp_path, text), tmp_path / "home") as engine:
        answers = Answers(engine)
        sink = ListSink()
        first = answers.ask("arguments", {"n": 0})
        while not engine._process.child.blamed():  # type: ignore[union-attr]
            await asyncio.sleep(0)
        rows = asyncio.create_task(engine.run(OpenFeed(sink, table_rows({"n": 1}, {"n": 2}), ended=True), sink))
        live = answers.ask("arguments", {"n": 3})
        while engine.stats().in_flight < 2:
            await asyncio.sleep(0)
        await asyncio.to_thread((tmp_path / "go").write_text, "go")
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(first, rows)
            together = json.loads((await live).body)
    assert together == [1, 2, 3]
    assert list(bodies(sink).values()) == [together, together]


async def test_a_large_batch_is_called_whole(tmp_path: Path) -> None:
    """Rows of a job reach a function of 10,000 rows in lists of 10,000."""
    code = "import batchmill\n@batchmill.batched(10_000)\ndef f(a): return [len(a)] * len(a)"
    async with running(deployed(tmp_path, code), tmp_path / "home") as engine:
        sink = await run_all(engine, table_rows(*[{"a": n} for n in range(25_000)]))
    assert max(bodies(sink).values()) == 10_000


async def test_rows_held_follow_the_limit(tmp_path: Path) -> None:
    """`in_flight_max` bounds the rows that are taken and not put."""
    spec = deployed(tmp_path, "def f(n):\n    return n", limits=Limits(in_flight_max=3))
    async with running(spec, tmp_path / "home") as engine:
        sink = ListSink()
        feed = OpenFeed(sink, table_rows(*({"n": n} for n in range(50))), ended=True)
        async with asyncio.timeout(PATIENCE_S):
            await engine.run(feed, sink)
    assert (sink.numbers(), feed.unput_most <= 3) == (list(range(50)), True)


async def test_streams_of_other_forms(tmp_path: Path) -> None:
    """A stream in Modelbit's form has its events, and no [DONE]; an error in its midst is raised."""
    text = "def f(n):\n    for each in range(n):\n        yield each\n    raise ValueError('no more')"
    async with running(deployed(tmp_path, text), tmp_path / "home") as engine:
        request = LiveRequest("/v1/f/latest", b'{"data": 2}', stream=True, form="rows")
        pieces = engine.predict(request)
        _, *events = [await anext(pieces) for _ in range(3)]
        with pytest.raises(ModelFailed, match="ValueError: no more"):
            await anext(pieces)
    assert events == [b'data: {"data":0}\n\n', b'data: {"data":1}\n\n']


async def test_a_stream_whose_process_dies(tmp_path: Path) -> None:
    """A stream that had begun ends with `worker_crashed`, and the next one works."""
    text = "import os\ndef f(n):\n    yield 1\n    if n: os._exit(1)\n    yield 2"
    async with running(deployed(tmp_path, text), tmp_path / "home") as engine:
        with pytest.raises(ModelFailed) as failed:
            await answer_to(engine, LiveRequest("", b'{"n": 1}', stream=True))
        assert failed.value.code == "worker_crashed"
        _, body = await answer_to(engine, LiveRequest("", b'{"n": 0}', stream=True))
    assert body == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"


async def test_rows_that_are_not_json(adder: FunctionEngine) -> None:
    """A row of a table that cannot be read has an error of its own."""
    broken = Row(1, 1, b'{"a": 1', TableForm())
    sink = await run_all(adder, [*table_rows({"a": 1}), broken])
    assert (bodies(sink)[0]["sum"], errors(sink)[1][0]) == (2, "invalid_json")


async def test_a_model_without_a_version(tmp_path: Path) -> None:
    """A model that was never deployed is refused by name."""
    with pytest.raises(BatchmillError, match="never deployed"):
        FunctionEngine(ModelSpec("g", "function_process", "app.py:g"), tmp_path)
