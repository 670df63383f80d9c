"""Archives of code to deploy: a tar.gz whose first member is deploy.json; all others are below code/.

The writer gets the list of files. Reading checks names, kinds, sizes and the number of members.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput, TooLarge
from batchmill.types import ModelSpec

BUNDLE_MEDIA = (
    "application/vnd.batchmill.bundle+gzip"  # a web page cannot send this type cross-origin without a preflight
)
REQUIREMENTS_CHARS_MAX = 200_000
EXAMPLES_MAX = 100


SCHEMA = "schema"  # a kind of what is deployed
READY = "ready"  # the state of a version that serves
SHOWN_MAX = 5  # versions that an error message lists


class DeployOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a deployment: the function's name, its target in the code, and its environment."""

    name: str  # empty, of a schema: the server names it by its code
    target: str  # "app.py:fn"; the file is relative to the folder of code
    branch: str = "main"
    source: str = ""  # for people: app.py:fn, a git URL at its revision
    requirements: str | None = None  # the text of a requirements file; None: no environment of its own
    python: str | None = None  # an interpreter's path, or "3.11"; None: batchmill's own
    environment: dict[str, str] = {}
    secrets: dict[str, str] = {}  # variable -> "env:NAME", "file:PATH" or "secret:NAME", at the server
    workers: int = 1
    gpus: int = 0
    memory_bytes: int | None = None
    timeout_s: float | None = None
    batch_size: int = 0
    batch_window_s: float | None = None
    frame_columns: list[str] = []
    is_idempotent: bool = False
    is_deterministic: bool = False  # equal rows have equal results: projects may reuse them
    received_shapes: bool = False
    examples: list[
        Any
    ] = []  # arguments by name (an object) or by position (a list): the server calls the function with each first
    is_shared: bool | None = None  # other projects may call it; None: as before; at first only if it came without a key
    has_samples: bool = False  # input.json or output.json was given explicitly: the code must be able to use them
    kind: Literal["model", "schema"] = "model"  # schema: `target` is a class, which validates answers of jobs


class ModelVersion(Struct, frozen=True):
    """A version of a deployed function. States: building, ready, failed, removed."""

    name: str
    branch: str
    number: int
    state: str
    created: float
    finished: float | None = None
    source: str = ""
    error: str | None = None  # why it failed: the traceback
    spec: ModelSpec | None = None  # once it is ready
    project: str = "default"  # the owner
    key: str | None = None  # the public id of the key that deployed it; None: the user of the machine
    is_shared: bool = True  # other projects may call it

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.branch}/{self.number}"


def unknown_version(name: str, version: str, state: str | None, ready: Sequence[str], aliases: Sequence[str]) -> str:
    """The message for a version that does not exist (`state` is None) or is not ready, with those that are."""
    problem = f"is {state}" if state is not None else "does not exist"
    choices = [*ready[-SHOWN_MAX:], *aliases]
    return f"the version {name}@{version} {problem}; ready versions of {name}: {', '.join(choices) or 'none'}"


class Backend(Struct, frozen=True, array_like=True):
    """One version behind an alias."""

    branch: str
    number: int
    weight: float = 1.0


class Route(Struct, frozen=True):
    """The versions behind a branch's `latest` or an alias ("@prod")."""

    name: str
    label: str
    backends: list[Backend]
    mirrors: list[Backend] = []  # get copies of the calls; their answers are dropped
    changed: float = 0.0


class Deployed(Struct, frozen=True):
    """The result of a deployment."""

    version: ModelVersion
    is_new: bool  # false: the newest version has the same code and settings already


ORDER, CODE = "deploy.json", "code"
FILES_MAX = 20_000
BYTES_MAX = 2 * 1024**3  # of all files together, unpacked
ORDER_BYTES_MAX = 4 * 1024 * 1024
HEADER_BYTES_MAX = 64 * 1024  # of the extended headers of one tar member
PATH_CHARS_MAX = 1000
PIECE_BYTES = 1024 * 1024
SHOWN_CHARS = 80


def write(out: BinaryIO, order: DeployOrder, files: Mapping[str, Path | bytes]) -> None:
    """Write an archive of these files, by their paths in the folder of code. Raises: InvalidInput, TooLarge."""
    if len(files) > FILES_MAX:
        raise TooLarge(f"there are {len(files):,} files; at most {FILES_MAX:,} can be deployed together")
    left = BYTES_MAX
    with tarfile.open(fileobj=out, mode="w:gz", format=tarfile.PAX_FORMAT, compresslevel=1) as archive:
        _add(archive, ORDER, io.BytesIO(msgspec.json.encode(order)), 0o644)
        for path in sorted(files):
            check_path(path)
            content = files[path]
            try:
                left -= os.path.getsize(content) if isinstance(content, Path) else len(content)
                if left < 0:
                    raise TooLarge(f"the files are more than {BYTES_MAX:,} bytes: deploy fewer, or smaller ones")
                if isinstance(content, bytes):
                    _add(archive, f"{CODE}/{path}", io.BytesIO(content), 0o644)
                    continue
                with content.open("rb") as file:
                    _add(archive, f"{CODE}/{path}", file, os.fstat(file.fileno()).st_mode)
            except OSError as error:
                raise InvalidInput(f"{content} cannot be read: {error.strerror}", code="unreadable_file") from None


