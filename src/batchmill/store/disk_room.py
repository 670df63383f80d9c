"""Disk space: free space, the usage of each project, and a reserve for recording a full disk."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import OverQuota, TermOver
from batchmill.owned_files import OwnedFiles
from batchmill.owner_term import ENDLESS, Term
from batchmill.store.quotas import over_quota
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import adapters, files, jobs, upload_parts
from batchmill.types import ProjectQuotas
from batchmill.types.machines import size_text

RESERVE_BYTES = 4 * 1024 * 1024


class DiskReserve:
    """A file that reserves disk space for recording that the disk is full. It stays while it may be another owner's.

    Args: term: see `Database.term`.
    """

    def __init__(self, path: Path, term: Term = ENDLESS) -> None:
        self._path, self._owned = path, OwnedFiles(term)

    def reserve(self) -> None:
        """Allocate the reserve. Without enough space there is none until the next call."""
        if self._path.exists() and self._path.stat().st_size == RESERVE_BYTES:
            return
        with suppress(TermOver):
            if not self._owned.allocate(self._path, RESERVE_BYTES):
                self.release()

    def release(self) -> None:
        """Free the reserve."""
        with suppress(TermOver):  # nothing can be stored then anyway
            self._owned.remove(self._path)


def _of(table: sa.Table, *where: sa.ColumnElement[bool]) -> sa.ScalarSelect[int]:
    mine = table.c.project == sa.bindparam("project")
    return sa.select(sa.func.coalesce(sa.func.sum(table.c.bytes), 0)).where(mine, *where).scalar_subquery()


# The bytes of a project. The results of jobs are counted as files once they can be downloaded.
USED = sa.select(_of(files) + _of(upload_parts) + _of(adapters, adapters.c.state != "removed") + _of(jobs))
RECENT_S = 1.0  # how long the usage of a project with over a tenth of its quota left is not read again
ROOM_BYTES, ROOM_SHARE = 16 * 1024 * 1024, 10  # free bytes, or part of the quota, before a job resumes
READS_MAX = 4  # of the usage of a project, while files are stored
WAY_OUT = "delete files, uploads or adapters"
T = TypeVar("T")


def used(db: sa.Connection, project: str) -> int:
    """The bytes of a project in the database."""
    return db.execute(USED, {"project": project}).scalar_one()


class DiskQuota:
    """The disk usage of each project against its quota. Concurrency: one event loop."""

    def __init__(self, database: Database, data_dir: Path, quotas: ProjectQuotas) -> None:
        self.database, self._data_dir, self.quotas = database, data_dir, quotas
        self._usage: dict[str, tuple[int, int]] = {}  # project -> bytes used when last read, and the quota
        self._read_at: dict[str, float] = {}  # project -> when it was last read, on the monotonic clock
        self._pending: Counter[str] = Counter()  # project -> bytes that are being written
        self._kept: Counter[str] = Counter()  # project -> bytes that were written and kept

    async def usage(self, project: str) -> tuple[int, int]:
        """The bytes of a project, including those being written, and its limit."""
        reads = 0
        while True:
            kept_before = self._kept[project]
            used_bytes, most = await self.database.read(self._read, project)
            kept_meanwhile, reads = self._kept[project] - kept_before, reads + 1
            if kept_meanwhile == 0 or reads == READS_MAX:
                break
        # A read that began before a file was stored may not have it: after the last one, such files may count twice.
        self._usage[project] = used_bytes + kept_meanwhile, most
        self._read_at[project] = time.monotonic()
        return self._usage[project][0] + self._pending[project], most

    def _read(self, db: sa.Connection, project: str) -> tuple[int, int]:
        disk = os.statvfs(self._data_dir)
        return used(db, project), self.quotas.of(project).disk_bytes(disk.f_blocks * disk.f_frsize)

    async def check(self, project: str, adding: int = 1) -> None:
        """Raises: OverQuota if a project has no room for this many more bytes."""
        read_at = self._read_at.get(project, 0.0)
        is_recent = read_at and time.monotonic() - read_at < RECENT_S
        if is_recent and self.left(project) - adding > self._usage[project][1] // 10:
            return  # recently far from its quota, and later bytes are counted
        has, most = await self.usage(project)
        if has + adding > most:
            raise self.refusal(project)

    async def has_room(self, project: str) -> bool:
        """Whether a project has enough free bytes for its jobs to resume."""
        has, most = await self.usage(project)
        return most - has >= min(ROOM_BYTES, most // ROOM_SHARE)

    async def begin(self, project: str) -> Writing:
        """Begin to write; always call `end`. Raises: OverQuota if there is no room."""
        await self.check(project)
        return Writing(self, project)

    def refusal(self, project: str) -> OverQuota:
        """The error of a project without room."""
        used_bytes, most = self._usage[project]
        size = size_text(used_bytes + self._pending[project])
        return over_quota("disk", project, f"has {size} on the disk", size_text(most), WAY_OUT)

    def grow(self, project: str, by: int) -> None:
        """Count more bytes being written. Raises: OverQuota if they are too many; they count nevertheless."""
        self._pending[project] += by
        if by > 0 and self.left(project) < 0:
            raise self.refusal(project)

    def left(self, project: str) -> int:
        used_bytes, most = self._usage[project]
        return most - used_bytes - self._pending[project]

    def end(self, project: str, size_bytes: int, is_kept: bool) -> None:
        used_bytes, most = self._usage[project]
        self._pending[project] -= size_bytes
        if is_kept:
            self._kept[project] += size_bytes
            self._usage[project] = used_bytes + size_bytes, most


class Writing:
    """Bytes of a project that are being written."""

    def __init__(self, quota: DiskQuota, project: str) -> None:
        self._quota, self._project = quota, project
        self._size, self._has_ended = 0, False

    def grew_to(self, size_bytes: int) -> None:
        """Set the number of bytes written, or about to be written. Raises: OverQuota."""
        if not self._has_ended and size_bytes != self._size:
            by, self._size = size_bytes - self._size, size_bytes
            self._quota.grow(self._project, by)

    @property
    def left(self) -> int:
        """The number of bytes that the quota still allows."""
        return max(0, self._quota.left(self._project))

    @property
    def refusal(self) -> OverQuota:
        return self._quota.refusal(self._project)

    def end(self, *, is_kept: bool = False) -> None:
        """Finish: the bytes are in the database now (`is_kept`), or deleted. May be called twice."""
        if not self._has_ended:
            self._has_ended = True
            self._quota.end(self._project, self._size, is_kept)


class Preparing(Struct):
    """A dataset that is being unpacked or checked. `bytes_left` None: only the disk limits it."""

    folder: Path
    writing: Writing | None = None
    bytes_left: int | None = None
    no_space_message: str = ""
    over: OverQuota | None = None  # its project has reached its quota
    work: asyncio.Future[object] | None = None

    def check_usage(self) -> None:
        """Count the bytes written so far; cancel the work if they exceed the quota."""
        if self.writing is None or self.over is not None:
            return
        try:
            self.writing.grew_to(bytes_in(self.folder))
        except OverQuota as error:
            self.over = error
            if self.work is not None:
                self.work.cancel()

    async def stoppable(self, work: Awaitable[T]) -> T:
        """Run work that writes to the folder; return its result. Raises: OverQuota if `check_usage` cancelled it."""
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
async def preparing(disk_quota: DiskQuota | None, project: str, folder: Path) -> AsyncIterator[Preparing]:
    """Count a dataset that is written to `folder`. `disk_quota` None: a command without a quota. Raises: OverQuota."""
    if disk_quota is None:
        yield Preparing(folder)
        return
    writing = await disk_quota.begin(project)
    try:
        yield Preparing(folder, writing, writing.left, writing.refusal.message)
    finally:
        writing.end()


def bytes_in(folder: Path) -> int:
    """The total size of the files in a folder. Files may be deleted meanwhile."""
    total = 0
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
    return total
