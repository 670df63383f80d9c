"""Files and folders that outlive a loss of power."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from batchmill import part_files
from batchmill.part_files import make_folder


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_folder_whose_maker_was_killed(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process that uses it makes its name durable, before it makes others in it; no later one does so again.
    Folders of a user are left as they are.
    """
    synced: list[Path] = []

    def kill(folder: Path) -> None:
        if folder == tmp_path / "a":
            raise Killed

    os.chmod(tmp_path, 0o1777)
    monkeypatch.setattr(part_files, "sync_folder", kill)
    with pytest.raises(Killed):
        make_folder(tmp_path / "a" / "b" / "c", mode)
    assert not (tmp_path / "a" / "b" / "c").exists()
    monkeypatch.setattr(part_files, "sync_folder", synced.append)
    make_folder(tmp_path / "a" / "b" / "c", mode)
    assert synced == [tmp_path / "a", tmp_path / "a" / "b"]
    make_folder(tmp_path / "a" / "b" / "c", mode)
    make_folder(tmp_path / "a" / "b" / "d", mode)
    assert synced[2:] == [tmp_path / "a" / "b"]
    for folder in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"):
        assert stat.S_IMODE(folder.stat().st_mode) == mode
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777


def test_folders_for_others_under_the_umask_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as private as others, and get a durable name from their next user, too."""
    synced: list[Path] = []

    def kill(folder: Path) -> None:
        if folder == tmp_path:
            raise Killed

    before = os.umask(0o077)
    try:
        monkeypatch.setattr(part_files, "sync_folder", kill)
        with pytest.raises(Killed):
            make_folder(tmp_path / "a", 0o777)
        monkeypatch.setattr(part_files, "sync_folder", synced.append)
        for _ in range(2):
            make_folder(tmp_path / "a" / "b", 0o777)
        assert synced == [tmp_path, tmp_path / "a"]
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_a_folder_below_what_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a home in a folder of the automounter, which keeps no names; and where nobody may change a mode."""
    home = tmp_path / "home"
    home.mkdir(0o755)

    def sync(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(part_files, "sync_folder", sync)
    monkeypatch.setattr(Path, "chmod", refuse)
    make_folder(home / "a" / "b")
    make_folder(home / "a" / "b")
    assert (home / "a" / "b").is_dir()
