"""The folder of a data directory and the lock of its owner."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path

from batchmill.config import Config
from batchmill.errors import InvalidConfig, of_system
from batchmill.services import salvage as salvaging
from batchmill.services.data_dir_modes import make_private
from batchmill.store.database import NAME as DATABASE
from batchmill.store.segments import sync_folder
from batchmill.types import SalvageReport

log = logging.getLogger("batchmill.owner")

LOCK, SOCKET = "owner.lock", "control.sock"
TAKEOVER_S = 0.1  # between two tries while one owner ends and another begins
TAKEOVER_TRIES = 1200


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
