"""The process of a deployed function, as whoever starts it sees it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from batchmill.children.process_end import VARIABLE
from batchmill.errors import ModelFailed
from batchmill.models.function_child import FILE, LOG_BYTES_MAX, TRACEBACKS_MAX, FunctionChild, FunctionLog
from batchmill.models.function_socket import Frame
from batchmill.models.worker_environment import environment_of
from batchmill.types import FunctionSpec, ModelSpec

PATIENCE_S = 30.0

PLAIN = {"from_job": False, "staged": False, "exact": False}


def spec(folder: Path, text: str, *, source: str = "app.py:f", **how: object) -> ModelSpec:
    (folder / "app.py").write_text(text)
    function = FunctionSpec(version="main/1", folder=str(folder), digest="0", **how)
    return ModelSpec("f", "function_process", source, function=function)


async def answer(child: FunctionChild, arguments: dict[str, object]) -> object:
    """What one call gives."""
    come: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
    child.on_frames = lambda frames: come.set_result(frames[0])
    ask = {"kind": "ask", "id": 7, "rows": 1, "layout": "named", **PLAIN}
    child.send(ask, [json.dumps([arguments]).encode()])
    async with asyncio.timeout(PATIENCE_S):
        meta, buffers = await come
    assert (meta["id"], meta["errors"]) == (7, {})
    return json.loads(bytes(buffers[0]))[0]


async def test_start_tells_the_interface(tmp_path: Path) -> None:
    """start() returns what the function takes, as its code says it, and how many rows it takes together."""
    text = "import batchmill\n@batchmill.batched(5)\ndef f(a, b=1):\n    'Adds.'\n    return [1 for _ in a]"
    child = FunctionChild(spec(tmp_path, text), tmp_path)
    try:
        interface = await child.start()
    finally:
        await child.stop()
    assert [each.name for each in interface.inputs] == ["a", "b"]
    assert (interface.calls, interface.summary, child.batch_size) == ("list", "Adds.", 5)


async def test_start_that_fails(tmp_path: Path) -> None:
    """start() raises with the user's traceback, and the process is gone."""
    child = FunctionChild(spec(tmp_path, "import no_such_module_at_all"), tmp_path)
    with pytest.raises(ModelFailed, match="no_such_module_at_all"):
        await child.start()
    await child.stop()
    assert not child.is_alive


async def test_start_that_takes_too_long(tmp_path: Path) -> None:
    """start() gives up after the time it was given, and ends the process."""
    child = FunctionChild(spec(tmp_path, "import threading; threading.Event().wait()"), tmp_path)
    with pytest.raises(ModelFailed, match=r"not ready after 0\.3 s"):
        await child.start(timeout_s=0.3)
    await child.stop()


async def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    """An environment that cannot be started is named."""
    function = FunctionSpec(version="main/1", folder=str(tmp_path), digest="0")
    model = ModelSpec("f", "function_process", "app.py:f", python="/no/such/python", function=function)
    child = FunctionChild(model, tmp_path)
    with pytest.raises(ModelFailed, match=r"/no/such/python cannot be started: No such.*`batchmill models restart f`"):
        await child.start()
    await child.stop()


async def test_stop_lets_it_finalize(tmp_path: Path) -> None:
    """stop() lets the function release what it holds, and may be called twice."""
    text = "class f:\n    def predict(self): return 1\n    def teardown(self): print('released')"
    child = FunctionChild(spec(tmp_path, text), tmp_path)
    await child.start()
    await child.stop()
    await child.stop()
    assert "released" in (tmp_path / "function.log").read_text()


async def test_its_children_go_with_it(tmp_path: Path) -> None:
    """A program that the function has started ends with its process."""
    text = "import subprocess\nheld = subprocess.Popen(['sleep', '600'])\ndef f(): return held.pid"
    child = FunctionChild(spec(tmp_path, text), tmp_path)
    await child.start()
    pid = await answer(child, {})
    child.kill()
    await child.wait()
    await child.stop()
    async with asyncio.timeout(PATIENCE_S):
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1][:3]:
            await asyncio.sleep(0)


async def test_blame(tmp_path: Path) -> None:
    """After a death in a call blamed() names the ask and its row, and exit_report the signal."""
    text = "import os, signal\ndef f(): os.kill(os.getpid(), signal.SIGKILL)"
    child = FunctionChild(spec(tmp_path, text), tmp_path)
    ended = asyncio.Event()
    await child.start()
    child.ended = ended.set
    ask = {"kind": "ask", "id": 1 << 50, "rows": 1, "layout": "named", **PLAIN}
    child.send(ask, [b"[{}]"])
    async with asyncio.timeout(PATIENCE_S):
        await ended.wait()
    assert (child.blamed(), child.progress and child.progress.last_called()) == ([(1 << 50, 0, 1)], 1 << 50)
    assert child.exit_report() == "signal SIGKILL"
    await child.stop()


