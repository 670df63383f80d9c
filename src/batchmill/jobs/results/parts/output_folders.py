"""Results in a folder of parts: their names, and the manifest that says which of them count.

A part is a range of rows. Its name carries the job and the attempt that wrote it, so attempts never share a file.
`manifest.json` is written last; readers follow it. Loaded by every owner: it imports no store and no numpy.

An attempt reads the manifest before it writes a part, and replaces only that one: of two attempts that run at the same
time, the second to publish has lost. So the attempt that publishes may remove the parts that it saw before: the
attempts that wrote them can publish no more.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec import Struct

from batchmill import faults
from batchmill.errors import Conflict, InputChanged, InvalidInput, StorageFailed, TooLarge
from batchmill.jobs.ledger.files import MANIFEST_NAME
from batchmill.object_store.urls import ObjectInfo, is_object_url, open_store, parse_url
from batchmill.owner_term import term_at
from batchmill.part_files import PartFile, full_disk_named, remove_files, sync_folder
from batchmill.wire.job_spec import EXISTS

if TYPE_CHECKING:
    from batchmill.object_store.store import ObjectStore

MANIFEST_BYTES_MAX = 64 * 1024 * 1024  # about 150,000 parts
READS_MAX = 5  # of a manifest that is replaced while it is read
LOCK_NAME = ".manifest.lock"  # exists while a manifest of a local folder is replaced
NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})  # of what is opened: a link, a folder, a socket
LOCK_S, LOCK_PAUSE_S = 60.0, 0.05  # how long another process may hold it; between two tries
_NAME = re.compile(
    r"(?:part|errors|manifest)-(?:[0-9]{5,}-)?([0-9a-f]{20})-[0-9a-f]{8}\.(?:jsonl?|csv|parquet)(?:\.part)?"
)


class Part(Struct, frozen=True):
    """One file of rows first <= n < end; `rows` are those that it holds: rows that failed may be apart."""

    name: str
    first: int
    end: int
    rows: int
    bytes: int
    sha256: str


class PartManifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The parts that count, in the order of their rows. `errors`: the rows that failed, if they are kept apart.

    `attempt` put the manifest; it may name the equal parts of an earlier one.
    """

    job: str
    generation: int
    attempt: str
    rows: int
    ok: int
    failed: int
    parts: list[Part]
    errors: list[Part]

    @property
    def names(self) -> set[str]:
        return {part.name for part in (*self.parts, *self.errors)}

    def has_same_content(self, other: PartManifest) -> bool:
        """Whether two manifests name the same rows, whatever the names of the files."""
        return _nameless(self) == _nameless(other)


def _nameless(manifest: PartManifest) -> PartManifest:
    def without(parts: Sequence[Part]) -> list[Part]:
        return [msgspec.structs.replace(part, name="") for part in parts]

    return msgspec.structs.replace(manifest, attempt="", parts=without(manifest.parts), errors=without(manifest.errors))


def part_name(prefix: str, number: int, job: str, attempt: str, kind: str = "jsonl") -> str:
    """Args: prefix: part or errors. attempt: 8 hexadecimal digits."""
    return f"{prefix}-{number:05}-{job.removeprefix('job_')}-{attempt}.{kind}"


class StoredManifest(Struct, frozen=True):
    """A manifest as it was read. Another one has another `etag`."""

    data: bytes
    info: ObjectInfo


class OutputFolder(Protocol):
    """Where parts go. Every method blocks. Raises: as `ObjectStore`, or StorageFull."""

    def writing_place(self, scratch: Path) -> Path:
        """The folder of this machine in which a part is written."""

    def put_part(self, path: Path) -> None:
        """Bring a complete part from there to its place."""

    def read_manifest(self) -> StoredManifest | None: ...

    def put_manifest(self, data: bytes, *, scratch: str, replaced: ObjectInfo | None) -> None:
        """Put a manifest where there is none, or instead of the one that was seen as `replaced`.

        Raises: Conflict if what is there is not `replaced`.
        """

    def names(self, is_wanted: Callable[[str], bool]) -> list[str]:
        """The wanted names among those directly in the folder: it may hold any number of others."""

    def remove(self, names: Sequence[str]) -> None: ...


