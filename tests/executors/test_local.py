"""Workers as local processes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import select
import signal
import sys
from pathlib import Path

import pytest
from contract.executor_suite import ExecutorSuite
from fakes.open_files import open_files

from batchmill.children.process_end import boot_id, started
from batchmill.executors import local
from batchmill.executors.local import LocalExecutor
from batchmill.models import functions
from batchmill.types import FunctionRequest, ModelSpec
from batchmill.wire.messages import FunctionRequests, Ready, Start


class TestLocalExecutor(ExecutorSuite):
    @pytest.fixture
    def executor(self, tmp_path):
        return LocalExecutor(tmp_path / "workers")

    @pytest.mark.parametrize("source", ["code/app.py:double", "package.part:double", "package/part.py:double"])
    async def test_files_beside_the_user_are_not_ours(self, executor, tmp_path, monkeypatch, source):
        """A queue.py in the folder we stand in breaks no worker, and functions under that folder are found."""
        for folder in ("code", "package", "stand"):
            (tmp_path / folder).mkdir()
        (tmp_path / "package" / "__init__.py").touch()
        (tmp_path / "code" / "beside.py").write_text("TWO = 2\n")
        (tmp_path / "code" / "app.py").write_text("from beside import TWO\ndef double(n):\n    return TWO * n\n")
        (tmp_path / "package" / "part.py").write_text("from package import other\nfrom .other import double\n")
        (tmp_path / "package" / "other.py").write_text("def double(n):\n    return 2 * n\n")
        for name in ("queue.py", "msgspec.py"):
            (tmp_path / "stand" / name).write_text("raise RuntimeError('shadowed')\n")
        source = functions.absolute(source, Path(tmp_path))
        monkeypatch.chdir(tmp_path / "stand")
        worker = await executor.start(Start("w3", ModelSpec("double", "function", source), str(tmp_path / "home")))
        await self.expect(worker, Ready)
        worker.kill()
        await worker.wait()


async def test_the_memory_of_a_killed_worker_is_freed(tmp_path):
    """An owner shares memory with a worker that lives, and has none left of one that was killed with work under way."""
    (tmp_path / "app.py").write_text("import threading\ndef hangs(text): threading.Event().wait()")
    model = ModelSpec("hangs", "function", f"{tmp_path / 'app.py'}:hangs")
    before = open_files()
    worker = await LocalExecutor(tmp_path / "workers").start(Start("w", model, str(tmp_path / "home")))
    async for message in worker.messages():
        if isinstance(message, Ready):
            break
    for number in range(20):
        worker.send(FunctionRequests([FunctionRequest(number, "arguments", b'{"text": "%b"}' % (b"x" * 1_000_000))]))
    assert "batchmill-buffers" in Path("/proc/self/maps").read_text()
    worker.kill()
    async for _ in worker.messages():
        pass
    await worker.wait()
    async with asyncio.timeout(10):
        while open_files() - before:  # transports close in turns of their own
            await asyncio.sleep(0.01)
            gc.collect()
    gc.collect()
    assert "batchmill-buffers" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(("gpus", "seen"), [(["2", "5"], ["2,5", "2,5"]), ([], ["", ""]), (None, [None, "7"])])
async def test_a_worker_sees_its_own_devices(tmp_path, monkeypatch, gpus, seen):
    """User code finds the devices that were dealt to its worker, and ours where nobody deals them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.delenv("BATCHMILL_GPUS", raising=False)
    (tmp_path / "app.py").write_text(
        "import json, os\n"
        "class Look:\n"
        "    def setup(self):\n"
        "        seen = [os.environ.get(name) for name in ('BATCHMILL_GPUS', 'CUDA_VISIBLE_DEVICES')]\n"
        f"        open({str(tmp_path / 'seen.json')!r}, 'w').write(json.dumps(seen))\n"
        "    def predict(self, n):\n"
        "        return n\n"
    )
    model = ModelSpec("look", "function", f"{tmp_path / 'app.py'}:Look")
    executor = LocalExecutor(tmp_path / "workers")
    worker = await executor.start(Start("w", model, str(tmp_path / "home"), gpus=gpus))
    async for message in worker.messages():
        if isinstance(message, Ready):
            break
    worker.kill()
    await worker.wait()
    assert json.loads((tmp_path / "seen.json").read_text()) == seen


