"""Reads what was sealed of media when the request of a row is made, and makes the request.

Files are read only then, so that a job takes no memory and no disk for rows that wait.
"""

from __future__ import annotations

import os
from base64 import b64encode
from typing import Any

from blake3 import blake3

from batchmill.datasets.media.files import read_file
from batchmill.errors import InvalidRow
from batchmill.types import LoadedPart, Request, Row
from batchmill.wire.json_bytes import decode
from batchmill.wire.rows.forms import TableForm
from batchmill.wire.rows.rendered_rows import MediaPart


def has_media(row: Row) -> bool:
    """Whether a row needs its media to be loaded before `request_of`."""
    return isinstance(row.form, TableForm) and bool(row.form.media)


def request_of(row: Row) -> Request:
    """As `Form.request`, for a row that is sent."""
    assert row.media is not None or not has_media(row), "its media are loaded first"
    return row.form.request(row)


def read_part(part: MediaPart, members: dict[str, Any]) -> LoadedPart:
    """A part that is in a file or a cell. Raises: InvalidRow for a file that is gone or has changed."""
    return loaded(part, part.type, read_bytes(part), members)


def loaded(part: MediaPart, kind: str, data: bytes | None, members: dict[str, Any]) -> LoadedPart:
    """A part with its type and bytes. Args: data: None: they are in a cell."""
    text = base64_of(decode(members[part.column])) if data is None else b64encode(data).decode()
    return LoadedPart(kind, text)


def read_bytes(part: MediaPart) -> bytes | None:
    """The bytes of a part that is in a file; None: it is in a cell. Raises: as `read_part`."""
    if not part.path:
        return None
    name = os.path.basename(part.path)
    try:
        data = read_file(part.path, part.size_bytes)
    except InvalidRow as error:  # results may be a caller's, whom folders of this machine do not concern
        raise InvalidRow(error.message.replace(repr(part.path), repr(name)), code=error.code) from None
    if len(data) != part.size_bytes or blake3(data).hexdigest() != part.digest:
        raise InvalidRow(
            f"the {part.kind} {name} has changed since the job began: run it as a new job", code="media_changed"
        )
    return data


def base64_of(cell: object) -> str:
    """The base64 text of a cell: a data: URL, bytes of Parquet, or a struct with such `bytes`."""
    text = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(text, str):
        raise TypeError("a cell without bytes")
    return text.partition(",")[2] if text.startswith("data:") else text
