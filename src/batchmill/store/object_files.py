"""ObjectFiles: every published path of the data directory lies in an object store; the data directory is the cache.

A path counts once the database names its objects (`store.catalog`). `DATA_DIR/stored/PATH` names the objects that the
local copy was made of, so a copy that another owner has replaced meanwhile is not taken for the current one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import sqlalchemy as sa
from msgspec import Struct

from batchmill import faults
from batchmill.errors import BatchmillError, DatabaseUnavailable, StorageFailed, TermOver
from batchmill.owned_files import OwnedFiles, discard
from batchmill.owner_term import PrefixTerm, Term
from batchmill.part_files import sync_folder
from batchmill.ports.storage import Objects
from batchmill.store import catalog, folder_objects
from batchmill.store.catalog import Stored
from batchmill.store.media_copies import FOLDER as MEDIA
from batchmill.store.media_copies import prefix_of
from batchmill.store.objects import StoreObjects
from batchmill.store.segments import objects as segment_objects
from batchmill.store.sql.database import Database
from batchmill.wire.messages import StoredFile

MARKS, MARK, WORK = "stored", ".mark", ".fetching"  # folders in the data directory, and the ending of a mark
SEGMENTS = "segments"
SCRATCH = "scratch"  # in the folder of a job, of objects alone
DELETED_AT_ONCE = 1000  # objects in one request
MARK_ATTEMPTS_MAX = 10  # to write a mark while other threads remove empty folders

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("batchmill.owner")


def open_files(
    database: Database, data_dir: Path, url: str, cache_bytes: int, term: PrefixTerm, *, has_nodes: bool = False
) -> ObjectFiles:
    """Raises: InvalidConfig for a URL at which there can be no store."""
    objects = StoreObjects(url, term)
    return ObjectFiles(database, data_dir, objects, cache_bytes, url=url, has_nodes=has_nodes, term=term)


class _Copy(Struct, frozen=True):
    """A local copy of these objects."""

    object: str
    bytes: int


class _OwnersObjects:
    """Objects that are written and deleted only while this process owns the database."""

    def __init__(self, objects: Objects, term: Term) -> None:
        self._objects, self._term = objects, term
        self.get, self.list = objects.get, objects.list

    def put(self, name: str, data: bytes) -> None:
        self._term.check()
        self._objects.put(name, data)

    def delete(self, names: Iterable[str]) -> None:
        self._term.check()
        self._objects.delete(names)


class ObjectFiles:
    """`StoredFiles` in an object store. Call `open` before anything else.

    Args:
        cache_bytes: local copies that no job needs are removed, the least recently used first, beyond so many bytes.
    """

    is_elsewhere = True
    log = None

    def __init__(
        self, database: Database, data_dir: Path, objects: Objects, cache_bytes: int, *, url: str = "",
        has_nodes: bool = False, term: PrefixTerm | None = None,
    ) -> None:  # fmt: skip
        self.has_nodes, self.url = has_nodes, url
        self.term = term or PrefixTerm(database.term, math.inf)
        self._database, self._data_dir, self._cache_bytes = database, data_dir, cache_bytes
        self._objects: Objects = _OwnersObjects(objects, database.term)
        self._owned = OwnedFiles(database.term)  # of the local copies, which a successor on this machine uses
        self._copies: dict[str, _Copy] = {}  # by path, the least recently used first
        self._bytes = 0  # of all copies
        self._held: defaultdict[str, set[str]] = defaultdict(set)  # holder -> paths
        self._holds: Counter[str] = Counter()  # path -> holders
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by path
        self._deleting: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Look at the local copies, and begin to delete what an earlier owner left unnamed."""
        with contextlib.suppress(TermOver):  # else it is a successor's
            await asyncio.to_thread(self._owned.remove_tree, self._data_dir / WORK)
        self._copies = await asyncio.to_thread(_read_marks, self._data_dir / MARKS)
        self._bytes = sum(copy.bytes for copy in self._copies.values())
        leftover = await self._database.read(catalog.unnamed)
        self._deleting = asyncio.create_task(self._delete(leftover))

    async def close(self) -> None:
        if self._deleting is not None:
            self._deleting.cancel()
            await asyncio.wait({self._deleting})

    # -- publish ------------------------------------------------------------------------------------------------------

    async def publish(self, *paths: Path) -> None:
        async with self.publishing(*paths) as name:
            await self._database.write(name)

    @contextlib.asynccontextmanager
    async def publishing(self, *paths: Path) -> AsyncIterator[Callable[[sa.Connection], None]]:
        wanted = {key: path for path in paths if (key := self._key(path)) and path.exists()}
        if not wanted:
            yield lambda _: None
            return
        prefixes = {key: f"{key}/{uuid.uuid4().hex}/" for key in wanted}
        await self._database.write(catalog.begin, list(prefixes.values()))
        faults.point("before_publish_objects")
        published, unnamed = list[Stored](), list[str]()

        def name(db: sa.Connection) -> None:
            unnamed[:] = catalog.name(db, published)

        with self._holding(wanted):  # an older copy of the same path may not be removed meanwhile
            for key, path in wanted.items():
                async with self._lock(key):
                    size = await _in_thread(folder_objects.put, self._objects, prefixes[key], path)
                published.append(Stored(key, prefixes[key], size))
            faults.point("after_publish_objects")
            try:
                yield name
            except DatabaseUnavailable:
                raise  # they may be named all the same: the next owner knows
            except BatchmillError:
                await self._delete_nameless(set(prefixes.values()))
                raise
            await self._named(published, unnamed)

    async def link(self, source: Path, target: Path) -> None:
        key, source_key = self._key(target), self._key(source)
        if key is None:
            return
        linked = await self._database.write(catalog.link, source_key or "", key)
        if linked is None:
            await self.publish(target)
        else:
            await self._named([linked[0]], linked[1])

    async def _named(self, published: list[Stored], unnamed: list[str]) -> None:
        for each in published:
            await self._mark(each)
        await self._delete(unnamed)
        await self._trim()

    # -- fetch --------------------------------------------------------------------------------------------------------

    async def fetch(self, *paths: Path, holder: str = "") -> None:
        wanted = {key: path for path in paths if (key := self._key(path))}
        if holder:
            self._hold(holder, wanted)
        for stored in (await self._database.read(catalog.find, list(wanted))).values():
            path = wanted[stored.path]
            async with self._lock(stored.path):
                if not await asyncio.to_thread(self._is_here, stored, path):
                    work = self._data_dir / WORK / uuid.uuid4().hex
                    await _in_thread(folder_objects.get, self._objects, stored.object, path, work, self._owned)
                await self._mark(stored)
        await self._trim()

    def _hold(self, holder: str, keys: Iterable[str]) -> None:
        new = set(keys) - self._held[holder]
        self._held[holder] |= new
        self._holds.update(new)

    def release(self, holder: str) -> None:
        self._holds -= Counter(self._held.pop(holder, ()))

    @contextlib.contextmanager
    def _holding(self, keys: Iterable[str]) -> Iterator[None]:
        holder = uuid.uuid4().hex
        self._hold(holder, keys)
        try:
            yield
        finally:
            self.release(holder)

    def _is_held(self, key: str) -> bool:
        """Whether a holder needs a path, or the folder of the job that it is in."""
        job = _job_of(key)
        return key in self._holds or (job is not None and f"jobs/{job}" in self._holds)

    async def holds(self, path: Path) -> bool:
        key = self._key(path)
        return key is not None and key in await self._database.read(catalog.find, [key])

    async def same(self, path: Path, others: list[Path]) -> list[Path]:
        keys = {key: other for other in (path, *others) if (key := self._key(other))}
        found = await self._database.read(catalog.find, list(keys))
        own = found.get(self._key(path) or "")
        if own is None:
            return []
        return [keys[each.path] for each in found.values() if each.object == own.object and each is not own]

    async def names_in(self, folder: Path) -> list[str]:
        key = self._key(folder)
        below = [] if key is None else await self._database.read(catalog.below, key)
        names = [each.path.removeprefix(f"{key}/") for each in below if each.path != key]
        return [name for name in names if "/" not in name]

    async def settle_segments(self, folder: Path, worker: str = "") -> None:
        key = self._key(folder)
        assert key is not None, "segments of a job are in the data directory"
        async with self._lock(key):
            await _in_thread(segment_objects.settle, self._objects, folder, folder.parent.name, worker)
            size = await asyncio.to_thread(_bytes_in, folder)
            await self._mark(Stored(key, SEGMENTS, size))

    @contextlib.asynccontextmanager
    async def scratch(self, folder: Path) -> AsyncIterator[str]:
        prefix = f"{self._key(folder)}/{SCRATCH}/{uuid.uuid4().hex}/"
        await self._database.write(catalog.begin, [prefix])
        try:
            yield prefix
        finally:
            await self._delete([prefix])

    # -- remove -------------------------------------------------------------------------------------------------------

    async def remove(self, *paths: Path) -> None:
        keys = [key for path in paths if (key := self._key(path))]
        prefixes = [prefix for key in keys for prefix in _unnamed_below(key)]
        unnamed = await self._database.write(catalog.remove, keys, prefixes)
        for key in keys:
            await self._unmark(key)
        await self._delete(unnamed)

    async def _delete_nameless(self, objects: set[str]) -> None:
        """Delete those of these objects that nothing names."""
        with contextlib.suppress(DatabaseUnavailable):  # the next owner does
            await self._delete(objects.intersection(await self._database.read(catalog.unnamed)))

    async def _delete(self, objects: Iterable[str]) -> None:
        """Delete objects that nothing names. What cannot be deleted now, the next owner deletes."""
        try:
            for prefix in objects:
                await _in_thread(_delete_below, self._objects, prefix)
                await self._database.write(catalog.forget, [prefix])
        except BatchmillError as error:
            log.warning("objects that are needed no more are deleted after the next start: %s", error.message)

    # -- the local copies ---------------------------------------------------------------------------------------------

    def _key(self, path: Path) -> str | None:
        """The path below the data directory; None if it is elsewhere."""
        try:
            key = path.relative_to(self._data_dir).as_posix()
        except ValueError:
            return None
        return None if key == "." else key

    def _lock(self, key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    def references(self, *paths: Path) -> list[StoredFile]:
        found = {}
        for path in paths:
            for key in map(self._key, (path, *path.parents)):
                if key is None:
                    break
                if (copy := self._copies.get(key)) is not None and copy.object != SEGMENTS:
                    found[key] = StoredFile(str(self._data_dir / key), copy.object, copy.bytes)
                    break
        return list(found.values())

    def _is_here(self, stored: Stored, path: Path) -> bool:
        copy = self._copies.get(stored.path)
        if copy is None or copy.object != stored.object:
            return False
        return any(path.iterdir()) if path.is_dir() else path.exists()

    async def _mark(self, stored: Stored) -> None:
        """Note a local copy, as the most recently used."""
        copy, before = _Copy(stored.object, stored.bytes), self._copies.pop(stored.path, None)
        self._bytes += copy.bytes - (0 if before is None else before.bytes)
        self._copies[stored.path] = copy
        with contextlib.suppress(TermOver):  # the next owner fetches what has no mark
            await asyncio.to_thread(
                _write_mark, self._owned, self._mark_of(stored.path), None if copy == before else copy
            )

    async def _unmark(self, key: str) -> None:
        for each in [path for path in self._copies if path == key or path.startswith(f"{key}/")]:
            self._bytes -= self._copies.pop(each).bytes
            await asyncio.to_thread(_remove_mark, self._owned, self._mark_of(each), self._data_dir / MARKS)

    def _mark_of(self, key: str) -> Path:
        return self._data_dir / MARKS / f"{key}{MARK}"

    async def _trim(self) -> None:
        """Remove local copies that nobody holds, the least recently used first, until the rest fits."""
        with contextlib.suppress(TermOver):  # a successor may hold them
            await self._trim_copies()

    async def _trim_copies(self) -> None:
        excess = self._bytes - self._cache_bytes
        if excess <= 0:
            return
        for key, copy in list(self._copies.items())[:-1]:  # the last one has just been asked for
            if excess <= 0:
                return
            lock = self._lock(key)
            if lock.locked() or self._is_held(key) or self._copies.get(key) != copy:  # which may have changed meanwhile
                continue
            async with lock:
                if copy.object == SEGMENTS:  # what was spooled and not put goes with the folder
                    folder = self._data_dir / key
                    await _in_thread(segment_objects.settle, self._objects, folder, folder.parent.name)
                work = self._data_dir / WORK / uuid.uuid4().hex
                await asyncio.to_thread(_remove_copy, self._owned, self._data_dir / key, work)
                await self._unmark(key)
            excess -= copy.bytes


def _job_of(key: str) -> str | None:
    """The job whose folder a path is in."""
    top, _, rest = key.partition("/")
    return rest.partition("/")[0] if top == "jobs" and rest else None


def _unnamed_below(key: str) -> list[str]:
    """What the names of objects begin with that no path names, and that are removed with this one."""
    job = _job_of(key)
    own = {SEGMENTS: [segment_objects.folder_of(job), f"jobs/{job}/{SCRATCH}/"], MEDIA: [prefix_of(job)]} if job else {}
    if key == f"jobs/{job}":
        return [prefix for prefixes in own.values() for prefix in prefixes]
    return own.get(key.removeprefix(f"jobs/{job}/"), [])


def _delete_below(objects: Objects, prefix: str) -> None:
    names: list[str] = []
    for name, _ in objects.list(prefix):
        names.append(name)
        if len(names) == DELETED_AT_ONCE:
            objects.delete(names)
            names = []
    if names:
        objects.delete(names)


def _read_marks(folder: Path) -> dict[str, _Copy]:
    """The local copies, the least recently used first."""
    found: list[tuple[float, str, _Copy]] = []
    for mark in folder.rglob(f"*{MARK}"):
        object_prefix, _, size = mark.read_text().rpartition(" ")
        if object_prefix and size.isdecimal():
            key = mark.relative_to(folder).as_posix().removesuffix(MARK)
            found.append((mark.stat().st_mtime, key, _Copy(object_prefix, int(size))))
    return {key: copy for _, key, copy in sorted(found, key=lambda each: each[0])}


def _write_mark(owned: OwnedFiles, mark: Path, copy: _Copy | None) -> None:
    """Write what a local copy was made of; None: it is as before, and was used just now."""
    if copy is None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(mark)
        return
    part = mark.with_suffix(f".{uuid.uuid4().hex}.part")
    for attempt in range(MARK_ATTEMPTS_MAX):
        mark.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            owned.create(part, f"{copy.object} {copy.bytes}".encode())
            break
        except FileNotFoundError:  # the folder was empty, and removed
            if attempt + 1 == MARK_ATTEMPTS_MAX:
                raise
    try:
        owned.move(part, mark)
    except BaseException:
        discard(part)
        raise


def _remove_mark(owned: OwnedFiles, mark: Path, home: Path) -> None:
    """Remove a mark, and the folders that are empty then."""
    owned.remove(mark)
    for folder in mark.parents:
        if folder == home:
            return
        owned.remove_empty(folder)
        if folder.exists():  # other marks are in it
            return


def _remove_copy(owned: OwnedFiles, path: Path, work: Path) -> None:
    """Remove it as a whole: after a crash, half a folder would pass for a copy. Args: work: as `folder_objects.get`."""
    if not path.is_dir():
        owned.remove(path)
        return
    owned.make_folder(work.parent)
    owned.move(path, work)
    sync_folder(path.parent)
    discard(work)


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*"))


class _StoppableObjects:
    """Objects of which none is read or written any more once `stop` is set."""

    def __init__(self, objects: Objects, stop: threading.Event) -> None:
        self._objects, self._stop = objects, stop

    def get(self, name: str) -> bytes:
        self._check()
        return self._objects.get(name)

    def put(self, name: str, data: bytes) -> None:
        self._check()
        self._objects.put(name, data)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        self._check()
        return self._objects.list(prefix)

    def delete(self, names: Iterable[str]) -> None:
        self._check()
        self._objects.delete(names)

    def _check(self) -> None:
        if self._stop.is_set():
            raise StorageFailed("the caller does not wait for it any more")


async def _in_thread(
    function: Callable[Concatenate[Objects, P], T], objects: Objects, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run a call of the store. If the caller is cancelled, it ends with the object that is under way, before what it
    reads is removed."""
    stop = threading.Event()
    task = asyncio.ensure_future(asyncio.to_thread(function, _StoppableObjects(objects, stop), *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # the caller does not want to know
        raise
