"""An adapter brought here: from a folder, a model hub or an object store, into a folder that never changes after.

Runs in a child process: what it fetches with may hang, and holds memory. A folder appears under its name once all its
files are on the disk; a crash before that leaves a staging folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.models.adapters.reading import flaw as flaw_of
from batchmill.models.adapters.reading import read_adapter
from batchmill.optional import require
from batchmill.wire.adapter_bundles import FILES, check_names, too_large

HUB = "batchmill.models.adapters.hub:download"
OBJECTS = "batchmill.models.adapters.objects:download"
SCHEMES = ("s3", "gs", "az")
STAGING = "staging"  # beside the folders of adapters
PIECE_BYTES = 1024 * 1024
SHOWN_CHARS = 200
UNFIT = "?#%\\"  # in the address of an object: what is read of it would be another place than what was allowed
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?(@[\w./-]{1,200})?")


class Fetched(Struct, frozen=True):
    """An adapter that is here."""

    folder: str
    digest: str  # sha256 of its files
    bytes: int


class FetchOrder(Struct, frozen=True):
    """`base_source` empty: nobody knows yet for which base."""

    source: str
    home: str
    token: str | None = None
    base_source: str = ""
    rank_max: int = 0

    def __repr__(self) -> str:  # it may hold a token
        return f"FetchOrder({self.source})"


class FetchReport(Struct, frozen=True):
    """What was fetched and what it is; `flaw`: why it does not fit its base."""

    fetched: Fetched
    rank: int
    base: str | None
    flaw: str = ""


class Take(Protocol):
    """Gives the bytes of a file of an adapter, piece by piece, to `write`."""

    def __call__(self, name: str, write: Callable[[bytes], None]) -> None: ...


def kind_of(source: str) -> str:
    """Where an adapter comes from: "folder", "hub" or "objects". Raises: InvalidInput for a text that is none."""
    scheme, colon, rest = source.partition("://")
    if colon:
        bucket, *parts = rest.split("/")
        is_plain = not any(mark in rest for mark in UNFIT) and not any(part in (".", "..") for part in parts)
        if scheme not in SCHEMES or not bucket or "@" in bucket or not is_plain:
            raise InvalidInput(
                f"{source[:SHOWN_CHARS]!r} is no address of an object store: write s3://BUCKET/PREFIX, gs:// or az://, "
                f"without . and .. as parts and without {' '.join(UNFIT)}; credentials come from the environment",
                code="invalid_source",
            )
        return "objects"
    if source.startswith(("/", ".", "~")):
        return "folder"
    if HUB_ID.fullmatch(source) and ".." not in source:
        return "hub"
    raise InvalidInput(
        f"{source[:SHOWN_CHARS]!r} is no source of an adapter: write the path of a folder, ORG/NAME of a model hub, or "
        "s3://BUCKET/PREFIX",
        code="invalid_source",
    )


def run(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: FetchOrder in, FetchReport out, both as JSON."""
    asked = msgspec.json.decode(order, type=FetchOrder)
    fetched = fetch(asked.source, Path(asked.home), token=asked.token)
    return msgspec.json.encode(described(fetched, asked.base_source, asked.rank_max))


def described(fetched: Fetched, base_source: str, rank_max: int) -> FetchReport:
    """What an adapter that is here is."""
    facts = read_adapter(Path(fetched.folder))
    why = flaw_of(facts, base_source=base_source, rank_max=rank_max) if base_source else ""
    return FetchReport(fetched, facts.rank, facts.base, why)


def fetch(source: str, home: Path, *, token: str | None) -> Fetched:
    """Bring the adapter of `source` into the folder `home`; one that is there already is whole, and stays.

    Args: token: what a model hub is shown.

    Raises: InvalidInput for one that is not there or cannot be served, TooLarge, Unavailable where asking again may
    help, InvalidConfig (`missing_dependency`).
    """
    kind = kind_of(source)
    if home.is_dir():
        return found(home)
    home.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    work = home.parent / STAGING / home.name
    shutil.rmtree(work, ignore_errors=True)  # of one that was killed
    staged = work / "adapter"
    staged.mkdir(parents=True, mode=0o700)
    try:
        if kind == "hub":
            require(HUB, "an adapter of a model hub")(source, staged, work, token)
        elif kind == "objects":
            require(OBJECTS, "an adapter in an object store")(source, staged)
        else:
            _copy_folder(Path(source).expanduser(), staged)
        return settle(staged, home)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def settle(staged: Path, home: Path) -> Fetched:
    """Check what was staged, and give it the folder in which it stays. Raises: InvalidInput."""
    read_adapter(staged)
    for path in staged.iterdir():
        path.chmod(0o444)
        _sync(path)
    _sync(staged)
    staged.rename(home)
    _sync(home.parent)
    return found(home)


def found(home: Path) -> Fetched:
    """An adapter that has its folder."""
    total, size = hashlib.sha256(), 0
    for name in FILES:
        with (home / name).open("rb") as file:
            size += os.fstat(file.fileno()).st_size
            total.update(hashlib.file_digest(file, "sha256").digest())
    return Fetched(str(home), total.hexdigest(), size)


def write_file(place: Path, name: str, take: Take) -> None:
    """One of FILES, in pieces and no larger than it may be. Raises: TooLarge."""
    with (place / name).open("xb") as out:

        def write(piece: bytes) -> None:
            check_size(name, out.tell() + len(piece))
            out.write(piece)

        take(name, write)


def check_size(name: str, size_bytes: int) -> None:
    """Raises: TooLarge."""
    if size_bytes > FILES[name]:
        raise too_large(name)


def _copy_folder(source: Path, place: Path) -> None:
    """The files of a folder of this machine; none that lies elsewhere."""
    if not source.is_dir():
        raise InvalidInput(f"there is no folder {str(source)[:SHOWN_CHARS]!r}", code="unknown_adapter")
    root = source.resolve()
    check_names(str(source), {path.name for path in source.iterdir()})
    for name in FILES:
        if not (root / name).resolve().is_relative_to(root):
            raise InvalidInput(
                f"{source / name} is a link that leads out of its folder: copy the file there, or register the id of "
                "a model hub",
                code="invalid_source",
            )
        check_size(name, (root / name).stat().st_size)
        write_file(place, name, lambda each, write: _read_pieces(root / each, write))


def _read_pieces(path: Path, write: Callable[[bytes], None]) -> None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidInput(f"{path} is no file", code="invalid_source")
            copy_pieces(file, write)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", code="unreadable_file") from None


def copy_pieces(file: BinaryIO, write: Callable[[bytes], None]) -> None:
    while piece := file.read(PIECE_BYTES):
        write(piece)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