async def test_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process sees its own variables and secrets, none of ours, and runs in its folder with empty input."""
    monkeypatch.setenv("OUR_OWN_KEY", "hidden")
    monkeypatch.setenv("WHERE_IT_LIES", "s3cret")
    text = (
        "import os, sys\ndef f(): return [dict(os.environ), os.getcwd(), sys.stdin.read(), os.getpgrp() == os.getpid()]"
    )
    how = {"environment": {"MODE": "fast"}, "secrets": {"TOKEN": "env:WHERE_IT_LIES"}}
    child = FunctionChild(spec(tmp_path, text, **how), tmp_path)
    await child.start()
    found, folder, read, leads = await answer(child, {})
    await child.stop()
    assert (found["MODE"], found["TOKEN"], found["CUDA_VISIBLE_DEVICES"]) == ("fast", "s3cret", "")
    assert {"OUR_OWN_KEY", "WHERE_IT_LIES"}.isdisjoint(found)
    assert (folder, read, leads) == (os.path.realpath(tmp_path), "", True)


def test_gpus_of_each_worker() -> None:
    """Each worker sees its own GPUs of those that we see; too few are refused by name."""
    function = FunctionSpec(version="main/1", folder="/", digest="0", gpus=2)
    ours = {"CUDA_VISIBLE_DEVICES": "0,3,5,7", "BATCHMILL_REPLICA": "1", "PATH": "/bin"}
    assert environment_of(function, ours)["CUDA_VISIBLE_DEVICES"] == "5,7"
    with pytest.raises(ModelFailed, match="has 0 left of this machine.s 4") as failed:
        environment_of(function, ours | {"BATCHMILL_REPLICA": "2"})
    assert failed.value.code == "too_few_gpus"
    dealt = ours | {"BATCHMILL_REPLICA": "7", "BATCHMILL_GPUS": "1,9"}
    assert environment_of(function, dealt)["CUDA_VISIBLE_DEVICES"] == "1,9"


def test_a_secret_that_is_not_there() -> None:
    """A secret that cannot be had is named, not passed over."""
    function = FunctionSpec(version="main/1", folder="/", digest="0", secrets={"TOKEN": "env:NO_SUCH_VARIABLE"})
    with pytest.raises(ModelFailed, match="NO_SUCH_VARIABLE"):
        environment_of(function, {})


def test_the_log_is_bounded(tmp_path: Path) -> None:
    """A full log becomes the older one, and whoever has the file open writes on at its new begin."""
    log = FunctionLog(tmp_path / "function.log")
    os.truncate(log.path, LOG_BYTES_MAX - 1)
    assert not log.is_full()
    os.write(log.fd, b"x")
    assert log.is_full()
    log.rotate()
    os.write(log.fd, b"fresh\n")
    log.close()
    assert (tmp_path / "function.log").read_bytes() == b"fresh\n"
    assert (tmp_path / "function.log.1").stat().st_size == LOG_BYTES_MAX


def test_tracebacks_are_written_a_few_times(tmp_path: Path) -> None:
    """Of one error from one place only the first tracebacks are written down."""
    log = FunctionLog(tmp_path / "function.log")
    for number in range(TRACEBACKS_MAX + 5):
        log.traceback("ValueError", 'Traceback\n  File "a.py", line 3, in f\nValueError: no', f"row {number}")
    log.traceback("ValueError", 'Traceback\n  File "a.py", line 9, in f\nValueError: no', "row 99")
    log.close()
    text = log.path.read_text()
    assert (text.count("line 3"), text.count("row 99")) == (TRACEBACKS_MAX, 1)


LEAVES = """
import subprocess
def f(): return subprocess.Popen(["sleep", "600"], start_new_session=True).pid
"""


def is_alive(pid: int) -> bool:
    """A zombie is none: whoever adopted it has yet to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def test_what_it_started_goes_with_it(tmp_path: Path) -> None:
    """A process of the function's, in a session of its own too, is gone when the function's process is."""
    child = FunctionChild(spec(tmp_path, LEAVES), tmp_path / "home")
    await child.start()
    try:
        left = await answer(child, {})
        assert isinstance(left, int) and is_alive(left)
    finally:
        await child.stop(0)
    assert not is_alive(left)
    assert not (tmp_path / "home" / FILE).exists()


async def test_what_a_killed_worker_left_goes_before_the_next_start(tmp_path: Path) -> None:
    """What the function had started when its worker was killed holds nothing any more when the next one starts."""
    home = tmp_path / "home"
    home.mkdir()
    (home / FILE).write_text("of-a-worker-that-was-killed")
    orphan = await asyncio.create_subprocess_exec("sleep", "600", env={VARIABLE: "of-a-worker-that-was-killed"})
    other = await asyncio.create_subprocess_exec("sleep", "600", env={VARIABLE: "of-another"})
    child = FunctionChild(spec(tmp_path, LEAVES), home)
    try:
        await child.start()
        async with asyncio.timeout(PATIENCE_S):
            assert await orphan.wait() < 0
        assert is_alive(other.pid)
    finally:
        other.kill()
        await other.wait()
        await child.stop()
