"""URLs that an input may have. Imports nothing heavy: commands and the SDK look at every input."""

from __future__ import annotations

from urllib.parse import urlsplit

from batchmill.object_store.urls import is_object_url

WEB_SCHEMES = ("https://", "http://")


def is_web_url(text: str) -> bool:
    """Whether an input is downloaded over HTTP before it is read."""
    return text[:8].lower().startswith(WEB_SCHEMES)


def is_fetched(text: str) -> bool:
    """Whether an input is copied to the job's dataset before it is read."""
    return is_web_url(text)


def is_input_url(text: str) -> bool:
    """Whether an input is a URL: others are paths, or ids of files of a server."""
    return is_fetched(text) or is_object_url(text)


def shown(url: str) -> str:
    """A URL for messages: a query may hold a signature."""
    return f"{url.partition('?')[0]}?…" if "?" in url and is_fetched(url) else url


def file_name(url: str) -> str:
    """The last part of a URL's path, whose suffixes name the format."""
    return urlsplit(url).path.rpartition("/")[2] if is_fetched(url) else url.rpartition("/")[2]
