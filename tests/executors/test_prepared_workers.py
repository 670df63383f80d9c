"""Workers that start before it is known what they run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from batchmill.children.process_end import started
from batchmill.executors.local import LocalExecutor
from batchmill.executors.prepared_workers import PREFIX, PreparedWorkers
from batchmill.models.worker_environment import of_worker
from batchmill.types import ModelSpec
from batchmill.wire.messages import Failed, Ready, Start

LOOK = """
import json, os, pathlib
print("to the log")
def f(n):
    return n
class Look:
    def setup(self):
        seen = {"replica": os.environ["BATCHMILL_REPLICA"], "parent": os.getppid()}
        pathlib.Path(__file__).with_name("seen.json").write_text(json.dumps(seen))
    def predict(self, n):
        return n
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "app.py").write_text(LOOK)
    return ModelSpec("look", "function", f"{tmp_path / 'app.py'}:Look")


@pytest.fixture
async def prepared(tmp_path):
    workers = PreparedWorkers(tmp_path / "workers")
    yield workers
    await workers.close()


def start_of(model, tmp_path, **fields) -> Start:
    return Start("w1", model, str(tmp_path / "home"), 3, **fields)


def logs(tmp_path) -> list[Path]:
    return list((tmp_path / "workers").glob(f"{PREFIX}*"))


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


async def function_process_of(pid: int) -> int:
    """The function's process that a prepared worker starts."""
    while not (found := children_of(pid)):
        assert started(pid), "the worker has ended"
        await asyncio.sleep(0.01)
    return found[0]


async def gone(pid: int) -> None:
    while started(pid):
        await asyncio.sleep(0.01)


async def end(worker) -> None:
    worker.kill()
    await worker.wait()


async def first_of(worker, *kinds):
    async for message in worker.messages():
        if isinstance(message, kinds):
            return message
    raise AssertionError("the worker has ended")


async def test_a_start_takes_a_prepared_worker(tmp_path, model, prepared):
    """The worker that waits gets the start, with the process of its function, its log and its variables."""
    await prepared.start(["function"])
    (log,) = logs(tmp_path)
    worker = await LocalExecutor(tmp_path / "workers", prepared=prepared).start(start_of(model, tmp_path))
    function = await function_process_of(worker.pid)
    assert isinstance(await first_of(worker, Ready, Failed), Ready)
    assert json.loads((tmp_path / "seen.json").read_text()) == {"replica": "3", "parent": worker.pid}
    assert children_of(worker.pid) == [function]
    assert os.getpriority(os.PRIO_PROCESS, function) == os.getpriority(os.PRIO_PROCESS, worker.pid) > 0
    assert (tmp_path / "home" / "w1.log").exists() and not log.exists()
    assert "to the log" in (tmp_path / "home" / "function.log").read_text()
    assert (tmp_path / "workers" / "w1.pid").read_text().split()[0] == str(worker.pid)
    await end(worker)
    await gone(function)


async def test_a_worker_that_has_died_is_not_used(tmp_path, model, prepared):
    """A prepared worker that was killed is replaced by a new one."""
    await prepared.start(["function"])
    dead = prepared.waiting[0].process
    dead.kill()
    await dead.wait()
    worker = await LocalExecutor(tmp_path / "workers", prepared=prepared).start(start_of(model, tmp_path))
    assert worker.pid != dead.pid and logs(tmp_path) == []
    assert isinstance(await first_of(worker, Ready, Failed), Ready)
    await end(worker)


async def test_a_function_process_that_has_died_is_not_used(tmp_path, model, prepared):
    """A function's process that was killed before it was needed is replaced by a new one."""
    await prepared.start(["function"])
    pid = prepared.waiting[0].process.pid
    function = await function_process_of(pid)
    os.kill(function, signal.SIGKILL)
    while children_of(pid):  # until its worker has noticed
        await asyncio.sleep(0.01)
    worker = await LocalExecutor(tmp_path / "workers", prepared=prepared).start(start_of(model, tmp_path))
    assert isinstance(await first_of(worker, Ready, Failed), Ready)
    await end(worker)


async def test_other_environments_get_workers_of_their_own(tmp_path, model, prepared):
    """Workers with devices, or with a chosen environment as those of a server, are started anew."""
    await prepared.start(["function"])
    pid = prepared.waiting[0].process.pid
    with_devices = LocalExecutor(tmp_path / "workers", prepared=prepared)
    chosen = LocalExecutor(tmp_path / "workers", lambda model: of_worker(model, os.environ, []), prepared)
    for executor, fields in ((with_devices, {"gpus": ["0"]}), (chosen, {})):
        worker = await executor.start(start_of(model, tmp_path, **fields))
        assert worker.pid != pid
        await end(worker)
    assert [each.process.pid for each in prepared.waiting] == [pid]


async def test_another_engine_gets_a_worker_of_its_own(tmp_path, prepared):
    """A worker that was prepared for one engine is not used for another: their priorities differ."""
    await prepared.start(["function"])
    pid = prepared.waiting[0].process.pid
    executor = LocalExecutor(tmp_path / "workers", prepared=prepared)
    worker = await executor.start(start_of(ModelSpec("m", "http", "m", base_url="http://127.0.0.1:9/v1"), tmp_path))
    assert isinstance(await first_of(worker, Ready, Failed), Ready)
    assert children_of(worker.pid) == [] and [each.process.pid for each in prepared.waiting] == [pid]
    await end(worker)


async def test_nobody_needs_them(tmp_path, prepared):
    """Closing ends the workers that nobody took, with the processes of their functions, and removes their logs."""
    await prepared.start(["function", "function"])
    pids = [each.process.pid for each in prepared.waiting]
    functions = [await function_process_of(pid) for pid in pids]
    await prepared.close()
    assert [pid for pid in pids if started(pid)] == [] and logs(tmp_path) == []
    for pid in functions:
        await gone(pid)


async def test_their_owner_ends(tmp_path, prepared):
    """A prepared worker and the process of its function end when the owner's end of the socket closes."""
    await prepared.start(["function"])
    waiting = prepared.waiting[0]
    function = await function_process_of(waiting.process.pid)
    waiting.channel.close()
    assert await waiting.process.wait() == 0
    await gone(function)


async def test_logs_of_a_killed_owner_are_removed(tmp_path, prepared):
    """The next owner removes the logs that prepared workers of a killed one left."""
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / f"{PREFIX}old.log").touch()
    await prepared.start([])
    assert logs(tmp_path) == []


BROKEN = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "batchmill.engines.function.engine":
            raise ValueError("a package of another version")
sys.meta_path.insert(0, Broken())
"""


async def test_an_engine_that_cannot_be_imported(tmp_path, model):
    """Whatever an engine's packages raise when they are imported, the owner gets it as the reason."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    executor = LocalExecutor(tmp_path / "workers", lambda _: {**os.environ, "PYTHONPATH": str(tmp_path)})
    worker = await executor.start(start_of(model, tmp_path))
    message = await first_of(worker, Ready, Failed)
    assert isinstance(message, Failed) and "a package of another version" in str(message)
    await end(worker)
