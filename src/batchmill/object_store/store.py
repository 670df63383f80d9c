"""One object store: reads by ranges, writes whole objects, tries again what may succeed later.

The only module that imports obstore, with `failures`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import obstore
from obstore.store import LocalStore, MemoryStore, from_url

from batchmill.errors import AuthRefused, BatchmillError, Conflict, InvalidConfig, InvalidInput, TooLarge, Unavailable
from batchmill.object_store import local_files
from batchmill.object_store.credentials import Variables, find_access
from batchmill.object_store.failures import ERRORS, changed, exists, translate, unavailable
from batchmill.object_store.urls import BUCKETS, ObjectInfo, ObjectUrl, check_key, local_path
from batchmill.owner_term import ENDLESS, Term
from batchmill.part_files import make_folder

RANGE_BYTES = 8 * 1024 * 1024  # of one GET of a large object, and of one part of a large upload
RETRY_S = 60.0  # how long a call tries again
DELAY_S, DELAY_MAX_S = 0.1, 5.0  # before the second attempt, and the most before any
REQUEST_S = 60  # for one request of at most RANGE_BYTES
CONNECT_S = 10
UPLOADS_MAX = 4  # parts of one object that are sent at the same time
UPLOAD_RETRIES_MAX = 8  # of each part
LISTED_AT_ONCE = 1000
DELETED_AT_ONCE = 1000

Result = TypeVar("Result")
Pause = Callable[[float], None]


class _CheckedFile:
    """A file that is uploaded in parts: each part is read only within a term."""

    def __init__(self, file: BinaryIO, term: Term) -> None:
        self._file, self._term = file, term
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        self._term.check()
        return self._file.read(size)


class ObjectStore:
    """The objects below one URL. Keys are relative to it.

    All methods raise InvalidInput (`no_object`, `store_refused`), AuthRefused (`auth_error`) and Unavailable
    (`store_unavailable`, after RETRY_S of attempts).
    Concurrency: any number of threads at once. Every method blocks: an event loop calls them in a thread.
    """

    def __init__(
        self,
        place: ObjectUrl,
        environment: Variables = os.environ,
        *,
        retry_s: float = RETRY_S,
        pause: Pause = time.sleep,
        term: Term = ENDLESS,
    ) -> None:
        """Args:
        environment: the variables that it is reached with; see `credentials`.
        term: checked before each request that changes an object. Past it, methods raise TermOver.

        Raises: InvalidConfig (`invalid_store`, `missing_dependency`), AuthRefused.
        """
        self.url = str(place).rstrip("/")
        self._place, self._environment = place, environment
        self._retry_s, self._pause, self._term = retry_s, pause, term
        self._prefix = f"{place.key.rstrip('/')}/" if place.key and place.scheme != "file" else ""
        self._client = self._connect(retries=0)

    def _connect(self, *, retries: int) -> Any:
        """A client with the credentials of now. Raises: InvalidConfig, AuthRefused."""
        place = self._place
        try:
            if place.scheme == "memory":
                return MemoryStore()
            if place.scheme == "file":
                make_folder(Path(local_path(place)), 0o777)
                return LocalStore(local_path(place))
            access = find_access(place.scheme, self._environment)
            return from_url(
                place.root,
                config=access.config,
                client_options={
                    "timeout": timedelta(seconds=REQUEST_S),
                    "connect_timeout": timedelta(seconds=CONNECT_S),
                    "allow_http": access.allow_http,
                },
                retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=self._retry_s)},
                credential_provider=access.provider,
            )
        except ERRORS as error:
            detail = str(error).strip().partition("\n")[0]
            raise InvalidConfig(f"{place.root} cannot be opened: {detail}", code="invalid_store") from None

    def head(self, key: str) -> ObjectInfo:
        """Size, ETag and version of an object."""
        return self._call(key, lambda client, path: self._info(obstore.head(client, path)))

    def find(self, key: str) -> ObjectInfo | None:
        """As `head`; None: there is no such object."""
        try:
            return self.head(key)
        except InvalidInput as error:
            if error.code != "no_object":
                raise
            return None

    def get(self, key: str, *, size_max: int) -> bytes:
        """A whole object. Raises: TooLarge for one of more than `size_max` bytes."""
        info = self.head(key)
        if info.size_bytes > size_max:
            raise TooLarge(f"{self._name(key)} has {info.size_bytes:,} bytes, more than {size_max:,}")
        return b"".join(self.read(info))

    def read(self, info: ObjectInfo) -> Iterator[memoryview]:
        """The content of an object as it was seen, in ranges. Raises: InputChanged."""
        for start in range(0, info.size_bytes, RANGE_BYTES):
            yield self.get_range(info, start, min(start + RANGE_BYTES, info.size_bytes))

    def get_range(self, info: ObjectInfo, start: int, end: int) -> memoryview:
        """Bytes start <= n < end of an object as it was seen: never fewer. Raises: InputChanged."""
        assert 0 <= start < end <= info.size_bytes, (start, end, info.size_bytes)

        def fetch(client: Any, path: str) -> memoryview:
            options: dict[str, Any] = {"range": (start, end)}
            if info.etag:
                options["if_match"] = info.etag
            reply = obstore.get(client, path, options=options)
            if not _is_same(self._info(reply.meta), info):  # a store may ignore If-Match
                raise changed(self._name(info.key))
            data = memoryview(reply.bytes())
            if len(data) != end - start:
                raise unavailable(self._name(info.key), f"{len(data):,} of {end - start:,} bytes came")
            return data

        return self._call(info.key, fetch)

    def put(
        self, key: str, data: bytes | memoryview, *, overwrite: bool = False, replaced: ObjectInfo | None = None
    ) -> ObjectInfo:
        """Write an object. Without `overwrite` it must not exist, or still be `replaced`, or have this very content:
        the reply to an earlier attempt may have been lost.

        Raises: Conflict (`object_exists`).
        """
        mode: Any = "overwrite" if overwrite else "create"
        if replaced is not None:
            seen = {"e_tag": replaced.etag, "version": replaced.version}
            mode = {name: value for name, value in seen.items() if value is not None}

        def send(client: Any, path: str) -> ObjectInfo:
            if (place := self._file_of(key)) is not None and replaced is None:
                is_written = local_files.write(place, [data], overwrite=overwrite)
                return self._info(obstore.head(client, path)) if is_written else self._settle(key, data)
            try:
                reply = obstore.put(client, path, data, mode=mode, use_multipart=False)
            except obstore.exceptions.AlreadyExistsError:
                return self._settle(key, data)
            except (obstore.exceptions.PreconditionError, obstore.exceptions.NotFoundError, FileNotFoundError):
                if replaced is None:
                    raise
                return self._settle(key, data, is_replacing=True)
            return ObjectInfo(key, len(data), reply["e_tag"], reply["version"])

        return self._call(key, send, writes=True)

    def put_file(self, key: str, path: Path, *, overwrite: bool = False) -> ObjectInfo:
        """Write the content of a file. A file of more than RANGE_BYTES goes in parts, and replaces what has its name:
        stores have no condition for those. A smaller one is put as by `put`.

        The object appears when it is whole. Parts of an upload that was cut off cost money until the bucket's
        lifecycle rule removes them.
        """
        size = path.stat().st_size
        if size <= RANGE_BYTES:
            return self.put(key, path.read_bytes(), overwrite=overwrite)
        self._call(key, lambda _, name: self._upload(name, path), writes=True)
        info = self.head(key)
        if info.size_bytes != size:
            raise unavailable(self._name(key), f"{info.size_bytes:,} of {size:,} bytes were stored")
        return info

    def _upload(self, name: str, path: Path) -> None:
        is_remote = self._place.scheme in BUCKETS
        client = self._connect(retries=UPLOAD_RETRIES_MAX) if is_remote else self._client
        with path.open("rb") as file:
            source: Any = _CheckedFile(file, self._term)
            if (place := self._file_of(name)) is not None:
                local_files.write(place, iter(partial(source.read, RANGE_BYTES), b""), overwrite=True)
                return
            try:
                obstore.put(
                    client, name, source, use_multipart=True, chunk_size=RANGE_BYTES, max_concurrency=UPLOADS_MAX
                )
            except OSError:  # also what the term raised
                self._term.check()
                raise

    def list(self, prefix: str = "", *, after: str = "", listed_max: int | None = None) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in the order of their keys; those after the key `after` only.

        Raises: InvalidInput (`too_many_objects`) once more than `listed_max` were looked at.
        """
        folder, _, name = prefix.rpartition("/")  # obstore lists whole folders
        at = max(after, prefix[:-1]) if len(name) > 1 else after  # it lists what comes after a key
        listed = 0
        while True:
            found = self._call(folder, lambda client, _, at=at: self._list_some(client, folder, at))
            infos = sorted((self._info(each) for each in found), key=lambda info: info.key)
            yield from (info for info in infos if info.key.startswith(prefix) and info.key > after)
            listed += len(infos)
            is_past = bool(infos) and infos[-1].key > prefix and not infos[-1].key.startswith(prefix)
            if len(infos) < LISTED_AT_ONCE or is_past:
                return
            if listed_max is not None and listed > listed_max:
                raise InvalidInput(
                    f"more than {listed_max:,} objects were looked at below {self._name(prefix)}: name a longer prefix",
                    code="too_many_objects",
                )
            at = infos[-1].key

    def _list_some(self, client: Any, folder: str, after: str) -> list[Any]:
        place = f"{self._prefix}{folder}"
        found: list[Any] = []
        chunks = obstore.list(client, place or None, offset=f"{self._prefix}{after}" if after else None)
        for chunk in chunks:
            found += chunk
            if len(found) >= LISTED_AT_ONCE and self._place.scheme not in ("file", "memory"):  # which are not sorted
                break
        return found

    def delete(self, *keys: str) -> None:
        """Remove objects. One that is not there is fine."""
        for at in range(0, len(keys), DELETED_AT_ONCE):
            some = keys[at : at + DELETED_AT_ONCE]
            if len(some) == 1 or not self._deleted_together(some):
                for key in some:
                    self._delete(key)

    def _deleted_together(self, keys: Sequence[str]) -> bool:
        """Remove objects with as few requests as the store has for it; False if it refuses that for one of them."""
        for key in keys:
            check_key(key, self._name(key))
        try:
            self._call("", lambda client, path: obstore.delete(client, [f"{path}{key}" for key in keys]), writes=True)
        except InvalidInput:
            return False
        return True

    def _delete(self, key: str) -> None:
        try:
            self._call(key, lambda client, path: obstore.delete(client, path), writes=True)
        except InvalidInput as error:
            if error.code != "no_object":
                raise

    def _settle(self, key: str, data: bytes | memoryview, *, is_replacing: bool = False) -> ObjectInfo:
        """The object that is there instead of a new one. Raises: Conflict if it has other content."""
        info = self.find(key)
        if info is None and is_replacing:
            raise Conflict(f"{self._name(key)} is gone: it cannot be replaced", code="object_exists")
        if info is None:
            raise unavailable(self._name(key), "another writer was at it")
        if info.size_bytes != len(data):
            raise exists(self._name(key))
        view = memoryview(data)
        for start in range(0, len(view), RANGE_BYTES):
            if self.get_range(info, start, min(start + RANGE_BYTES, len(view))) != view[start : start + RANGE_BYTES]:
                raise exists(self._name(key))
        return info

    def _call(self, key: str, action: Callable[[Any, str], Result], *, writes: bool = False) -> Result:
        """Call `action` with the client and the full key until it succeeds, fails for good, or RETRY_S are over."""
        if key:
            check_key(key, self._name(key))
        deadline, delay, is_renewed = time.monotonic() + self._retry_s, DELAY_S, self._place.scheme not in BUCKETS
        while True:
            try:
                if writes:
                    self._term.check()
                return action(self._client, f"{self._prefix}{key}")
            except BatchmillError as error:
                failure = error
            except ERRORS as error:
                failure = translate(self._name(key), error)
            if isinstance(failure, AuthRefused) and not is_renewed:
                is_renewed = True  # they may have expired: those of now are fetched once
                self._client = self._connect(retries=0)
                continue
            if not isinstance(failure, Unavailable) or time.monotonic() + delay > deadline:
                raise failure from None
            self._pause(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, DELAY_MAX_S)

    def _info(self, meta: Any) -> ObjectInfo:
        key = str(meta["path"]).removeprefix(self._prefix)
        return ObjectInfo(key, meta["size"], meta["e_tag"], meta["version"], meta["last_modified"].timestamp())

    def _file_of(self, key: str) -> Path | None:
        """The file of an object in a folder; None: it is elsewhere."""
        return Path(local_path(self._place)) / key if self._place.scheme == "file" else None

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url


def _is_same(info: ObjectInfo, seen: ObjectInfo) -> bool:
    if info.size_bytes != seen.size_bytes or (info.etag and seen.etag and info.etag != seen.etag):
        return False
    return not (info.version and seen.version and info.version != seen.version)
