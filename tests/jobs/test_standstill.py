"""Jobs that stand still say so, and go on when what held them has gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from batchmill.engines.clock import SystemClock
from batchmill.types import DatasetSpec, JobOrder, ModelSpec

# One row waits for its turn; as it comes, a library forks and the worker dies, once.
CODE = """
import ctypes, os, pathlib, signal, time

here = pathlib.Path(__file__).parent

def wait(n):
    if n == 3 and not (here / "died").exists():
        with open(here / "turn", "w") as turn:
            turn.write(str(os.getppid()))
        open(here / "turn").read()
        (here / "died").touch()
        if ctypes.CDLL(None).fork() == 0:
            time.sleep(600)
            os._exit(0)
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    return n
"""


class Later(SystemClock):
    """As late as a test says."""

    by_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.by_s


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "app.py").write_text(CODE)
    rows = [{"custom_id": f"r{n}", "url": "/v1/x", "body": {"n": n}} for n in range(5)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.mkfifo(tmp_path / "turn")
    return tmp_path


async def test_a_job_that_stands_still(folder, opened):
    """A job whose row does not end says so, and names the worker that a signal has stopped; the worker's death while a
    process that it forked lives costs the job nothing."""
    clock = Later()
    service = await opened(clock=clock)
    model = ModelSpec("wait", "function", f"{folder / 'app.py'}:wait")
    order = JobOrder(DatasetSpec([str(folder / "in.jsonl")]), [model], output=str(folder / "out.jsonl"))
    job = (await service.submit(order)).id
    worker = int(await asyncio.to_thread((folder / "turn").read_text))
    os.kill(worker, signal.SIGSTOP)
    results: list[str] = []
    while len(results) < 2 or "kill -CONT" not in results[0]:  # signals and messages take a while
        clock.by_s += 10.0
        results = (await service.explain(job)).reasons
    assert f"(process {worker})" in results[0] and f"kill -CONT {worker}" in results[0]
    assert "no row of it has ended for" in results[1] and "are with its workers" in results[1]
    os.kill(worker, signal.SIGCONT)
    clock.by_s = 0.0
    await asyncio.to_thread((folder / "turn").write_text, "go")
    view = [view async for view in service.watch(job, 0.05)][-1]
    assert (view.state, view.rows_ok) == ("completed", 5)
