"""Fetches an adapter from a folder, a model hub or an object store into a folder that never changes afterwards.

It runs in a child process, because the client libraries may hang and use much memory. The folder gets its name once all
its files are on the disk; a crash before that leaves a staging folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.models.adapters.reading import find_mismatch, read_adapter
from batchmill.optional import require
from batchmill.part_files import make_folder, sync_file, sync_folder
from batchmill.wire.adapter_bundles import FILES, check_names, too_large

HUB = "batchmill.models.adapters.hub:download"
OBJECTS = "batchmill.models.adapters.objects:download"
SCHEMES = ("s3", "gs", "az")
STAGING = "staging"  # beside the folders of adapters
CHUNK_BYTES = 1024 * 1024
SHOWN_CHARS = 200
UNFIT_CHARS = "?#%\\"  # in the address of an object: the store would read another object than the one that was checked
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?(@[\w./-]{1,200})?")


class Fetched(Struct, frozen=True):
    """A fetched adapter."""

    folder: str
    digest: str  # sha256 of its files
    bytes: int


class FetchOrder(Struct, frozen=True):
    """`base_source` is empty if the base model is not known yet."""

    source: str
    home: str
    token: str | None = None
    base_source: str = ""
    rank_max: int = 0

    def __repr__(self) -> str:  # without the token
        return f"FetchOrder({self.source})"


class FetchReport(Struct, frozen=True):
    """A fetched adapter and its properties. `flaw` says why it does not fit its base; empty if it fits."""

    fetched: Fetched
    rank: int
    base: str | None
    flaw: str = ""


class FileReader(Protocol):
    """Reads a file of an adapter, and passes it to `write` in chunks."""

    def __call__(self, name: str, write: Callable[[bytes], None]) -> None: ...


def kind_of(source: str) -> str:
    """The kind of an adapter's source: "folder", "hub" or "objects". Raises: InvalidInput for an invalid source."""
    scheme, colon, path = source.partition("://")
    if colon:
        bucket, *parts = path.split("/")
        is_plain = not any(mark in path for mark in UNFIT_CHARS) and not any(part in (".", "..") for part in parts)
        if scheme not in SCHEMES or not bucket or "@" in bucket or not is_plain:
            raise InvalidInput(
                f"{source[:SHOWN_CHARS]!r} is not an address of an object store: write s3://BUCKET/PREFIX, gs:// or "
                f"az://, without . and .. as parts and without {' '.join(UNFIT_CHARS)}; credentials come from the "
                "environment",
                code="invalid_source",
            )
        return "objects"
    if source.startswith(("/", ".", "~")):
        return "folder"
    if HUB_ID.fullmatch(source) and ".." not in source:
        return "hub"
    raise InvalidInput(
        f"{source[:SHOWN_CHARS]!r} is not a source of an adapter: write the path of a folder, ORG/NAME of a model "
        "hub, or s3://BUCKET/PREFIX",
        code="invalid_source",
    )


def run(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Run in a child process: takes a FetchOrder and returns a FetchReport, both as JSON."""
    fetch_order = msgspec.json.decode(order, type=FetchOrder)
    fetched = fetch(fetch_order.source, Path(fetch_order.home), token=fetch_order.token)
    return msgspec.json.encode(describe(fetched, fetch_order.base_source, fetch_order.rank_max))


def describe(fetched: Fetched, base_source: str, rank_max: int) -> FetchReport:
    """Report the properties of a fetched adapter."""
    facts = read_adapter(Path(fetched.folder))
    mismatch = find_mismatch(facts, base_source=base_source, rank_max=rank_max) if base_source else ""
    return FetchReport(fetched, facts.rank, facts.base, mismatch)


def fetch(source: str, home: Path, *, token: str | None) -> Fetched:
    """Fetch the adapter of `source` into the folder `home`. If the folder exists, it is complete and stays.

    Args:
        token: for a model hub.

    Raises: InvalidInput if it does not exist or cannot be served; TooLarge; Unavailable if a retry may help;
    InvalidConfig (`missing_dependency`).
    """
    kind = kind_of(source)
    if home.is_dir():
        return measure(home)
    make_folder(home.parent)
    of_adapter = home.parent / STAGING / home.name
    make_folder(of_adapter)
    # The child of an owner that was cut off may go on beside that of its successor.
    work_folder = Path(tempfile.mkdtemp(dir=of_adapter))
    staged = work_folder / "adapter"
    staged.mkdir(mode=0o700)
    try:
        if kind == "hub":
            require(HUB, "an adapter of a model hub")(source, staged, work_folder, token)
        elif kind == "objects":
            require(OBJECTS, "an adapter in an object store")(source, staged)
        else:
            _copy_folder(Path(source).expanduser(), staged)
        return settle(staged, home)
    finally:
        shutil.rmtree(work_folder, ignore_errors=True)
        with suppress(OSError):  # there is another one's
            of_adapter.rmdir()


def settle(staged: Path, home: Path) -> Fetched:
    """Check a staged adapter, and move it to its final folder. Raises: InvalidInput."""
    read_adapter(staged)
    for path in staged.iterdir():
        path.chmod(0o444)
        sync_file(path)
    sync_folder(staged)
    try:
        staged.rename(home)
    except OSError:
        if not home.is_dir():  # else another one was faster
            raise
    sync_folder(home.parent)
    return measure(home)


def measure(home: Path) -> Fetched:
    """Compute the digest and size of an adapter in its folder."""
    digest, size = hashlib.sha256(), 0
    for name in FILES:
        with (home / name).open("rb") as file:
            size += os.fstat(file.fileno()).st_size
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return Fetched(str(home), digest.hexdigest(), size)


def write_file(folder: Path, name: str, read_file: FileReader) -> None:
    """Write one of FILES in chunks, with a check of its size. Raises: TooLarge."""
    with (folder / name).open("xb") as out:

        def write(chunk: bytes) -> None:
            check_size(name, out.tell() + len(chunk))
            out.write(chunk)

        read_file(name, write)


def check_size(name: str, size_bytes: int) -> None:
    """Raises: TooLarge for a file that is larger than its limit."""
    if size_bytes > FILES[name]:
        raise too_large(name)


def _copy_folder(source: Path, folder: Path) -> None:
    """Copy the files of a local folder. Refuses links to files outside of it."""
    if not source.is_dir():
        raise InvalidInput(f"there is no folder {str(source)[:SHOWN_CHARS]!r}", code="unknown_adapter")
    root = source.resolve()
    check_names(str(source), {path.name for path in source.iterdir()})
    for name in FILES:
        if not (root / name).resolve().is_relative_to(root):
            raise InvalidInput(
                f"{source / name} is a link to a file outside of its folder: copy the file there, or register the id "
                "of a model hub",
                code="invalid_source",
            )
        check_size(name, (root / name).stat().st_size)
        write_file(folder, name, lambda file_name, write: _read_chunks(root / file_name, write))


def _read_chunks(path: Path, write: Callable[[bytes], None]) -> None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidInput(f"{path} is not a file", code="invalid_source")
            copy_chunks(file, write)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", code="unreadable_file") from None


def copy_chunks(file: BinaryIO, write: Callable[[bytes], None]) -> None:
    while chunk := file.read(CHUNK_BYTES):
        write(chunk)
