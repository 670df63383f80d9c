"""Functions run in place: every row gets exactly one outcome, whatever user code does."""

import asyncio

import msgspec
import pytest

from batchmill.engines.function.batching import ROWS_MAX
from batchmill.engines.function.engine import LocalFunctionEngine
from batchmill.errors import ModelFailed
from batchmill.models.function_child import TRACEBACKS_MAX
from batchmill.types import Limits, ModelSpec, Row, Usage
from batchmill.wire.json_bytes import DEPTH_MAX
from batchmill.wire.rows.forms import OpenAIForm, TableForm

TABLE = TableForm()


class ListFeed:
    """Rows that are all there from the beginning."""

    def __init__(self, rows):
        self.rows = rows
        self.sizes = []

    async def take(self, n):
        assert n > 0
        self.sizes.append(n)
        taken, self.rows = self.rows[:n], self.rows[n:]
        return taken


class ListSink:
    """Outcomes by row number; a row that is put twice is an error."""

    def __init__(self):
        self.outcomes = {}
        self.reached = asyncio.Event()
        self.wanted = 0

    def put(self, outcomes):
        for outcome in outcomes:
            assert outcome.row.number not in self.outcomes
            self.outcomes[outcome.row.number] = outcome
        if self.wanted and len(self.outcomes) >= self.wanted:
            self.reached.set()

    @property
    def bodies(self):
        return [None if one.body is None else msgspec.json.decode(one.body) for one in self.in_order]

    @property
    def errors(self):
        return [one.error and one.error.code for one in self.in_order]

    @property
    def in_order(self):
        return [self.outcomes[number] for number in sorted(self.outcomes)]


def table_rows(*columns):
    return [Row(n, n, msgspec.json.encode(each), TABLE) for n, each in enumerate(columns)]


@pytest.fixture
async def build(tmp_path):
    """Start an engine on the function `f` of a file with this text."""
    engines = []

    async def start(text, **fields):
        (tmp_path / "app.py").write_text("import batchmill\n" + text)
        engine = LocalFunctionEngine(ModelSpec("m", "function", f"{tmp_path}/app.py:f", **fields), tmp_path / "home")
        engines.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in engines:
        await engine.stop()


async def answer(engine, rows):
    sink = ListSink()
    await engine.run(ListFeed(rows), sink)
    assert sorted(sink.outcomes) == [row.number for row in rows]
    return sink


async def test_columns_bind_by_name(build):
    """Columns become keyword arguments, further columns are dropped, and defaults fill what is missing."""
    engine = await build("def f(a, b=10): return a + b")
    sink = await answer(engine, table_rows({"a": 1, "b": 2, "c": 3}, {"a": 1}))
    assert sink.bodies == [3, 11]


async def test_kwargs_get_every_column(build):
    """A function with ** gets every column."""
    engine = await build("def f(a, **rest): return rest")
    assert (await answer(engine, table_rows({"a": 1, "b": 2}))).bodies == [{"b": 2}]


async def test_openai_fields_are_arguments(build):
    """The fields of an OpenAI row's body are the arguments; `model` goes to a function that names it only."""
    raw = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[1],"n":2}}'
    rows = [Row(0, 0, raw, OpenAIForm())]
    engine = await build("def f(messages): return {'got': messages}")
    assert (await answer(engine, rows)).bodies == [{"got": [1]}]
    engine = await build("def f(model, **rest): return [model, sorted(rest)]")
    assert (await answer(engine, rows)).bodies == [["m", ["messages", "n"]]]


async def test_a_missing_argument_is_that_rows_error(build):
    """A row that lacks a required argument fails alone and names it."""
    engine = await build("def f(a, b): return a")
    sink = await answer(engine, table_rows({"a": 1}, {"a": 2, "b": 2}))
    assert sink.errors == ["missing_argument", None]
    assert "needs b" in sink.in_order[0].error.message


async def test_a_row_that_cannot_be_read_fails_alone(build):
    """A number out of range is an error of its row, not of the engine."""
    engine = await build("def f(a): return a")
    rows = [Row(0, 0, b'{"a":1e999}', TABLE), Row(1, 1, b'{"a":5}', TABLE)]
    sink = await answer(engine, rows)
    assert sink.errors == ["invalid_json", None]


