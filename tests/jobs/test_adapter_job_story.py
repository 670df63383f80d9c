"""A job over several adapters, with a real worker and a server that answers as vLLM does."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from engines.llm_support import CHAT, FakeVllm
from small_adapter import write_adapter

from batchmill.states import JobState
from batchmill.types import DatasetSpec, JobOrder, Price

ROWS = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def fake(folder, monkeypatch) -> FakeVllm:
    fake = FakeVllm(folder)
    for name in ("PYTHONPATH", "FAKE_ONCE", "FAKE_CALLS", "FAKE_HEALTH_DELAY_S"):
        monkeypatch.setenv(name, fake.env[name])
    return fake


def write_rows(folder: Path, names: list[str | None]) -> str:
    lines = []
    for number in range(ROWS):
        name = names[number % len(names)]
        body = {"messages": [{"role": "user", "content": f"row {number}"}]} | ({} if name is None else {"model": name})
        lines.append(json.dumps({"custom_id": f"r{number}", "url": CHAT, "body": body}) + "\n")
    (folder / "in.jsonl").write_text("".join(lines))
    return str(folder / "in.jsonl")


async def test_a_bad_adapter_fails_its_own_rows(folder, fake, opened):
    """Rows of adapters that fit run, under the adapter's own name; those of one that does not fail, and no others."""
    places = {"good/1": write_adapter(folder / "good"), "high/2": write_adapter(folder / "high", rank=64)}
    model = fake.model(
        adapters=places, adapter_names={"good": "good/1", "high": "high/2"}, adapter_rank=16, price=Price.of(0.5),
        allowed=["tiny", "good", "good/1", "high", "high/2"],
    )  # fmt: skip
    names = [None, "good", "high", "good/1", "tiny"]
    job_order = JobOrder(
        DatasetSpec([write_rows(folder, names)], format="openai"), [model], origin={"frontend": "x"}, together=True
    )
    service = await opened()
    job = (await service.submit(job_order)).id
    async with asyncio.timeout(100):
        view = [view async for view in service.watch(job, 0.05)][-1]
    assert (view.state, view.message, view.errors_output) == (JobState.COMPLETED, "", None)
    found = [json.loads(line) for line in Path(view.output or "").read_text().splitlines()]
    assert [each["custom_id"] for each in found] == [f"r{number}" for number in range(ROWS)]
    for number, each in enumerate(found):
        name = names[number % len(names)]
        if name == "high":
            assert (each["response"], each["error"]["code"]) == (None, "bad_adapter")
            assert "its rank is 64" in each["error"]["message"]
        else:
            own = {"good": "good/1", "good/1": "good/1"}.get(name or "", "tiny")
            assert each["response"]["body"]["model"] == own, each
    assert view.errors == {"bad_adapter": ROWS // len(names)}
    assert view.prices == {"tiny": Price(0.5, None, 0.5)}
    assert view.cost == pytest.approx((view.usage.input_tokens + view.usage.output_tokens) / 2e6)
    async with asyncio.timeout(60):
        while (sums := service.dispatcher.tallies.adapters.by_adapter.get(("tiny", "good/1"))) is None or (
            sums.rows < 2 * ROWS // len(names)
        ):
            await asyncio.sleep(0.05)
    assert sums.loads == 1 and sums.hits <= sums.rows == 2 * ROWS // len(names)


async def test_a_retry_runs_with_an_adapter_that_was_repaired(folder, fake, opened):
    """Rows that failed for their adapter run when they are retried after the adapter was repaired."""
    places = {"high/1": write_adapter(folder / "high", rank=64)}
    model = fake.model(
        adapters=places, adapter_names={"high": "high/1"}, adapter_rank=16, allowed=["tiny", "high", "high/1"]
    )
    service = await opened()
    dataset = DatasetSpec([write_rows(folder, ["high"])], format="openai")
    job = (await service.submit(JobOrder(dataset, [model], origin={"frontend": "x"}))).id
    async with asyncio.timeout(100):
        view = [view async for view in service.watch(job, 0.05)][-1]
        assert (view.state, view.errors) == (JobState.COMPLETED, {"bad_adapter": ROWS})
        shutil.rmtree(folder / "high")
        write_adapter(folder / "high", rank=8)
        await service.retry(job)
        view = [view async for view in service.watch(job, 0.05)][-1]
    assert (view.state, view.rows_ok, view.errors) == (JobState.COMPLETED, ROWS, {})
