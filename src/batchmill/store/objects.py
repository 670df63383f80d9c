"""`ports.storage.Objects` at the address of `[storage] objects`: errors become those that pause a job that goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from batchmill.errors import AuthRefused, Conflict, InvalidInput, StorageFailed, TooLarge, Unavailable
from batchmill.object_store.urls import ObjectInfo, open_store
from batchmill.owner_term import ENDLESS, Term

OBJECT_BYTES_MAX = 256 * 1024 * 1024  # nothing larger is put: see `folder_objects` and `segment_objects`


class StoreObjects:
    """The objects below a URL. Raises: InvalidConfig for a URL that no store can be opened at."""

    def __init__(self, url: str, term: Term = ENDLESS) -> None:
        """Args: term: see `ObjectStore`."""
        self._store = open_store(url, term=term)

    def put(self, name: str, data: bytes) -> None:
        with _store_errors(name):
            self._store.put(name, data)

    def get(self, name: str) -> bytes:
        with _store_errors(name):
            return self._store.get(name, size_max=OBJECT_BYTES_MAX)

    def find(self, name: str) -> ObjectInfo | None:
        """An object as it is now; None: there is none."""
        with _store_errors(name):
            return self._store.find(name)

    def get_range(self, info: ObjectInfo, start: int, end: int) -> memoryview:
        """Bytes start <= n < end of an object as it was seen, in one request. Raises: InputChanged."""
        with _store_errors(info.key):
            return self._store.get_range(info, start, end)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        for info in self.infos(prefix):
            yield info.key, info.size_bytes

    def infos(self, prefix: str) -> Iterator[ObjectInfo]:
        """As `list`, with what tells whether an object is still the same."""
        with _store_errors(prefix):
            yield from self._store.list(prefix)

    def delete(self, names: Iterable[str]) -> None:
        with _store_errors("objects that are needed no more"):
            self._store.delete(*names)


@contextmanager
def _store_errors(what: str) -> Iterator[None]:
    """Whatever fails is the storage's, credentials included: a server resumes the jobs that pause for it by itself."""
    try:
        yield
    except AuthRefused as error:
        raise StorageFailed(
            f"{error.message}; the job goes on once `[storage] objects` takes the credentials", code=error.code
        ) from None
    except Unavailable as error:
        raise StorageFailed(f"{error.message}; the job goes on once the store of `[storage] objects` answers") from None
    except Conflict as error:
        raise StorageFailed(f"{error.message}: another process writes below `[storage] objects`") from None
    except (InvalidInput, TooLarge) as error:
        raise StorageFailed(f"{what} cannot be used in the store of `[storage] objects`: {error.message}") from None
