"""A database that is damaged or gone, and what `ledger salvage` makes of it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time

import pytest
from fakes.held_clock import HeldClock
from fakes.lossy_disk.disk import COMPILER, LossyDisk
from fakes.lost_machine import run_until
from finished_job import quiet
from ledgered_job import LedgeredJob
from msgspec.structs import replace

from batchmill.config import BackupsEntry
from batchmill.errors import InvalidConfig, StorageFull
from batchmill.faults import BACKUP_POINTS, SALVAGE_POINTS
from batchmill.jobs.ledger.audit import AuditOrder, verify
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.owned_files import OwnedFiles
from batchmill.services.data_dirs import backups, salvage
from batchmill.services.data_dirs.backups import Backups
from batchmill.store.file_log import FileLog
from batchmill.store.sql.damaged_database import is_sound
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import files, keys

JOB = "job_" + "1" * 20
ROWS, SHARD, KEYS = 400, 100, 300
PAGE = 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A data directory with a job of four shards, three of them run, some hundred keys and a file."""
    folder = tmp_path_factory.mktemp("model")
    job = LedgeredJob(folder, ROWS, SHARD, JOB)
    job.files.write_spec(job.spec, OwnedFiles())
    segment = job.segment()
    for first in range(0, 3 * SHARD, 50):
        job.run(segment, range(first, first + 50))
    segment.close()
    with job.ledger.database.writer.begin() as db:
        for number in range(KEYS):
            db.execute(keys.insert().values(
                id=f"k{number:04}", name="n" * 100, project="p", hash="0" * 64, scopes="read", created=1.0
            ))  # fmt: skip
        db.execute(files.insert().values(
            id="file-a", project="p", purpose="batch", filename="a.jsonl", bytes=2, created=1.0
        ))  # fmt: skip
    (job.data_dir / "files").mkdir()
    (job.data_dir / "files" / "file-a").write_bytes(b"{}")
    job.ledger.close()
    return job


@pytest.fixture
def data_dir(model, tmp_path):
    return shutil.copytree(model.data_dir, tmp_path / "data")


