"""Places that projects share."""

from __future__ import annotations

import asyncio

import pytest

from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.errors import Unavailable


class Work:
    """Holds a place from when it gets one until it is let go."""

    def __init__(self, semaphore: FairSemaphore, project: str) -> None:
        self.has_begun, self._let_go = False, asyncio.Event()
        self.task = asyncio.create_task(self._run(semaphore, project))

    async def _run(self, semaphore: FairSemaphore, project: str) -> None:
        async with semaphore.slot(project):
            self.has_begun = True
            await self._let_go.wait()

    async def end(self) -> None:
        self._let_go.set()
        await self.task
        await settle()


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


def made(slots: int = 4, waiting_max: int = 3) -> FairSemaphore:
    return FairSemaphore(slots, waiting_max=waiting_max, what="previews")


async def begun(*works: Work) -> list[bool]:
    await settle()
    return [each.has_begun for each in works]


async def test_one_project_never_holds_all_places():
    """Half of them are its most, whatever waits; another project's work begins at once."""
    semaphore = made()
    greedy = [Work(semaphore, "greedy") for _ in range(5)]
    other = Work(semaphore, "other")
    assert await begun(*greedy, other) == [True, True, False, False, False, True]
    await asyncio.gather(*(each.end() for each in [*greedy, other]))


async def test_a_free_place_goes_to_who_holds_fewest():
    """A project with one piece of work does not wait behind another's queue."""
    semaphore = made(slots=2)
    first, second = Work(semaphore, "a"), Work(semaphore, "b")
    await settle()
    queue, late = [Work(semaphore, "a") for _ in range(3)], Work(semaphore, "c")
    assert await begun(*queue, late) == [False, False, False, False]
    await second.end()
    assert await begun(*queue, late) == [False, False, False, True]
    await first.end()
    assert await begun(*queue) == [True, False, False]
    await asyncio.gather(*(each.end() for each in [*queue, late]))


async def test_waiting_has_an_end():
    """One too many of a project is told to come again; another project may still wait."""
    semaphore = made(slots=1, waiting_max=2)
    works = [Work(semaphore, "a") for _ in range(3)]
    await settle()
    with pytest.raises(Unavailable, match="2 previews of this project") as refused:
        async with semaphore.slot("a"):
            """Never begun."""
    assert refused.value.code == "busy"
    other = Work(semaphore, "b")
    await settle()
    await asyncio.gather(*(each.end() for each in [*works, other]))


async def test_who_stops_waiting_leaves_nothing_behind():
    """A cancelled wait holds no place: neither while it waits nor in the moment in which it is given one."""
    semaphore = made(slots=1)
    first, second, third = (Work(semaphore, "a") for _ in range(3))
    await settle()
    second.task.cancel()
    await first.end()
    assert await begun(third) == [True]
    fourth, fifth = Work(semaphore, "a"), Work(semaphore, "b")
    await settle()
    third._let_go.set()
    await third.task  # the fourth has a place now, and has not heard of it
    fourth.task.cancel()
    assert await begun(fifth) == [True]
    await fifth.end()
    assert await begun(last := Work(semaphore, "a")) == [True]
    await last.end()
