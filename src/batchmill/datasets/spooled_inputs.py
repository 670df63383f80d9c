"""Datasets that are no file of their user: standard input, and data of a Python program. Each becomes a file of the
data directory, named by its contents and removed with the last job of it.

Beside each file an empty one, FILE.JOB, says that a job reads it. What a killed command leaves is removed by age.
Folders with the code of a program's functions are kept in the same way, and removed by age alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from batchmill.datasets import layout
from batchmill.datasets.formats import FORMATS, HEAD_BYTES, MAGIC
from batchmill.errors import InvalidDataset, to_storage_error
from batchmill.owned_files import OwnedFiles, discard
from batchmill.part_files import make_folder, sync_folder

FOLDER = "spooled-inputs"
FUNCTIONS = "captured-functions"  # a folder for each function, by its contents
PART = ".part-"
LEFT_S = 24 * 3600.0  # after this time, what no job reads is removed
PIECE_BYTES = 1024 * 1024
DIGEST_CHARS = 32
_SUFFIXES = {"gzip": ".gz", "zstd": ".zst"}


def spool(stream: BinaryIO, folder: Path, row_format: str | None) -> Path:
    """Write a stream to a file of `folder` whose name says its contents and format. The same bytes are the same file.

    Args: row_format: as --format gives it; None: the first bytes say it.
    Raises: InvalidDataset (`empty_file`, `unknown_format`); StorageFull.
    """
    with part_in(folder) as part:
        digest, head = blake3(), b""
        with part.open("r+b") as file:
            while piece := stream.read(PIECE_BYTES):
                if len(head) < HEAD_BYTES:
                    head += piece[:HEAD_BYTES]
                digest.update(piece)
                file.write(piece)
        return _named(part, digest.hexdigest(), _suffix(head, row_format))


def adopt(part: Path, suffix: str) -> Path:
    """Name a file of `part_in` by its contents and return its path. The same bytes are the same file.

    Raises: StorageFull.
    """
    digest = blake3()
    with storage_errors():
        with part.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
        return _named(part, digest.hexdigest(), suffix)


@contextlib.contextmanager
def part_in(folder: Path) -> Iterator[Path]:
    """An empty file in `folder`, which is gone at the end if it did not get a name. Raises: StorageFull."""
    with storage_errors():
        make_folder(folder)
        part = folder / f"{PART}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            part.touch(mode=0o600, exist_ok=False)
            yield part
        finally:
            discard(part)


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Raise what the file system refuses as our error."""
    try:
        yield
    except OSError as error:
        raise to_storage_error(error) or error from None


def _named(part: Path, digest: str, suffix: str) -> Path:
    path = part.with_name(f"{digest[:DIGEST_CHARS]}{suffix}")
    with contextlib.suppress(FileNotFoundError):  # one that a job has sealed stays as it is, but for its last use
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return path
    with part.open("rb") as file:
        os.fsync(file.fileno())
    OwnedFiles().move(part, path)  # for a command, which has no term
    sync_folder(path.parent)
    return path


def _suffix(head: bytes, row_format: str | None) -> str:
    """The suffix of a dataset that begins so. Raises: InvalidDataset."""
    if not head:
        raise InvalidDataset("standard input is empty: there is nothing to run", code="empty_file")
    content = next((name for magic, name in MAGIC if head.startswith(magic)), None)
    packed = _SUFFIXES.get(content or "", "")
    if row_format is not None:
        return f".{FORMATS[row_format]}{packed}"
    if content == "parquet":
        return ".parquet"
    start = head.removeprefix(layout.BOM).lstrip()
    if not packed and start[:1] in (b"{", b"["):
        return ".jsonl"
    if not packed and b"," in start.partition(b"\n")[0]:
        return ".csv"
    raise InvalidDataset(
        f"the format of standard input is unknown: name it with --format {'|'.join(FORMATS)}", code="unknown_format"
    )


def keep(data_dir: Path, paths: Sequence[str], job_id: str) -> None:
    """Say durably that a job reads these, where they are spooled, or FILE.py:NAME of a captured function."""
    for path in map(Path, paths):
        kept = path if path.parent == data_dir / FOLDER else path.parent
        if kept.parent in (data_dir / FOLDER, data_dir / FUNCTIONS):
            Path(f"{kept}.{job_id}").touch(mode=0o600)
            sync_folder(kept.parent)


def release(data_dir: Path, job_id: str, owned: OwnedFiles) -> None:
    """Say that a job is gone; a file that no other job reads is removed. Raises: TermOver."""
    for mark in (data_dir / FOLDER).glob(f"*.{job_id}"):
        owned.remove(mark)
        path = mark.with_suffix("")
        if not any(path.parent.glob(f"{path.name}.job_*")):
            owned.remove(path)
    for mark in (data_dir / FUNCTIONS).glob(f"*.{job_id}"):
        owned.remove(mark)


def release_unknown(data_dir: Path, known: Container[str], owned: OwnedFiles) -> None:
    """Say that jobs are gone that were never stored, after a crash before that. Args: known: jobs that there are; what
    jobs with a folder read stays, too. Raises: TermOver.
    """
    for folder in (FOLDER, FUNCTIONS):
        for mark in (data_dir / folder).glob("*.job_*"):
            job_id = mark.suffix.removeprefix(".")
            if job_id not in known and not (data_dir / "jobs" / job_id).exists():
                owned.remove(mark)


def sweep(data_dir: Path, owned: OwnedFiles) -> None:
    """Remove what killed commands have left, and functions that no job has used for long. Raises: TermOver."""
    before = time.time() - LEFT_S
    for folder in (data_dir / FOLDER, data_dir / FUNCTIONS):
        for path in folder.iterdir() if folder.is_dir() else ():
            is_read = ".job_" in path.name or any(folder.glob(f"{path.name}.job_*"))
            if is_read or max(path.stat().st_mtime, path.stat().st_atime) >= before:
                continue
            if path.is_dir():
                owned.remove_tree(path)
            else:
                owned.remove(path)