async def test_an_exception_is_that_rows_error(build, tmp_path):
    """An exception becomes its class and message, status 0, and the first tracebacks of each error are kept."""
    engine = await build("def f(a):\n    return 1 // a")
    sink = await answer(engine, table_rows({"a": 1}, *[{"a": 0}] * 9))
    assert sink.errors == [None] + ["ZeroDivisionError"] * 9
    failed = sink.in_order[1]
    assert failed.status == 0 and failed.body is None and "division" in failed.error.message
    log = (tmp_path / "home/function.log").read_text()
    assert log.count("ZeroDivisionError") == TRACEBACKS_MAX
    assert "row 1:" in log and 'app.py", line 3, in f' in log and "function_runtime" not in log


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import sys; sys.exit(2)", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise ValueError('x' * 9999)", "ValueError"),
        (r"raise ValueError('\ud800')", "ValueError"),
        ("def g(): g()\n    g()", "RecursionError"),
        ("return object()", "bad_return"),
        (r"return '\ud800'", "bad_return"),
        ("a = []; a.append(a); return a", "bad_return"),
        ("async def g(): ...\n    return g()", "bad_return"),
    ],
)
async def test_nothing_a_row_does_ends_the_engine(build, code, error):
    """Exits, endless recursion, unreadable messages and values that are not JSON are errors of their row."""
    engine = await build(f"def f(a=0):\n    {code}")
    sink = await answer(engine, table_rows({}, {}))
    assert sink.errors == [error, error]
    assert len(sink.in_order[0].error.message) < 3000
    assert msgspec.json.encode(sink.in_order[0].error)


async def test_bad_return_names_the_type(build):
    """The error of a value that JSON cannot hold says what the value is."""
    engine = await build("def f(): return {'x': object()}")
    message = (await answer(engine, table_rows({}))).in_order[0].error.message
    assert message == "TypeError: Object of type object is not JSON serializable"


async def test_a_result_has_a_largest_depth(build):
    """A result of the deepest nesting that is allowed is kept, and one level more is that row's error."""
    engine = await build("def f(n):\n    a = []\n    for _ in range(n - 1): a = [a]\n    return {'[' * 2000: a}")
    sink = await answer(engine, table_rows({"n": DEPTH_MAX - 1}, {"n": DEPTH_MAX}))
    assert sink.errors == [None, "bad_return"]
    assert f"nested deeper than {DEPTH_MAX} levels" in sink.outcomes[1].error.message


async def test_values_of_the_field_become_json(build):
    """numpy values, NaN, dates, dataclasses, bytes and sets come out as JSON."""
    engine = await build(
        "import numpy as np, datetime, dataclasses\n"
        "@dataclasses.dataclass\nclass D:\n    x: int\n"
        "def f(): return [np.float32(0.5), np.arange(2), float('nan'), np.float64('nan'), datetime.date(2026, 1, 2),"
        " D(1), b'ab', {7}, {np.int64(1): 2}]"
    )
    sink = await answer(engine, table_rows({}))
    assert sink.bodies == [[0.5, [0, 1], None, None, "2026-01-02", {"x": 1}, "ab", [7], {"1": 2}]]


async def test_a_reply_with_usage_is_counted(build):
    """A reply in OpenAI's form brings its tokens with it."""
    engine = await build("def f(): return {'usage': {'prompt_tokens': 3, 'completion_tokens': 4}}")
    assert (await answer(engine, table_rows({}))).in_order[0].usage == Usage(3, 0, 4)


async def test_list_functions_get_lists_of_their_size(build):
    """A list-taking function gets one list of values for each parameter, never longer than it asked for."""
    engine = await build("@batchmill.batched(4)\ndef f(a, b='-'): return [[len(a), x, y] for x, y in zip(a, b)]")
    sink = await answer(engine, table_rows(*[{"a": n} for n in range(5)], {"b": 1}, {"a": 6, "b": 1}))
    assert sink.bodies == [[4, 0, "-"], [4, 1, "-"], [4, 2, "-"], [4, 3, "-"], [2, 4, "-"], None, [2, 6, 1]]
    assert sink.errors[5] == "missing_argument"


async def test_list_functions_may_take_whole_rows(build):
    """The parameter `rows` gets the rows as dicts, every column in them."""
    engine = await build("@batchmill.batched(3)\ndef f(rows): return rows")
    columns = [{"a": 1, "z": 2}, {"b": 1}]
    assert (await answer(engine, table_rows(*columns))).bodies == columns