def _add(archive: tarfile.TarFile, name: str, file: BinaryIO, mode: int) -> None:
    """Add a file. The same content gives the same bytes: owner and time are left out."""
    info = tarfile.TarInfo(name)
    info.mode = 0o755 if mode & 0o100 else 0o644
    info.size = file.seek(0, io.SEEK_END)
    file.seek(0)
    archive.addfile(info, file)


def read(source: BinaryIO, folder: Path) -> DeployOrder:
    """Unpack an archive into `folder`, which must be empty, and return its order.

    Raises: InvalidInput (`invalid_bundle`) for an archive that `write` would not make; TooLarge.
    """
    try:
        with (
            gzip.GzipFile(fileobj=source, mode="rb") as unpacked,
            tarfile.open(fileobj=unpacked, mode="r|", tarinfo=_PlainInfo) as archive,
        ):
            members = iter(archive)
            order = _read_order(archive, next(members, None))
            _unpack(archive, members, folder)
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile, UnicodeError, RecursionError) as error:
        raise _invalid(f"it is not a tar.gz: {error}") from None
    return order


class _PlainInfo(tarfile.TarInfo):
    """A tar member with a limit on its extended headers, so that they cannot fill the memory."""

    def _proc_member(self, tarfile_: tarfile.TarFile) -> tarfile.TarInfo:
        if not (self.isreg() or self.isdir()) and self.size > HEADER_BYTES_MAX:
            raise _invalid(f"a header of {self.size:,} bytes")
        return super()._proc_member(tarfile_)  # type: ignore[misc]


def _read_order(archive: tarfile.TarFile, first: tarfile.TarInfo | None) -> DeployOrder:
    if first is None or first.name != ORDER or not first.isreg() or first.size > ORDER_BYTES_MAX:
        raise _invalid(f"its first member is not {ORDER}")
    file = archive.extractfile(first)
    assert file is not None
    try:
        return msgspec.json.decode(file.read(), type=DeployOrder)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _invalid(f"{ORDER}: {error}") from None


def _unpack(archive: tarfile.TarFile, members: Iterator[tarfile.TarInfo], folder: Path) -> None:
    left = BYTES_MAX
    for count, member in enumerate(members, 1):
        if count > FILES_MAX:
            raise TooLarge(f"the bundle holds more than {FILES_MAX:,} files")
        if member.isdir():
            continue
        top, _, path = member.name.partition("/")
        if not member.isreg() or member.issparse() or top != CODE:
            raise _invalid(f"{member.name[:SHOWN_CHARS]!r} is not a file below {CODE}/")
        left -= member.size
        if left < 0:
            raise TooLarge(f"the bundle unpacks to more than {BYTES_MAX:,} bytes")
        _write_file(archive, member, folder / check_path(path))


def _write_file(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    file = archive.extractfile(member)
    assert file is not None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as out:
            while piece := file.read(PIECE_BYTES):
                out.write(piece)
        path.chmod(0o755 if member.mode & 0o100 else 0o644)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise _invalid(f"it has {member.name[:SHOWN_CHARS]!r} twice") from None


def check_path(path: str) -> str:
    """Return the relative path of a file if it is safe: it stays below any folder. Raises: InvalidInput."""
    parts = PurePosixPath(path).parts
    is_plain = path and "\\" not in path and path.isprintable() and len(path) <= PATH_CHARS_MAX
    if not is_plain or path.startswith("/") or ".." in parts or str(PurePosixPath(path)) != path:
        raise _invalid(f"{path[:SHOWN_CHARS]!r} is not a valid path of a file")
    return path


def _invalid(message: str) -> InvalidInput:
    return InvalidInput(f"this is not a bundle of code: {message}", code="invalid_bundle")


def digest(folder: Path) -> str:
    """The sha256 of all files below a folder: their paths, executable bits and bytes."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                inner = hashlib.file_digest(file, "sha256").digest()
            name = str(path.relative_to(folder)).encode()
            total.update(len(name).to_bytes(4, "little") + name + bytes([path.stat().st_mode & 0o100 != 0]) + inner)
    return total.hexdigest()
