"""Live requests to functions: arguments, answers, errors, streams, and their way past rows."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from contract.engine_suite import ListSink, OpenFeed, answer_to, chat_row

from batchmill.engines.function.in_worker import FunctionEngine
from batchmill.errors import BatchmillError, InvalidInput, ModelFailed
from batchmill.types import Limits, LiveHead, LiveRequest, ModelSpec

Start = Callable[..., Awaitable[FunctionEngine]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """An engine on the function `f` of a file with the given text."""
    path, modules, engines = list(sys.path), set(sys.modules), []

    async def make(text: str, **limits: float) -> FunctionEngine:
        (tmp_path / "live_app.py").write_text(text)
        spec = ModelSpec("f", "function", f"{tmp_path}/live_app.py:f", limits=Limits(**limits))
        engines.append(FunctionEngine(spec, tmp_path / "home"))
        await engines[-1].start()
        return engines[-1]

    yield make
    for engine in engines:
        await engine.stop()
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def call(**body: object) -> LiveRequest:
    return LiveRequest("/v1/things", json.dumps(body).encode(), bool(body.get("stream")))


async def reply(engine: FunctionEngine, **body: object) -> object:
    """What the function returned."""
    head, data = await answer_to(engine, call(**body))
    assert head == LiveHead(200)
    return json.loads(data)


async def test_fields_are_arguments(start: Start) -> None:
    """A body's fields are the arguments that the function names, and what it returns is the body."""
    engine = await start("def f(a, b=2): return [a, b]")
    assert await reply(engine, a=1, model="f", other=3) == [1, 2]


async def test_whole_body(start: Start) -> None:
    """A function that takes everything gets every field."""
    engine = await start("def f(**fields): return fields")
    assert await reply(engine, a=1, model="f") == {"a": 1, "model": "f"}


async def test_lists_of_one(start: Start) -> None:
    """A function of lists is given a list of one, and its one result is the body."""
    engine = await start("import batchmill\n@batchmill.batched(8)\ndef f(a): return [[len(a), a[0]]]")
    assert await reply(engine, a=7) == [1, 7]


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    ("body", "kind_of_error", "code", "words"),
    [
        ({"a": 0}, ModelFailed, "function_error", "ZeroDivisionError: division by zero"),
        ({"b": 1}, InvalidInput, "missing_argument", "the function needs a, and the row has: b"),
        ({"a": None}, ModelFailed, "bad_return", "the function returned a set that JSON cannot hold"),
    ],
)
async def test_errors(
    start: Start, kind: str, body: dict[str, object], kind_of_error: type[BatchmillError], code: str, words: str
) -> None:
    """What a row would be told, a caller is told, as an error whose code says whose fault it is."""
    engine = await start(f"{kind} f(a): return 1 / a if a is not None else {{object()}}")
    with pytest.raises(kind_of_error, match=words) as received:
        await reply(engine, **body)
    assert received.value.code == code


async def test_a_late_async_function(start: Start) -> None:
    """An async function that takes longer than it may is ended."""
    engine = await start("import asyncio\nasync def f(): await asyncio.Event().wait()", attempt_timeout_s=0.01)
    with pytest.raises(ModelFailed, match="longer than 0.01 s") as received:
        await reply(engine)
    assert received.value.code == "timeout"


async def test_between_two_rows(start: Start) -> None:
    """A live request waits for the row that is running, and for no other of those that were taken with it."""
    text = """
import threading
order, first, go = [], threading.Event(), threading.Event()
def f(messages=None, live=None):
    order.append(live or messages[0]["content"])
    if len(order) == 21:
        first.set()
        go.wait()
    return list(order)
"""
    engine = await start(text)
    app = sys.modules["live_app"]
    sink = ListSink()
    feed = OpenFeed(sink, [chat_row(n, f"{n}") for n in range(200)], ended=True)
    running = asyncio.create_task(engine.run(feed, sink))
    await asyncio.to_thread(app.first.wait)
    answers = [asyncio.create_task(reply(engine, live=f"live {n}")) for n in range(3)]
    while engine.stats().live < 3:
        await asyncio.sleep(0)
    app.go.set()
    await asyncio.gather(*answers)
    await running
    assert app.order[21:24] == ["live 0", "live 1", "live 2"]
    assert len(app.order) == 203


