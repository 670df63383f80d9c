"""The LLM engine keeps the promises of every engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from contract.engine_suite import EngineSuite, chat_request, chat_row
from llm_support import FakeVllm

from batchmill.engines.llm.engine import LlmEngine
from batchmill.ports.engines import Engine
from batchmill.types import LiveRequest, Row


class TestLlmEngine(EngineSuite):
    held_max = 1100

    @pytest.fixture
    async def engine(self, tmp_path) -> AsyncIterator[Engine]:
        fake = FakeVllm(tmp_path)
        engine = LlmEngine(fake.model(), fake.home, env=fake.env)
        await engine.start()
        yield engine
        await engine.stop()

    def good_row(self, number: int, lease: object = None) -> Row:
        return chat_row(number, f"text {number}", lease=lease)

    def bad_row(self, number: int) -> Row:
        return chat_row(number, "too-long")

    def endless_row(self, number: int) -> Row:
        return chat_row(number, "hangs")

    def bad_live_request(self) -> LiveRequest:
        return chat_request("too-long")

    def endless_live_request(self) -> LiveRequest:
        return chat_request("hangs")
