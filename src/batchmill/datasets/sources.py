"""Which files a dataset consists of, and whether they are still what they were."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Collection

from batchmill.errors import InvalidDataset
from batchmill.types import SealedFile

FORMAT_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}
CODEC_SUFFIXES = {".gz": "gzip", ".zst": "zstd"}


def kind(path: str) -> tuple[str | None, str | None]:
    """Format (jsonl, csv, parquet) and compression (gzip, zstd) that a file's name promises; None: it promises none."""
    stem, suffix = os.path.splitext(os.path.basename(path).lower())
    codec = CODEC_SUFFIXES.get(suffix)
    if codec is not None:
        suffix = os.path.splitext(stem)[1]
    return FORMAT_SUFFIXES.get(suffix), codec


def resolve(patterns: list[str], leave_out: Collection[str] = ()) -> list[str]:
    """The absolute paths of the files that these files, folders and globs mean, each once, in name order.

    A folder means the files directly in it that have a known suffix and are not hidden. The files of `leave_out` are
    not among what a folder or a glob means; one that is named itself is taken.
    Raises: InvalidDataset when a pattern means no file.
    """
    if not patterns:
        raise InvalidDataset("no input file was named", code="no_input")
    left_out = set(map(os.path.realpath, leave_out))
    return sorted({os.path.abspath(path) for pattern in patterns for path in _files(pattern, left_out)})


def _files(pattern: str, left_out: set[str]) -> list[str]:
    if os.path.isdir(pattern):
        found = [os.path.join(pattern, name) for name in os.listdir(pattern) if _belongs(name)]
        found = [path for path in found if os.path.isfile(path)]
        known = ", ".join([*FORMAT_SUFFIXES, *CODEC_SUFFIXES])
        missing = f"the folder {pattern} holds no file of a dataset (known suffixes: {known})"
    elif os.path.lexists(pattern):
        return [pattern]
    elif glob.has_magic(pattern):
        found = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
        missing = f"no file matches {pattern}"
    else:
        raise InvalidDataset(f"there is no file {pattern}", code="no_input")
    found = [path for path in found if os.path.realpath(path) not in left_out]
    if not found:
        raise InvalidDataset(missing, code="no_input")
    return found


def _belongs(name: str) -> bool:
    return not name.startswith(".") and kind(name)[0] is not None


def describe(path: str) -> SealedFile:
    """The file as it is now. Raises: InvalidDataset when it cannot be read or is no regular file."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise InvalidDataset(f"{path} cannot be read: {error.strerror}", code="unreadable_file") from None
    if not stat.S_ISREG(found.st_mode):
        raise InvalidDataset(f"{path} is no regular file; write its contents to one first", code="unreadable_file")
    if not os.access(path, os.R_OK):
        raise InvalidDataset(f"{path} cannot be read: permission denied", code="unreadable_file")
    return SealedFile(path, found.st_size, found.st_mtime_ns, found.st_ino)


def unchanged(file: SealedFile) -> bool:
    """Whether size, time and inode are what they were."""
    try:
        return describe(file.path) == file
    except InvalidDataset:
        return False