def test_sweeping_an_empty_folder(tmp_path):
    """A data directory that never had a worker has nothing to sweep."""
    LocalExecutor(tmp_path / "none").sweep()


def test_a_process_id_that_was_used_again_is_left_alone(tmp_path):
    """A process that has a dead worker's id but began at another time is not ended."""
    folder = tmp_path / "workers"
    folder.mkdir()
    (folder / "w.pid").write_text(f"{os.getpid()} 1 {boot_id()}")
    LocalExecutor(folder).sweep()
    assert not (folder / "w.pid").exists()


async def test_what_a_dead_worker_forked_is_swept(tmp_path):
    """A worker that has gone, and its owner too, leaves what it forked: the next owner ends that."""
    parent = await asyncio.create_subprocess_exec(
        "sh", "-c", "sleep 600 & echo $!; kill -STOP $$", stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert parent.stdout is not None
    left = os.pidfd_open(int(await parent.stdout.readline()))
    folder = tmp_path / "workers"
    folder.mkdir()
    (folder / "w.pid").write_text(f"{parent.pid} {started(parent.pid)} {boot_id()}")
    parent.kill()
    while started(parent.pid):
        await asyncio.sleep(0)
    LocalExecutor(folder).sweep()
    await asyncio.to_thread(select.select, [left], [], [])
    os.close(left)
    assert await parent.wait() == -signal.SIGKILL


async def test_a_worker_that_closed_its_socket_is_ended(tmp_path, monkeypatch):
    """A worker that has closed every file is of no use: it is ended, and its messages end."""
    monkeypatch.setattr(local, "CLOSED_S", 0.0)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if 'batchmill.executors.worker' in sys.orig_argv:\n    os.closerange(3, 1000)\n    time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "app.py").write_text("def closes(): ...")
    model = ModelSpec("closes", "function", f"{tmp_path / 'app.py'}:closes")
    worker = await LocalExecutor(tmp_path / "workers").start(Start("w", model, str(tmp_path / "home")))
    assert [message async for message in worker.messages()] == []
    assert await worker.wait() == -signal.SIGKILL


LEAVES = """
import os, subprocess, sys
NAME = __file__ + ".pid"
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(NAME + ".part", "w") as file:
    file.write(str(left.pid))
os.rename(NAME + ".part", NAME)
"""


async def test_a_function_that_left_the_session_of_a_killed_worker_is_ended(tmp_path):
    """A function may begin a session of its own, which ends with its worker."""
    (tmp_path / "app.py").write_text(f"{LEAVES}def double(n): return 2 * n\n")
    model = ModelSpec("double", "function", f"{tmp_path / 'app.py'}:double")
    worker = await LocalExecutor(tmp_path / "workers").start(Start("w", model, str(tmp_path / "home")))
    async for message in worker.messages():
        if isinstance(message, Ready):
            break
    left = os.pidfd_open(int((tmp_path / "app.py.pid").read_text()))
    worker.kill()
    await worker.wait()
    await asyncio.to_thread(select.select, [left], [], [])
    os.close(left)


CHECKS = """
import asyncio, sys
from batchmill.executors.validators.messages import LoadOrder
from batchmill.executors.validators.validators import ValidatorProcess

async def main():
    process, _ = await ValidatorProcess.start(LoadOrder(sys.argv[1]))
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_class_that_left_the_session_of_a_killed_worker_is_ended(tmp_path):
    """So does a class that validates answers; where the owner has gone too, the next one ends what it has left."""
    path = tmp_path / "app.py"
    path.write_text(f"{LEAVES}import msgspec\nclass Answer(msgspec.Struct):\n    n: int\n")
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHECKS, f"{path}:Answer", stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert parent.stdout is not None and await parent.stdout.readline() == b"ready\n"
    folder = tmp_path / "workers"
    folder.mkdir()
    (folder / "w.pid").write_text(f"{parent.pid} {started(parent.pid)} {boot_id()}")
    left = os.pidfd_open(int((tmp_path / "app.py.pid").read_text()))
    parent.kill()
    assert await parent.wait() == -signal.SIGKILL
    assert not select.select([left], [], [], 0)[0], "nothing has ended it yet"
    LocalExecutor(folder).sweep()
    await asyncio.to_thread(select.select, [left], [], [])
    os.close(left)
