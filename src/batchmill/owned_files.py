"""OwnedFiles: changes of files and folders that a successor of the owner sees too, each within the owner's term."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from batchmill.owner_term import ENDLESS, Term
from batchmill.part_files import Digest, PartFile, link_over, make_folder, remove_files, sync_file, sync_folder

FOLDER_MODE, FILE_MODE = 0o700, 0o600


class OwnedFiles:
    """Changes files by their paths, for the owner of a database or a child of it.

    Every method checks the term right before each change, and raises TermOver past it: another process may be the
    owner, and the files its own. What only this process knows needs no check: see `discard`.

    Raises, everywhere: TermOver, OSError. Concurrency: any thread.
    """

    def __init__(self, term: Term = ENDLESS) -> None:
        self.term = term

    # -- make ---------------------------------------------------------------------------------------------------------

    def make_folder(self, path: Path, *, is_new: bool = False) -> None:
        """Make a folder and its parents durably, unless they are there. Raises: FileExistsError if it is to be new."""
        self.term.check()
        if is_new:
            make_folder(path.parent)
            path.mkdir(FOLDER_MODE)
            sync_folder(path.parent)
        else:
            make_folder(path, FOLDER_MODE)

    def open_new(self, path: Path) -> BinaryIO:
        """Open a file to write it from its beginning, over what is there. The caller closes it."""
        self.term.check()
        return open(path, "wb")  # noqa: SIM115 - as it says

    def part(self, path: Path, mode: int = FILE_MODE, digest: Digest | None = None) -> PartFile:
        """As `PartFile`."""
        return PartFile(path, mode, digest, self.term)

    def create(self, path: Path, data: bytes) -> None:
        """Write a new file, without a sync. It replaces the one that is there, which may have another name."""
        self.term.check()
        try:
            _write_new(path, data)
        except FileExistsError:
            part = path.with_name(path.name + ".part")
            part.unlink(missing_ok=True)
            try:
                _write_new(part, data)
                self.term.check()
                os.replace(part, path)
            except OSError:
                part.unlink(missing_ok=True)
                raise

    def overwrite(self, path: Path, data: bytes) -> None:
        """Write a file, without a sync, over the one that is there, which keeps its other names. Who seals one of the
        same size meanwhile sees no change.
        """
        self.term.check()
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        try:
            before = os.fstat(fd)
            _write_all(fd, data)
            os.ftruncate(fd, len(data))
            if before.st_size == len(data):
                os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        finally:
            os.close(fd)

    def write(self, path: Path, data: bytes) -> None:
        """Write a file whole, and durably, in the place of an earlier one."""
        self.term.check()
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(data)
        sync_file(temporary)
        self.move(temporary, path)
        sync_folder(path.parent)

    def allocate(self, path: Path, size_bytes: int) -> bool:
        """Make a file that takes so much of the disk. Returns whether there is room."""
        self.term.check()
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def move(self, source: Path, target: Path) -> None:
        """Rename a file, over one that is there, or a folder."""
        self.term.check()
        os.replace(source, target)

    def move_over(self, source: Path, target: Path, aside: Path) -> None:
        """Rename a file or a folder, over one that is there. Args: aside: a new path for a folder that is there."""
        self.term.check()
        if target.is_dir() and not target.is_symlink():
            os.rename(target, aside)
        os.rename(source, target)

    def link(self, source: Path | str, target: Path | str) -> None:
        """As `link_over`."""
        self.term.check()
        link_over(source, target)

    def link_new(self, source: Path, target: Path) -> None:
        """Link a file to another name. Raises: FileExistsError."""
        self.term.check()
        os.link(source, target)

    def symlink_over(self, target: str, path: Path) -> None:
        """Make a symbolic link, in the place of an earlier one. Args: target: what it says."""
        self.term.check()
        part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
        os.symlink(target, part)
        try:
            self.move(part, path)
        except BaseException:
            part.unlink()
            raise

    def copy_tree(self, source: Path, target: Path) -> None:
        """Copy a folder to where none is."""
        self.term.check()
        shutil.copytree(source, target)

    # -- remove -------------------------------------------------------------------------------------------------------

    def remove(self, *paths: Path) -> None:
        """Remove those of these files that there are."""
        for path in paths:
            self.term.check()
            path.unlink(missing_ok=True)

    def remove_durably(self, paths: Sequence[Path]) -> None:
        """As `remove_files`."""
        self.term.check()
        remove_files(paths)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder with all that is in it, as far as it can be removed. It need not be there.

        It may take minutes, in which another owner may make it anew: the term is checked before each file.
        """
        self.term.check()
        with suppress(FileNotFoundError, NotADirectoryError):
            for _, folders, names, fd in os.fwalk(path, topdown=False):
                for name in names:
                    self._remove_at(fd, name)
                for name in folders:
                    self._remove_at(fd, name, is_folder=True)
        self.remove_empty(path)

    def _remove_at(self, fd: int, name: str, *, is_folder: bool = False) -> None:
        """Remove what has a name in an open folder."""
        self.term.check()
        with suppress(OSError):
            if not is_folder:
                os.unlink(name, dir_fd=fd)
                return
            try:
                os.rmdir(name, dir_fd=fd)
            except NotADirectoryError:  # a symbolic link to one
                os.unlink(name, dir_fd=fd)

    def remove_empty(self, path: Path) -> None:
        """Remove a folder that may be there, if nothing is in it."""
        self.term.check()
        with suppress(OSError):
            path.rmdir()


def discard(path: Path) -> None:
    """Remove a file or a folder, without a look at any term: it has a name that this process has made up, and no
    successor counts on it, because no record that a successor may have read names it.
    """
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write_new(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE)
    try:
        _write_all(fd, data)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])
