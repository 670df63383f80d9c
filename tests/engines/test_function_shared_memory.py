"""Whatever a function does with the memory of its arguments and results: its callers get their own data, or an error.

Each test has a real process.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.engine_suite import PATIENCE_S
from fakes.open_files import open_files
from function_process_support import Answers, deployed, running

from batchmill.errors import ModelFailed
from batchmill.function_runtime.shared_memory import SIZE_BYTES

COUNT = 40_000  # float64: 320,000 bytes
NAME = "batchmill-buffers"
CODE = """
import ctypes, os, stat, struct, threading, zlib
import numpy as np
kept = []

def areas():
    for line in open("/proc/self/maps"):
        if "batchmill-buffers" in line:
            begin, _, end = line.split()[0].partition("-")
            yield int(begin, 16), int(end, 16) - int(begin, 16), "w" in line.split()[1]

def scribble():
    for begin, size, is_writable in areas():
        if is_writable:
            ctypes.memset(begin, 255, size)

def forge(*sizes, text=b"{}", magic=b"bmf1"):
    head = struct.pack("<4sIII", magic, len(text), len(sizes), zlib.crc32(text))
    data = head + struct.pack(f"<{len(sizes)}Q", *sizes) + text
    for fd in range(1024):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode): os.write(fd, data)
        except OSError: pass
    threading.Event().wait()

def f(x: np.ndarray, does: str = ""):
    if does == "write": x *= 2
    if does == "view": return x[::-1][::-1]
    if does == "keep": kept.append(x)
    if does == "kept": return np.concatenate(kept)
    if does == "fork":
        child = os.fork()
        if not child: os._exit(0)
        os.waitpid(child, 0)
    if does == "scribble":
        threading.Thread(target=lambda: [scribble() for _ in range(100)], daemon=True).start()
    if does == "exit": os._exit(3)
    if does == "far": forge(1 << 63 | 4096 << 40 | 8)
    if does == "long": forge(1 << 63 | (1 << 40) - 1)
    if does == "twice": forge(1 << 63 | 1 << 24, 1 << 63 | 1)
    if does == "return": forge(5, text=b"", magic=b"bmr1")
    if does == "room": return np.zeros(SIZE, dtype=np.uint8)
    return x
