"""Results in a folder of parts: their names, and the manifest that says which of them count.

A part is a range of rows. Its name carries the job and the attempt that wrote it, so attempts never share a file.
`manifest.json` is written last; readers follow it. Loaded by every owner: it imports no store and no numpy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec import Struct

from batchmill.errors import Conflict, InvalidInput
from batchmill.jobs.ledger.files import MANIFEST_NAME, PartFile, full_disk_named, remove_files
from batchmill.object_store.urls import is_object_url, open_store, parse_url
from batchmill.store.segments import sync_folder

if TYPE_CHECKING:
    from batchmill.object_store.store import ObjectStore

MANIFEST_BYTES_MAX = 64 * 1024 * 1024  # about 150,000 parts
SETTLED_MAX = 3  # times that a manifest which appears or vanishes meanwhile is looked at again
_NAME = re.compile(r"(?:part|errors|manifest)-(?:[0-9]{5,}-)?([0-9a-f]{20})-[0-9a-f]{8}\.json(?:l)?(?:\.part)?")


class Part(Struct, frozen=True):
    """One file of rows first <= n < end; `rows` are those that it holds: rows that failed may be apart."""

    name: str
    first: int
    end: int
    rows: int
    bytes: int
    sha256: str


class PartManifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The parts that count, in the order of their rows. `errors`: the rows that failed, if they are kept apart."""

    job: str
    generation: int
    rows: int
    ok: int
    failed: int
    parts: list[Part]
    errors: list[Part]

    def has_same_content(self, other: PartManifest) -> bool:
        """Whether two manifests name the same rows, whatever the names of the files."""
        return _nameless(self) == _nameless(other)


def _nameless(manifest: PartManifest) -> PartManifest:
    def without(parts: Sequence[Part]) -> list[Part]:
        return [msgspec.structs.replace(part, name="") for part in parts]

    return msgspec.structs.replace(manifest, parts=without(manifest.parts), errors=without(manifest.errors))


def part_name(prefix: str, number: int, job: str, attempt: str) -> str:
    """Args: prefix: part or errors. attempt: 8 hexadecimal digits."""
    return f"{prefix}-{number:05}-{job.removeprefix('job_')}-{attempt}.jsonl"


class OutputFolder(Protocol):
    """Where parts go. Every method blocks. Raises: as `ObjectStore`, or StorageFull."""

    def writing_place(self, scratch: Path) -> Path:
        """The folder of this machine in which a part is written."""

    def put_part(self, path: Path) -> None:
        """Bring a complete part from there to its place."""

    def read_manifest(self) -> bytes | None: ...

    def put_manifest(self, data: bytes, *, scratch: str, overwrite: bool) -> None:
        """Raises: Conflict if there is another and it must not be overwritten."""

    def names(self) -> list[str]: ...

    def remove(self, names: Sequence[str]) -> None: ...


class LocalFolder:
    """A folder of this machine, in which parts are written where they stay."""

    def __init__(self, output: str) -> None:
        self._home = Path(output)

    def writing_place(self, scratch: Path) -> Path:
        self._home.mkdir(exist_ok=True)
        return self._home

    def put_part(self, path: Path) -> None:
        """It is there."""

    def read_manifest(self) -> bytes | None:
        try:
            with open(self._home / MANIFEST_NAME, "rb") as file:
                return file.read(MANIFEST_BYTES_MAX + 1)
        except FileNotFoundError:
            return None

    def put_manifest(self, data: bytes, *, scratch: str, overwrite: bool) -> None:
        self._home.mkdir(exist_ok=True)
        with PartFile(self._home / (MANIFEST_NAME if overwrite else scratch)) as file:
            file.write(data)
            file.publish()
        if overwrite:
            return
        try:
            with full_disk_named(self._home / MANIFEST_NAME):
                os.link(self._home / scratch, self._home / MANIFEST_NAME)
        except FileExistsError:
            raise Conflict(f"{self._home / MANIFEST_NAME} exists", code="object_exists") from None
        finally:
            remove_files([self._home / scratch])
        sync_folder(self._home)

    def names(self) -> list[str]:
        return os.listdir(self._home)

    def remove(self, names: Sequence[str]) -> None:
        remove_files([self._home / name for name in names])


