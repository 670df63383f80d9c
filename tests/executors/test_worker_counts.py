"""What a worker has counted reaches its owner, up to its end."""

from __future__ import annotations

import asyncio
from pathlib import Path

from contract.engine_suite import chat_request
from engines.llm_support import FakeVllm

from batchmill.executors.local import LocalExecutor
from batchmill.types import EngineStats, LiveRequest
from batchmill.wire.messages import AnswerLive, Drain, Heartbeat, Ready, Start

PATIENCE_S = 60.0


async def test_the_last_counts_are_told(tmp_path: Path, monkeypatch) -> None:
    """A worker that answers and is drained at once tells of that answer before it ends."""
    fake = FakeVllm(tmp_path)
    for name in ("PYTHONPATH", "FAKE_ONCE", "FAKE_CALLS", "FAKE_HEALTH_DELAY_S"):
        monkeypatch.setenv(name, fake.env[name])
    place = fake.adapter("upper")
    model = fake.model(adapters={"upper": place}, adapter_rank=16)
    worker = await LocalExecutor(tmp_path / "workers").start(Start("w1", model, str(tmp_path / "home")))
    request = chat_request("hi", model="upper")
    stats = EngineStats()
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for message in worker.messages():
                if isinstance(message, Ready):
                    worker.send(
                        AnswerLive(1, LiveRequest(request.url, request.body, adapter="upper", adapter_place=place))
                    )
                    worker.send(Drain())
                elif isinstance(message, Heartbeat):
                    stats = message.stats
            assert await worker.wait() == 0
    finally:
        worker.kill()
        await worker.wait()
    assert [(each.name, each.rows, each.loads) for each in stats.adapters] == [("upper", 1, 1)]
