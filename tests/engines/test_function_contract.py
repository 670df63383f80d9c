"""The function engine keeps the promises that every engine makes, however the function is written."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from contract.engine_suite import EngineSuite, answer_to, chat_request, chat_row

from batchmill.engines.function.in_worker import FunctionEngine
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


class FunctionSuite(EngineSuite):
    text: str

    @pytest.fixture
    async def engine(self, tmp_path: Path) -> AsyncIterator[FunctionEngine]:
        path, modules = list(sys.path), set(sys.modules)
        (tmp_path / "app.py").write_text(self.text)
        engine = FunctionEngine(ModelSpec("f", "function", f"{tmp_path}/app.py:f"), tmp_path / "home")
        await engine.start()
        yield engine
        await engine.stop()
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
                del sys.modules[name]

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


class TestSyncFunction(FunctionSuite):
    held_max = 1024
    text = SYNC


class TestAsyncFunction(FunctionSuite):
    held_max = 64
    text = ASYNC


class TestListFunction(FunctionSuite):
    held_max = 1024
    text = LISTS
