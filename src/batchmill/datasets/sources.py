"""The files of a dataset wherever they lie: each is read by ranges. Workers use it: it imports nothing heavy.

An object is read with the ETag that it was sealed with, so that bytes of another one are never returned. Reads that
follow one another grow, and the next is fetched while the last is used; scattered reads stay small.
"""

from __future__ import annotations

import fnmatch
import glob
import io
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from batchmill.errors import InputChanged, InvalidDataset, InvalidInput, StorageFailed, Unavailable
from batchmill.object_store.urls import ObjectInfo, is_object_url, open_store, parse_url
from batchmill.types import SealedFile

if TYPE_CHECKING:
    from batchmill.object_store.store import ObjectStore

Access = Mapping[str, str]  # the variables that stores are reached with; see `object_store.credentials`

RANGE_BYTES = 8 * 1024 * 1024  # the most that is fetched at once
SCATTERED_BYTES = 256 * 1024  # the least
KEPT_BYTES_MAX = 4 * RANGE_BYTES  # of ranges in memory: those in use, and those on their way
SHORT_BYTES, SHORT_MAX = 16 * 1024, 64  # files that are remembered whole: several ask for the bytes of a short job's
STORES_MAX = 16  # that stay connected
LISTED_MAX = 100_000  # objects that are looked at to find those of a folder or a glob
_MAGIC = re.compile(r"[*?\[]")


class Source(Protocol):
    """A file that is open. All methods but `close` raise OSError, InputChanged, AuthRefused and StorageFailed.

    Concurrency: any number of threads at once.
    """

    size_bytes: int

    def read_at(self, start: int, end: int, until: int | None = None) -> bytes:
        """Bytes start <= n < end; fewer where a file has become shorter.

        Args: until: the next reads go on to this byte and no further. None: nobody knows.
        """

    def read_into(self, buffer: memoryview, start: int) -> int:
        """Fill a buffer with the bytes from `start` on. Returns: their number."""

    def close(self) -> None:
        """Release it; safe to call twice."""


