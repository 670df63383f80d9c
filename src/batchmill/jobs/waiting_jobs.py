"""Jobs that a server lets go on by itself: those that had no room, and those that end although a provider is silent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from batchmill.jobs import job_records
from batchmill.jobs.caretaker import Waiting
from batchmill.jobs.job_files import read_spec
from batchmill.jobs.roster import Roster
from batchmill.states import PauseReason
from batchmill.store.database import Database
from batchmill.store.disk_room import DiskRoom


class WaitingJobs:
    def __init__(self, data_dir: Path, database: Database, roster: Roster, room: Callable[[], DiskRoom]) -> None:
        """Args: room: where the bytes of projects are counted."""
        self._data_dir, self._database, self._roster, self._room = data_dir, database, roster, room
        self.stranded: set[str] = set()  # jobs of doors that would go on, but for a full disk

    async def look(self) -> Sequence[Waiting]:
        """Which of them to try again; what runs for projects that have no room left is paused."""
        await self._see_quotas()
        read, room = self._database.read, self._room()
        stuck = PauseReason.STORAGE_FULL, PauseReason.STORAGE_FAILED
        found = [record for reason in stuck for record in await read(job_records.paused_for, reason)]
        kept_out = await read(job_records.paused_for, PauseReason.DISK_QUOTA)
        has_room = {project: await room.has_room(project) for project in {each["project"] for each in kept_out}}
        found += [record for record in kept_out if has_room[record["project"]]]
        stopped = await read(job_records.paused_for, PauseReason.ROUTE_FAILED)
        found += [record for record in stopped if record["cancelling"] is not None]
        paused = {record["id"] for record in found}
        found += [await read(job_records.find, job_id) for job_id in self.stranded - paused]
        specs = [read_spec(record["spec"]) for record in found]
        return [
            Waiting(spec.id, [self._data_dir, *([Path(spec.output).parent] if spec.output is not None else [])])
            for spec in specs
        ]

    async def _see_quotas(self) -> None:
        room = self._room()
        running = [drive for drive in self._roster.drives() if drive.spec.origin is not None]
        for project in {drive.spec.project for drive in running}:
            has, most = await room.look(project)
            if has > most:
                for drive in running:
                    if drive.spec.project == project:
                        drive.refuse_more(room.refusal(project))
