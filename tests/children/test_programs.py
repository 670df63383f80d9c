"""Programs of callers in children: each is stopped at every bound, and nobody's keep another's waiting."""

from __future__ import annotations

import asyncio
import os

import pytest
from fakes.held_clock import HeldClock

from batchmill.children import programs as limits
from batchmill.children.bounds import ResourceLimits
from batchmill.children.programs import Programs
from batchmill.errors import InvalidInput, RateLimited, TooComplex

WORK = """
import os
from batchmill.errors import InvalidInput

def pid(order, progress):
    return str(os.getpid()).encode()

def spin(order, progress):
    while True:
        pass

def sleep(order, progress):
    open(order).read()

def hoard(order, progress):
    held = []
    while True:
        held.append(bytearray(1024 * 1024))

def talk(order, progress):
    return bytes(1024 * 1024)

def write(order, progress):
    try:
        with open(order, "wb") as file:
            file.write(b"x")
            file.flush()
    except OSError:
        return b"refused"

def wrong(order, progress):
    raise InvalidInput("no", code="wrong")

def environ(order, progress):
    return ",".join(sorted(os.environ)).encode()

def wait(order, progress):
    with open(order, "w") as told:
        told.write(str(os.getpid()))
    open(order).read()
    return b"done"
"""


@pytest.fixture
def clock():
    return HeldClock()


@pytest.fixture
async def programs(tmp_path, monkeypatch, clock):
    (tmp_path / "caller_work.py").write_text(WORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("A_SECRET", "s3cret")
    made = Programs(clock, places=2)
    yield made
    await made.close()


def run(programs: Programs, name: str, order: bytes = b"", **more):
    return programs.run(f"caller_work:{name}", order, **{"who": "a", "work": "the work", **more})


async def test_each_bound_stops_a_program(programs, tmp_path):
    """Processor time, time, memory and answer each have an end, and the next work is done all the same."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    cases = [
        ("spin", ResourceLimits(cpu_s=0.1), "more than 0.1 s"),
        ("sleep", ResourceLimits(wall_s=0.1), "more than 0.1 s"),
        ("hoard", ResourceLimits(memory_bytes=64 * 1024 * 1024), "more than 64 MiB of memory"),
        ("talk", ResourceLimits(answer_bytes=1024 * 1023), "came to more than"),
    ]
    for name, bounds, said in cases:
        with pytest.raises(TooComplex, match=said) as raised:
            await run(programs, name, str(fifo).encode(), bounds=bounds)
        assert raised.value.code == "too_complex"
    assert int(await run(programs, "pid")) > 0
    assert len(await run(programs, "talk", bounds=ResourceLimits(answer_bytes=1024 * 1024))) == 1024 * 1024


async def test_a_child_is_used_again_after_an_error(programs):
    """What a program raises arrives as it was raised, and ends no child."""
    first = await run(programs, "pid")
    with pytest.raises(InvalidInput, match="no") as raised:
        await run(programs, "wrong")
    assert raised.value.code == "wrong"
    assert await run(programs, "pid") == first


async def test_a_program_has_nothing_of_ours(programs, tmp_path):
    """A program sees no variable that is not on the list, and cannot write a file."""
    seen = (await run(programs, "environ")).decode().split(",")
    assert set(seen) <= {*limits.ENVIRON}
    assert await run(programs, "write", str(tmp_path / "file").encode()) == b"refused"


async def test_a_program_that_was_stopped_often_is_not_run(programs, clock):
    """After so many times it is refused at once, for a while; others of the same project are not."""
    bounds = ResourceLimits(cpu_s=0.05)
    for _ in range(limits.STRIKES_MAX):
        with pytest.raises(TooComplex, match="make it simpler"):
            await run(programs, "spin", program=b"p", bounds=bounds)
    with pytest.raises(TooComplex, match="not run for 300 s"):
        await run(programs, "spin", program=b"p")
    assert await run(programs, "pid", program=b"q")
    clock.at += limits.STRUCK_S
    with pytest.raises(TooComplex, match="more than 0.05 s"):
        await run(programs, "spin", program=b"p", bounds=bounds)


class Waiting:
    """A program that runs until it is let go."""

    def __init__(self, programs: Programs, folder, name: str, **more) -> None:
        self.fifo = folder / name
        os.mkfifo(self.fifo)
        self.task = asyncio.create_task(run(programs, "wait", str(self.fifo).encode(), bounds=LONG, **more))

    async def begun(self) -> int:
        return int(await asyncio.to_thread(self.fifo.read_text))

    async def let_go(self) -> None:
        await asyncio.to_thread(self.fifo.write_text, "go")


LONG = ResourceLimits(cpu_s=60, wall_s=60)


async def test_one_project_leaves_a_place_to_others(programs, tmp_path):
    """However much one project asks for, another's program runs at once."""
    first, second = (Waiting(programs, tmp_path, name, who="a", patience_s=60) for name in "12")
    await first.begun()
    assert int(await run(programs, "pid", who="b"))
    assert not second.task.done()
    await first.let_go()
    await second.begun()
    await second.let_go()
    assert await asyncio.gather(first.task, second.task) == [b"done", b"done"]


async def test_who_took_much_waits_behind_who_did_not(programs, clock, tmp_path):
    """Projects that took much lately share all places but one, so that one is free for the next who did not."""
    for who in ("a", "b"):
        spent = Waiting(programs, tmp_path, who, who=who)
        await spent.begun()
        clock.at += limits.HEAVY_S * 2
        await spent.let_go()
        await spent.task
    first = Waiting(programs, tmp_path, "3", who="a", patience_s=60)
    await first.begun()
    second = Waiting(programs, tmp_path, "4", who="b", patience_s=60)
    assert int(await run(programs, "pid", who="c"))
    assert not second.task.done()
    second.task.cancel()
    await asyncio.wait({second.task})
    await first.let_go()
    await first.task
    assert int(await run(programs, "pid", who="b"))


async def test_waiting_has_an_end(programs, tmp_path, monkeypatch):
    """What waits too long, and what is one too many to wait, is told when to come again."""
    first = Waiting(programs, tmp_path, "1")
    await first.begun()
    with pytest.raises(RateLimited, match="not begun in 0 s") as raised:
        await run(programs, "pid", patience_s=0)
    assert raised.value.retry_after_s == 0
    monkeypatch.setattr(limits, "WAITING_MAX", 0)
    with pytest.raises(RateLimited, match="0 others of yours wait"):
        await run(programs, "pid")
    assert int(await run(programs, "pid", who="b"))
    first.task.cancel()
    await asyncio.wait({first.task})
    assert int(await run(programs, "pid"))


async def test_who_wastes_time_gets_less_of_it(programs, clock, monkeypatch):
    """Once much of a project's time went to what was stopped, its next programs are stopped sooner."""
    monkeypatch.setattr(limits, "WASTED_MAX_S", 0.0)
    with pytest.raises(TooComplex, match="more than 0.5 s"):
        task = asyncio.create_task(run(programs, "spin", bounds=ResourceLimits(cpu_s=0.5)))
        await asyncio.sleep(0)
        clock.at += 1.0
        await task
    with pytest.raises(TooComplex, match="more than 0.05 s"):
        await run(programs, "spin", bounds=ResourceLimits(cpu_s=0.5))
