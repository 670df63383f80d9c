"""A disk that loses its power and keeps only what was synced, for the processes of one test.

They preload a library (disk.c), which leaves an image of each file and folder as it is synced. Afterwards the folder is
built anew from these images. A C compiler has to be there. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

SOURCE = Path(__file__).with_name("disk.c")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
PAGE_BYTES = 4096
KEY_BYTES = 96
LIBRARY = "disk.so"
END_S, LOOK_S = 60.0, 0.01
FOLDER, LINK = "d", "l"

# What is left of what was not synced. Names: those of the last sync of their folder, or all that there were, as file
# systems with a journal may keep them. Bytes: those of the last sync of their file, or of each page either.
Names = Literal["synced", "all"]
Bytes = Literal["synced", "mixed"]
NAMES_LEFT: Sequence[Names] = ("synced", "all")
BYTES_LEFT: Sequence[Bytes] = ("synced", "mixed")


@dataclass(frozen=True)
class _Name:
    """What a folder says of one name."""

    kind: str
    mode: int
    key: str  # of a symbolic link: where it leads to, in hexadecimal digits


class LossyDisk:
    """The disk of one folder, which has to be there and on a file system that knows when a file was made.

    Processes that use it are started with `environment`. Their other files are as safe as ever.
    """

    def __init__(self, folder: Path) -> None:
        self._root = folder.resolve()
        self._images = Path(mkdtemp(prefix="images-", dir=self._root.parent))
        library = self._images / LIBRARY
        _compile(library, ROOT=str(self._root), IMAGES=str(self._images))
        self._library = ctypes.CDLL(str(library))
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library)}
        if self._key(self._root).endswith("-0-0"):
            raise NotImplementedError(f"{folder} is on a file system that does not tell when a file was made")
        self.keep()

    def keep(self) -> None:
        """Everything that is there counts as synced."""
        self._keep_names(self._root)
        for path in files_below(self._root):
            self._record(path)

    def lose_power(self, chance: random.Random, names: Names, content: Bytes) -> None:
        """End every process that uses the disk, and leave in the folder what may be left after a loss of power."""
        self._end_processes()
        seen = {self._key(path): path for path in files_below(self._root)}
        if names == "all":
            self._keep_names(self._root)
        built = Path(mkdtemp(dir=self._root.parent))
        self._build(self._key(self._root), built, {}, seen, chance if content == "mixed" else None)
        lost = Path(mkdtemp(dir=self._root.parent))
        for source, target in ((self._root, lost), (built, self._root)):
            for path in list(source.iterdir()):
                os.rename(path, target / path.name)
        for folder in (lost, built):
            shutil.rmtree(folder)
        for path in self._images.iterdir():
            if path.name != LIBRARY:
                path.unlink()
        self.keep()

    def close(self) -> None:
        shutil.rmtree(self._images)

    # -- images -------------------------------------------------------------------------------------------------------

    def _key(self, path: Path) -> str:
        key = ctypes.create_string_buffer(KEY_BYTES)
        if error := self._library.lossy_disk_key(os.fsencode(path), key):
            raise OSError(-error, os.strerror(-error), str(path))
        return key.value.decode()

    def _record(self, path: Path) -> None:
        if error := self._library.lossy_disk_record(os.fsencode(path)):
            raise OSError(-error, os.strerror(-error), str(path))

    def _keep_names(self, folder: Path) -> None:
        for path in (folder, *folder.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                self._record(path)

    def _names_in(self, key: str) -> dict[str, _Name]:
        image = self._images / key
        names: dict[str, _Name] = {}
        for line in image.read_text().splitlines() if image.exists() else ():
            kind, mode, child, name = line.split(" ", 3)
            names[name] = _Name(kind, int(mode, 8), child)
        return names

    # -- the folder after a loss of power -----------------------------------------------------------------------------

    def _build(
        self, key: str, folder: Path, made: dict[str, Path], seen: Mapping[str, Path], chance: random.Random | None
    ) -> None:
        """Args: key: of the folder as it was. made: files by their keys: another name of one is a link to it. seen: the
        files as they were when the power was lost. chance: mixes their pages with those that were synced.
        """
        for name, each in sorted(self._names_in(key).items()):
            path = folder / name
            if each.kind == FOLDER:
                path.mkdir()
                self._build(each.key, path, made, seen, chance)
            elif each.kind == LINK:
                path.symlink_to(os.fsdecode(bytes.fromhex(each.key)))
                continue
            elif each.key in made:
                os.link(made[each.key], path)
            else:
                self._build_file(each.key, path, seen.get(each.key), chance)
                made[each.key] = path
            path.chmod(each.mode)

    def _build_file(self, key: str, path: Path, seen: Path | None, chance: random.Random | None) -> None:
        image = self._images / key
        content = image.read_bytes() if image.exists() else b""
        current = None if seen is None else seen.read_bytes()
        if chance is not None and current is not None:
            content = _mixed(content, current, chance)
        if seen is not None and content == current:
            os.link(seen, path)  # with its times
        else:
            path.write_bytes(content)

    def _end_processes(self) -> None:
        """A loss of power ends them all, also those that another process has started in a session of its own."""
        deadline = time.monotonic() + END_S
        while pids := list(self._processes()):
            assert time.monotonic() < deadline, f"processes do not end: {pids}"
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(LOOK_S)

    def _processes(self) -> Iterator[int]:
        mark = f"LD_PRELOAD={self._images / LIBRARY}".encode()
        for path in Path("/proc").iterdir():
            if path.name.isdigit() and int(path.name) != os.getpid():
                try:
                    if mark in (path / "environ").read_bytes().split(b"\0"):  # of one that has ended there is none
                        yield int(path.name)
                except OSError:
                    continue


def files_below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _mixed(synced: bytes, seen: bytes, chance: random.Random) -> bytes:
    """Of each page, what was synced or what was there; a size of either. A page that was never written is zeros."""
    size = chance.choice((len(synced), len(seen)))
    pages = []
    for at in range(0, size, PAGE_BYTES):
        source = chance.choice((synced, seen))
        pages.append(source[at : at + PAGE_BYTES].ljust(PAGE_BYTES, b"\0"))
    return b"".join(pages)[:size]


def _compile(target: Path, **macros: str) -> None:
    assert COMPILER is not None, "a C compiler is needed: see COMPILER"
    defined = [f'-D{name}="{value}"' for name, value in macros.items()]
    words = [COMPILER, "-O1", "-shared", "-fPIC", *defined, "-o", str(target), str(SOURCE), "-ldl"]
    subprocess.run(words, check=True, timeout=60)
