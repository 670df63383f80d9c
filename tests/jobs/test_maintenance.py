"""Maintenance: jobs go on when a disk that was full has room again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from fakes.held_clock import HeldClock

from batchmill.errors import LedgerBroken
from batchmill.jobs.maintenance import POLL_S, RETRY_MAX_S, TIDY_S, Maintenance, Stalled
from batchmill.store.disk_room import RESERVE_BYTES, DiskReserve


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0)


class Owner:
    def __init__(self, folder: Path) -> None:
        self.clock, self.folder = HeldClock(), folder
        self.jobs: list[Stalled] = []
        self.resumed: list[tuple[str, float]] = []
        self.tidied: list[float] = []
        self.can_tidy = True
        self.maintenance = Maintenance(
            self.clock, DiskReserve(folder / "disk_reserve"), self.stalled, self.resume, self.tidy
        )

    async def stalled(self) -> list[Stalled]:
        return self.jobs

    async def tidy(self) -> None:
        self.tidied.append(self.clock.at)
        if not self.can_tidy:
            raise LedgerBroken("nothing can be deleted")

    async def resume(self, job_id: str) -> None:
        self.resumed.append((job_id, self.clock.at))


async def test_a_job_goes_on_when_there_is_room(tmp_path):
    """A job whose folders have room is resumed, after the reserve is in its place again."""
    owner = Owner(tmp_path)
    await asyncio.gather(*await owner.maintenance.poll())
    assert owner.resumed == [] and not (tmp_path / "disk_reserve").exists()
    owner.jobs = [Stalled("job_1", [tmp_path])]
    await asyncio.gather(*await owner.maintenance.poll())
    assert [job for job, _ in owner.resumed] == ["job_1"]
    assert (tmp_path / "disk_reserve").stat().st_size == RESERVE_BYTES


async def test_without_room_nothing_is_tried(tmp_path):
    """A folder on a file system that has no room keeps its job waiting."""
    owner = Owner(tmp_path)
    owner.jobs = [Stalled("job_1", [tmp_path, Path("/proc")])]  # procfs has 0 bytes free
    await asyncio.gather(*await owner.maintenance.poll())
    assert owner.resumed == []


async def test_a_job_that_fills_the_disk_each_time(tmp_path):
    """A job that comes back at once is tried less and less often, but never given up."""
    owner = Owner(tmp_path)
    owner.jobs = [Stalled("job_1", [tmp_path])]
    for _ in range(400):
        await asyncio.gather(*await owner.maintenance.poll())
        owner.clock.at += POLL_S
    times = [at for _, at in owner.resumed]
    pauses = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert pauses[:3] == [5.0, 10.0, 20.0] and max(pauses) == RETRY_MAX_S == pauses[-1]


async def test_a_resume_that_waits_holds_up_no_other(tmp_path):
    """While a job waits for a store that is away, others are resumed, and no second attempt begins; close ends it."""
    owner = Owner(tmp_path)
    waiting, resume = asyncio.Event(), owner.resume

    async def resume_slowly(job_id: str) -> None:
        await resume(job_id)
        if job_id == "job_1":
            waiting.set()
            await asyncio.Event().wait()

    owner.maintenance._resume = resume_slowly
    owner.jobs = [Stalled("job_1", [tmp_path]), Stalled("job_2", [tmp_path])]
    slow, fast = await owner.maintenance.poll()
    await fast
    await waiting.wait()
    owner.clock.at += RETRY_MAX_S
    await asyncio.gather(*await owner.maintenance.poll())
    assert [job for job, _ in owner.resumed] == ["job_1", "job_2", "job_2"]
    await owner.maintenance.close()
    assert slow.cancelled()


async def test_what_cannot_be_deleted_is_tried_less_and_less_often(tmp_path, caplog):
    """Deleting old records that fails is tried again with growing pauses, and soon again after it has succeeded once.
    Each failure is logged.
    """
    owner = Owner(tmp_path)
    owner.can_tidy = False
    owner.maintenance.start()
    await until(lambda: owner.clock.at > 3 * TIDY_S)
    pauses = [after - before for before, after in pairwise(owner.tidied)]
    assert pauses == sorted(pauses) and pauses[:3] == [POLL_S, 2 * POLL_S, 4 * POLL_S] and len(pauses) < 15
    assert caplog.text.count("nothing can be deleted") == len(owner.tidied)
    owner.can_tidy, failures = True, len(owner.tidied)
    await until(lambda: len(owner.tidied) == failures + 2)
    assert owner.tidied[-1] - owner.tidied[-2] == TIDY_S
    owner.can_tidy = False
    await until(lambda: len(owner.tidied) == failures + 4)
    assert owner.tidied[-1] - owner.tidied[-2] == POLL_S
    await owner.maintenance.close()
