"""A server killed between two durable steps of a job of its own: the order that comes again is the same job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchmill.faults import POINTS

TESTS = Path(__file__).parents[1]
SMALL, LARGE = 500, 1200  # rows of a job that lies in the database, and of one with a folder
SERVER = """
import asyncio, sys
from pathlib import Path
from batchmill.engines.clock import SystemClock
from batchmill.executors.local import LocalExecutor
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.store.sql.database import Database
from batchmill.jobs.service import JobService
from fakes.job_service import job_service
from batchmill.types import DatasetSpec, JobOrder, ModelSpec, Once

async def main(folder: Path) -> None:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    executor = LocalExecutor(data / "workers")
    executor.sweep()
    service = job_service(data, Ledger(Database(data / "batchmill.db")), executor, SystemClock())
    await service.recover(resume_server_jobs=True)
    order = JobOrder(
        DatasetSpec([str(folder / "in.jsonl")], format="openai"),
        [ModelSpec("double", "function", f"{folder / 'app.py'}:double", allowed=["double"])],
        origin={"frontend": "openai"}, default_model=False, once=Once("blind:1", "0" * 64, blind=True),
    )
    submitted = await service.submit(order)
    while True:
        last = [view async for view in service.watch(submitted.id, 0.05)][-1]
        if last.state != "paused":  # until it is resumed
            break
        await asyncio.sleep(0.01)
    print(submitted.how, len(await service.list()), last.state, last.rows_ok, last.output)
    await service.close()

asyncio.run(main(Path(sys.argv[1])))
"""


def run(folder, fault: str = "") -> list[str]:
    environment = {**os.environ, "BATCHMILL_FAULT": fault, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", SERVER, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 or fault, done.stderr
    return done.stdout.split()


CASES = [(point, rows) for point in POINTS for rows in (SMALL, LARGE) if (point, rows) != ("after_sync", SMALL)]


@pytest.mark.parametrize(("point", "count"), CASES)
def test_an_order_that_comes_again_after_a_kill(point, count, tmp_path):
    """Whenever the server dies, the same order after it is one job with every row once, and no other folder stays."""
    (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
    rows = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/x", "body": {"model": "double", "n": n}}
        for n in range(count)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(tmp_path, f"{point}:1:{tmp_path / 'fired'}")
    assert (tmp_path / "fired").exists()
    how, jobs, state, rows_ok, output = run(tmp_path)
    assert how == ("started" if point == "after_describe" else "repeated")
    assert (jobs, state, rows_ok) == ("1", "completed", str(count))
    homes = list((tmp_path / "data" / "jobs").glob("*"))
    assert len(homes) <= 1 if count == SMALL else len(homes) == 1
    with open(output) as file:
        lines = [json.loads(line) for line in file]
    assert [(line["custom_id"], line["response"]["body"]) for line in lines] == [(f"r{n}", 2 * n) for n in range(count)]
