"""The caretaker: jobs go on when a disk that was full has room again."""

from __future__ import annotations

from pathlib import Path

from fakes.held_clock import HeldClock

from batchmill.jobs.caretaker import AGAIN_MAX_S, LOOK_S, Caretaker, Waiting
from batchmill.store.ballast import BALLAST_BYTES, Ballast


class Keeper:
    def __init__(self, folder: Path) -> None:
        self.clock, self.folder = HeldClock(), folder
        self.jobs: list[Waiting] = []
        self.resumed: list[tuple[str, float]] = []
        self.caretaker = Caretaker(self.clock, Ballast(folder / "ballast"), self.waiting, self.resume, self.tidy)

    async def waiting(self) -> list[Waiting]:
        return self.jobs

    async def tidy(self) -> None:
        """There is nothing to forget."""

    async def resume(self, job_id: str) -> None:
        self.resumed.append((job_id, self.clock.at))


async def test_a_job_goes_on_when_there_is_room(tmp_path):
    """A job whose folders have room is resumed, after the ballast is in its place again."""
    keeper = Keeper(tmp_path)
    await keeper.caretaker.look()
    assert keeper.resumed == [] and not (tmp_path / "ballast").exists()
    keeper.jobs = [Waiting("job_1", [tmp_path])]
    await keeper.caretaker.look()
    assert [job for job, _ in keeper.resumed] == ["job_1"]
    assert (tmp_path / "ballast").stat().st_size == BALLAST_BYTES


async def test_without_room_nothing_is_tried(tmp_path):
    """A folder on a file system that has no room keeps its job waiting."""
    keeper = Keeper(tmp_path)
    keeper.jobs = [Waiting("job_1", [tmp_path, Path("/proc")])]  # procfs has 0 bytes free
    await keeper.caretaker.look()
    assert keeper.resumed == []


async def test_a_job_that_fills_the_disk_each_time(tmp_path):
    """A job that comes back at once is tried less and less often, but never given up."""
    keeper = Keeper(tmp_path)
    keeper.jobs = [Waiting("job_1", [tmp_path])]
    for _ in range(400):
        await keeper.caretaker.look()
        keeper.clock.at += LOOK_S
    times = [at for _, at in keeper.resumed]
    pauses = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert pauses[:3] == [5.0, 10.0, 20.0] and max(pauses) == AGAIN_MAX_S == pauses[-1]
