"""Files and folders that outlive a loss of power."""

from __future__ import annotations

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
