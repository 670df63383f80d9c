"""Functions on a GPU that an error ends for their process, or whose memory is too small for a batch.

The functions bring a stand-in for CUDA's driver, whose state they set as kernels do.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
from pathlib import Path

import pytest
from contract.engine_suite import PATIENCE_S, run_all
from function_process_support import Answers, deployed, running, table_rows

from batchmill.engines.function.engine import FunctionEngine
from batchmill.errors import ModelFailed
from batchmill.function_runtime import gpus
from batchmill.types import Outcome, Row

DRIVER = """
import asyncio, sys
import batchmill

class Driver:
    state = 0  # a CUresult

    def cuDeviceGetCount(self, count):
        count._obj.value = 2
        return 0

    def cuDevicePrimaryCtxGetState(self, device, flags, is_active):
        is_active._obj.value = device  # the first device is not used
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device): return 0
    def cuDevicePrimaryCtxRelease_v2(self, device): return 0
    def cuCtxPushCurrent_v2(self, context): return 0
    def cuCtxPopCurrent_v2(self, context): return 0
    def cuCtxSynchronize(self): return self.state

driver = Driver()
sys.modules["_batchmill_function_runtime.gpus"]._driver = lambda: driver

class OutOfMemoryError(RuntimeError):
    pass

def kernel(n):
    if n == 41: driver.state = 710
    if n == 42: driver.state = 1  # an invalid value is an error of the call alone
    if driver.state: state, driver.state = driver.state, driver.state if driver.state == 710 else 0
    else: return n * 2
    raise RuntimeError(f"CUDA error {state}")
"""
ROW = DRIVER + "def f(n): return kernel(n)"
ASYNC_ROW = DRIVER + "async def f(n): return kernel(n)"
BATCH = DRIVER + "@batchmill.batched(64)\ndef f(n): return [kernel(each) for each in n]"
ASYNC_BATCH = DRIVER + "@batchmill.batched(64)\nasync def f(n): return [kernel(each) for each in n]"
LOST = "the function's process cannot use its GPU any more after this call"


async def outcomes_of(engine: FunctionEngine, rows: list[Row]) -> list[Outcome]:
    async with asyncio.timeout(PATIENCE_S):
        sink = await run_all(engine, rows)
    return sorted(sink.outcomes, key=lambda outcome: outcome.row.number)


@pytest.mark.parametrize("text", [ROW, ASYNC_ROW, BATCH, ASYNC_BATCH])
async def test_a_row_that_loses_the_gpu_fails_alone(tmp_path: Path, text: str) -> None:
    """The row has the exception's message; all others have their results, of processes with a GPU that works."""
    async with running(deployed(tmp_path, text), tmp_path / "home") as engine:
        outcomes = await outcomes_of(engine, table_rows(*[{"n": n} for n in range(100)]))
        errors = {each.row.number: each.error for each in outcomes if each.error is not None}
        assert {number: error.code for number, error in errors.items()} == {41: "gpu_lost", 42: "RuntimeError"}
        assert re.fullmatch(rf"{LOST}: RuntimeError: CUDA error 710 \(tried [2-4] times\)", errors[41].message)
        assert errors[42].message == "CUDA error 1"
        results = [json.loads(each.body) for each in outcomes if each.error is None]
        assert results == [n * 2 for n in range(100) if n not in errors]
    assert "in kernel" in (tmp_path / "calls.log").read_text()


async def test_callers_who_shared_the_batch_are_answered(tmp_path: Path) -> None:
    """Of live calls in one batch, only the one that loses the GPU fails."""
    async with running(deployed(tmp_path, BATCH, batch_window_s=1.0), tmp_path / "home") as engine:
        answers = Answers(engine)
        numbers = [39, 40, 41, 43]
        async with asyncio.timeout(PATIENCE_S):
            replies = await asyncio.gather(*[answers.ask("arguments", {"n": n}) for n in numbers])
        assert [json.loads(each.body) for each in replies if each.raised is None] == [78, 80, 86]
        [raised] = [each.raised for each in replies if each.raised is not None]
        assert (raised.code, raised.message) == ("gpu_lost", f"{LOST}: RuntimeError: CUDA error 710")
        assert await answers.value({"n": 7}) == 14


