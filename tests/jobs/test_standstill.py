"""Jobs that stand still say so, and go on when what held them has gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from batchmill.engines.clock import SystemClock
from batchmill.jobs.views import STILL_S
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
    """As late as a test says, however long the test takes. Nobody wakes while `goes_on` is unset: whoever looks for
    workers that have been stopped for long would kill the one of the test."""

    def __init__(self) -> None:
        self.at, self.goes_on = 1000.0, asyncio.Event()
        self.goes_on.set()

    def monotonic(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.goes_on.wait()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "app.py").write_text(CODE)
    rows = [{"custom_id": f"r{n}", "url": "/v1/x", "body": {"n": n}} for n in range(5)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.mkfifo(tmp_path / "turn")
    return tmp_path


def state_of(pid: int) -> str:
    """One letter, as `ps` shows it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_a_job_that_stands_still(folder, opened):
    """A job whose row does not end says so, and names the worker that a signal has stopped; the worker's death while a
    process that it forked lives costs the job nothing."""
    clock = Later()
    service = await opened(clock=clock)
    model = ModelSpec("wait", "function", f"{folder / 'app.py'}:wait")
    order = JobOrder(DatasetSpec([str(folder / "in.jsonl")]), [model], output=str(folder / "out.jsonl"))
    job = (await service.submit(order)).id
    worker = int(await asyncio.to_thread((folder / "turn").read_text))
    clock.goes_on.clear()
    os.kill(worker, signal.SIGSTOP)
    while state_of(worker) != "T":
        await asyncio.sleep(0)
    found = ""
    while "has said nothing" not in found or "no row of it has ended for" not in found:  # it had sent something
        clock.at += STILL_S
        found = "; ".join((await service.explain(job)).reasons)
    assert f"(process {worker})" in found and f"kill -CONT {worker}" in found
    assert "are with its workers" in found
    os.kill(worker, signal.SIGCONT)
    while state_of(worker) == "T":
        await asyncio.sleep(0)
    clock.goes_on.set()
    await asyncio.to_thread((folder / "turn").write_text, "go")
    view = [view async for view in service.watch(job, 0.05)][-1]
    assert (view.state, view.rows_ok) == ("completed", 5)
