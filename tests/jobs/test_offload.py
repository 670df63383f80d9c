"""Work in a child process: its answer, its errors, and that it never outlives who asked."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from batchmill.errors import BatchmillError
from batchmill.jobs.offload import offload

CHILD = [sys.executable, "-P", "-m", "batchmill.jobs.offload_child"]


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A module of work for children to find."""
    code = "def upper(order, progress):\n    progress(0.5)\n    return order.upper()\n"
    (tmp_path / "offloaded_work.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


async def test_the_answer_of_a_child(work):
    """The order goes in, progress and the answer come back."""
    seen: list[float] = []
    assert await offload("offloaded_work:upper", b"abc", seen.append) == b"ABC"
    assert seen == [0.5]


async def test_what_cannot_be_found_is_told(work):
    """A child whose work is not there says so."""
    with pytest.raises(BatchmillError, match="lower"):
        await offload("offloaded_work:lower", b"abc", lambda _: None)


async def test_files_beside_the_user_are_not_ours(work, tmp_path, monkeypatch):
    """A queue.py or json.py in the folder we stand in is not taken for the library's."""
    stand = tmp_path / "stand"
    stand.mkdir()
    for name in ("queue.py", "json.py", "msgspec.py"):
        (stand / name).write_text("raise RuntimeError('shadowed')\n")
    monkeypatch.chdir(stand)
    assert await offload("offloaded_work:upper", b"abc", lambda _: None) == b"ABC"


def test_a_child_whose_parent_has_gone(work):
    """A child that finds another parent than the one that started it ends without running anything."""
    done = subprocess.run([*CHILD, str(os.getpid() + 1), "offloaded_work:upper"], input=b"abc", capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_child_is_bound_before_anything_slow():
    """Nothing heavy is imported before the kernel is asked to end the child with its parent."""
    code = "import batchmill.jobs.offload_child, sys; print([n for n in ('asyncio', 'msgspec') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_child_ends_with_its_parent(tmp_path, monkeypatch):
    """Killing the process that offloaded work ends the work."""
    fifo = tmp_path / "told"
    os.mkfifo(fifo)
    code = f"""import os, time
def wait(order, progress):
    with open({str(fifo)!r}, "w") as told:
        told.write(str(os.getpid()))
    time.sleep(600)
"""
    (tmp_path / "offloaded_wait.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ask = "import asyncio; from batchmill.jobs.offload import offload; "
    ask += "asyncio.run(offload('offloaded_wait:wait', b'', print))"
    asker = await asyncio.create_subprocess_exec(sys.executable, "-c", ask)
    pid = int(await asyncio.to_thread(fifo.read_text))
    asker.kill()
    await asker.wait()
    watch = os.pidfd_open(pid)
    try:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(watch, ended.set)
        await asyncio.wait_for(ended.wait(), 20)
    finally:
        asyncio.get_running_loop().remove_reader(watch)
        os.close(watch)
