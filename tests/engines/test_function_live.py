"""Live requests to functions: arguments, answers, errors, streams, and their way past rows."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from contract.engine_suite import answer_to

from batchmill.engines.function.engine import LocalFunctionEngine
from batchmill.errors import BatchmillError, InvalidInput, ModelFailed
from batchmill.types import Limits, LiveHead, LiveRequest, ModelSpec

Start = Callable[..., Awaitable[LocalFunctionEngine]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """An engine on the function `f` of a file with the given text."""
    engines = []

    async def make(text: str, **limits: float) -> LocalFunctionEngine:
        (tmp_path / "live_app.py").write_text(text)
        spec = ModelSpec("f", "function", f"{tmp_path}/live_app.py:f", limits=Limits(**limits))
        engines.append(LocalFunctionEngine(spec, tmp_path / "home"))
        await engines[-1].start()
        return engines[-1]

    yield make
    for engine in engines:
        await engine.stop()


def call(**body: object) -> LiveRequest:
    return LiveRequest("/v1/things", json.dumps(body).encode(), bool(body.get("stream")))


async def reply(engine: LocalFunctionEngine, **body: object) -> object:
    """What the function returned."""
    head, data = await answer_to(engine, call(**body))
    assert head == LiveHead(200)
    return json.loads(data)


async def test_fields_are_arguments(start: Start) -> None:
    """A body's fields are the arguments that the function names, and what it returns is the body."""
    engine = await start("def f(a, b=2): return [a, b]")
    assert await reply(engine, a=1, model="f", other=3) == [1, 2]


async def test_whole_body(start: Start) -> None:
    """A function that takes everything gets every field but those that say where the call goes."""
    engine = await start("def f(**fields): return fields")
    assert await reply(engine, a=1, model="f") == {"a": 1}
    engine = await start("def f(model, **fields): return [model, fields]")
    assert await reply(engine, a=1, model="f") == ["f", {"a": 1}]


async def test_lists_of_one(start: Start) -> None:
    """A function of lists is given a list of one, and its one result is the body."""
    engine = await start("import batchmill\n@batchmill.batched(8)\ndef f(a): return [[len(a), a[0]]]")
    assert await reply(engine, a=7) == [1, 7]


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    ("body", "kind_of_error", "code", "words"),
    [
        ({"a": 0}, ModelFailed, "function_error", "ZeroDivisionError: division by zero"),
        ({"b": 1}, InvalidInput, "missing_argument", "the function needs a, and the row has"),
        ({"a": None}, ModelFailed, "bad_return", "TypeError: Object of type object is not JSON serializable"),
    ],
)
async def test_errors(
    start: Start, kind: str, body: dict[str, object], kind_of_error: type[BatchmillError], code: str, words: str
) -> None:
    """What a row would be told, a caller is told, as an error whose code says whose fault it is."""
    engine = await start(f"{kind} f(a): return 1 / a if a is not None else object()")
    with pytest.raises(kind_of_error, match=words) as received:
        await reply(engine, **body)
    assert received.value.code == code


@pytest.mark.parametrize("wait", ["async def f(): await asyncio.Event().wait()", "def f(): time.sleep(600)"])
async def test_a_late_function(start: Start, wait: str) -> None:
    """A function that takes longer than it may is ended."""
    engine = await start(f"import asyncio, time\n{wait}", attempt_timeout_s=0.1)
    with pytest.raises(ModelFailed, match=r"longer than 0\.1 s") as received:
        await reply(engine)
    assert received.value.code == "timeout"


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
