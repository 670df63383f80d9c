"""FileLog: short files that are durable in the database before they are durable on the disk.

A file costs two syncs, its own and its folder's. The bytes of a short one lie in the database with the record that
names it, so the sync of that transaction is enough: the file itself is written without one. A while later many files
are synced together, and the database forgets their bytes. What a loss of power took is written again when the database
is opened, before anything reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path

import sqlalchemy as sa
from msgspec import Struct

from batchmill import faults
from batchmill.errors import BatchmillError, StorageFailed, to_storage_error
from batchmill.owned_files import OwnedFiles
from batchmill.part_files import sync_folder
from batchmill.store.sql.compiled import CompiledStatement
from batchmill.store.sql.database import Database
from batchmill.store.sql.portable import put
from batchmill.store.sql.tables import logged_files

log = logging.getLogger("batchmill.store")

FILE_BYTES_MAX = 64 * 1024  # a longer one is synced by itself
SYNC_EVERY_S = 2.0
BATCH_MAX = 500  # files that are synced together, and forgotten in one transaction

# Links come last: what they link to is on the disk by then.
_ORDER = logged_files.c.source.is_not(None), logged_files.c.path
_NEXT = sa.select(logged_files.c.path, logged_files.c.number, logged_files.c.source).order_by(*_ORDER).limit(BATCH_MAX)
_WHOLE = sa.select(logged_files).where(logged_files.c.path.in_(sa.bindparam("paths", expanding=True))).order_by(*_ORDER)
_OF_PATH = logged_files.c.path == sa.bindparam("of_path")
_FORGET = CompiledStatement(
    logged_files.delete().where(
        logged_files.c.path.in_(sa.bindparam("paths", expanding=True)),
        logged_files.c.number <= sa.bindparam("newest"),
    )
)
_FORGET_ANY = CompiledStatement(logged_files.delete().where(_OF_PATH))


class _Logged(Struct, frozen=True):
    """A file of which the database has the bytes, or what it is a link to."""

    path: str
    number: int
    source: str | None


class FileLog:
    """The log of a data directory. Paths are absolute, and below it.

    Concurrency: `write`, `link` and `forget` run in the thread that writes the database, inside a transaction.
    """

    def __init__(self, database: Database, data_dir: Path) -> None:
        self._database, self._home, self._begin = database, data_dir, f"{data_dir}/"
        self._owned = OwnedFiles(database.term)
        self._number = 0  # of the newest file; a file that is written again gets another one
        self._has_some = True  # perhaps
        self._is_uncertain = self._is_opening = True  # the files may lack what the database has of them
        self._syncing = asyncio.Lock()

    def write(self, db: sa.Connection, path: Path, data: bytes) -> None:
        """Write a file, or replace it. It is durable once the transaction is, and may be there without it.

        Raises: OSError. TermOver where another process may have become the owner: the file may be its own.
        """
        assert len(data) <= FILE_BYTES_MAX, "a longer file is synced by itself"
        with self._logged(db, path, None, data):
            self._owned.create(path, data)

    def link(self, db: sa.Connection, source: Path | str, target: Path | str) -> int | None:
        """Link a file to another name, as `write`. Returns its size; None: it is not there.

        The link would be made again of what the file is then: `sync` before its name gets other bytes.

        Raises: as `write`.
        """
        try:
            with self._logged(db, target, self._name(source), None):
                self._owned.link(source, target)
                return os.stat(target).st_size
        except FileNotFoundError:
            return None

    def forget(self, db: sa.Connection, paths: Iterable[Path | str]) -> None:
        """Forget files that are being removed."""
        if gone := [{"of_path": self._name(path)} for path in paths]:
            _FORGET_ANY.run_all(db, gone)

    @contextlib.contextmanager
    def _logged(self, db: sa.Connection, path: Path | str, source: str | None, data: bytes | None) -> Iterator[None]:
        """Store what a file is to be, then have it written.

        In this order: the database ends the transaction of a process that was stopped and replaced, which must not
        write over a file of its successor.
        """
        self._number += 1
        put(db, logged_files, {"path": self._name(path), "number": self._number, "source": source, "data": data})
        try:
            yield
        except OSError:
            self.forget(db, [path])
            raise
        self._has_some = True

    def _name(self, path: Path | str) -> str:
        name = str(path)
        assert name.startswith(self._begin), f"{name} is not below {self._begin}"
        return name[len(self._begin) :]

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Write again what was lost. Meanwhile files are synced in the background, and the rest at the end.

        Raises: StorageFull, StorageFailed.
        """
        try:
            await self.sync()
        except OSError as error:
            raise to_storage_error(error) or StorageFailed(f"files of the data directory: {error}") from error
        self._is_opening = False
        syncing = asyncio.create_task(self._sync_regularly())
        try:
            yield
        finally:
            syncing.cancel()
            await asyncio.wait({syncing})
            with contextlib.suppress(BatchmillError, OSError):  # the next owner does it
                await self.sync()

    async def _sync_regularly(self) -> None:
        while True:
            await asyncio.sleep(SYNC_EVERY_S)
            try:
                await self.sync()
            except (BatchmillError, OSError) as error:
                log.warning("files could not be synced, and stay in the database until they can: %s", error)

    async def sync(self) -> None:
        """Make the files themselves durable, and have the database forget them: all that were written before."""
        async with self._syncing:
            await self._sync_all()

    async def _sync_all(self) -> None:
        synced: set[str] = set()  # a link to one of these is the same file
        while self._has_some:
            try:
                if not (found := await self._database.write(self._next)):
                    self._is_uncertain = False  # no file is left of which nothing is known
                    return
                if self._is_uncertain:
                    await self._database.write(self._restore_all, found)
                await asyncio.to_thread(self._sync, found, synced)
                faults.point("after_files_synced")
                await self._database.write(_forget, found)
            except BaseException:
                # The kernel tells once that it could not write, so nothing is known of any file.
                self._has_some = self._is_uncertain = True
                raise

    def _next(self, db: sa.Connection) -> list[_Logged]:
        """Files to be synced. In the thread that writes them: none is missed."""
        found = [_Logged(each.path, each.number, each.source) for each in db.execute(_NEXT)]
        self._has_some = len(found) == BATCH_MAX
        self._number = max([self._number, *(each.number for each in found)])
        return found

    def _sync(self, found: Sequence[_Logged], synced: set[str]) -> None:
        folders: set[str] = set()
        for each in found:  # thousands a minute: joining a Path takes longer than most of these
            path = f"{self._home}/{each.path}"
            with contextlib.suppress(FileNotFoundError):  # it has been removed
                if each.source not in synced:
                    _fsync(path)
                    synced.add(each.path)
                folders.add(path.rpartition("/")[0])
        for folder in folders:
            sync_folder(Path(folder))
        if len(found) < BATCH_MAX:
            self._is_uncertain = False

    def _restore_all(self, db: sa.Connection, found: Sequence[_Logged]) -> None:
        """Write files as the database has them now. In the thread that writes them: none is replaced meanwhile."""
        for each in db.execute(_WHOLE, {"paths": [each.path for each in found]}):
            path = self._home / each.path
            if self._is_opening or path.exists():  # else it has been removed
                self._restore(path, each.source, each.data)

    def _restore(self, path: Path, source: str | None, data: bytes | None) -> None:
        """Write a file as it was. Who has it open sees the same bytes as before."""
        self._owned.make_folder(path.parent)
        if data is not None:
            self._owned.overwrite(path, bytes(data))
        elif source is not None:
            first = self._home / source
            if not first.exists() or (path.exists() and path.samefile(first)):
                return  # what is left of a file whose first name is gone stays
            self._owned.link(first, path)


def _forget(db: sa.Connection, found: Sequence[_Logged]) -> None:
    """Forget files, but for those that were written again meanwhile."""
    newest = max(each.number for each in found)  # all numbers of what was not written again are below it
    _FORGET.run(db, {"paths": [each.path for each in found], "newest": newest})


def _fsync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
