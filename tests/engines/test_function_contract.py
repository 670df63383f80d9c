"""The engine of deployed functions keeps the promises that every engine makes, however the function is written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from contract.engine_suite import EngineSuite, answer_to, chat_request, chat_row
from function_process_support import deployed, running

from batchmill.engines.function.engine import FunctionEngine, LocalFunctionEngine
from batchmill.errors import BatchmillError
from batchmill.types import LiveRequest, ModelSpec, Row

SYNC = """
import threading
def f(messages):
    text = messages[0]["content"]
    if text.startswith("bad"): raise ValueError(text)
    if text.startswith("endless"): threading.Event().wait()
    return {"said": text}
"""
ASYNC = SYNC.replace("import threading", "import asyncio").replace("def f", "async def f")
ASYNC = ASYNC.replace("threading.Event().wait()", "await asyncio.Event().wait()")
LISTS = """
import threading, batchmill
@batchmill.batched(16)
def f(messages):
    texts = [each[0]["content"] for each in messages]
    if any(text.startswith("endless") for text in texts): threading.Event().wait()
    return [ValueError(text) if text.startswith("bad") else {"said": text} for text in texts]
"""
CLASS = """
import threading
class f:
    def setup(self): self.said = "said"
    def predict(self, messages):
        text = messages[0]["content"]
        if text.startswith("bad"): raise ValueError(text)
        if text.startswith("endless"): threading.Event().wait()
        return {self.said: text}
"""
GENERATOR = """
import itertools
async def f(messages):
    text = messages[0]["content"]
    words = itertools.repeat("on") if text.startswith("trickles") else text.split()
    for word in words:
        yield {"said": word}
"""


class FunctionProcessSuite(EngineSuite):
    text: str

    @pytest.fixture
    async def engine(self, tmp_path: Path) -> AsyncIterator[FunctionEngine]:
        async with running(deployed(tmp_path, self.text), tmp_path / "home") as engine:
            yield engine

    def bad_live_request(self) -> LiveRequest:
        return chat_request("bad")

    def endless_live_request(self) -> LiveRequest:
        return chat_request("endless")

    async def test_live_stream(self, engine: FunctionEngine) -> None:
        """A function that returns its answer in one piece refuses `stream` by name."""
        with pytest.raises(BatchmillError, match="`stream` is true") as refused:
            await answer_to(engine, self.live_stream(3))
        assert refused.value.code == "streaming_not_supported"

    test_closing_a_stream = None  # there is none

    def good_row(self, number: int, lease: object = None) -> Row:
        return chat_row(number, f"good {number}", lease=lease)

    def bad_row(self, number: int) -> Row:
        return chat_row(number, f"bad {number}")

    def endless_row(self, number: int) -> Row:
        return chat_row(number, f"endless {number}")


class TestSyncFunctionProcess(FunctionProcessSuite):
    text = SYNC


class TestLocalFunction(FunctionProcessSuite):
    """Code that is run where it lies."""

    @pytest.fixture
    async def engine(self, tmp_path: Path) -> AsyncIterator[FunctionEngine]:
        (tmp_path / "app.py").write_text(SYNC)
        engine = LocalFunctionEngine(ModelSpec("f", "function", f"{tmp_path}/app.py:f"), tmp_path / "home")
        await engine.start()
        yield engine
        await engine.stop()


class TestAsyncFunctionProcess(FunctionProcessSuite):
    text = ASYNC


class TestListFunctionProcess(FunctionProcessSuite):
    text = LISTS


class TestClassFunctionProcess(FunctionProcessSuite):
    text = CLASS


@pytest.fixture
async def generator(tmp_path: Path) -> AsyncIterator[FunctionEngine]:
    async with running(deployed(tmp_path, GENERATOR), tmp_path / "home") as engine:
        yield engine


class TestGeneratorFunctionProcess:
    """What the suite says of streams."""

    live_stream = EngineSuite.live_stream
    endless_stream = EngineSuite.endless_stream
    test_live_stream = EngineSuite.test_live_stream

    @pytest.fixture
    def engine(self, generator: FunctionEngine) -> FunctionEngine:
        return generator

    async def test_closing_a_stream(self, engine: FunctionEngine) -> None:
        """A stream that is closed early leaves nothing in flight, and the engine answers on."""
        pieces = engine.predict(self.endless_stream())
        await anext(pieces)
        await anext(pieces)
        assert engine.stats().live == 1
        await pieces.aclose()
        assert engine.stats().live == 0
        assert (await answer_to(engine, self.live_stream(3)))[0].status == 200