class ObjectFolder:
    """The objects below a URL."""

    def __init__(self, output: str) -> None:
        self._store: ObjectStore = open_store(output)

    def writing_place(self, scratch: Path) -> Path:
        return scratch

    def put_part(self, path: Path) -> None:
        self._store.put_file(path.name, path)
        path.unlink()

    def read_manifest(self) -> bytes | None:
        if self._store.find(MANIFEST_NAME) is None:
            return None
        return self._store.get(MANIFEST_NAME, size_max=MANIFEST_BYTES_MAX)

    def put_manifest(self, data: bytes, *, scratch: str, overwrite: bool) -> None:
        self._store.put(MANIFEST_NAME, data, overwrite=overwrite)

    def names(self) -> list[str]:
        return [info.key for info in self._store.list() if "/" not in info.key]

    def remove(self, names: Sequence[str]) -> None:
        self._store.delete(*names)


def open_folder(output: str) -> OutputFolder:
    """Args: output: an absolute path or a URL, with a slash at its end."""
    return ObjectFolder(output) if is_object_url(output) else LocalFolder(output)


def check_folder(output: str) -> None:
    """Whether parts can be written to a folder. Raises: InvalidInput."""
    if is_object_url(output):
        parse_url(output)
        return
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"the output {output!r} is a file: leave out the slash", code="invalid_output")
    existing = folder if folder.exists() else folder.parent
    if not existing.is_dir():
        raise InvalidInput(f"the folder {str(existing)!r} of the output is not there: make it", code="invalid_output")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InvalidInput(f"the folder {str(existing)!r} of the output cannot be written", code="invalid_output")


def decode_manifest(data: bytes, output: str) -> PartManifest:
    """Raises: InvalidInput (`output_exists`) for a file that batchmill did not write."""
    try:
        if len(data) > MANIFEST_BYTES_MAX:
            raise msgspec.ValidationError("it is too large")
        return msgspec.json.decode(data, type=PartManifest)
    except msgspec.DecodeError as error:
        raise InvalidInput(
            f"{output}{MANIFEST_NAME} is not a manifest of batchmill ({error}): choose another output, or remove it",
            code="output_exists",
        ) from None


def read_manifest(output: str) -> PartManifest | None:
    """The manifest of a folder; None: there is none. Raises: as `decode_manifest`."""
    data = open_folder(output).read_manifest()
    return None if data is None else decode_manifest(data, output)


def publish_manifest(folder: OutputFolder, output: str, mine: PartManifest, replaced_job: str | None) -> PartManifest:
    """Put the manifest; return the one that counts, which may be that of an earlier attempt with the same content.

    Args: replaced_job: another job whose manifest this one may replace.
    Raises: InvalidInput (`output_taken`) if another job's is there.
    """
    scratch = f"manifest-{mine.job.removeprefix('job_')}-{os.urandom(4).hex()}.json"
    data = msgspec.json.format(msgspec.json.encode(mine), indent=1)
    for _ in range(SETTLED_MAX):
        there = folder.read_manifest()
        if there is not None:
            earlier = decode_manifest(there, output)
            if earlier.job not in (mine.job, replaced_job) or (
                earlier.job == mine.job and earlier.generation > mine.generation
            ):
                break
            if earlier.has_same_content(mine):
                return earlier
        with suppress(Conflict):
            folder.put_manifest(data, scratch=scratch, overwrite=there is not None)
            return mine
    raise InvalidInput(
        f"{output}{MANIFEST_NAME} was written by something else since the job {mine.job} began: move it away, "
        f"then resume the job",
        code="output_taken",
    )


def remove_uncounted(folder: OutputFolder, counted: PartManifest, replaced_job: str | None) -> None:
    """Remove parts of this job and of the one that it replaces, but for those that count."""
    owners = {job.removeprefix("job_") for job in (counted.job, replaced_job) if job is not None}
    kept = {part.name for part in (*counted.parts, *counted.errors)}
    folder.remove(
        [
            name
            for name in folder.names()
            if name not in kept and (match := _NAME.fullmatch(name)) is not None and match[1] in owners
        ]
    )
