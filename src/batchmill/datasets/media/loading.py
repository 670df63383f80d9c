"""Makes the request of a row in a worker, with the media that its cells name.

Files are read when the request is made, so that a job takes no memory and no disk for those that wait.
"""

from __future__ import annotations

import os
from base64 import b64encode

from blake3 import blake3

from batchmill.datasets.media.files import read_file
from batchmill.errors import InvalidRow
from batchmill.types import Request, Row
from batchmill.wire.forms import TableForm
from batchmill.wire.json_bytes import decode, split_object
from batchmill.wire.rendered_rows import MediaPart, media_of


def request_of(row: Row) -> Request:
    """As `Form.request`. Raises: InvalidRow, also for a file that is gone or has changed since it was sealed."""
    if not reads_files(row):
        return row.form.request(row)
    members = split_object(row.raw)
    row.media = tuple(_data_of(part, members) for part in media_of(members))
    try:
        return row.form.request(row)
    finally:
        row.media = ()


def reads_files(row: Row) -> bool:
    """Whether `request_of` may read files: it may take long."""
    return isinstance(row.form, TableForm) and bool(row.form.media)


def _data_of(part: MediaPart, members: dict) -> str:
    """The bytes of a part, as base64."""
    if not part.path:
        return base64_of(decode(members[part.column]))
    name = os.path.basename(part.path)
    try:
        data = read_file(part.path, part.size_bytes)
    except InvalidRow as error:  # results may be a caller's, whom folders of this machine do not concern
        raise InvalidRow(error.message.replace(repr(part.path), repr(name)), code=error.code) from None
    if len(data) != part.size_bytes or blake3(data).hexdigest() != part.digest:
        raise InvalidRow(
            f"the {part.kind} {name} has changed since the job began: run it as a new job", code="media_changed"
        )
    return b64encode(data).decode()


def base64_of(cell: object) -> str:
    """The base64 text of a cell: a data: URL, bytes of Parquet, or a struct with such `bytes`."""
    text = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(text, str):
        raise TypeError("a cell without bytes")
    return text.partition(",")[2] if text.startswith("data:") else text
