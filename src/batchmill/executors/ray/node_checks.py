"""Whether a node can use the object store of `[storage]`, for `batchmill doctor`."""

from __future__ import annotations

import os
import uuid

from batchmill.errors import BatchmillError
from batchmill.executors.ray.frames import NodeStore
from batchmill.executors.ray.node_cache import cache_folder
from batchmill.object_store.credentials import joined
from batchmill.object_store.urls import parse_url
from batchmill.optional import require

RETRY_S = 5.0
PROBES = "doctor/"  # what the names of the objects begin with that are written and deleted


def find_flaw(node: NodeStore) -> str:
    """Why this node cannot use the store, or its cache; empty: it can. It writes, reads and deletes an object."""
    storage, name = node.storage, f"{PROBES}{uuid.uuid4().hex}"
    try:
        cache_folder(node.cache, storage.url)
        variables = joined({**storage.environ, **storage.credentials}, os.environ)
        make = require("batchmill.object_store.store:ObjectStore", "[storage] objects")
        store = make(parse_url(storage.url), variables, retry_s=RETRY_S)
        store.put(name, b"written by a node")
        store.get(name, size_max=1024)
        store.delete(name)
    except BatchmillError as error:
        return error.message
    return ""


__all__ = ["find_flaw"]
