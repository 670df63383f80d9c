"""Folders of the files of a sealed dataset, or of a plan: on a disk, or in memory for a small job.

Sealing, planning and their readers know files by their names alone, so that one code serves both.
"""

from __future__ import annotations

import io
import mmap
import os
from pathlib import Path
from typing import BinaryIO, Protocol, Self

from batchmill.datasets.sources import LocalSource, Source
from batchmill.errors import StorageFull
from batchmill.owned_files import OwnedFiles
from batchmill.owner_term import ENDLESS, Term
from batchmill.part_files import Digest, sync_file


class Part(Protocol):
    """A file that counts once it is published, whole and durably; without that, nothing is left of it."""

    size_bytes: int

    def write(self, data: bytes | memoryview, /) -> int: ...

    def publish(self) -> None: ...

    def discard(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Folder(Protocol):
    """Files by name. All that read raise FileNotFoundError; on a disk any OSError, and StorageFull."""

    path: Path  # where they lie, or would on a disk
    is_on_disk: bool  # what lies there may be damaged, or changed by others

    def on_disk(self) -> Path:
        """The folder, for files that grow with the rows. Raises: StorageFull where it is in memory."""

    def create(self, name: str) -> BinaryIO:
        """Begin to write a file, in the place of an earlier one. Close it before it is read."""

    def part(self, name: str, digest: Digest | None = None) -> Part:
        """Begin a file that counts once it is published. Args: digest: as of `PartFile`."""

    def write(self, name: str, data: bytes) -> None:
        """Write a file whole and durably, in the place of an earlier one."""

    def open(self, name: str) -> BinaryIO:
        """Open a file to read it from its beginning on."""

    def source(self, name: str) -> Source:
        """Open a file to read any range of it."""

    def view(self, name: str) -> mmap.mmap | bytes:
        """All bytes of a file that is not empty, without reading them."""

    def read(self, name: str) -> bytes: ...

    def size(self, name: str) -> int: ...

    def names(self) -> list[str]:
        """Those of all files; none where there is no folder."""

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""

    def remove_durably(self, *names: str) -> None:
        """Remove those of these files that there are, durably."""

    def rename(self, name: str, new_name: str) -> None: ...

    def sync(self) -> None:
        """Make every file durable."""


Home = Path | Folder  # a path is a folder on a disk


def folder_of(home: Home) -> Folder:
    return DiskFolder(home) if isinstance(home, Path) else home


class DiskFolder:
    """A folder of a file system. Past the term, what changes files raises TermOver, or waits: see `owner_term`."""

    is_on_disk = True

    def __init__(self, path: Path, term: Term = ENDLESS) -> None:
        self.path, self._owned = path, OwnedFiles(term)

    def on_disk(self) -> Path:
        self._owned.term.check()
        return self.path

    def create(self, name: str) -> BinaryIO:
        return self._owned.open_new(self.path / name)

    def part(self, name: str, digest: Digest | None = None) -> Part:
        return self._owned.part(self.path / name, digest=digest)

    def write(self, name: str, data: bytes) -> None:
        self._owned.write(self.path / name, data)

    def open(self, name: str) -> BinaryIO:
        return open(self.path / name, "rb")  # noqa: SIM115 - the caller closes it

    def source(self, name: str) -> Source:
        return LocalSource(str(self.path / name))

    def view(self, name: str) -> mmap.mmap | bytes:
        with self.open(name) as file:
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def names(self) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if entry.is_file()]
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        self._owned.remove(self.path / name)

    def remove_durably(self, *names: str) -> None:
        self._owned.remove_durably([self.path / name for name in names])

    def rename(self, name: str, new_name: str) -> None:
        self._owned.move(self.path / name, self.path / new_name)

    def sync(self) -> None:
        for name in self.names():
            sync_file(self.path / name)


class MemoryFolder:
    """A folder in memory. Its `files` are lost unless the caller stores them.

    Args:
        path: what the folder is called in messages.
        files: that it begins with: name -> bytes.
    """

    is_on_disk = False

    def __init__(self, path: Path, files: dict[str, bytes] | None = None) -> None:
        self.path = path
        self.files = {} if files is None else files

    def on_disk(self) -> Path:
        raise StorageFull(f"{self.path} is in memory, and what is written may be more than it has")

    def create(self, name: str) -> BinaryIO:
        return _MemoryFile(self.files, name)

    def part(self, name: str, digest: Digest | None = None) -> Part:
        return _MemoryPart(self.files, name, digest)

    def write(self, name: str, data: bytes) -> None:
        self.files[name] = data

    def open(self, name: str) -> BinaryIO:
        return io.BytesIO(self.read(name))

    def source(self, name: str) -> Source:
        return MemorySource(self.read(name))

    def view(self, name: str) -> mmap.mmap | bytes:
        return self.read(name)

    def read(self, name: str) -> bytes:
        try:
            return self.files[name]
        except KeyError:
            raise FileNotFoundError(f"{self.path / name} is not among {', '.join(self.files)}") from None

    def size(self, name: str) -> int:
        return len(self.read(name))

    def names(self) -> list[str]:
        return list(self.files)

    def remove(self, name: str) -> None:
        self.files.pop(name, None)

    def remove_durably(self, *names: str) -> None:
        for name in names:
            self.remove(name)

    def rename(self, name: str, new_name: str) -> None:
        self.files[new_name] = self.files.pop(name)

    def sync(self) -> None:
        """Memory is not durable."""


class MemorySource:
    """A file in memory, to be read by ranges."""

    def __init__(self, data: bytes) -> None:
        self._data, self.size_bytes = data, len(data)

    def read_at(self, start: int, end: int, until: int | None = None) -> bytes:
        return self._data[start:end]

    def read_into(self, buffer: memoryview, start: int) -> int:
        found = self._data[start : start + len(buffer)]
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        """There is nothing to release."""


class _MemoryFile(io.BytesIO):
    """A file that is being written; it is in the folder once it is closed."""

    def __init__(self, files: dict[str, bytes], name: str) -> None:
        super().__init__()
        self._owned, self._name = files, name

    def close(self) -> None:
        if not self.closed:
            self._owned[self._name] = self.getvalue()
        super().close()


class _MemoryPart:
    def __init__(self, files: dict[str, bytes], name: str, digest: Digest | None) -> None:
        self._owned, self._name, self._digest = files, name, digest
        self._pieces: list[bytes | memoryview] = []
        self.size_bytes = 0

    def write(self, data: bytes | memoryview, /) -> int:
        self._pieces.append(data)
        self.size_bytes += len(data)
        return len(data)

    def publish(self) -> None:
        data = self._owned[self._name] = b"".join(self._pieces)
        if self._digest is not None:
            self._digest.update(data)

    def discard(self) -> None:
        self._pieces.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()
