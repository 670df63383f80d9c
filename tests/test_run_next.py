"""What somebody waits for runs before what else is ready."""

from __future__ import annotations

import asyncio
import threading

import pytest

from batchmill.run_next import answer_with, post_next, run_next, start_next


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


async def test_what_a_thread_posts():
    """It runs before what was ready earlier, in its order, and wakes a loop that waits."""
    loop, ran, woken = asyncio.get_running_loop(), [], asyncio.Event()

    def post() -> None:
        for name in ("first", "second"):
            post_next(loop, ran.append, name)

    loop.call_soon(ran.append, "earlier")
    thread = threading.Thread(target=post)
    thread.start()
    thread.join()
    loop.call_soon(ran.append, "later")
    run_next(loop, lambda: loop.call_soon(ran.append, "next"))
    await asyncio.sleep(0)
    assert ran == ["next", "first", "second", "earlier", "later"]
    threading.Timer(0.01, post_next, [loop, woken.set]).start()
    async with asyncio.timeout(60):
        await woken.wait()


def test_what_a_thread_posts_to_a_loop_that_has_ended():
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError):
        post_next(loop, print)


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
