"""Backups of the database, made while it is in use, to restore from if the file is damaged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sqlite3
import time
from pathlib import Path

from batchmill import faults
from batchmill.config import BackupsEntry
from batchmill.errors import BatchmillError, LedgerBroken, StorageFull
from batchmill.part_files import make_folder, sync_folder
from batchmill.ports.clock import Clock
from batchmill.store.names import DATABASE
from batchmill.store.sql.damaged_database import is_sound

log = logging.getLogger("batchmill.owner")

FREE_BYTES_MIN = 256 * 1024 * 1024  # disk space that a backup leaves for jobs
FIRST_S = 3600.0  # the delay of the first backup: before that there is little to lose
FOLDER, PREFIX, SUFFIX, PART = "backups", "batchmill-", ".db", "batchmill.db.part"


async def keep_backups(backups: Backups) -> None:
    """Run `Backups.sweep`. An error is logged, not raised."""
    try:
        await backups.sweep()
    except (BatchmillError, OSError) as error:
        log.warning("%s", error)


class Backups:
    """The backups of a data directory that this process owns."""

    def __init__(self, data_dir: Path, clock: Clock, entry: BackupsEntry) -> None:
        self._data_dir, self._clock, self._entry = data_dir, clock, entry

    async def sweep(self) -> Path | None:
        """Make a backup if the newest is old enough, and remove the oldest beyond the number to keep.

        Raises: StorageFull; LedgerBroken if part of the database cannot be read.
        """
        return await asyncio.to_thread(self._sweep)

    def _sweep(self) -> Path | None:
        folder = self._data_dir / FOLDER
        (folder / PART).unlink(missing_ok=True)  # left by a process that was killed
        if self._entry.keep == 0:
            return None
        make_folder(folder)
        if not self._is_due(folder):
            return None
        target = folder / time.strftime(f"{PREFIX}%Y%m%dT%H%M%SZ{SUFFIX}", time.gmtime(self._clock.now()))
        _copy(self._data_dir / DATABASE, folder / PART)
        faults.point("before_backup")
        os.replace(folder / PART, target)
        sync_folder(folder)
        faults.point("after_backup")
        others = [path for path in list_backups(self._data_dir, self._clock.now()) if path != target]
        for old in others[self._entry.keep - 1 :]:
            old.unlink()
        return target

    def _is_due(self, folder: Path) -> bool:
        now = self._clock.now()
        backups = list_backups(self._data_dir, now)
        newest_path, wait_s = (
            (backups[0], self._entry.interval_s) if backups else (folder, min(self._entry.interval_s, FIRST_S))
        )
        age_s = now - newest_path.stat().st_mtime
        return not 0 <= age_s < wait_s  # ignore a time in the future


def list_backups(data_dir: Path, now: float) -> list[Path]:
    """Return the backups, newest first. Those with a time in the future (the clock was ahead) come last."""
    paths = (data_dir / FOLDER).glob(f"{PREFIX}*{SUFFIX}")
    return sorted(paths, key=lambda path: (path.stat().st_mtime <= now, path.name), reverse=True)


def newest(data_dir: Path) -> Path | None:
    """Return the newest backup that is sound."""
    return next((path for path in list_backups(data_dir, time.time()) if is_sound(path)), None)


def _check_free_space(database: Path, folder: Path) -> None:
    """Raises: StorageFull if the backup would leave jobs too little disk space."""
    log_file = database.with_name(f"{database.name}-wal")
    needed_bytes = sum(path.stat().st_size for path in (database, log_file) if path.exists())
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes + FREE_BYTES_MIN:
        raise StorageFull(
            f"a backup of the database needs {needed_bytes:,} bytes, and {FREE_BYTES_MIN:,} must stay free, but "
            f"{folder} has only {free_bytes:,}: free some space, or keep fewer backups"
        )


def _copy(database: Path, target: Path) -> None:
    """Make a consistent, durable copy of the database. Writers do not wait for it."""
    _check_free_space(database, target.parent)
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    try:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=5.0)) as db:
            db.execute("VACUUM INTO ?", (str(target),))
        with open(target, "rb") as file:
            os.fsync(file.fileno())
    except sqlite3.Error as error:
        target.unlink(missing_ok=True)
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            raise StorageFull(f"no space is left for a backup of the database in {target.parent}") from error
        raise LedgerBroken(
            f"the database {database} could not be copied: {error}; earlier backups are kept. If it is "
            "damaged, stop the server and run `batchmill ledger salvage`",
            code="backup_failed",
        ) from error
