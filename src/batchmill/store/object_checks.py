"""What `batchmill doctor` says of the object store of `[storage]`: each row with the way out where it is wrong."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

from batchmill.errors import BatchmillError, Conflict
from batchmill.object_store.store import ObjectStore
from batchmill.object_store.urls import parse_url

CLOCK_S_MAX = 60.0  # signatures of S3 are refused from 15 minutes on; logs are compared before
RETRY_S = 10.0
PROBES = "doctor/"  # what the names of the objects begin with that are written and deleted

Row = tuple[str, bool, str]


def examine(url: str) -> Iterator[Row]:
    """Write, read, list and delete an object of its own."""
    name = f"{PROBES}{uuid.uuid4().hex}"
    try:
        store = ObjectStore(parse_url(url), retry_s=RETRY_S)
        store.put(name, b"first")
        yield "object store", True, f"{url} can be reached and written"
        yield _create_only(store, name)
        yield _clock(store.head(name).modified_s)
        listed = any(info.key == name for info in store.list(PROBES))
        way_out = "" if listed else ": give the credentials the right to list the bucket (s3:ListBucket)"
        yield "object store: list", listed, f"objects {'are' if listed else 'are not'} listed{way_out}"
        store.delete(name)
        is_gone = store.find(name) is None
        way_out = "" if is_gone else ": give the credentials the right to delete (s3:DeleteObject)"
        yield "object store: delete", is_gone, f"objects {'are' if is_gone else 'are not'} deleted{way_out}"
    except BatchmillError as error:
        yield "object store", False, error.message


def _create_only(store: ObjectStore, name: str) -> Row:
    label = "object store: create-only"
    try:
        store.put(name, b"second")
    except Conflict:
        return label, True, "a second write of one name is refused"
    return (
        label, False,
        "a second write of one name was accepted, so that a worker that comes back late may replace results: use a "
        "store with conditional writes (If-None-Match)",
    )  # fmt: skip


def _clock(modified_s: float) -> Row:
    off_s = abs(time.time() - modified_s)
    note = f"it differs by {off_s:.0f} s from the store's"
    is_ok = off_s <= CLOCK_S_MAX
    return "object store: clock", is_ok, note if is_ok else f"{note}: synchronise this machine's clock"
