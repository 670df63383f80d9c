"""The prefixes of object stores that a project's jobs may read and write, and whether a URL lies below one.

URLs are compared as texts after `parse_url`, which knows one way to write each. Imports nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

from batchmill.errors import Forbidden, InvalidConfig, InvalidInput
from batchmill.object_store.urls import BUCKETS, SHOWN_CHARS, is_object_url, parse_url

PREFIXES_MAX = 100  # of one project
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,221}")
_UNCLEAR = re.compile(r"[*?\[\]\\%]")  # of globs, and what some servers decode


def check_prefixes(setting: str, prefixes: Sequence[str], storage: str | None) -> None:
    """Check the prefixes of a project.

    Args: storage: the URL of `storage.objects`, which no prefix may contain or lie in.
    Raises: InvalidConfig.
    """
    if len(prefixes) > PREFIXES_MAX:
        raise InvalidConfig(f"{setting} has {len(prefixes)} prefixes: {PREFIXES_MAX} are the most")
    for prefix in prefixes:
        shown = repr(prefix[:SHOWN_CHARS])
        if not is_object_url(prefix):
            schemes = ", ".join(f"{each}://" for each in BUCKETS)
            raise InvalidConfig(f"{setting}: {shown} must begin with one of {schemes}")
        try:
            url = parse_url(prefix)
        except InvalidInput as error:
            raise InvalidConfig(f"{setting}: {error.message}") from None
        if not prefix.endswith("/"):
            raise InvalidConfig(f"{setting}: {shown} must end with a slash, so that it is a folder: write '{prefix}/'")
        if not _BUCKET.fullmatch(url.bucket):
            raise InvalidConfig(f"{setting}: the bucket of {shown} is made of a-z, 0-9 and . _ -, 222 at most")
        if _UNCLEAR.search(url.key):
            raise InvalidConfig(f"{setting}: {shown} names one folder: it cannot have * ? [ ] \\ or %")
        if storage is not None and _overlap(prefix, storage):
            raise InvalidConfig(
                f"{setting}: {shown} and storage.objects ({storage[:SHOWN_CHARS]}) overlap: callers would read what "
                "batchmill stores; give them a folder outside of it, and batchmill one that holds nothing else"
            )


def _overlap(one: str, other: str) -> bool:
    """Whether one of two folders contains the other; in doubt: upper and lower case are equal."""
    one, other = (f"{each.casefold().rstrip('/')}/" for each in (one, other))
    return one.startswith(other) or other.startswith(one)


def check_allowed(url: str, prefixes: Sequence[str], project: str) -> None:
    """Check a URL or a glob of a caller, before anything is read.

    Raises: Forbidden (`object_forbidden`) for one that is not below a prefix; InvalidInput (`invalid_url`).
    """
    place = parse_url(url)
    parts = unquote(unquote(place.key)).split("/")
    if "\\" in place.key or any(part in (".", "..") for part in parts):
        raise InvalidInput(
            f"{url[:SHOWN_CHARS]!r} is not a URL of an object: its key has a backslash, or an escaped '.' or '..' "
            "between slashes",
            code="invalid_url",
        )
    if any(url.startswith(prefix) for prefix in prefixes):
        return
    allowed = f"it may use what is below {', '.join(prefixes)}" if prefixes else "it may use no objects"
    raise Forbidden(
        f"the project {project!r} may not use {url[:SHOWN_CHARS]!r}: {allowed}. Upload and download files, or ask the "
        f"operator to add the folder to projects.{project}.objects",
        code="object_forbidden",
    )