def roots(path):
    """Name of a table or index -> its first page."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return dict(db.execute("SELECT name, rootpage FROM sqlite_schema WHERE rootpage > 0"))


def overwrite(path, page, data=b"\xa5" * PAGE):
    with open(path, "r+b") as file:
        file.seek((page - 1) * PAGE)
        file.write(data)


def state_of(model, data_dir):
    """(rows that the ledger of the job counts, how many keys there are, ids of files), after an audit."""
    database = Database(data_dir / "batchmill.db")
    try:
        report = verify(
            AuditOrder(model.spec, str(data_dir), model.files.segment_place, Ledger(database).snapshot(JOB)), quiet
        )
        assert report.broken == []
        with database.reader.connect() as db:
            found = db.execute(files.select()).mappings().all()
            return report.rows_done, len(db.execute(keys.select()).all()), [each["id"] for each in found]
    finally:
        database.close()


def test_a_bad_page_in_any_table_or_index(model, data_dir):
    """Whichever table or index has a bad page, all rows of jobs stay; other tables lose at most those of the page."""
    whole = (data_dir / "batchmill.db").read_bytes()
    place = roots(data_dir / "batchmill.db")
    for name in ("jobs", "shards", "commits", "error_counts", "schema", "keys", "files", "sqlite_autoindex_jobs_1",
                 "sqlite_autoindex_keys_1", "jobs_by_project"):  # fmt: skip
        (data_dir / "batchmill.db").write_bytes(whole)
        overwrite(data_dir / "batchmill.db", place[name])
        assert not is_sound(data_dir / "batchmill.db")
        report = salvage.salvage(data_dir, lambda _: None)
        assert is_sound(data_dir / "batchmill.db") and not report.failed, name
        rows, kept, ids = state_of(model, data_dir)
        assert rows == 300, name
        assert kept == KEYS, name  # the damaged page of this table only refers to those with rows
        tables = {table.name: table for table in report.tables}
        assert name not in ("shards", "commits") or (tables[name].rows, tables[name].rebuilt) in ((0, 3), (0, 6)), name
        assert name != "jobs" or (tables[name].rows, tables[name].rebuilt, report.rebuilt) == (0, 1, [JOB])
        assert ids == ([] if name == "files" else ["file-a"]), name
        moved = data_dir / "lost+found" / "files" / "file-a"
        assert moved.exists() == (name == "files")
        if name == "files":
            os.rename(moved, data_dir / "files" / "file-a")


def test_rows_around_a_bad_page_are_kept(model, data_dir):
    """A bad page in the middle of a table costs the rows on it and no other."""
    path = data_dir / "batchmill.db"
    with contextlib.closing(sqlite3.connect(path)) as db:
        pages = [number for (number,) in db.execute(
            "SELECT pageno FROM dbstat WHERE name = 'keys' AND pagetype = 'leaf' ORDER BY pageno"
        )] if _has_dbstat(db) else _leaves_of_keys(path)  # fmt: skip
    bad = pages[len(pages) // 2]
    lost = path.read_bytes().count(b"n" * 100, (bad - 1) * PAGE, bad * PAGE)
    assert 0 < lost < KEYS
    overwrite(path, bad, b"\0" * PAGE)
    report = salvage.salvage(data_dir, lambda _: None)
    (table,) = [table for table in report.tables if table.is_damaged]
    assert table.name == "keys" and table.rows == KEYS - lost
    assert state_of(model, data_dir)[:2] == (300, table.rows)


def _has_dbstat(db):
    return ("ENABLE_DBSTAT_VTAB",) in db.execute("PRAGMA compile_options").fetchall()


def _leaves_of_keys(path):
    data = path.read_bytes()
    return [
        number for number in range(2, len(data) // PAGE + 1)
        if data[(number - 1) * PAGE] == 0x0D and data.count(b"n" * 100, (number - 1) * PAGE, number * PAGE) > 5
    ]  # fmt: skip


def test_files_that_sqlite_cannot_open(model, data_dir):
    """A zeroed header, a first page of noise, half a file, an empty one and none at all: every job is had again."""
    path = data_dir / "batchmill.db"
    whole = path.read_bytes()
    for name, data, kept in (
        ("header", bytes(100) + whole[100:], KEYS),
        ("first page", os.urandom(PAGE) + whole[PAGE:], KEYS),
        ("half", whole[: len(whole) // 2], None),
        ("torn", whole[:-100], None),
        ("noise", os.urandom(len(whole)), 0),
        ("empty", b"", 0),
        ("gone", None, 0),
    ):
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        report = salvage.salvage(data_dir, lambda _: None)
        assert not report.is_sound and report.failed == [], name
        rows, found, _ = state_of(model, data_dir)
        assert rows == 300 and (kept is None or found == kept), name
        if (moved := data_dir / "lost+found" / "files" / "file-a").exists():
            os.rename(moved, data_dir / "files" / "file-a")


def test_what_was_lost_comes_from_a_backup(model, data_dir):
    """Rows that cannot be read are taken from the newest backup; rows that were deleted since stay deleted."""
    assert backups.list_backups(data_dir, time.time()) == []
    assert Backups(data_dir, HeldClock(), BackupsEntry())._sweep() is not None
    path = data_dir / "batchmill.db"
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM files")
    for page in (roots(path)["keys"], *_leaves_of_keys(path)):
        overwrite(path, page)
    report = salvage.salvage(data_dir, lambda _: None)
    assert {table.name: table.from_backup for table in report.tables if table.is_damaged} == {"keys": KEYS}
    assert state_of(model, data_dir) == (300, KEYS, [])
    path.unlink()
    salvage.salvage(data_dir, lambda _: None)
    assert state_of(model, data_dir) == (300, KEYS, ["file-a"])


async def test_files_that_were_logged_at_a_backup(data_dir):
    """A file that a backup still had the bytes of was synced since: it stays what it has become."""
    database = Database(data_dir / "batchmill.db")
    await database.write(FileLog(database, data_dir).write, data_dir / "files" / "file-a", b"before")
    database.close()
    assert Backups(data_dir, HeldClock(), BackupsEntry())._sweep() is not None
    (data_dir / "files" / "file-a").write_bytes(b"after")
    (data_dir / "batchmill.db").unlink()
    salvage.salvage(data_dir, lambda _: None)
    database = Database(data_dir / "batchmill.db")
    async with FileLog(database, data_dir).open():
        assert (data_dir / "files" / "file-a").read_bytes() == b"after"
    database.close()


def test_a_sound_database_is_left_alone(data_dir):
    """Where nothing is damaged nothing is changed."""
    before = (data_dir / "batchmill.db").stat().st_ino
    assert salvage.salvage(data_dir, lambda _: None).is_sound
    assert (data_dir / "batchmill.db").stat().st_ino == before


def test_the_way_out_is_named(data_dir):
    """Whoever opens a damaged database, or none where there are jobs, is told of `ledger salvage`."""
    path = data_dir / "batchmill.db"
    overwrite(path, 1)
    with pytest.raises(InvalidConfig, match="ledger salvage"):
        Database(path)
    path.unlink()
    with pytest.raises(InvalidConfig, match="ledger salvage"):
        salvage.make_ready(data_dir)


SALVAGE = """
import sys
from pathlib import Path
from batchmill.services.data_dirs import salvage
salvage.salvage(Path(sys.argv[1]), lambda _: None)
"""


def test_killed_at_any_point(model, data_dir):
    """A salvage that is killed is finished by whoever opens the data directory next, or begun again."""
    path = data_dir / "batchmill.db"
    overwrite(path, roots(path)["files"])
    damaged = path.read_bytes()
    for point in SALVAGE_POINTS:
        fired = data_dir.parent / point
        killed = subprocess.run(
            [sys.executable, "-c", SALVAGE, str(data_dir)], env=os.environ | {"BATCHMILL_FAULT": f"{point}:1:{fired}"}
        )
        assert killed.returncode == -9 and fired.exists(), point
        salvage.make_ready(data_dir)
        if not is_sound(path):
            assert point == "before_salvaged" and path.read_bytes() == damaged
            salvage.salvage(data_dir, lambda _: None)
        assert state_of(model, data_dir) == (300, KEYS, []), point
        assert not (data_dir / "salvage").exists() and not (data_dir / "batchmill.db.salvaged").exists()
        moved = data_dir / "lost+found" / "files" / "file-a"
        assert moved.read_bytes() == b"{}", point
        os.rename(moved, data_dir / "files" / "file-a")
        shutil.rmtree(data_dir / "damaged")
        path.write_bytes(damaged)


@pytest.mark.skipif(COMPILER is None, reason="a C compiler builds the disk that loses what was not synced")
@pytest.mark.parametrize(("point", "names"), [("after_salvaged", "all"), ("after_strays", "synced")])
def test_power_is_lost_at_a_point(point, names, model, data_dir):
    """What is left of the file that names the damaged tables can be read, and what was moved is there."""
    path = data_dir / "batchmill.db"
    overwrite(path, roots(path)["files"])
    damaged = path.read_bytes()
    fired = data_dir.parent / point
    with contextlib.closing(LossyDisk(data_dir)) as disk:
        run_until(
            fired, [sys.executable, "-c", SALVAGE, str(data_dir)], data_dir,
            {**os.environ, **disk.environment, "BATCHMILL_FAULT": f"{point}:1:{fired}"},
        )  # fmt: skip
        disk.lose_power(random.Random(1), names, "synced")
    salvage.make_ready(data_dir)
    assert state_of(model, data_dir) == (300, KEYS, [])
    assert (data_dir / "lost+found" / "files" / "file-a").read_bytes() == b"{}"
    assert [each.read_bytes() == damaged for each in data_dir.glob("damaged/*/batchmill.db")] == [True]


def test_uploads_of_jobs_are_restored_with_their_names(model, data_dir):
    """The record of a file that a job reads comes back, beside inputs that are no uploads."""
    path, job = data_dir / "batchmill.db", JobFiles(data_dir, JOB)
    spec = job.read_spec()
    inputs = ["https://example.com/rows.jsonl", str(data_dir / "files" / "file-a")]
    origin = {"frontend": "native", "files": {inputs[0]: inputs[0], "file-a": "mine.jsonl"}}
    changed = replace(spec, dataset=replace(spec.dataset, paths=inputs), origin=origin)
    job.write_spec(changed, OwnedFiles())
    overwrite(path, roots(path)["files"])
    salvage.salvage(data_dir, lambda _: None)
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT id, filename FROM files").fetchall() == [("file-a", "mine.jsonl")]


def test_three_backups_are_kept(data_dir):
    """A backup is made once a day; the three newest stay, each of them whole."""
    clock = HeldClock()
    service = Backups(data_dir, clock, BackupsEntry())
    made = []
    for _ in range(5):
        made.append(service._sweep())
        os.utime(made[-1], (clock.now(), clock.now()))
        assert service._sweep() is None  # not twice in a day
        clock.at += 86_400
    assert backups.list_backups(data_dir, clock.now()) == made[:1:-1]
    assert all(is_sound(path) and path.stat().st_mode & 0o777 == 0o600 for path in made[2:])


def test_backups_of_the_future(data_dir):
    """Backups that a clock made which was ahead are the first to go, and keep none of the present from being made."""
    clock = HeldClock()
    service = Backups(data_dir, clock, BackupsEntry())

    def make(days):
        clock.at = 1_000.0 + days * 86_400.0
        if (made := service._sweep()) is not None:
            os.utime(made, (clock.now(), clock.now()))
        return made

    ahead = [make(days) for days in (1_000, 1_001, 1_002)]
    first = make(1)
    assert backups.list_backups(data_dir, clock.now()) == [first, *ahead[:0:-1]]
    assert make(1.5) is None  # one a day, all the same
    second, third = make(2), make(3)
    assert backups.list_backups(data_dir, clock.now()) == [third, second, first]


def test_a_backup_that_the_disk_has_no_room_for(data_dir, monkeypatch):
    """A backup that would take the last room from jobs is refused before a byte of it is written."""
    usage = shutil.disk_usage(data_dir)
    monkeypatch.setattr(backups.shutil, "disk_usage", lambda folder: usage._replace(free=backups.FREE_BYTES_MIN))
    with pytest.raises(StorageFull, match="must stay free"):
        Backups(data_dir, HeldClock(), BackupsEntry())._sweep()
    assert not list((data_dir / "backups").iterdir())


def test_a_backup_that_is_killed(data_dir):
    """What a killed backup left is removed, and the backups before it stay."""
    program = SALVAGE.split("salvage.salvage")[0] + (
        "from batchmill.services.data_dirs.backups import Backups\nfrom batchmill.config import BackupsEntry\n"
        "from batchmill.engines.clock import SystemClock\n"
        "Backups(Path(sys.argv[1]), SystemClock(), BackupsEntry(interval_s=1e-9, keep=1))._sweep()\n"
    )
    for number, point in enumerate(BACKUP_POINTS):
        fired = data_dir.parent / point
        killed = subprocess.run(
            [sys.executable, "-c", program, str(data_dir)], env=os.environ | {"BATCHMILL_FAULT": f"{point}:1:{fired}"}
        )
        assert killed.returncode == -9
        assert len(backups.list_backups(data_dir, time.time())) == number
    Backups(data_dir, HeldClock(), BackupsEntry(keep=1))._sweep()
    assert [path.name for path in (data_dir / "backups").iterdir()] == [backups.newest(data_dir).name]