async def test_more_live_requests_than_the_stack_is_deep(start: Start) -> None:
    """Thousands that wait for one thread are answered one after another."""
    engine = await start("def f(n): return n")
    answers = await asyncio.gather(*(reply(engine, n=n) for n in range(3000)))
    assert answers == list(range(3000))


GENERATOR = """
closed = []
{kind} f(words, fail=False):
    try:
        for word in words:
            if word == "bad": raise ValueError(word)
            yield {{"said": word}}
    finally:
        closed.append(True)
"""


@pytest.fixture(params=["def", "async def"])
def generator(request: pytest.FixtureRequest) -> str:
    return GENERATOR.format(kind=request.param)


async def test_a_generator_answers_a_stream(start: Start, generator: str) -> None:
    """Each value that a generator yields is one event, and the last is [DONE]."""
    engine = await start(generator)
    head, data = await answer_to(engine, call(words=["a", "b"], stream=True))
    assert head == LiveHead(200, "text/event-stream")
    assert data == b'data: {"said":"a"}\n\ndata: {"said":"b"}\n\ndata: [DONE]\n\n'


async def test_a_generator_without_values(start: Start, generator: str) -> None:
    """A generator that yields nothing answers an empty stream."""
    engine = await start(generator)
    assert (await answer_to(engine, call(words=[], stream=True)))[1] == b"data: [DONE]\n\n"


async def test_a_generator_that_fails_at_once(start: Start, generator: str) -> None:
    """What is raised before the first value is the answer, and no stream begins."""
    engine = await start(generator)
    with pytest.raises(ModelFailed, match="ValueError: bad"):
        await anext(engine.predict(call(words=["bad"], stream=True)))


async def test_a_generator_that_fails_later(start: Start, generator: str) -> None:
    """What is raised after the first value ends the stream with an error."""
    engine = await start(generator)
    pieces = engine.predict(call(words=["a", "bad"], stream=True))
    assert [await anext(pieces) for _ in range(2)] == [LiveHead(200, "text/event-stream"), b'data: {"said":"a"}\n\n']
    with pytest.raises(ModelFailed, match="ValueError: bad"):
        await anext(pieces)


async def test_a_closed_stream_closes_its_generator(start: Start, generator: str) -> None:
    """A caller that goes lets the generator's own `finally` run."""
    engine = await start(generator)
    pieces = engine.predict(call(words=["a", "b"], stream=True))
    await anext(pieces)
    await pieces.aclose()
    await answer_to(engine, call(words=[], stream=True))
    assert sys.modules["live_app"].closed == [True, True]
    assert engine.stats().live == 0


async def test_a_generator_needs_a_stream(start: Start, generator: str) -> None:
    """Without `stream` a generator has no answer, as for a row."""
    engine = await start(generator)
    with pytest.raises(ModelFailed, match="generator that JSON cannot hold"):
        await reply(engine, words=["a"])


async def test_rows_leave_room_for_live_requests(start: Start) -> None:
    """Rows of an async function take what live requests leave of `in_flight_max`, and always one place."""
    text = """
import asyncio
go, most, now = asyncio.Event(), 0, 0
async def f(messages=None, live=None):
    global most, now
    if live:
        await go.wait()
        return 0
    now += 1
    most = max(most, now)
    await asyncio.sleep(0)
    now -= 1
"""
    engine = await start(text, in_flight_max=4)
    answers = [asyncio.create_task(reply(engine, live=True)) for _ in range(6)]
    while engine.stats().live < 6:
        await asyncio.sleep(0)
    sink = ListSink()
    await engine.run(OpenFeed(sink, [chat_row(n, "x") for n in range(50)], ended=True), sink)
    app = sys.modules["live_app"]
    assert (app.most, len(sink.outcomes)) == (1, 50)
    app.go.set()
    await asyncio.gather(*answers)


async def test_only_the_thread_runs_user_code(start: Start) -> None:
    """What `setup` makes for a thread serves live requests too."""
    engine = await start("import threading\ndef f(): return threading.current_thread().name")
    assert await reply(engine) == "user-code" != threading.current_thread().name
