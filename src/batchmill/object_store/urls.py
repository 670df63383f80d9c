"""URLs of objects, and what is known of one.

Imports nothing heavy: commands read URLs before they know whether a store is needed.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote

from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.optional import require
from batchmill.owner_term import ENDLESS, Term

if TYPE_CHECKING:
    from batchmill.object_store.store import ObjectStore

STORE = "batchmill.object_store.store:ObjectStore"
BUCKETS = ("s3", "gs", "az")  # schemes of stores with buckets, which Azure calls containers
_BUCKET_URLS = tuple(f"{each}://" for each in BUCKETS)
SCHEMES = (*BUCKETS, "file", "memory")
KEY_BYTES_MAX = 1024  # of S3 and of Google Cloud Storage; Azure takes as many characters
SHOWN_CHARS = 200


class ObjectUrl(Struct, frozen=True):
    """An object, or the objects below a prefix: `key` is empty for a whole bucket."""

    scheme: str
    bucket: str  # empty for file and memory
    key: str  # as the store has it, without escapes

    @property
    def root(self) -> str:
        """The URL of its bucket. For a file: of its folder."""
        return f"{self.scheme}://{self.bucket}"

    def __str__(self) -> str:
        return f"{self.root}/{self.key}"


class ObjectInfo(Struct, frozen=True):
    """An object as it was seen. Another `etag` or `version` means other content."""

    key: str
    size_bytes: int
    etag: str | None = None
    version: str | None = None  # in buckets with versions
    modified_s: float = 0.0  # seconds since the epoch


def is_object_url(text: str) -> bool:
    """Whether a text is a URL of an object store with buckets (s3, gs, az): others are paths, or other URLs."""
    return text.startswith(_BUCKET_URLS)


def parse_url(text: str) -> ObjectUrl:
    """The bucket and key of a URL. A key is written as it is: `%20` in it is three characters.

    Raises: InvalidInput (`invalid_url`).
    """
    scheme, colon, rest = text.partition("://")
    if not colon or scheme not in SCHEMES:
        raise _invalid(text, f"write one of {', '.join(f'{each}://' for each in BUCKETS)}")
    bucket, _, key = rest.partition("/")
    if scheme in BUCKETS and not bucket:
        raise _invalid(text, f"it names no bucket: write {scheme}://BUCKET/KEY")
    if scheme not in BUCKETS and bucket:
        raise _invalid(text, f"write {scheme}:///PATH, with three slashes")
    if "@" in bucket or ":" in bucket:
        raise _invalid(text, "credentials and ports do not belong in a URL: they come from the environment")
    check_key(key, text)
    return ObjectUrl(scheme, bucket, key)


def check_key(key: str, text: str) -> None:
    """Raises: InvalidInput (`invalid_url`) for a key that stores would take for another one."""
    parts = key.removesuffix("/").split("/")
    if key and any(part in ("", ".", "..") for part in parts):
        raise _invalid(text, "a part between its slashes is empty, '.' or '..'")
    if len(key.encode()) > KEY_BYTES_MAX:
        raise _invalid(text, f"its key has more than {KEY_BYTES_MAX:,} bytes")
    if any(unicodedata.category(each) == "Cc" for each in key):
        raise _invalid(text, "its key has control characters")


def open_store(url: str, environment: Mapping[str, str] = os.environ, *, term: Term = ENDLESS) -> ObjectStore:
    """The store at a URL; its keys are relative to the URL. Connects to nothing yet.

    Args: environment: the variables that it is reached with; see `credentials`. term: see `ObjectStore`.

    Raises: InvalidInput (`invalid_url`), InvalidConfig (`missing_dependency`, `invalid_store`), AuthRefused.
    """
    place = parse_url(url)
    return require(STORE, f"an object store ({place.scheme}://)")(place, environment, term=term)


def local_path(url: ObjectUrl) -> str:
    """The path of the folder of a file:// URL."""
    return "/" + unquote(url.key)


def _invalid(text: str, reason: str) -> InvalidInput:
    return InvalidInput(f"{text[:SHOWN_CHARS]!r} is not a URL of an object: {reason}", code="invalid_url")
