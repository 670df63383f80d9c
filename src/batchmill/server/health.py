"""Whether this server can take work: asked of what it stands on, not of what it was told."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import BatchmillError
from batchmill.ports import Clock
from batchmill.store.database import Database
from batchmill.store.tables import schema

FRESH_S = 1.0  # an answer is given again for so long: anybody may ask, and a look costs a commit
ANSWER_S = 5.0
ROOM_BYTES_MIN = 64 * 1024 * 1024


class Part(Struct, frozen=True):
    """One thing that the server stands on. `note` says what is wrong, or what it is doing."""

    name: str
    ok: bool
    note: str = ""


class Report(Struct, frozen=True):
    status: str  # ok, failing, stopping
    version: str
    parts: list[Part]


class Health:
    """`watched` are further parts: each call gives some, and must not wait."""

    def __init__(self, database: Database, data_dir: Path, clock: Clock, version: str) -> None:
        self._database, self._data_dir, self._clock, self._version = database, data_dir, clock, version
        self.watched: list[Callable[[], list[Part]]] = []
        self.is_stopping = False
        self._looking = asyncio.Lock()
        self._report: tuple[float, Report] | None = None

    async def report(self) -> Report:
        async with self._looking:
            now = self._clock.monotonic()
            if self._report is None or now - self._report[0] >= FRESH_S:
                self._report = (now, await self._look())
        report = self._report[1]
        return Report("stopping", report.version, report.parts) if self.is_stopping else report

    async def _look(self) -> Report:
        parts = [await self._see_database(), self._see_disk()]
        for watched in self.watched:
            parts += watched()
        is_ok = all(part.ok for part in parts)
        return Report("ok" if is_ok else "failing", self._version, parts)

    async def _see_database(self) -> Part:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._database.write(_touch)
        except BatchmillError as error:
            return Part(
                "database", False, "the disk is full" if error.code == "storage_full" else "it cannot be written"
            )
        except TimeoutError:
            return Part("database", False, f"a commit takes longer than {ANSWER_S:.0f} s")
        return Part("database", True)

    def _see_disk(self) -> Part:
        try:
            free = shutil.disk_usage(self._data_dir).free
        except OSError:
            return Part("disk", False, "the data directory cannot be read")
        return Part("disk", free >= ROOM_BYTES_MIN, f"{free // 2**20:,} MiB are free")


def _touch(db: sa.Connection) -> Any:
    """A commit that changes nothing: the page is written all the same."""
    return db.execute(schema.update().values(version=schema.c.version)).rowcount
