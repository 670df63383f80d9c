"""The folder of a data directory and the lock of its owner."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

from batchmill.config import Config
from batchmill.errors import InvalidConfig, of_system
from batchmill.services import salvage as salvaging
from batchmill.store.database import NAME as DATABASE
from batchmill.store.segments import sync_folder
from batchmill.types import SalvageReport

log = logging.getLogger("batchmill.owner")

LOCK, SOCKET = "owner.lock", "control.sock"
TAKEOVER_S = 0.1  # between two tries while one owner ends and another begins
TAKEOVER_TRIES = 1200
OTHERS = 0o077  # what group and others may
FOLDER_MODE, FILE_MODE = 0o700, 0o600


def has_models(config: Config) -> bool:
    """Something may have been deployed here: there is something to look at."""
    return (config.data_dir / DATABASE).exists()


def salvage(config: Config, progress: Callable[[str], None]) -> SalvageReport:
    """Make another database of what can be had of one that is damaged or gone.

    Raises: InvalidConfig while another process uses the data directory.
    """
    prepare_data_dir(config.data_dir)
    lock = try_lock(config.data_dir)
    if lock is None:
        raise InvalidConfig(
            f"another process owns the data directory {config.data_dir}: end it first, so that nothing writes to the "
            "database meanwhile",
            code="data_dir_owned",
        )
    try:
        return salvaging.salvage(config.data_dir, progress)
    finally:
        os.close(lock)


def prepare_data_dir(data_dir: Path) -> None:
    """Have the folder there, and to ourselves. Raises: InvalidConfig where it cannot be used, or is another user's."""
    try:
        make_durable(data_dir)
        if make_private(data_dir):
            log.warning("the data directory %s could be opened by other users: it is now this user's alone", data_dir)
        probe = data_dir / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        refused = InvalidConfig(
            f"the data directory {data_dir} cannot be written: {error.strerror}; choose another with --data-dir"
        )
        raise of_system(error) or refused from None


def make_durable(folder: Path) -> None:
    """Have a folder there that a power cut does not take with all that it holds: each one that is made is synced."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True, mode=0o700 if each == folder else 0o777)
        with contextlib.suppress(PermissionError):  # it may be written to and not be read
            sync_folder(each.parent)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def try_lock(data_dir: Path) -> int | None:
    """The owner's lock, held until its descriptor is closed; None while another process holds it."""
    fd = os.open(data_dir / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


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
            os.fchmod(fd, FOLDER_MODE)
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
    mode = FOLDER_MODE if stat.S_ISDIR(info.st_mode) else FILE_MODE
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
