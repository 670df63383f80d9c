"""What adapters are called: NAME is the newest version that is ready, NAME/VERSION one that never changes."""

from __future__ import annotations

import re

from batchmill.errors import InvalidInput

NAME_CHARS_MAX = 190
NUMBER_MAX = 10**9
SHOWN_CHARS = 200
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")


def check_name(name: str) -> str:
    """The name, if an adapter may be called so. Raises: InvalidInput (`invalid_name`)."""
    is_version = _VERSION.fullmatch(name.rpartition("/")[2]) is not None and "/" in name
    if not _NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX or is_version:
        raise InvalidInput(
            f"{name[:SHOWN_CHARS]!r} is no name of an adapter: it is NAME or ORG/NAME, of letters, digits and . _ -, "
            f"{NAME_CHARS_MAX} characters at most, and its last part is no number: that is a version's",
            code="invalid_name",
        )
    return name


def read_reference(text: str) -> tuple[str, int | None]:
    """The name and version that "NAME" or "NAME/VERSION" says; None: the newest."""
    name, slash, version = text.rpartition("/")
    if slash and _VERSION.fullmatch(version):
        return name, int(version)
    return text, None
