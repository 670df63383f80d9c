"""Archives that commands leave in the data directory, where its owner reads them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

SENT_PREFIX = "deploy-"


@contextlib.contextmanager
def sent_archive(data_dir: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Create a file for an archive that the owner of the data directory reads. It stays locked while the command
    runs."""
    while True:
        handle, name = tempfile.mkstemp(prefix=SENT_PREFIX, suffix=".tar.gz", dir=data_dir)
        with open(handle, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink == 0:
                continue  # a starting owner removed the file before this lock
            try:
                yield Path(name), file
            finally:
                Path(name).unlink(missing_ok=True)
        return


def sweep_archives(data_dir: Path) -> None:
    """Remove the archives of killed commands."""
    for archive in data_dir.glob(f"{SENT_PREFIX}*"):
        _remove_unlocked(archive)


def _remove_unlocked(archive: Path) -> None:
    """Remove an archive whose command was killed. A running command holds the lock of its archive."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError), archive.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        archive.unlink()
