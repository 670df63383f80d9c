"""What somebody waits for runs before what else is ready."""

from __future__ import annotations

import asyncio

import pytest

from batchmill.run_next import answer_with, run_next, start_next


async def test_a_task_that_is_started_next():
    """It runs before what was ready earlier, and those before each other in their order."""
    loop, ran = asyncio.get_running_loop(), []

    async def note(name):
        ran.append(name)

    def schedule():
        for name in ("first", "second"):
            loop.call_soon(ran.append, name)

    loop.call_soon(ran.append, "earlier")
    run_next(loop, schedule)
    await start_next(note("task"))
    assert ran == ["task", "first", "second", "earlier"]


async def test_an_answer():
    """Who waits gets the result, or the error, of work in another task; and the work goes on if nobody waits."""
    loop, ended = asyncio.get_running_loop(), []

    async def work(error=None):
        await asyncio.sleep(0)
        if error is not None:
            raise error
        ended.append(True)
        return 1

    answer = loop.create_future()
    start_next(answer_with(work(), answer))
    assert await answer == 1
    answer = loop.create_future()
    start_next(answer_with(work(ValueError("no")), answer))
    with pytest.raises(ValueError, match="no"):
        await answer
    answer = loop.create_future()
    working = start_next(answer_with(work(), answer))
    answer.cancel()
    await working
    assert len(ended) == 2


async def test_an_answer_of_cancelled_work():
    """Who waits for work that is cancelled is cancelled, too."""
    answer = asyncio.get_running_loop().create_future()
    working = start_next(answer_with(asyncio.sleep(60), answer))
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
