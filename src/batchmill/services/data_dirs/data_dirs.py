"""Creates and checks a data directory, and holds the lock of the process that owns it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
from pathlib import Path

from batchmill.config import Config
from batchmill.errors import InvalidConfig, to_storage_error
from batchmill.part_files import make_folder
from batchmill.services.data_dirs.forks import leave_to_owner
from batchmill.store.names import DATABASE

log = logging.getLogger("batchmill.owner")

LOCK, SOCKET = "owner.lock", "control.sock"
TAKEOVER_S = 0.1  # between two attempts to take the lock while its owner stops
OTHER_BITS = 0o077  # the permissions of group and others
FOLDER_MODE, FILE_MODE = 0o700, 0o600


def has_models(config: Config) -> bool:
    """Tell whether there is a database, so that models may be deployed in it."""
    return config.database.url is not None or (config.data_dir / DATABASE).exists()


def prepare_data_dir(data_dir: Path) -> None:
    """Create the folder and make it private. Raises: InvalidConfig if it is unusable or belongs to another user."""
    try:
        make_folder(data_dir, FOLDER_MODE, parents_mode=0o777)
        if make_private(data_dir):
            log.warning("other users could open the data directory %s: now only this user can", data_dir)
        tempfile.TemporaryFile(dir=data_dir, buffering=0).close()  # it has no name: threads do this at once
    except OSError as error:
        unwritable = InvalidConfig(
            f"the data directory {data_dir} cannot be written: {error.strerror}; choose another with --data-dir"
        )
        raise to_storage_error(error) or unwritable from None


def try_lock(data_dir: Path) -> int | None:
    """Take the owner's lock. Returns a descriptor that holds it until it is closed; None if another process does.

    Forks of this process do not hold it.
    """
    fd = os.open(data_dir / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    leave_to_owner(fd)
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def take_lock_of_stopped(data_dir: Path) -> int:
    """Take the owner's lock from a process that no longer owns the database: it was stopped, or is on a lost machine.

    It keeps the lock of a file that is not there any more.
    """
    (data_dir / LOCK).unlink(missing_ok=True)
    lock = try_lock(data_dir)
    assert lock is not None, "the owner of the database is the only process that takes the new lock"
    return lock


def owner_pid(data_dir: Path) -> str:
    """Return the id of the process that took the owner's lock last, for a message; PID while it is being written."""
    return (data_dir / LOCK).read_text().strip() or "PID"


def make_private(data_dir: Path, user: int | None = None) -> bool:
    """Remove the permissions of other users. Returns whether the folder was open to them.

    Args: user: the uid that must own the folder; None: the uid of this process.

    Raises: InvalidConfig if the folder or an entry belongs to another user: a file's owner can open it up again.
    """
    user = os.geteuid() if user is None else user
    fd = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        folder_info = os.fstat(fd)
        _check_owner(data_dir, folder_info, user)
        was_open = bool(folder_info.st_mode & OTHER_BITS)
        if was_open:
            os.fchmod(fd, FOLDER_MODE)
        with os.scandir(fd) as entries:
            for entry in entries:
                _restrict(fd, entry, data_dir, user)
    finally:
        os.close(fd)
    return was_open


def _restrict(folder: int, entry: os.DirEntry[str], data_dir: Path, user: int) -> None:
    try:
        info = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # another process of this user just removed it
        return
    if stat.S_ISLNK(info.st_mode):
        return
    _check_owner(data_dir / entry.name, info, user)
    if not info.st_mode & OTHER_BITS:
        return
    mode = FOLDER_MODE if stat.S_ISDIR(info.st_mode) else FILE_MODE
    if stat.S_ISSOCK(info.st_mode):  # it cannot be opened, but no other user can replace it by a link any more
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


def _check_owner(path: Path, info: os.stat_result, user: int) -> None:
    if info.st_uid != user:
        raise InvalidConfig(
            f"{path} belongs to the user {info.st_uid}, and batchmill runs as {user}: run it as that user, "
            "change the owner with `chown -R`, or choose another --data-dir",
            code="foreign_data_dir",
        )
