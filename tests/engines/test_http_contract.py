"""The http engine keeps the promises that every engine makes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from contract.engine_suite import ServiceSuite
from fakes.openai_service import HANG, Answer, OpenAIService, refusal

from batchmill.engines.remote.http import HttpEngine
from batchmill.types import Limits, ModelSpec

LIMITS = Limits(in_flight_max=64)


class TestHttpEngine(ServiceSuite):
    held_max = 160

    @pytest.fixture
    async def engine(self, tmp_path: Path) -> AsyncIterator[HttpEngine]:
        async with OpenAIService() as service:
            for n in range(100):
                service.script[f"bad {n}"] = [refusal(400, "bad_thing")]
                service.script[f"endless {n}"] = [Answer(act=HANG)]
            model = ModelSpec(name="m", engine="http", source="remote", base_url=service.base_url, limits=LIMITS)
            engine = HttpEngine(model, tmp_path)
            await engine.start()
            yield engine
            await engine.stop()
