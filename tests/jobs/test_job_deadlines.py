"""Deadlines: one task that sleeps until the next one, under a clock that is held."""

from __future__ import annotations

import asyncio

import pytest
from fakes.held_clock import HeldClock

from batchmill.errors import StorageFull
from batchmill.jobs.maintenance import DEADLINE_RETRY_S, DEADLINE_SLEEP_MAX_S, JobDeadlines


class Board:
    """Jobs and their deadlines, as the ledger would tell them."""

    def __init__(self) -> None:
        self.clock = HeldClock()
        self.open: dict[str, float] = {}
        self.ended: list[tuple[str, float]] = []
        self.refusals = 0
        self.looks = 0
        self.news = asyncio.Event()
        self.deadlines = JobDeadlines(self.clock, self.upcoming, self.expire)

    async def upcoming(self, count: int) -> list[tuple[str, float]]:
        self.looks += 1
        return sorted(self.open.items(), key=lambda job: job[1])[:count]

    async def expire(self, job_id: str) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StorageFull("no room")
        self.ended.append((job_id, self.clock.now()))
        del self.open[job_id]
        self.news.set()

    async def wait_for(self, count: int) -> None:
        while len(self.ended) < count:
            self.news.clear()
            await self.news.wait()


@pytest.fixture
async def board():
    made = Board()
    yield made
    await made.deadlines.close()


async def test_each_job_ends_at_its_deadline(board):
    """Jobs end in the order of their deadlines, none before its own and none long after it."""
    start = board.clock.now()
    board.open = {"late": start + 500, "soon": start + 7, "past": start - 100}
    board.deadlines.start()
    await board.wait_for(3)
    assert [job for job, _ in board.ended] == ["past", "soon", "late"]
    assert all(
        due <= at <= due + DEADLINE_SLEEP_MAX_S
        for (_, at), due in zip(board.ended[1:], (start + 7, start + 500), strict=True)
    )
    assert max(board.clock.slept) <= DEADLINE_SLEEP_MAX_S


async def test_it_is_told_of_new_ones(board):
    """With no deadline nothing is looked at until somebody says that there is one."""
    board.deadlines.start()
    for _ in range(10):
        await asyncio.sleep(0)
    assert (board.looks, board.clock.slept) == (1, [])
    board.open["new"] = board.clock.now() + 3
    board.deadlines.changed()
    await board.wait_for(1)
    assert board.clock.slept == [3]


async def test_later_ones_do_not_wake_it(board):
    """A job whose deadline is after the next look costs none; one whose deadline is before it does."""
    asleep, sleeping = asyncio.Event(), asyncio.Event()

    async def sleep(seconds):
        board.clock.slept.append(seconds)
        asleep.set()
        await sleeping.wait()

    board.clock.sleep = sleep
    board.open["first"] = board.clock.now() + 20
    board.deadlines.start()
    await asleep.wait()
    board.deadlines.added(board.clock.now() + 21)
    for _ in range(10):
        await asyncio.sleep(0)
    assert board.looks == 1
    asleep.clear()
    board.open["next"] = board.clock.now() + 19
    board.deadlines.added(board.open["next"])
    await asleep.wait()
    assert (board.looks, board.clock.slept) == (2, [20, 19])


async def test_a_job_that_cannot_be_ended_is_tried_again(board):
    """A full disk puts an expiry off; it does not lose it."""
    board.refusals = 2
    board.open = {"job": board.clock.now() - 1}
    board.deadlines.start()
    await board.wait_for(1)
    assert board.clock.slept.count(DEADLINE_RETRY_S) == 2
