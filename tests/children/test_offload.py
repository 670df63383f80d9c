"""Work in a child process: its answer, its errors, and that it never outlives who asked."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys

import pytest

from batchmill.children import offload as offloading
from batchmill.children.offload import Child, Children, offload
from batchmill.errors import BatchmillError

WORK = """
import ctypes, os, signal, time

def leave_one(order, progress):
    pid = ctypes.CDLL(None).fork()  # as a library does, which calls no hooks of Python's
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    with open(order, "w") as told:
        told.write(str(pid))
    os.kill(os.getpid(), signal.SIGKILL)

def upper(order, progress):
    progress(0.5)
    return order.upper()

def pid(order, progress):
    return str(os.getpid()).encode()

def wait(order, progress):
    with open(order, "w") as told:
        told.write(str(os.getpid()))
    open(order).read()
    return b"done"

def die(order, progress):
    os.kill(os.getpid(), signal.SIGKILL)

def die_once(order, progress):
    if os.path.exists(order):
        return b"done"
    open(order, "w").close()
    os.write(1, b"A" + (9).to_bytes(8, "little") + b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
CHILD = [sys.executable, "-P", "-m", "batchmill.children.child"]


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A module of work for children to find."""
    (tmp_path / "offloaded_work.py").write_text(WORK)
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


class Kept:
    """Children over work that says which process did it."""

    def __init__(self) -> None:
        self.children = Children()

    async def pid(self) -> int:
        return int(await self.children.offload("offloaded_work:pid", b"", lambda _: None))


@pytest.fixture
async def kept(work):
    made = Kept()
    yield made
    await made.children.close()


def has_gone(pid: int) -> bool:
    """The process has ended and was waited for."""
    return not os.path.exists(f"/proc/{pid}")


async def test_a_child_is_used_again(kept):
    """One piece of work after another costs one start; what one of them raised does not end the child."""
    first = await kept.pid()
    with pytest.raises(BatchmillError, match="lower"):
        await kept.children.offload("offloaded_work:lower", b"abc", lambda _: None)
    assert await kept.pid() == first
    await kept.children.close()
    assert has_gone(first)


async def test_long_work_holds_up_nobody(kept, tmp_path):
    """While one child works, another is started; no more are kept than agreed, and cancelling ends just that child."""
    fifos = []
    for n in range(offloading.IDLE_MAX + 2):
        fifos.append(tmp_path / f"fifo-{n}")
        os.mkfifo(fifos[-1])
    calls = [kept.children.offload("offloaded_work:wait", str(each).encode(), lambda _: None) for each in fifos]
    tasks = [asyncio.create_task(call) for call in calls]
    pids = [int(await asyncio.to_thread(each.read_text)) for each in fifos]
    assert await kept.pid() not in pids
    tasks[0].cancel()
    await asyncio.wait({tasks[0]})
    assert has_gone(pids[0]) and not any(map(has_gone, pids[1:]))
    for each in fifos[1:]:
        await asyncio.to_thread(each.write_text, "go")
    assert await asyncio.gather(*tasks[1:]) == [b"done"] * (len(pids) - 1)
    while sum(map(has_gone, pids)) < len(pids) - offloading.IDLE_MAX:
        await asyncio.sleep(0)


async def test_a_child_that_has_grown_is_not_kept(kept, monkeypatch):
    """A child that holds on to memory after its work ends, and the next work gets another."""
    first = await kept.pid()
    monkeypatch.setattr(offloading, "GROWN_BYTES", 1)
    assert await kept.pid() != first


async def test_a_child_that_died_while_it_waited_is_passed_over(kept):
    """Work does not go to a child that has gone."""
    first = await kept.pid()
    os.kill(first, signal.SIGKILL)
    while not has_gone(first):
        await asyncio.sleep(0)
    assert await kept.pid() != first


async def test_an_idle_child_ends_after_a_while(work):
    """A child that nobody needed for so long is let go."""
    children = Children(idle_s=0.0)
    pid = int(await children.offload("offloaded_work:pid", b"", lambda _: None))
    while not has_gone(pid):
        await asyncio.sleep(0)
    await children.close()


async def test_what_killed_a_child_is_told(kept):
    """A child that dies at its work is an error that names the work, and the next work gets another child."""
    with pytest.raises(BatchmillError, match="offloaded_work:die ended with exit code -9"):
        await kept.children.offload("offloaded_work:die", b"", lambda _: None)
    assert await kept.pid()


async def test_what_a_child_forked_keeps_nobody_waiting(work, tmp_path):
    """A child that dies while a process it forked lives, and holds all that it holds, has died; the other ends too."""
    with pytest.raises(BatchmillError, match="exit code -9"):
        await offload("offloaded_work:leave_one", str(tmp_path / "told").encode(), lambda _: None)
    with contextlib.suppress(ProcessLookupError):  # it has gone already
        watch = os.pidfd_open(int((tmp_path / "told").read_text()))
        await asyncio.to_thread(select.select, [watch], [], [])
        os.close(watch)


async def test_work_whose_child_was_killed_begins_anew(kept, tmp_path):
    """A child that dies once, even in the midst of its answer, is replaced by another that does the work."""
    order = str(tmp_path / "died").encode()
    assert await kept.children.offload("offloaded_work:die_once", order, lambda _: None) == b"done"


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
    done = subprocess.run([*CHILD, str(os.getpid() + 1)], input=b"abc", capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_child_is_bound_before_anything_slow():
    """Nothing heavy is imported before the kernel is asked to end the child with its parent."""
    code = "import batchmill.children.child, sys; print([n for n in ('asyncio', 'msgspec') if n in sys.modules])"
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
    ask = "import asyncio; from batchmill.children.offload import offload; "
    ask += "asyncio.run(offload('offloaded_wait:wait', b'', print))"
    asker = await asyncio.create_subprocess_exec(sys.executable, "-c", ask)
    pid = int(await asyncio.to_thread(fifo.read_text))
    watch = os.pidfd_open(pid)
    asker.kill()
    await asker.wait()
    try:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(watch, ended.set)
        await asyncio.wait_for(ended.wait(), 20)
    finally:
        asyncio.get_running_loop().remove_reader(watch)
        os.close(watch)


async def test_whoever_is_cancelled_leaves_no_child():
    """A start that is cancelled at any moment leaves neither a process nor a socket open."""
    for steps in range(12):
        starting = asyncio.create_task(Child.start())
        for _ in range(steps):
            await asyncio.sleep(0)
        starting.cancel()
        try:
            child = await starting
        except asyncio.CancelledError:
            continue
        await child.end()
    gc.collect()  # what was left open says so
