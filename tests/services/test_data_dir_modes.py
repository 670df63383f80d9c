"""A data directory is its user's alone, whatever it was before, and what is anybody else's is refused."""

from __future__ import annotations

import errno
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batchmill import part_files
from batchmill.errors import InvalidConfig, JobPaused
from batchmill.services.data_dirs.data_dirs import make_private, prepare_data_dir
from batchmill.store.sql.database import Database


def mode(path: Path) -> int:
    return path.lstat().st_mode & 0o777


def test_what_others_could_read_is_mended_once_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that others can open is this user's alone once it was opened, with all that lies in it, and one line
    says so the one time."""
    place = tmp_path / "data"
    (place / "jobs" / "one").mkdir(parents=True)
    for name in ("batchmill.db", "batchmill.db-wal", "secrets.key"):
        (place / name).write_text("x")
        (place / name).chmod(0o644)
    monkeypatch.chdir(place)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("control.sock")
    for each in (place, place / "jobs", place / "control.sock"):
        each.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        prepare_data_dir(place)
        prepare_data_dir(place)
    assert [mode(each) for each in (place, place / "jobs")] == [0o700, 0o700]
    files = ("batchmill.db", "batchmill.db-wal", "secrets.key", "control.sock")
    assert [mode(place / name) for name in files] == [0o600] * 4
    assert [each.getMessage() for each in caplog.records] == [
        f"other users could open the data directory {place}: now only this user can"
    ]


def test_links_are_not_followed(tmp_path: Path) -> None:
    """What a link in the folder leads to keeps its mode."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    (outside / "page").write_text("x")
    (outside / "page").chmod(0o644)
    place = tmp_path / "data"
    place.mkdir(mode=0o755)
    (place / "secrets.key").symlink_to(outside / "page")
    (place / "jobs").symlink_to(outside)
    assert make_private(place)
    assert [mode(each) for each in (place, outside, outside / "page")] == [0o700, 0o755, 0o644]


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """A data directory that belongs to another user is refused with both users named, and keeps its mode."""
    place = tmp_path / "data"
    place.mkdir(mode=0o755)
    other = os.geteuid() + 1
    with pytest.raises(InvalidConfig, match=f"belongs to the user {os.geteuid()}, and batchmill runs as {other}"):
        make_private(place, other)
    assert mode(place) == 0o755


def test_the_database_is_never_readable_by_others(tmp_path: Path) -> None:
    """The database and the files that SQLite puts beside it are made for this user alone, whatever the umask."""
    before = os.umask(0)
    try:
        database = Database(tmp_path / "batchmill.db")
        there = {path.name: mode(path) for path in tmp_path.iterdir()}
        database.close()
    finally:
        os.umask(before)
    assert "batchmill.db-wal" in there and set(there.values()) == {0o600}


def test_a_new_data_directory_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder on the way to a data directory that is made is brought to the disk in the one that it lies in, and
    the one that is there already, which may be of a process that was killed.
    """
    synced: list[Path] = []
    monkeypatch.setattr(part_files, "sync_folder", synced.append)
    place = tmp_path / "one" / "two" / "data"
    prepare_data_dir(place)
    assert synced == [tmp_path.parent, tmp_path, tmp_path / "one", tmp_path / "one" / "two"]
    assert mode(place) == 0o700
    prepare_data_dir(place)
    assert len(synced) == 4


@pytest.mark.parametrize(
    ("number", "kind", "expected"),
    [
        (errno.ENOSPC, JobPaused, "the disk is full"),
        (errno.EMFILE, JobPaused, "too many files are open"),
        (errno.EIO, JobPaused, "the disk failed"),
        (errno.EROFS, InvalidConfig, "--data-dir"),
    ],
)
def test_what_is_wrong_with_the_machine_is_no_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], expected: str
) -> None:
    """A data directory that the machine cannot open now is told as such; one that it never could is to be another."""

    def fails(folder: Path) -> None:
        raise OSError(number, os.strerror(number), str(folder))

    monkeypatch.setattr(part_files, "sync_folder", fails)
    with pytest.raises(kind, match=expected):
        prepare_data_dir(tmp_path / "data")


def test_threads_prepare_it_at_once(tmp_path: Path) -> None:
    """As programs with several jobs do: none takes another's trial for a fault, and nothing stays of them."""
    with ThreadPoolExecutor(8) as threads:
        for prepared in [threads.submit(prepare_data_dir, tmp_path / "data") for _ in range(200)]:
            prepared.result()
    assert list((tmp_path / "data").iterdir()) == []