class LocalSource:
    """A file of this machine."""

    def __init__(self, path: str) -> None:
        """Raises: OSError."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size_bytes = os.fstat(self._fd).st_size

    def read_at(self, start: int, end: int, until: int | None = None) -> bytes:
        return os.pread(self._fd, end - start, start)

    def read_into(self, buffer: memoryview, start: int) -> int:
        return os.preadv(self._fd, [buffer], start)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Range(Struct, eq=False):
    start: int
    end: int
    data: Future[memoryview]
    follows: bool  # reads came to it from the range before


class ObjectSource:
    """An object as it was seen.

    Args:
        streams: how many places of it are read in turns.
        beyond: a range is fetched as it was asked for, with so many bytes more, and nothing ahead of it: several
            processes read the ranges of one object. None: reads that follow one another are prefetched.
    """

    def __init__(self, store: ObjectStore, info: ObjectInfo, *, streams: int = 1, beyond: int | None = None) -> None:
        self.size_bytes = info.size_bytes
        self._store, self._info, self._beyond = store, info, beyond
        self._range_max = max(SCATTERED_BYTES, RANGE_BYTES // streams)
        self._ranges: OrderedDict[int, _Range] = OrderedDict()  # by their starts, the one used last at the end
        self._ordered: set[Future[memoryview]] = set()  # what the prefetching thread is to fetch
        self._lock = Lock()
        self._ahead: ThreadPoolExecutor | None = None

    def read_at(self, start: int, end: int, until: int | None = None) -> bytes:
        pieces = list(self._pieces(start, min(end, self.size_bytes), until))
        return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, buffer: memoryview, start: int) -> int:
        at = 0
        for piece in self._pieces(start, min(start + len(buffer), self.size_bytes)):
            buffer[at : at + len(piece)] = piece
            at += len(piece)
        return at

    def close(self) -> None:
        with self._lock:
            self._ranges.clear()
            if self._ahead is not None:
                self._ahead.shutdown(wait=False, cancel_futures=True)
                self._ahead = None
            while self._ordered:  # another thread may wait for one that nobody fetches any more
                self._ordered.pop().cancel()

    def _pieces(self, start: int, end: int, until: int | None = None) -> Iterator[memoryview]:
        while start < end:
            with self._lock:
                range_, is_new = self._range_at(start, end, until)
            if is_new:
                self._fetch(range_)
            place = f"{self._store.url}/{self._info.key}"
            with _translated(place):
                try:
                    data = range_.data.result()
                except CancelledError:
                    raise StorageFailed(f"{place} was closed while it was read") from None
            last = min(end, range_.end)
            yield data[start - range_.start : last - range_.start]
            start = last

    def _range_at(self, start: int, end: int, until: int | None) -> tuple[_Range, bool]:
        """The range that holds byte `start`, and whether the caller must fetch it."""
        limit = self.size_bytes if until is None else min(max(end, until), self.size_bytes)
        range_ = next((each for each in self._ranges.values() if each.start <= start < each.end), None)
        is_new = range_ is None
        if range_ is None:
            before = next((each for each in self._ranges.values() if each.end == start), None)
            length = min(self._length(end - start, before), limit - start)
            range_ = self._add(start, length, follows=before is not None or limit > end and until is not None)
        self._ranges.move_to_end(range_.start)
        if range_.follows and self._beyond is None and range_.end < limit and range_.end not in self._ranges:
            following = self._add(range_.end, min(self._length(0, range_), limit - range_.end), follows=True)
            self._ahead = self._ahead or ThreadPoolExecutor(1, thread_name_prefix="ranges")
            self._ordered.add(following.data)
            self._ahead.submit(self._fetch, following)
        return range_, is_new

    def _length(self, size: int, before: _Range | None) -> int:
        if self._beyond is not None:
            return size + self._beyond
        if before is not None:
            size = max(size, 2 * (before.end - before.start))
        return min(max(size, SCATTERED_BYTES), self._range_max)

    def _add(self, start: int, length: int, *, follows: bool) -> _Range:
        range_ = _Range(start, min(start + length, self.size_bytes), Future(), follows)
        self._ranges[start] = range_
        kept = sum(each.end - each.start for each in self._ranges.values())
        while kept > KEPT_BYTES_MAX and len(self._ranges) > 2:
            _, oldest = self._ranges.popitem(last=False)
            kept -= oldest.end - oldest.start
        return range_

    def _fetch(self, range_: _Range) -> None:
        try:
            data = self._store.get_range(self._info, range_.start, range_.end)
        except BaseException as error:  # the reader of the range gets it
            with self._lock:
                self._ranges.pop(range_.start, None)  # the next read tries again
                self._ordered.discard(range_.data)
                if not range_.data.cancelled():
                    range_.data.set_exception(error)
            return
        with self._lock:
            self._ordered.discard(range_.data)
            if not range_.data.cancelled():
                range_.data.set_result(data)


class SourceFile(io.RawIOBase):
    """A source as a file object; closes it."""

    def __init__(self, source: Source) -> None:
        self._source, self._at = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._source.size_bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._source.size_bytes

    def read(self, size: int | None = -1) -> bytes:
        end = self._source.size_bytes if size is None or size < 0 else self._at + size
        data = self._source.read_at(self._at, end) if end > self._at else b""
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        count = self._source.read_into(memoryview(buffer).cast("B"), self._at)
        self._at += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()


def describe(path: str) -> SealedFile:
    """The size, time and identity of a file. Raises: InvalidDataset if it is unreadable or not a regular file;
    AuthRefused, StorageFailed.
    """
    if is_object_url(path):
        return _describe_object(path)
    try:
        status = os.stat(path)
    except OSError as error:
        raise InvalidDataset(f"{path} cannot be read: {error.strerror}", code="unreadable_file") from None
    if not stat.S_ISREG(status.st_mode):
        raise InvalidDataset(f"{path} is not a regular file; write its contents to one first", code="unreadable_file")
    if not os.access(path, os.R_OK):
        raise InvalidDataset(f"{path} cannot be read: permission denied", code="unreadable_file")
    return SealedFile(path, status.st_size, status.st_mtime_ns, status.st_ino)


def bytes_of_short(file: SealedFile) -> bytes | None:
    """All bytes of a short file of this machine, as they were when it was first asked for them since it is as it was
    seen; None: it is longer, or elsewhere. Raises: OSError.
    """
    if file.size_bytes > SHORT_BYTES or is_object_url(file.path):
        return None
    return _read_short(file)


@lru_cache(maxsize=SHORT_MAX)
def _read_short(file: SealedFile) -> bytes:
    with open(file.path, "rb", buffering=0) as opened:
        return opened.readall()


def _describe_object(path: str) -> SealedFile:
    url = parse_url(path)
    try:
        return sealed_object(url.root, _store(url.root, None).head(url.key))
    except Unavailable as error:
        raise StorageFailed(error.message) from None
    except InvalidInput as error:
        raise InvalidDataset(error.message, code=error.code) from None


def is_pattern(text: str) -> bool:
    """Whether the URL of an object names a folder or is a glob, for which a store is listed. Raises: InvalidInput."""
    key = parse_url(text).key
    return not key or key.endswith("/") or glob.has_magic(key)


def find_objects(pattern: str, skipped: Collection[str], is_wanted: Callable[[str], bool]) -> list[str]:
    """The URLs of the objects that a URL names or matches. A folder ends with a slash: the objects directly in it that
    `is_wanted` by their names count.

    Raises: InvalidDataset (`no_input`, `too_many_objects`), AuthRefused, StorageFailed.
    """
    if not is_pattern(pattern):
        return [pattern]
    url = parse_url(pattern)
    is_folder = not url.key or url.key.endswith("/")
    prefix = url.key if is_folder else _MAGIC.split(url.key, maxsplit=1)[0]
    found = []
    try:
        for info in _store(url.root, None).list(prefix, listed_max=LISTED_MAX):
            if is_folder:
                name = info.key.removeprefix(prefix)
                is_match = "/" not in name and is_wanted(name)
            else:
                is_match = matches(url.key.split("/"), info.key.split("/"))
            if is_match and f"{url.root}/{info.key}" not in skipped:
                found.append(f"{url.root}/{info.key}")
    except Unavailable as error:
        raise StorageFailed(error.message) from None
    except InvalidInput as error:
        raise InvalidDataset(error.message, code=error.code) from None
    if not found:
        missing = "holds no object with the suffix of a dataset" if is_folder else "matches no object"
        raise InvalidDataset(f"{pattern} {missing}", code="no_input")
    return found


def matches(parts: list[str], names: list[str]) -> bool:
    """Whether a glob matches a key, both split at slashes; `**` stands for any number of folders.

    Only the last `**` is ever extended, so that a glob of a caller takes no more steps than parts times names.
    """
    part = name = 0
    after = extended = -1  # the part behind the last `**`, and the name that it began at
    while name < len(names):
        if part < len(parts) and parts[part] == "**":
            part = after = part + 1
            extended = name
        elif part < len(parts) and fnmatch.fnmatchcase(names[name], parts[part]):
            part, name = part + 1, name + 1
        elif after >= 0:
            extended += 1
            part, name = after, extended
        else:
            return False
    return all(each == "**" for each in parts[part:])


def sealed_object(root: str, info: ObjectInfo) -> SealedFile:
    """An object as it is sealed."""
    modified_ns = int(info.modified_s * 1e9)
    return SealedFile(f"{root}/{info.key}", info.size_bytes, modified_ns, 0, info.etag or "", info.version or "")


def unchanged(file: SealedFile) -> bool:
    """Whether size, time and identity of a file are unchanged."""
    try:
        return describe(file.path) == file
    except InvalidDataset:
        return False


def open_source(
    file: SealedFile, access: Access | None = None, *, streams: int = 1, beyond: int | None = None
) -> Source:
    """Open a file as it was described. Of a local one only the path counts: what reads it compares its size.

    Args: access: None: this process's own variables. Others as in ObjectSource.
    Raises: OSError, AuthRefused, StorageFailed.
    """
    if not is_object_url(file.path):
        return LocalSource(file.path)
    url = parse_url(file.path)
    with _translated(file.path):
        store = _store(url.root, None if access is None else tuple(access.items()))
    info = ObjectInfo(url.key, file.size_bytes, file.etag or None, file.version or None)
    return ObjectSource(store, info, streams=streams, beyond=beyond)


def open_file(path: str, *, streams: int = 1) -> SourceFile:
    """Open a file as it is now, as a file object. Raises: OSError, InvalidDataset, AuthRefused, StorageFailed."""
    return SourceFile(
        open_source(describe(path) if is_object_url(path) else SealedFile(path, 0, 0, 0), streams=streams)
    )


@lru_cache(maxsize=STORES_MAX)
def _store(root: str, variables: tuple[tuple[str, str], ...] | None) -> ObjectStore:
    return open_store(root) if variables is None else open_store(root, dict(variables))


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """Raises: InputChanged for an object that is gone, StorageFailed for a store that does not serve it."""
    try:
        yield
    except Unavailable as error:
        raise StorageFailed(error.message) from None
    except InvalidInput as error:
        if error.code != "no_object":
            raise StorageFailed(error.message) from None
        raise InputChanged(f"{name} is gone since it was sealed; restore it, or start over with --restart") from None
