"""How a file or a folder is written as objects: parts first, then a manifest that names and describes all of them.

Every object of one publication begins with a prefix of its own, so none is ever overwritten. Small files lie in the
manifest, so most folders are one object.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import msgspec
from msgspec import Struct

from batchmill.errors import StorageFailed
from batchmill.owned_files import OwnedFiles, discard
from batchmill.part_files import sync_folder
from batchmill.ports.storage import Objects

MANIFEST = "manifest"
INLINE_BYTES = 256 * 1024  # a file up to this size lies in the manifest,
INLINE_BYTES_MAX = 4 * 1024 * 1024  # of this many bytes at most
PART_BYTES = 16 * 1024 * 1024
PARTS_AT_ONCE = 4  # in memory
FILES_MAX = 100_000  # of one folder
BYTES_MAX = 2**44  # of one file
RESTORE = "restore it from a version or copy of the bucket"
# Directly in the folder; what is below it may be a user's.
LEFT_OUT = (".part", ".tmp")  # endings of files that are being written
OWN_LOGS = ("calls.log", "calls.log.1")  # of a function's version: they grow


class FileEntry(Struct, frozen=True, omit_defaults=True):
    """One file. `name` is its path in the folder; empty: the published path is this file."""

    name: str
    size_bytes: int
    sha256: bytes
    mode: int
    data: bytes | None = None  # None: it is in parts


class Manifest(Struct, frozen=True):
    files: list[FileEntry]
    folders: list[str]  # also those without a file


def put(objects: Objects, prefix: str, path: Path) -> int:
    """Write a file or folder below `prefix`. Returns its size in bytes."""
    names, folders = [""], []
    if path.is_dir():
        names, folders = _names_in(path)
    inline_bytes, entries = 0, []
    with ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="objects-put") as threads:
        for number, name in enumerate(names):
            place = path / name if name else path
            size, mode = place.stat().st_size, place.stat().st_mode & 0o777
            if size <= INLINE_BYTES and inline_bytes + size <= INLINE_BYTES_MAX:
                data = place.read_bytes()
                inline_bytes += len(data)
                entries.append(FileEntry(name, len(data), hashlib.sha256(data).digest(), mode, data))
            else:
                size, digest = _put_parts(objects, f"{prefix}{number}-", place, threads)
                entries.append(FileEntry(name, size, digest, mode))
    objects.put(prefix + MANIFEST, msgspec.msgpack.encode(Manifest(entries, folders)))
    return sum(entry.size_bytes for entry in entries)


def get(objects: Objects, prefix: str, path: Path, work: Path, owned: OwnedFiles = OwnedFiles()) -> None:
    """Write the file or folder that was put below `prefix` to `path`, replacing what is there.

    Args: work: a path on the same file system that nobody else uses; it is removed. owned: for a path of which a
    successor may have a newer copy.

    Raises: StorageFailed if the objects are not what was put; TermOver.
    """
    manifest = _read_manifest(objects, prefix)
    discard(work)
    work.mkdir(parents=True, mode=0o700)
    target = work / "content"
    is_file = [entry.name for entry in manifest.files] == [""]
    try:
        if not is_file:
            target.mkdir(mode=0o700)
            for folder in manifest.folders:
                (target / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        with ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="objects-get") as threads:
            for number, entry in enumerate(manifest.files):
                _get_file(objects, f"{prefix}{number}-", entry, target / entry.name if entry.name else target, threads)
        if not is_file:  # a folder that is there counts as whole
            for folder, _, _ in os.walk(target):
                sync_folder(Path(folder))
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        owned.move_over(target, path, work / "before")
        sync_folder(path.parent)
    finally:
        discard(work)


def _read_manifest(objects: Objects, prefix: str) -> Manifest:
    """Raises: StorageFailed for one that no `put` has written: who can write to the store must not write here."""
    try:
        manifest = msgspec.msgpack.decode(objects.get(prefix + MANIFEST), type=Manifest)
    except msgspec.DecodeError as error:
        raise StorageFailed(f"{prefix}{MANIFEST} is not what was stored: {error}; {RESTORE}") from None
    names = [entry.name for entry in manifest.files]
    if names == [""] and not manifest.folders:
        names = []
    for name in [*names, *manifest.folders]:
        if str(PurePosixPath(name)) != name or not set(name.split("/")).isdisjoint(("", ".", "..")) or "\0" in name:
            raise StorageFailed(f"{prefix}{MANIFEST} is not what was stored: it names {name[:100]!r}; {RESTORE}")
    if len(set(names)) != len(names) or any(not 0 <= entry.size_bytes <= BYTES_MAX for entry in manifest.files):
        raise StorageFailed(f"{prefix}{MANIFEST} is not what was stored: a name or a size is wrong; {RESTORE}")
    return manifest


def _names_in(folder: Path) -> tuple[list[str], list[str]]:
    """The files and the folders of a folder, as paths in it. Links are left out: code and datasets have none."""
    names, folders = [], []
    for place, below, files in os.walk(folder):
        here = Path(place).relative_to(folder)
        folders += [str(here / each) for each in sorted(below) if not (Path(place) / each).is_symlink()]
        kept = sorted(files)
        if Path(place) == folder:
            kept = [each for each in kept if not each.endswith(LEFT_OUT) and each not in OWN_LOGS]
        names += [str(here / each) for each in kept if not (Path(place) / each).is_symlink()]
    if len(names) > FILES_MAX:
        raise StorageFailed(f"{folder} has {len(names):,} files: the object store keeps {FILES_MAX:,} of a folder")
    return names, folders


def _put_parts(objects: Objects, prefix: str, path: Path, threads: ThreadPoolExecutor) -> tuple[int, bytes]:
    digest, size, waiting = hashlib.sha256(), 0, []
    for number, data in enumerate(_parts_of(path)):
        digest.update(data)
        size += len(data)
        if len(waiting) >= PARTS_AT_ONCE:
            waiting.pop(0).result()
        waiting.append(threads.submit(objects.put, f"{prefix}{number:06d}", data))
    for each in waiting:
        each.result()
    return size, digest.digest()


def _parts_of(path: Path) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        while data := _read(file.fileno(), PART_BYTES):
            yield data


def _read(fd: int, size: int) -> bytes:
    """Up to `size` bytes; fewer only at the end of the file."""
    data = os.read(fd, size)
    while len(data) < size and (more := os.read(fd, size - len(data))):
        data += more
    return data


def _get_file(objects: Objects, prefix: str, entry: FileEntry, target: Path, threads: ThreadPoolExecutor) -> None:
    digest, size = hashlib.sha256(), 0
    fd = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        for data in [entry.data] if entry.data is not None else _get_parts(objects, prefix, entry.size_bytes, threads):
            digest.update(data)
            size += len(data)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        if size != entry.size_bytes or digest.digest() != entry.sha256:
            raise StorageFailed(
                f"the objects below {prefix} are not what was stored ({size:,} of {entry.size_bytes:,} bytes, or "
                f"another digest); {RESTORE}"
            )
        os.fchmod(fd, entry.mode & 0o777)
        os.fsync(fd)
    finally:
        os.close(fd)


def _get_parts(objects: Objects, prefix: str, size: int, threads: ThreadPoolExecutor) -> Iterator[bytes]:
    names = [f"{prefix}{number:06d}" for number in range(-(-size // PART_BYTES))]
    waiting = [threads.submit(objects.get, name) for name in names[:PARTS_AT_ONCE]]
    for name in names[PARTS_AT_ONCE:]:
        yield waiting.pop(0).result()
        waiting.append(threads.submit(objects.get, name))
    for each in waiting:
        yield each.result()
