"""URLs that an input may have. Imports nothing heavy: commands and the SDK look at every input."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.object_store.urls import SHOWN_CHARS, is_object_url

WEB_SCHEMES = ("https://", "http://")
HUB_SCHEME, HUB_DATASETS = "hf://", "hf://datasets/"
HUB_URL_CHARS_MAX = 2048
WEB_URL_CHARS_MAX = 2048
_HUB_URL = re.compile(
    r"hf://datasets/(?P<repository>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(?:@(?P<revision>[\w.~%-]{1,200}))?/(?P<path>[^\x00-\x1f\x7f\\]*)"
)
_REVISIONS = {"~parquet": "refs/convert/parquet"}


class HubFile(Struct, frozen=True):
    """A file of a data set of a hub, or a folder or glob."""

    repository: str  # OWNER/NAME
    revision: str  # a branch, a tag or a commit; empty: the newest
    path: str

    def at(self, commit: str, path: str) -> str:
        """The URL of a file of the data set at a commit."""
        return f"{HUB_DATASETS}{self.repository}@{commit}/{path}"


def is_hub_url(text: str) -> bool:
    return text.startswith(HUB_SCHEME)


def parse_hub_url(url: str) -> HubFile:
    """Raises: InvalidInput (`invalid_url`)."""
    found = _HUB_URL.fullmatch(url) if len(url) <= HUB_URL_CHARS_MAX else None
    parts = [] if found is None else found["path"].removesuffix("/").split("/")
    if found is None or (parts != [""] and any(part in ("", ".", "..") for part in parts)):
        raise InvalidInput(
            f"{url[:SHOWN_CHARS]!r} is not a URL of a data set: write hf://datasets/OWNER/NAME/PATH, or "
            "OWNER/NAME@REVISION with %2F for a slash in the revision; tokens come from the environment",
            code="invalid_url",
        )
    revision = found["revision"] or ""
    return HubFile(found["repository"], _REVISIONS.get(revision, unquote(revision)), found["path"])


def is_web_url(text: str) -> bool:
    """Whether an input is downloaded over HTTP before it is read."""
    return text[:8].lower().startswith(WEB_SCHEMES)


def is_fetched(text: str) -> bool:
    """Whether an input is copied to the job's dataset before it is read."""
    return is_web_url(text) or is_hub_url(text)


def is_input_url(text: str) -> bool:
    """Whether an input is a URL: others are paths, or ids of files of a server."""
    return is_fetched(text) or is_object_url(text)


def shown(url: str) -> str:
    """A URL for messages: a query may hold a signature, and what is before its host a password."""
    return f"{_without_login(url.partition('?')[0])}{'?…' if '?' in url else ''}" if is_web_url(url) else url


def _without_login(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{mark}…@{authority.rpartition('@')[2]}{slash}{path}" if "@" in authority else url


def file_name(url: str) -> str:
    """The last part of a URL's path, whose suffixes name the format."""
    return urlsplit(url).path.rpartition("/")[2] if is_web_url(url) else url.rpartition("/")[2]
