"""Killed while retention indexes the answers of a short job, or removes what they are made of, it goes on later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.answering_service import AnsweringService, choice
from fakes.databases import open_ledger
from fakes.held_clock import HeldClock
from fakes.job_service import end_of, job_service

from batchmill.config.entries import ProjectEntry
from batchmill.engines.clock import SystemClock
from batchmill.executors.local import LocalExecutor
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.service import JobService
from batchmill.store.sql.tables import jobs, packed_jobs
from batchmill.types import DatasetSpec, JobOrder, ModelSpec, Policy

TESTS = Path(__file__).parents[1]
AGE_S = 20 * 365 * 86_400.0  # the job ends in the time of the process that sweeps, whose clock stands still


def opened(folder: Path) -> JobService:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    projects = {"default": ProjectEntry(reuse_age_s=AGE_S)}
    ledger, executor = open_ledger(data / "batchmill.db"), LocalExecutor(data / "workers")
    return job_service(data, ledger, executor, SystemClock(), projects=projects)


async def run(service: JobService, url: str, path: Path, reuse: str):
    model = ModelSpec("m", "http", "m", base_url=url, api_key="env:OPENAI_API_KEY", allowed=["m"])
    order = JobOrder(
        DatasetSpec([str(path)], format="openai"), [model], origin={"frontend": "openai"}, policy=Policy(reuse=reuse),
        default_model=False,
    )  # fmt: skip
    return await end_of(service, (await service.submit(order)).id)


def sweep(folder: Path, fault: str = "") -> None:
    environment = {**os.environ, "BATCHMILL_FAULT": fault, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "fakes.ended_job", str(folder / "data"), "sweep"]
    subprocess.run(command, env=environment, capture_output=True, timeout=100)


@pytest.mark.parametrize("point", ["in_reuse_index", "after_reuse_index", "after_ending", "after_parts_dropped"])
async def test_killed_while_a_short_job_is_indexed(point, tmp_path, monkeypatch):
    """Whoever is killed, its answers are found once the next sweep has gone on, and nothing else of it is left."""
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"custom_id": "r", "method": "POST", "url": "/v1/chat/completions", "body": body}))
    async with AnsweringService(lambda asked: choice("b")) as chat:
        service = opened(tmp_path)
        first = await run(service, chat.url, path, "none")
        ended = jobs.update().values(finished=HeldClock().now() - 10)
        await service._ledger.database.write(lambda db: db.execute(ended).rowcount)
        await service.close()
        sweep(tmp_path, f"{point}:1:{tmp_path / point}")
        assert (tmp_path / point).exists()
        sweep(tmp_path)
        service = opened(tmp_path)
        try:
            assert await service._ledger.database.read(lambda db: db.execute(packed_jobs.select()).first()) is None
            home = JobFiles(tmp_path / "data", first.id).home
            assert [each.name for each in home.iterdir()] == ["reuse"]
            again = await run(service, chat.url, path, "all")
            assert (again.rows_reused, len(chat.bodies)) == (1, 1)
        finally:
            await service.close()
