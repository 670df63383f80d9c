"""The connector engine keeps the promises that every engine makes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from contract.engine_suite import ServiceSuite
from fakes.openai_service import HANG, Answer, OpenAIService, refusal

from batchmill.engines.remote.connector import ConnectorEngine
from batchmill.types import Action, Connector, Limits, ModelSpec

BODY = '{"model": "${parameters.deployed}", "messages": ${parameters.messages}, "stream": ${parameters.stream:-false}}'


class TestConnectorEngine(ServiceSuite):
    held_max = 160

    @pytest.fixture
    async def engine(self, tmp_path: Path) -> AsyncIterator[ConnectorEngine]:
        async with OpenAIService() as service:
            for n in range(100):
                service.script[f"bad {n}"] = [refusal(400, "bad_thing")]
                service.script[f"endless {n}"] = [Answer(act=HANG)]
            predict = Action("PREDICT", "POST", "${parameters.base}/chat/completions", request_body=BODY)
            parameters = {"base": service.base_url, "deployed": "remote"}
            connector = Connector("c1", "chat", "1", "http", [predict], parameters=parameters, is_trusted=True)
            limits = Limits(in_flight_max=64)
            model = ModelSpec(name="m", engine="connector", source="c1", connector=connector, limits=limits)
            engine = ConnectorEngine(model, tmp_path)
            await engine.start()
            yield engine
            await engine.stop()
