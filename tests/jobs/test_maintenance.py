"""Maintenance: jobs go on when a disk that was full has room again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fakes.held_clock import HeldClock

from batchmill.jobs.maintenance import POLL_S, RETRY_MAX_S, Maintenance, Stalled
from batchmill.store.disk_room import RESERVE_BYTES, DiskReserve


class Owner:
    def __init__(self, folder: Path) -> None:
        self.clock, self.folder = HeldClock(), folder
        self.jobs: list[Stalled] = []
        self.resumed: list[tuple[str, float]] = []
        self.maintenance = Maintenance(
            self.clock, DiskReserve(folder / "disk_reserve"), self.stalled, self.resume, self.tidy
        )

    async def stalled(self) -> list[Stalled]:
        return self.jobs

    async def tidy(self) -> None:
        """There is nothing to forget."""

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