class LocalFolder:
    """A folder of this machine, in which parts are written where they stay."""

    def __init__(self, output: str, *, lock_s: float = LOCK_S, pause: Callable[[float], None] = time.sleep) -> None:
        self._home = Path(output)
        self._lock_s, self._pause = lock_s, pause

    def writing_place(self, scratch: Path) -> Path:
        self._make()
        return self._home

    def _make(self) -> None:
        with suppress(FileExistsError):
            self._home.mkdir()
            sync_folder(self._home.parent)

    def put_part(self, path: Path) -> None:
        """It is there."""

    def read_manifest(self) -> StoredManifest | None:
        try:
            with open(self._home / MANIFEST_NAME, "rb") as file:
                data = file.read(MANIFEST_BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        return StoredManifest(data, ObjectInfo(MANIFEST_NAME, len(data), hashlib.sha256(data).hexdigest()))

    def put_manifest(self, data: bytes, *, scratch: str, replaced: ObjectInfo | None) -> None:
        self._make()
        place = self._home / MANIFEST_NAME
        with self._locked():
            there = self.read_manifest()
            if (there.info if there else None) != replaced:
                raise Conflict(f"{place} is another one by now", code="object_exists")
            with PartFile(self._home / scratch) as file:
                file.write(data)
                file.publish()
            if replaced is not None:
                os.replace(self._home / scratch, place)
            else:
                self._put_first(self._home / scratch, place)
        sync_folder(self._home)

    @staticmethod
    def _put_first(scratch: Path, place: Path) -> None:
        """Give a file its name, which a program that takes no lock may have taken meanwhile."""
        try:
            with full_disk_named(place):
                os.link(scratch, place)
        except FileExistsError:
            raise Conflict(f"{place} exists", code="object_exists") from None
        finally:
            remove_files([scratch])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time replaces the manifest; the lock of a dead one is free. Raises: StorageFailed."""
        path, deadline = self._home / LOCK_NAME, time.monotonic() + self._lock_s
        while (fd := _lock(path)) is None:
            if time.monotonic() > deadline:
                raise StorageFailed(
                    f"another process has been replacing {self._home / MANIFEST_NAME} for {self._lock_s:g} s: end it, "
                    "then resume the job"
                )
            self._pause(LOCK_PAUSE_S)
        try:
            yield
        finally:
            try:
                with suppress(PermissionError):  # another user's, in a folder where each user removes only their own
                    path.unlink(missing_ok=True)
            finally:
                os.close(fd)

    def names(self, is_wanted: Callable[[str], bool]) -> list[str]:
        if not self._home.exists():
            return []
        with os.scandir(self._home) as entries:
            return [entry.name for entry in entries if is_wanted(entry.name)]

    def remove(self, names: Sequence[str]) -> None:
        remove_files([self._home / name for name in names])


class ObjectFolder:
    """The objects below a URL."""

    def __init__(self, output: str, term: str) -> None:
        self._store: ObjectStore = open_store(output, term=term_at(term))

    def writing_place(self, scratch: Path) -> Path:
        return scratch

    def put_part(self, path: Path) -> None:
        self._store.put_file(path.name, path)
        path.unlink()

    def read_manifest(self) -> StoredManifest | None:
        for _ in range(READS_MAX):
            if (info := self._store.find(MANIFEST_NAME)) is None:
                return None
            if info.size_bytes > MANIFEST_BYTES_MAX:
                raise TooLarge(f"{self._store.url}/{MANIFEST_NAME} has more than {MANIFEST_BYTES_MAX:,} bytes")
            with suppress(InputChanged):
                return StoredManifest(b"".join(self._store.read(info)), info)
        raise StorageFailed(f"{self._store.url}/{MANIFEST_NAME} was replaced {READS_MAX} times while it was read")

    def put_manifest(self, data: bytes, *, scratch: str, replaced: ObjectInfo | None) -> None:
        self._store.put(MANIFEST_NAME, data, replaced=replaced)

    def names(self, is_wanted: Callable[[str], bool]) -> list[str]:
        return list(self.sizes(is_wanted))

    def sizes(self, is_wanted: Callable[[str], bool]) -> dict[str, int]:
        """As `names`, with the bytes of each."""
        return {info.key: info.size_bytes for info in self._store.list() if "/" not in info.key and is_wanted(info.key)}

    def remove(self, names: Sequence[str]) -> None:
        self._store.delete(*names)


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock of a file, which is made; None: another process holds it.

    Raises: StorageFailed where it is left of another user, and private, or no file.
    """
    fd = _open_lock(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(path), os.fstat(fd)):  # the last holder has not removed it meanwhile
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def _open_lock(path: Path) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # to open a pipe would wait for its other end
    try:
        fd = _open_any(path, flags)
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        raise _no_file(path) from None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise _no_file(path)


def _open_any(path: Path, flags: int) -> int:
    try:
        return os.open(path, os.O_CREAT | os.O_RDWR | flags, 0o666)
    except PermissionError as error:
        try:
            return os.open(path, os.O_RDONLY | flags)  # another user's: this is enough for its lock
        except FileNotFoundError:
            raise error from None  # of the folder
        except PermissionError:
            raise StorageFailed(
                f"{path} is another user's: delete it if no process of that user writes to the folder, then resume the "
                "job"
            ) from None


def _no_file(path: Path) -> StorageFailed:
    return StorageFailed(f"{path} is no regular file: delete it, then resume the job")


def open_folder(output: str, term: str = "") -> OutputFolder:
    """Args: output: an absolute path or a URL, with a slash at its end. term: see `Term.path`."""
    return ObjectFolder(output, term) if is_object_url(output) else LocalFolder(output)


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
    check_writable(existing)


def check_writable(folder: Path, name_bytes: int = 0) -> None:
    """Whether a file with a name of so many bytes can be made in a folder: by making one that has another name, because
    permissions do not tell of /proc, read-only mounts and the like. Raises: InvalidInput.
    """
    probe = folder / (f".{uuid.uuid4().hex}".ljust(name_bytes, "x") + ".part")  # as results are before they are whole
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        probe.unlink()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # there may be room when results are written
        raise InvalidInput(
            f"the folder {str(folder)!r} of the output cannot be written: {error.strerror}; choose another output",
            code="invalid_output",
        ) from None


def decode_manifest(data: bytes, output: str) -> PartManifest:
    """Raises: InvalidInput (`output_exists`) for a file that batchmill did not write."""
    try:
        if len(data) > MANIFEST_BYTES_MAX:
            raise msgspec.ValidationError("it is too large")
        return msgspec.json.decode(data, type=PartManifest)
    except msgspec.DecodeError as error:
        raise InvalidInput(
            f"{output}{MANIFEST_NAME} is not a manifest of batchmill ({error}): choose another output, or remove it",
            code=EXISTS,
        ) from None


def read_manifest(output: str) -> PartManifest | None:
    """The manifest of a folder; None: there is none. Raises: as `decode_manifest`."""
    stored = open_folder(output).read_manifest()
    return None if stored is None else decode_manifest(stored.data, output)


def seen_manifest(
    folder: OutputFolder, output: str, *, job: str, generation: int, replaced_job: str | None
) -> ObjectInfo | None:
    """The manifest that an attempt may replace, read before it writes a part; None: there is none.

    Args: replaced_job: another job whose manifest this one may replace.
    Raises: InvalidInput (`output_taken`, `output_exists`).
    """
    stored = folder.read_manifest()
    if stored is None:
        return None
    there = decode_manifest(stored.data, output)
    if there.job not in (job, replaced_job) or (there.job == job and there.generation > generation):
        raise _taken(there, output, job)
    return stored.info


def publish_manifest(
    folder: OutputFolder, output: str, mine: PartManifest, seen: ObjectInfo | None, replaced_job: str | None
) -> PartManifest:
    """Put the manifest, then remove the parts of this job and of the replaced one that do not count.

    Returns the manifest that counts: it names the parts of an earlier attempt if they have the same content.

    Args: seen: what `seen_manifest` returned before the first part of the attempt was written.
    Raises: InvalidInput (`output_taken`) if another manifest was put since; StorageFailed if a part is gone.
    """
    owners = {job.removeprefix("job_") for job in (mine.job, replaced_job) if job is not None}
    # Listed before the manifest is put: parts of later attempts are not touched.
    names = folder.names(lambda name: _owner_of(name) in owners)
    there = set(names)
    stored = folder.read_manifest()
    if (stored and stored.info.etag) != (seen and seen.etag):
        return _lost(folder, output, mine)
    if gone := sorted(mine.names - there):
        raise StorageFailed(f"{output}{gone[0]} was removed since it was written: resume the job to write it again")
    counted = mine
    if stored is not None:
        earlier = decode_manifest(stored.data, output)
        if earlier.has_same_content(mine) and earlier.names <= there:
            counted = msgspec.structs.replace(earlier, attempt=mine.attempt)
    scratch = f"manifest-{mine.job.removeprefix('job_')}-{os.urandom(4).hex()}.json"
    try:
        # Put even if it names the parts of an earlier attempt: from then on no other attempt can publish.
        data = msgspec.json.format(msgspec.json.encode(counted), indent=1)
        folder.put_manifest(data, scratch=scratch, replaced=seen)
    except Conflict:
        return _lost(folder, output, mine)
    faults.point("after_manifest")
    kept = counted.names
    folder.remove([name for name in names if name not in kept])
    return counted


def _owner_of(name: str) -> str | None:
    """The job of a part, without its prefix `job_`; None: the name is no part's."""
    match = _NAME.fullmatch(name)
    return None if match is None else match[1]


def _lost(folder: OutputFolder, output: str, mine: PartManifest) -> PartManifest:
    """The manifest that another attempt put first, if it has the same content. What nobody counts goes.

    Raises: InvalidInput (`output_taken`).
    """
    stored = folder.read_manifest()
    there = None if stored is None else decode_manifest(stored.data, output)
    folder.remove(sorted(mine.names - (there.names if there else set())))
    if there is None or not there.has_same_content(mine):
        raise _taken(there, output, mine.job)
    return there


def _taken(there: PartManifest | None, output: str, job: str) -> InvalidInput:
    place = f"{output}{MANIFEST_NAME}"
    if there is not None and there.job == job:
        message = f"another attempt of the job {job} wrote {place} first, with other results: resume the job"
    elif there is not None:
        message = (
            f"the job {there.job} wrote {place} since the job {job} was ordered: move it away, then resume the job"
        )
    else:
        message = f"{place} was removed while the job {job} wrote its parts: resume the job"
    return InvalidInput(f"{message}. No result is lost", code="output_taken")
