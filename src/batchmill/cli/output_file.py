"""A file that a command writes for the person who asked: whole or not at all, and never over what a job lives on."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from batchmill.errors import BatchmillError, InvalidInput

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def written_whole(path: str, kept: Sequence[str]) -> Iterator[BinaryIO]:
    """What is written gets its name at the end; until then what was there stays. A device or pipe is written as it is.

    Args: kept: files that must not be written over.
    Raises: InvalidInput when `path` is one of them or cannot be written; BatchmillError when the disk is full.
    """
    target = Path(os.path.realpath(path))
    for own in kept:
        if target == Path(os.path.realpath(own)) or _is_same(target, own):
            raise InvalidInput(f"{path} belongs to the job itself: choose another name", code="output_is_input")
    is_special = target.exists() and not target.is_file()
    part = target if is_special else target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        out = open(part, "wb" if is_special else "xb")  # noqa: SIM115 - it is closed below
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}", code="invalid_output") from None
    try:
        with _full_disk_named(path), out:
            yield out
        if not is_special:
            part.replace(target)
    finally:
        if not is_special:
            part.unlink(missing_ok=True)


def _is_same(target: Path, own: str) -> bool:
    try:
        return os.path.samefile(target, own)
    except OSError:  # one of them is not there
        return False


@contextlib.contextmanager
def _full_disk_named(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise BatchmillError(f"there is no room to write {path}: {error.strerror}", code="storage_full") from error