@pytest.mark.parametrize(
    ("result", "expected"),
    [("[1]", "1 results for 2 rows"), ("{}", "a dict for a list of 2 rows"), ("'ab'", "a str for a list")],
)
async def test_a_list_of_another_length_fails_its_rows(build, result, expected):
    """What is not a list of one result for each row is an error of all of them."""
    engine = await build(f"@batchmill.batched(2)\ndef f(a): return {result}")
    sink = await answer(engine, table_rows({"a": 1}, {"a": 2}))
    assert sink.errors == ["bad_return"] * 2
    assert expected in sink.in_order[0].error.message


async def test_an_exception_in_a_list_is_one_rows_error(build):
    """A list-taking function can fail single rows by returning an exception in their place; arrays are lists too."""
    engine = await build("@batchmill.batched(2)\ndef f(a): return [ValueError('no'), a[1]]")
    sink = await answer(engine, table_rows({"a": 1}, {"a": 2}))
    assert sink.errors == ["ValueError", None] and sink.bodies[1] == 2
    engine = await build("import numpy as np\n@batchmill.batched(2)\ndef f(a): return np.array(a) * 2")
    assert (await answer(engine, table_rows({"a": 1}, {"a": 2}))).bodies == [2, 4]


async def test_an_exception_of_a_list_call_fails_its_rows_only(build):
    """A list whose call raises is halved until only the row that raises fails."""
    engine = await build("@batchmill.batched(2)\ndef f(a):\n    if 1 in a: raise OSError('bad')\n    return a")
    sink = await answer(engine, table_rows(*[{"a": n} for n in range(4)]))
    assert sink.errors == [None, "OSError", None, None]


async def test_a_class_is_set_up_once_in_the_thread_that_calls_it(build):
    """`setup` runs once, in the thread in which every row is called."""
    engine = await build(
        "import threading\nclass f:\n    def setup(self): self.home = threading.get_ident()\n"
        "    def predict(self): return [self.home, threading.get_ident()]"
    )
    sink = await answer(engine, table_rows({}, {}))
    assert len({each for pair in sink.bodies for each in pair}) == 1


async def test_a_setup_that_fails_keeps_the_engine_from_starting(build):
    """What `setup` raises is told with its traceback, sync or async."""
    for kind in ("", "async "):
        with pytest.raises(ModelFailed, match="RuntimeError: no weights"):
            await build(
                f"class f:\n    {kind}def setup(self): raise RuntimeError('no weights')\n    def predict(self): 1"
            )


async def test_async_rows_run_together_up_to_the_limit(build):
    """As many rows of an async function are awaited at once as `in_flight_max` allows, and no more."""
    engine = await build(
        "import asyncio\nnow = most = 0\n"
        "async def f(a):\n    global now, most\n    now += 1; most = max(most, now)\n"
        "    for _ in range(3): await asyncio.sleep(0)\n    now -= 1\n    return most",
        limits=Limits(in_flight_max=5),
    )
    sink = await answer(engine, table_rows(*[{"a": n} for n in range(23)]))
    assert max(sink.bodies) == 5
    assert engine.stats().in_flight == 0 and engine.stats().in_flight_limit == 5


async def test_async_failures_are_row_errors(build):
    """Exceptions, exits and cancellations inside an async function fail their row; the rest go on."""
    engine = await build(
        "import asyncio, sys\nasync def f(a):\n    if a == 1: raise ValueError('x')\n    if a == 2: sys.exit(1)\n"
        "    if a == 3: raise asyncio.CancelledError\n    if a == 4: raise TimeoutError('mine')\n    return a"
    )
    sink = await answer(engine, table_rows(*[{"a": n} for n in range(6)]))
    assert sink.errors == [None, "ValueError", "SystemExit", "CancelledError", "TimeoutError", None]


async def test_async_rows_have_a_time_limit(build):
    """An await that outlasts `attempt_timeout_s` is the row's error `timeout`."""
    engine = await build(
        "import asyncio\nasync def f(a):\n    if a: await asyncio.Event().wait()\n    return a",
        limits=Limits(attempt_timeout_s=0.01),
    )
    sink = await answer(engine, table_rows({"a": 0}, {"a": 1}))
    assert sink.errors == [None, "timeout"]


