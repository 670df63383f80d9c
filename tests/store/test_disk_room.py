"""The bytes of a project: what is being written and what is stored never exceed its quota."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.databases import open_database

from batchmill.errors import OverQuota
from batchmill.store.disk_room import READS_MAX, DiskQuota
from batchmill.store.sql.tables import files
from batchmill.types import ProjectQuotas, Quotas

QUOTA = 100_000


class Gate:
    """Where a reader waits."""

    def __init__(self) -> None:
        self.is_closed, self.reached, self.opened = False, threading.Event(), threading.Event()

    def pass_through(self) -> None:
        if self.is_closed:
            self.reached.set()
            assert self.opened.wait(30)
            self.opened.clear()


class SlowQuotas(ProjectQuotas, frozen=True, kw_only=True):
    """Quotas that stop a reader of `DiskQuota` after it has read the bytes of a project."""

    gate: Gate

    def of(self, project: str) -> Quotas:
        self.gate.pass_through()
        return super().of(project)


class Room:
    def __init__(self, folder: Path) -> None:
        self.database = open_database(folder / "batchmill.db")
        self.gate, self._stored = Gate(), 0
        self.disk = DiskQuota(self.database, folder, SlowQuotas(Quotas(disk=QUOTA), gate=self.gate))

    async def insert(self, size_bytes: int) -> None:
        """Store the record of a file."""
        self._stored += 1
        row = {"id": str(self._stored), "project": "p", "purpose": "x", "created": 1.0, "bytes": size_bytes}
        await self.database.write(lambda db: db.execute(sa.insert(files).values(**row, filename="f")) and None)

    async def until_read(self) -> None:
        """Return once a reader has read the bytes of the project, and waits."""
        assert await asyncio.to_thread(self.gate.reached.wait, 30)
        self.gate.reached.clear()


@pytest.fixture
async def room(tmp_path: Path):
    room = Room(tmp_path)
    yield room
    room.database.close()


async def test_a_file_that_is_stored_while_the_usage_is_read(room: Room):
    """A read that began before a file was stored does not make the project forget the file."""
    writing = await room.disk.begin("p")
    writing.grew_to(60_000)
    room.gate.is_closed = True
    reading = asyncio.create_task(room.disk.usage("p"))
    await room.until_read()
    await room.insert(60_000)
    writing.end(is_kept=True)
    room.gate.is_closed = False
    room.gate.opened.set()
    assert await reading == (60_000, QUOTA)
    assert room.disk.left("p") == 40_000
    with pytest.raises(OverQuota):
        await room.disk.check("p", 40_001)


async def test_files_that_are_stored_during_every_read(room: Room):
    """The usage of a project is known although files are stored again and again: none of them is forgotten."""
    writings = [await room.disk.begin("p") for _ in range(READS_MAX)]
    room.gate.is_closed = True
    reading = asyncio.create_task(room.disk.usage("p"))
    for writing in writings:
        await room.until_read()
        writing.grew_to(1000)
        await room.insert(1000)
        writing.end(is_kept=True)
        room.gate.opened.set()
    assert await reading == (READS_MAX * 1000, QUOTA)
