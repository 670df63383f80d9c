"""Calls that take too long are cancelled, and told from those that somebody else cancels."""

from __future__ import annotations

import asyncio

import pytest

from batchmill.engines.connections import Deadlines


async def wait_with(deadlines: Deadlines, gate: asyncio.Event) -> str:
    task = asyncio.current_task()
    assert task is not None
    deadlines.begin(task)
    try:
        await gate.wait()
    except asyncio.CancelledError:
        if deadlines.is_late(task):
            return "late"
        raise
    finally:
        deadlines.end(task)
    return "done"


async def test_late_and_done() -> None:
    """What runs too long is late; what ends in time is left alone, and so is its task afterwards."""
    deadlines, gate = Deadlines(0.02), asyncio.Event()
    assert await wait_with(deadlines, gate) == "late"
    gate.set()
    assert await wait_with(deadlines, gate) == "done"
    assert asyncio.current_task().cancelling() == 0


async def test_cancelled_by_another() -> None:
    """A task that somebody else cancels stays cancelled, also when its time is over at that moment."""
    for also_late in (False, True):
        deadlines = Deadlines(0.0 if also_late else 60.0)
        task = asyncio.create_task(wait_with(deadlines, asyncio.Event()))
        await asyncio.sleep(0)
        if also_late:
            deadlines._sweep(asyncio.get_running_loop())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
