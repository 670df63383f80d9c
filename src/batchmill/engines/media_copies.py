"""Reads the copies of files that cells of media columns name: see `store.media_copies`."""

from __future__ import annotations

import os

from blake3 import blake3

from batchmill.datasets.media.files import read_file
from batchmill.errors import InvalidRow, StorageFailed
from batchmill.models import secrets
from batchmill.store.media_copies import path_of
from batchmill.store.objects import StoreObjects
from batchmill.wire.rows.rendered_rows import MediaPart

READ_BYTES = 8 * 1024 * 1024  # of an object, in one request


class CopyReader:
    """Reads copies. Concurrency: any thread."""

    def __init__(self) -> None:
        self._objects: StoreObjects | None = None

    def read(self, part: MediaPart, copies: str) -> bytes:
        """The content of a part. Args: copies: see `MediaBounds`.

        Raises: InvalidRow: `media_missing` if the copy is not what was written; `media_unavailable`.
        """
        name = os.path.basename(part.path)
        if copies.startswith("/"):
            try:
                data = read_file(path_of(copies, part.digest), part.size_bytes)
            except InvalidRow as error:
                raise _lost(part, name, error.message) from None
        else:
            data = self._object(part, name, copies + part.digest)
        if len(data) != part.size_bytes or blake3(data).hexdigest() != part.digest:
            raise _lost(part, name, "it has other bytes")
        return data

    def _object(self, part: MediaPart, name: str, key: str) -> bytes:
        try:
            objects = self._objects = self._objects or _open()
            info = objects.find(key)
            if info is None or info.size_bytes != part.size_bytes:
                raise _lost(part, name, "there is none" if info is None else "it has other bytes")
            starts = range(0, info.size_bytes, READ_BYTES)
            return b"".join(objects.get_range(info, at, min(at + READ_BYTES, info.size_bytes)) for at in starts)
        except StorageFailed as error:
            raise InvalidRow(
                f"the copy of the {part.kind} {name} could not be read: {error.message}; `batchmill retry` tries it "
                "again",
                code="media_unavailable",
            ) from None


def _open() -> StoreObjects:
    storage = secrets.storage()
    if storage is None:
        raise StorageFailed("this worker knows no object store")
    return StoreObjects(storage.url)


def _lost(part: MediaPart, name: str, why: str) -> InvalidRow:
    return InvalidRow(
        f"the copy of the {part.kind} {name} that the job was given cannot be used: {why}; run it as a new job",
        code="media_missing",
    )
