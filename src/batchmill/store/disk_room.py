"""Disk space: free space, the usage of each project, and a reserve for recording a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import OverQuota
from batchmill.store.database import Database
from batchmill.store.quotas import over_quota
from batchmill.store.tables import adapters, files, jobs, upload_parts
from batchmill.types import ProjectQuotas
from batchmill.types.machines import size_text

RESERVE_BYTES = 4 * 1024 * 1024


class DiskReserve:
    def __init__(self, path: Path) -> None:
        self._path = path

    def reserve(self) -> None:
        """Allocate the reserve. If there is no space, the next owner tries again."""
        if self._path.exists() and self._path.stat().st_size == RESERVE_BYTES:
            return
        fd = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, RESERVE_BYTES)
        except OSError:
            self.release()
        finally:
            os.close(fd)

    def release(self) -> None:
        """Free the reserve."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


def _of(table: sa.Table, *where: sa.ColumnElement[bool]) -> sa.ScalarSelect[int]:
    mine = table.c.project == sa.bindparam("project")
    return sa.select(sa.func.coalesce(sa.func.sum(table.c.bytes), 0)).where(mine, *where).scalar_subquery()


# What holds bytes of a project: results of jobs are among the files, once somebody may fetch them.
USED = sa.select(_of(files) + _of(upload_parts) + _of(adapters, adapters.c.state != "removed") + _of(jobs))
RECENT_S = 1.0  # for so long a project with a tenth of its quota left is not looked at again
ROOM_BYTES, ROOM_SHARE = 16 * 1024 * 1024, 10  # free, or this share of its quota, before a job continues
WAY_OUT = "delete files, uploads or adapters"
T = TypeVar("T")


def used(db: sa.Connection, project: str) -> int:
    """The bytes of a project in the database."""
    return db.execute(USED, {"project": project}).scalar_one()


class DiskQuota:
    def __init__(self, database: Database, data_dir: Path, quotas: ProjectQuotas) -> None:
        self.database, self._data_dir, self.quotas = database, data_dir, quotas
        self._known: dict[str, tuple[int, int]] = {}  # project -> bytes it had when somebody last looked, and may have
        self._seen: dict[str, float] = {}  # project -> when that was
        self._pending: Counter[str] = Counter()  # project -> bytes that are being written

    async def look(self, project: str) -> tuple[int, int]:
        """The bytes of a project, including those being written, and its limit."""
        known = self._known[project] = await self.database.read(self._read, project)
        self._seen[project] = time.monotonic()
        return known[0] + self._pending[project], known[1]

    def _read(self, db: sa.Connection, project: str) -> tuple[int, int]:
        disk = os.statvfs(self._data_dir)
        return used(db, project), self.quotas.of(project).disk_bytes(disk.f_blocks * disk.f_frsize)

    async def check(self, project: str, adding: int = 1) -> None:
        """Raises: OverQuota if a project has no room for this many more bytes."""
        seen = self._seen.get(project, 0.0)
        is_recent = seen and time.monotonic() - seen < RECENT_S
        if is_recent and self.left(project) - adding > self._known[project][1] // 10:
            return  # far from its quota a moment ago: what was kept since is counted
        has, most = await self.look(project)
        if has + adding > most:
            raise self.refusal(project)

    async def has_room(self, project: str) -> bool:
        """Whether a project has room for more than the next few bytes, so that its jobs may resume."""
        has, most = await self.look(project)
        return most - has >= min(ROOM_BYTES, most // ROOM_SHARE)

    async def begin(self, project: str) -> Writing:
        """Begin to write; always call `end`. Raises: OverQuota if there is no room."""
        await self.check(project)
        return Writing(self, project)

    def refusal(self, project: str) -> OverQuota:
        """The error of a project without room."""
        known, most = self._known[project]
        held = size_text(known + self._pending[project])
        return over_quota("disk", project, f"has {held} on the disk", size_text(most), WAY_OUT)

    def grow(self, project: str, by: int) -> None:
        """Raises: OverQuota where it is too much; it counts all the same."""
        self._pending[project] += by
        if by > 0 and self.left(project) < 0:
            raise self.refusal(project)

    def left(self, project: str) -> int:
        known, most = self._known[project]
        return most - known - self._pending[project]

    def end(self, project: str, size_bytes: int, is_kept: bool) -> None:
        known, most = self._known[project]
        self._pending[project] -= size_bytes
        if is_kept:  # the next to begin looks for itself
            self._known[project] = known + size_bytes, most


class Writing:
    """Bytes being written."""

    def __init__(self, room: DiskQuota, project: str) -> None:
        self._room, self._project = room, project
        self._size, self._has_ended = 0, False

    def grew_to(self, size_bytes: int) -> None:
        """Count the bytes written, or about to be. Raises: OverQuota."""
        if not self._has_ended and size_bytes != self._size:
            by, self._size = size_bytes - self._size, size_bytes
            self._room.grow(self._project, by)

    @property
    def left(self) -> int:
        """How many more bytes there may be."""
        return max(0, self._room.left(self._project))

    @property
    def refusal(self) -> OverQuota:
        return self._room.refusal(self._project)

    def end(self, *, is_kept: bool = False) -> None:
        """Finish: the bytes are in the database now (`is_kept`), or deleted. May be called twice."""
        if not self._has_ended:
            self._has_ended = True
            self._room.end(self._project, self._size, is_kept)


class Preparing(Struct):
    """A dataset that is being unpacked, or checked. `bytes_left` None: only the disk bounds it."""

    folder: Path
    writing: Writing | None = None
    bytes_left: int | None = None
    no_room: str = ""
    over: OverQuota | None = None  # its project has no room any more
    work: asyncio.Future[object] | None = None

    def look(self) -> None:
        """Count what is written now; stop the work if it is too much."""
        if self.writing is None or self.over is not None:
            return
        try:
            self.writing.grew_to(bytes_in(self.folder))
        except OverQuota as error:
            self.over = error
            if self.work is not None:
                self.work.cancel()

    async def stoppable(self, work: Awaitable[T]) -> T:
        """The result of work that writes to the folder. Raises: OverQuota where `look` has stopped it."""
        future = self.work = asyncio.ensure_future(work)
        try:
            result = await future
        except asyncio.CancelledError:
            if self.over is None:
                raise
        if self.over is not None:
            raise self.over
        return result


@asynccontextmanager
async def preparing(room: DiskQuota | None, project: str, folder: Path) -> AsyncIterator[Preparing]:
    """Room for a dataset that is written to `folder`; None: a command's, without a quota. Raises: OverQuota."""
    if room is None:
        yield Preparing(folder)
        return
    writing = await room.begin(project)
    try:
        yield Preparing(folder, writing, writing.left, writing.refusal.message)
    finally:
        writing.end()


def bytes_in(folder: Path) -> int:
    """What the files of a folder take. Some may go meanwhile."""
    total = 0
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
    return total