async def test_a_stream_that_loses_the_gpu_ends_with_its_error(tmp_path: Path) -> None:
    """The next call is answered by a new process."""
    async with running(deployed(tmp_path, DRIVER + "def f(n): yield kernel(n)"), tmp_path / "home") as engine:
        answers = Answers(engine)
        with pytest.raises(ModelFailed) as failed:
            await answers.value({"n": 41})
        assert failed.value.code == "gpu_lost"
        assert await answers.value({"n": 7}) == [14]


def out_of_memory_if(condition: str, sizes: Path, kind: str) -> str:
    """A batched function that notes the size of each call, and runs out of memory on a condition of its rows `n`."""
    return f"""{DRIVER}
@batchmill.batched(64)
{kind}def f(n):
    with open({str(sizes)!r}, "a") as file: file.write(f"{{len(n)}}\\n")
    if {condition}: raise OutOfMemoryError("CUDA out of memory")
    return n
"""


@pytest.mark.parametrize("kind", ["", "async "])
async def test_batches_that_do_not_fit_in_memory_become_smaller(tmp_path: Path, kind: str) -> None:
    """A batch that runs out of memory is called in halves, and later batches have the size that did fit."""
    sizes = tmp_path / "sizes"
    text = out_of_memory_if("len(n) > 20", sizes, kind)
    async with running(deployed(tmp_path, text), tmp_path / "home") as engine:
        outcomes = await outcomes_of(engine, table_rows(*[{"n": n} for n in range(1000)]))
        assert [json.loads(each.body) for each in outcomes] == list(range(1000))
    called = [int(size) for size in sizes.read_text().split()]
    too_large = [size for size in called if size > 20]
    assert len(too_large) <= 4 * (3 if not kind else 12)  # several async batches may be under way
    assert max(called[-10:]) <= 20


@pytest.mark.parametrize("kind", ["", "async "])
async def test_a_row_that_does_not_fit_in_memory_fails_alone(tmp_path: Path, kind: str) -> None:
    """Its error is the exception; the process goes on, and later batches are as large as before."""
    sizes = tmp_path / "sizes"
    text = out_of_memory_if("41 in n", sizes, kind)
    async with running(deployed(tmp_path, text), tmp_path / "home") as engine:
        outcomes = await outcomes_of(engine, table_rows(*[{"n": n} for n in range(2000)]))
        errors = {each.row.number: each.error for each in outcomes if each.error is not None}
        assert {number: error.code for number, error in errors.items()} == {41: "OutOfMemoryError"}
    assert max(int(size) for size in sizes.read_text().split()[-10:]) == 64


async def test_callers_beside_the_one_that_loses_the_gpu_read_nothing_of_it(tmp_path: Path) -> None:
    """A call that was interrupted is not repeated unless the function is idempotent, and has nobody else's message."""
    called = tmp_path / "called"
    text = (
        DRIVER
        + f"""
async def f(n):
    with open({str(called)!r}, "a") as file: file.write(f"{{n}}\\n")
    if n == 41:
        while open({str(called)!r}).read().count("\\n") < 2: await asyncio.sleep(0.01)
        kernel(n)
    await asyncio.Event().wait()
"""
    )
    async with running(deployed(tmp_path, text), tmp_path / "home") as engine:
        answers = Answers(engine)
        async with asyncio.timeout(PATIENCE_S):
            replies = await asyncio.gather(*[answers.ask("arguments", {"n": n}) for n in (7, 41)])
        raised = [each.raised for each in replies if each.raised is not None]
        assert [(each.code, each.message) for each in raised] == [
            ("gpu_lost", LOST),
            ("gpu_lost", f"{LOST}: RuntimeError: CUDA error 710"),
        ]
    assert sorted(called.read_text().split()) == ["41", "7"]


def test_a_driver_that_is_loaded_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a search in vain is not repeated before the process loads a library."""
    monkeypatch.setattr(gpus, "DRIVER", "libBrokenLocale.so.1")  # of glibc, and used by nobody
    assert gpus._driver() is None
    assert gpus._driver() is None
    assert not gpus.is_lost()
    library = ctypes.CDLL(gpus.DRIVER)
    found = gpus._driver()
    assert found is not None and found._handle == library._handle
