"""Who may read a data directory: its own user alone. One that others can read is mended when it is opened.

Nothing below a folder of mode 0700 can be reached by another user, so that the folder itself and what lies directly in
it are looked at: the cost is the same however many jobs and files there are. Links are never followed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from batchmill.errors import InvalidConfig

OTHERS = 0o077  # what group and others may
FOLDER, FILE = 0o700, 0o600


def make_private(data_dir: Path, user: int | None = None) -> bool:
    """Take from everybody but this user what they may do in the folder; whether the folder was open to them.

    Args: user: whose it has to be; None: this process's.

    Raises: InvalidConfig where it, or something in it, belongs to another user: who owns a file can open it again.
    """
    user = os.geteuid() if user is None else user
    fd = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        there = os.fstat(fd)
        _refuse_strangers(data_dir, there, user)
        was_open = bool(there.st_mode & OTHERS)
        if was_open:
            os.fchmod(fd, FOLDER)
        with os.scandir(fd) as entries:
            for entry in entries:
                _mend(fd, entry, data_dir, user)
    finally:
        os.close(fd)
    return was_open


def _mend(folder: int, entry: os.DirEntry[str], data_dir: Path, user: int) -> None:
    try:
        info = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # another process of this user has just removed it
        return
    if stat.S_ISLNK(info.st_mode):
        return
    _refuse_strangers(data_dir / entry.name, info, user)
    if not info.st_mode & OTHERS:
        return
    mode = FOLDER if stat.S_ISDIR(info.st_mode) else FILE
    if stat.S_ISSOCK(info.st_mode):  # it cannot be opened; nobody else can put a link in its place any more
        with contextlib.suppress(FileNotFoundError):
            os.chmod(entry.name, mode, dir_fd=folder)
        return
    try:
        fd = os.open(entry.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return
    try:
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def _refuse_strangers(path: Path, info: os.stat_result, user: int) -> None:
    if info.st_uid != user:
        raise InvalidConfig(
            f"{path} belongs to the user {info.st_uid}, and batchmill runs as {user}: run it as that user, "
            "give it to this one with `chown -R`, or choose another --data-dir",
            code="foreign_data_dir",
        )