""".replace("SIZE", f"{SIZE_BYTES} + 1")


def body(array: np.ndarray, does: str = "") -> tuple[bytes, bytes]:
    """(body, head) of a call with a binary tensor."""
    size = {"binary_data_size": array.nbytes}
    inputs: list[dict[str, Any]] = [{"name": "x", "shape": list(array.shape), "datatype": "FP64", "parameters": size}]
    inputs.append({"name": "does", "shape": [1], "datatype": "BYTES", "data": [does]})
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return text + array.tobytes(), str(len(text)).encode()


async def called(answers: Answers, array: np.ndarray, does: str = "", dtype: str = "<f8") -> np.ndarray:
    """The tensor of the answer. Raises: what the answer raises."""
    data, head = body(array, does)
    async with asyncio.timeout(PATIENCE_S):
        answer = await answers.ask("tensors", data, head=head)
    if answer.raised is not None:
        raise answer.raised.error()
    whole = answer.joined()
    return np.frombuffer(whole[int(answer.head) :], dtype)


def numbers(first: int) -> np.ndarray:
    return np.arange(first, first + COUNT, dtype="<f8")


def mapped() -> int:
    """Mappings of shared memory in this process."""
    return Path("/proc/self/maps").read_text().count(NAME)


async def test_arguments_belong_to_the_function(tmp_path: Path) -> None:
    """A function may write to its arguments, return or keep them or parts of them, and fork, unseen by other calls."""
    async with running(deployed(tmp_path, CODE), tmp_path / "home") as engine:
        answers = Answers(engine)
        assert mapped() == 2
        for does in ("", "view", "fork"):
            assert (await called(answers, numbers(5), does) == numbers(5)).all()
        assert (await called(answers, numbers(5), "write") == numbers(5) * 2).all()
        for first in range(100):  # more than the memory holds
            await called(answers, numbers(first), "keep")
        kept = await called(answers, numbers(0), "kept")
        assert (kept == np.concatenate([numbers(first) for first in range(100)])).all()
    assert mapped() == 0


async def test_many_calls_at_once(tmp_path: Path) -> None:
    """Calls whose arguments do not all fit into the memory each get their own data back."""
    async with running(deployed(tmp_path, CODE), tmp_path / "home") as engine:
        answers = Answers(engine)
        async with asyncio.timeout(PATIENCE_S):
            found = await asyncio.gather(*[called(answers, numbers(first)) for first in range(120)])
        assert all((each == numbers(first)).all() for first, each in enumerate(found))


async def test_a_result_that_finds_no_room(tmp_path: Path) -> None:
    """A result that is larger than the memory arrives whole."""
    async with running(deployed(tmp_path, CODE), tmp_path / "home") as engine:
        assert len(await called(Answers(engine), numbers(0), "room", "u1")) == SIZE_BYTES + 1


async def test_a_function_that_writes_everywhere(tmp_path: Path) -> None:
    """A function that overwrites all that it shares while results leave harms itself alone: the worker goes on."""
    async with running(deployed(tmp_path, CODE), tmp_path / "home") as engine:
        answers = Answers(engine)
        for _ in range(20):
            assert len(await called(answers, numbers(0), "scribble")) == COUNT
        with pytest.raises(ModelFailed):
            await called(answers, numbers(0), "exit")
        assert (await called(answers, numbers(3)) == numbers(3)).all()


@pytest.mark.parametrize("does", ["far", "long", "twice", "return"])
async def test_forged_places(tmp_path: Path, does: str) -> None:
    """A function that names memory beyond the end, or returns what it was not given, loses its process and no more."""
    async with running(deployed(tmp_path, CODE), tmp_path / "home") as engine:
        answers = Answers(engine)
        with pytest.raises(ModelFailed, match="the function's process died") as failed:
            await called(answers, numbers(0), does)
        assert failed.value.code == "worker_crashed"
        assert (await called(answers, numbers(7)) == numbers(7)).all()
        assert mapped() == 2


async def test_a_process_that_dies_with_places(tmp_path: Path) -> None:
    """The memory of a dead process is gone, waiting calls are answered by the next one, and no descriptor is left."""
    before = open_files()
    async with running(deployed(tmp_path, CODE), tmp_path / "home") as engine:
        answers = Answers(engine)
        for _ in range(3):
            calls = [called(answers, numbers(first), "exit" if first == 20 else "") for first in range(40)]
            async with asyncio.timeout(PATIENCE_S):
                found = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(found.pop(20), ModelFailed)
            firsts = [first for first in range(40) if first != 20]
            assert all((each == numbers(first)).all() for first, each in zip(firsts, found, strict=True))
            assert mapped() == 2
    assert mapped() == 0
    assert not open_files() - before


async def test_a_worker_that_gets_no_memory(tmp_path: Path) -> None:
    """Where no memory can be had to share, calls and results take the socket."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * 1024, limits[1]))
    try:
        async with running(deployed(tmp_path, CODE), tmp_path / "home") as engine:
            assert mapped() == 0
            assert (await called(Answers(engine), numbers(5)) == numbers(5)).all()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


RETURNING_CHILD = """
import os, time
async def f(child: bool = False):
    if child:
        if os.fork() == 0:
            time.sleep(0.1)
            return "C" * 1_000_000
        return "parent"
    return "P" * 1_000_000
"""


async def test_a_child_that_returns_does_not_write_to_results(tmp_path: Path) -> None:
    """A forked child of an async function ends when it returns, and leaves the memory of its parent's results alone."""
    async with running(deployed(tmp_path, RETURNING_CHILD), tmp_path) as engine:
        answers = Answers(engine)
        assert await answers.value({"child": True}) == "parent"
        waiting = answers.ask("arguments", {})
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(0.5)  # noqa: ASYNC251 (the worker is busy while the child returns)
        assert set(json.loads((await waiting).joined())) == {"P"}
