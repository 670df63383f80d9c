"""Downloads an adapter from an object store (s3://, gs:// or az://)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

from batchmill.errors import InvalidInput
from batchmill.models.adapters.fetching import check_size, write_file
from batchmill.object_store.store import ObjectStore
from batchmill.object_store.urls import ObjectInfo, open_store
from batchmill.wire.adapter_bundles import FILES, check_names

LISTED_MAX = 1000  # objects below the prefix that are listed


def download(source: str, folder: Path) -> None:
    """Download the files below `source` into `folder`. Raises: InvalidInput, AuthRefused, TooLarge, Unavailable."""
    store = open_store(source)
    try:
        objects = {each.key: each for each in islice(store.list(), LISTED_MAX)}
    except InvalidInput as error:
        raise InvalidInput(f"there is nothing at {source}: {error.message}", code="unknown_adapter") from None
    check_names(source, set(objects))
    for name in FILES:
        info = objects[name]
        check_size(name, info.size_bytes)
        write_file(folder, name, lambda _, write, info=info: _read(store, info, write))


def _read(store: ObjectStore, info: ObjectInfo, write: Callable[[bytes], None]) -> None:
    for chunk in store.read(info):
        write(bytes(chunk))