async def test_async_lists_are_filled(build):
    """An async list-taking function gets full lists while there are rows."""
    engine = await build(
        "@batchmill.batched(4)\nasync def f(a): return [len(a)] * len(a)", limits=Limits(in_flight_max=6)
    )
    sink = await answer(engine, table_rows(*[{"a": n} for n in range(4)]))
    assert sink.bodies == [4] * 4


async def test_rows_are_taken_in_bulk(build):
    """A fast function's rows are taken more and more at once, up to the maximum."""
    engine = await build("def f(a): return a")
    feed, sink = ListFeed(table_rows(*[{"a": n} for n in range(20 * ROWS_MAX)])), ListSink()
    await engine.run(feed, sink)
    assert feed.sizes[0] == 1 and ROWS_MAX / 2 < max(feed.sizes) <= ROWS_MAX
    assert sink.bodies == list(range(20 * ROWS_MAX))


async def test_slow_rows_are_taken_few_at_once(build):
    """Of a slow function no more rows are taken than a pause can wait for."""
    engine = await build("import threading\ndef f(a): threading.Event().wait(0.1)")
    feed = ListFeed(table_rows(*[{"a": n} for n in range(6)]))
    await engine.run(feed, ListSink())
    assert max(feed.sizes) <= 2


async def test_in_flight_bounds_what_is_taken(build):
    """`in_flight_max` bounds the rows a sync function is given at once."""
    engine = await build("def f(a): return a", limits=Limits(in_flight_max=3))
    feed, sink = ListFeed(table_rows(*[{"a": n} for n in range(7)])), ListSink()
    await engine.run(feed, sink)
    assert max(feed.sizes) <= 3 and sink.bodies == list(range(7))


async def test_a_blocking_function_has_a_time_limit(build):
    """A call that takes longer loses its process; its row fails, and the others are run."""
    engine = await build(
        "import threading\ndef f(a):\n    if a == 1: threading.Event().wait()\n    return a",
        limits=Limits(attempt_timeout_s=0.5),
    )
    sink = await answer(engine, table_rows(*[{"a": n} for n in range(4)]))
    assert sink.errors == [None, "timeout", None, None]


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("os._exit(3)", "worker_crashed"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "worker_crashed"),
        ("os.closerange(3, 4096)", None),
    ],
)
async def test_code_that_ends_its_process_costs_its_own_row(build, end, error):
    """Exits, signals and closed descriptors are the error of a row at most; every other row has its result."""
    engine = await build(f"import os, signal\ndef f(a):\n    if a == 1: {end}\n    return a")
    sink = await answer(engine, table_rows(*[{"a": n} for n in range(4)]))
    assert [sink.errors[n] for n in (0, 2, 3)] == [None] * 3
    assert error is None or sink.errors[1] == error


async def test_it_runs_in_the_workers_folder_and_environment(build, tmp_path, monkeypatch):
    """The working folder and the variables are those of the worker, and nothing is added to its paths."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_WORKER", "1")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    engine = await build("import os, sys\ndef f(): return [os.getcwd(), os.environ['OF_THE_WORKER'], sys.path]")
    [[folder, variable, path]] = (await answer(engine, table_rows({}))).bodies
    assert (folder, variable) == (str(tmp_path / "elsewhere"), "1")
    assert path[0] == str(tmp_path) and folder not in path


async def test_prints_go_to_the_log(build, tmp_path):
    """What user code prints lands in the log."""
    engine = await build("print('loading')\ndef f(a): print('row', a)")
    await answer(engine, table_rows({"a": 7}))
    await engine.stop()
    await engine.stop()
    assert (tmp_path / "home/function.log").read_text() == "loading\nrow 7\n"


async def test_cells_of_a_csv_have_the_types_of_the_function(build):
    """Strings of a CSV are called as the types of the function's hints; a cell that is none fails its row by name."""
    engine = await build("def f(a: int, b: float = 2.0): return [a + 1, b * 2]")
    texts = table_rows({"a": "1", "b": "0.5"}, {"a": "one"})
    sink = await answer(engine, [msgspec.structs.replace(row, form=TableForm(is_text=True)) for row in texts])
    good, bad = sink.outcomes[0], sink.outcomes[1]
    assert good.body == b"[2,1.0]"
    assert bad.error.code == "invalid_argument" and "'a'" in bad.error.message and "'one'" in bad.error.message
