"""What drives work with, and what a job takes of its project's disk while it is prepared: looked at whenever its child
says how far it is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct

from batchmill.children.offload import Offload
from batchmill.errors import OverQuota
from batchmill.jobs import adapters
from batchmill.jobs.commits import Books
from batchmill.jobs.dispatcher import Dispatcher
from batchmill.jobs.job_files import bytes_in
from batchmill.ports import Adapters, Clock
from batchmill.store.ballast import Ballast
from batchmill.store.disk_room import DiskRoom, Writing
from batchmill.wire.job_spec import JobSpec


class Tools(Struct, frozen=True):
    """What every drive of a data directory works with."""

    data_dir: Path
    books: Books
    dispatcher: Dispatcher
    clock: Clock
    ballast: Ballast
    offload: Offload  # in children that are kept for what comes next
    adapters: Callable[[], Adapters] = adapters.NoAdapters
    room: Callable[[], DiskRoom] | None = None  # where what projects have is counted

    def quota_of(self, spec: JobSpec) -> int | None:
        """How many unfinished jobs the project of a job that came by a door may have; None: it did not."""
        room = self.room_of(spec)
        return None if room is None else room.quotas.of(spec.project).unfinished_jobs

    def room_of(self, spec: JobSpec) -> DiskRoom | None:
        """As `quota_of`: where its bytes count."""
        return None if spec.origin is None or self.room is None else self.room()


class Preparing(Struct):
    """A dataset that is being unpacked, or looked at. `bytes_left` None: nothing bounds it but the disk.

    `over` is what ended it: its project had no room any more.
    """

    folder: Path
    writing: Writing | None = None
    bytes_left: int | None = None
    no_room: str = ""
    over: OverQuota | None = None

    def look(self, stop: Callable[[], object]) -> None:
        """See how much is written now; `stop` the work where it is too much."""
        if self.writing is None or self.over is not None:
            return
        try:
            self.writing.grew_to(bytes_in(self.folder))
        except OverQuota as error:
            self.over = error
            stop()


@asynccontextmanager
async def preparing(room: DiskRoom | None, project: str, folder: Path) -> AsyncIterator[Preparing]:
    """Room for a dataset that is written to `folder`; None: whoever runs the machine asks. Raises: OverQuota."""
    if room is None:
        yield Preparing(folder)
        return
    writing = await room.begin(project)
    try:
        yield Preparing(folder, writing, writing.left, writing.refusal.message)
    finally:
        writing.end()
