"""Finds the media that cells of a table name, checks those that are here, and adds to each row what they are and where.

URLs are noted: nothing is fetched before the row is sent.
"""

from __future__ import annotations

import os
import re
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3
from msgspec import Raw

from batchmill.datasets import layout, readers
from batchmill.datasets.conversion import Converted
from batchmill.datasets.formats import SourceFile
from batchmill.datasets.line_pieces import chunks_of, whole_lines
from batchmill.datasets.media.files import read_file
from batchmill.datasets.media.loading import base64_of
from batchmill.datasets.orders import KeepMedia
from batchmill.errors import InvalidRow
from batchmill.types import DatasetSpec, MediaColumn
from batchmill.wire.input_urls import WEB_URL_CHARS_MAX, is_web_url
from batchmill.wire.media import AUDIO, HEAD_BYTES, IMAGE, type_for
from batchmill.wire.media_tokens import HEAD_BYTES_MAX, seconds_of, size_of
from batchmill.wire.rows.rendered_rows import FAULT, MediaPart, with_fault, with_media

SHOWN_CHARS = 80
KNOWN_MAX = 4096  # files that were copied, of which rows may follow each other
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_members = msgspec.json.Decoder(dict[str, Raw]).decode
DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)

_State = tuple[int, int, int, int]


class MediaAdder:
    """Adds the parts of each row, or its fault."""

    def __init__(
        self, columns: list[MediaColumn], spec: DatasetSpec, home: Path, keep: KeepMedia | None = None
    ) -> None:
        """Args: keep: what to do with the contents of files that are copied: see `DatasetSpec.media_copies`."""
        self._columns, self._spec, self._home, self._keep = columns, spec, home, keep
        self._known: OrderedDict[tuple[str, str], tuple[_State, MediaPart]] = OrderedDict()  # kind and path of a copy

    def add(self, pieces: Iterator[Converted], source: SourceFile, *, are_whole_lines: bool) -> Iterator[Converted]:
        """Yield the pieces of one source with the media of their rows."""
        folder = self._folder_of(source)
        binary: set[str] = set()
        for piece in pieces if are_whole_lines else whole_lines(pieces, self._spec.line_bytes_max):
            if source.format == "parquet" and not binary:
                binary = readers.load("parquet").binary_columns(self._home / layout.SCHEMA)
            for chunk in chunks_of(piece):
                yield msgspec.structs.replace(chunk, data=self._added(chunk.data, folder, binary))

    def _folder_of(self, source: SourceFile) -> str | None:
        """What paths in the cells of a source are relative to; None: nothing, because it lies elsewhere."""
        if self._spec.media_folder:
            return self._spec.media_folder
        is_local = source.path.startswith("/") and not Path(source.path).is_relative_to(self._home)
        return os.path.dirname(source.path) if is_local else None

    def _added(self, lines: bytes, folder: str | None, binary: set[str]) -> bytes:
        added = []
        for line in lines.split(b"\n"):
            if (members := _row_of(line)) is None:
                added.append(line)
                continue
            try:
                added.append(with_media(line.strip(), self._parts(members, folder, binary)))
            except InvalidRow as error:
                added.append(with_fault(line.strip(), error.code, error.message))
        return b"\n".join(added)

    def _parts(self, members: dict[str, Raw], folder: str | None, binary: set[str]) -> list[MediaPart]:
        """The parts of a row. Raises: InvalidRow, with a code of MEDIA_FAULTS."""
        parts, left = [], self._spec.media_row_bytes_max
        for each in self._columns:
            cell = _text_of(members[each.column]) if each.column in members else None
            if cell is None or cell == "":
                continue
            part = self._part(each, cell, folder, each.column in binary)
            left -= part.size_bytes
            if left < 0:
                raise InvalidRow(
                    f"the media of the row have more than {self._spec.media_row_bytes_max:,} bytes together: make them "
                    "smaller, or raise limits.media_row_bytes_max",
                    code="media_too_large",
                )
            parts.append(part)
        return parts

    def _part(self, column: MediaColumn, cell: Any, folder: str | None, is_binary: bool) -> MediaPart:
        if isinstance(cell, dict) and not cell.get("bytes") and isinstance(cell.get("path"), str):
            cell = cell["path"]  # as data sets of the Hugging Face Hub write what they do not hold
            is_binary = False
        if is_binary or (isinstance(cell, str) and cell.startswith("data:")):
            return self._described(column, _decoded(column, cell), column=column.column)
        if not isinstance(cell, str):
            raise InvalidRow(f"{_named(column, cell)} is neither a path, a URL nor bytes", code="media_invalid")
        if is_web_url(cell):
            return MediaPart(column.kind, url=_checked_url(column, cell), column=column.column)
        path = self._path_of(column, cell, folder)
        if self._spec.media_copies:
            return self._copied(column, path)
        return self._described(column, read_file(path, self._spec.media_bytes_max), path=path)

    def _copied(self, column: MediaColumn, path: str) -> MediaPart:
        """A file that is copied: it is read once, and never again. One that lately was is known."""
        key = column.kind, path
        state, known = self._known.get(key, (None, None))
        if known is not None and state == _state_of(path):
            self._known.move_to_end(key)
            return known
        state = _state_of(path)
        data = read_file(path, self._spec.media_bytes_max)
        part = msgspec.structs.replace(self._described(column, data, path=path), is_copied=True)
        if self._keep is not None:
            self._keep(part.digest, data)
        if state is not None:
            self._known[key] = state, part
            if len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
        return part

    def _path_of(self, column: MediaColumn, cell: str, folder: str | None) -> str:
        if _SCHEME.match(cell):
            raise InvalidRow(
                f"{_named(column, cell)} is no https:// URL: only those, paths and bytes are read",
                code="media_not_allowed",
            )
        if self._spec.media_folder is None:
            raise InvalidRow(
                f"{_named(column, cell)} is a path: a server reads no files of its machine for callers; put "
                "https:// or data: URLs into the column, or bytes into Parquet",
                code="media_not_allowed",
            )
        if folder is None and not os.path.isabs(cell):
            raise InvalidRow(
                f"{_named(column, cell)} is relative to the folder of the dataset, which is not on this machine: name "
                "whole paths or URLs",
                code="media_missing",
            )
        return os.path.join(folder or "/", cell)

    def _described(self, wanted: MediaColumn, data: bytes, **place: str) -> MediaPart:
        """What a content is. Raises: InvalidRow if it is not what the column is for, or too large."""
        if len(data) > self._spec.media_bytes_max:
            raise InvalidRow(
                f"the {wanted.kind} in {wanted.column!r} has more than {self._spec.media_bytes_max:,} bytes: make it "
                "smaller, or raise limits.media_bytes_max",
                code="media_too_large",
            )
        kind = type_for(wanted.kind, wanted.column, data[:HEAD_BYTES])
        width, height = (size_of(data[:HEAD_BYTES_MAX]) or (0, 0)) if wanted.kind == IMAGE else (0, 0)
        seconds = round(seconds_of(data[:HEAD_BYTES_MAX], len(data)), 1) if wanted.kind == AUDIO else 0.0
        return MediaPart(
            wanted.kind, kind, len(data), blake3(data).hexdigest(), width=width, height=height, seconds=seconds, **place
        )


def _state_of(path: str) -> _State | None:
    """What changes with the content of a file; None: it cannot be said, and reading says why."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _row_of(line: bytes) -> dict[str, Raw] | None:
    """The members of a row that gets media; None: it is left as it is."""
    try:
        members = _members(line) if line.strip() else None
    except DECODE_ERRORS:
        return None
    return None if members is None or FAULT in members else members


def _text_of(cell: Raw) -> Any:
    """The value of a cell; a list, which no cell of media is, for one that cannot be read."""
    try:
        return msgspec.json.decode(cell)
    except DECODE_ERRORS:
        return []


def _decoded(column: MediaColumn, cell: Any) -> bytes:
    if isinstance(cell, str) and cell.startswith("data:") and ";base64," not in cell[:SHOWN_CHARS]:
        raise InvalidRow(f"{_named(column, cell)} is no data: URL with base64", code="media_invalid")
    try:
        return b64decode(base64_of(cell), validate=True)
    except (ValueError, TypeError):
        raise InvalidRow(f"{_named(column, cell)} holds no base64", code="media_invalid") from None


def _checked_url(column: MediaColumn, url: str) -> str:
    """A URL that the row may have once more: the guard refuses longer ones, and others, when it is fetched."""
    if len(url) > WEB_URL_CHARS_MAX:
        raise InvalidRow(
            f"{_named(column, url)} is longer than {WEB_URL_CHARS_MAX:,} characters", code="media_not_allowed"
        )
    return url


def _named(column: MediaColumn, cell: Any) -> str:
    text = repr(cell)
    shown = text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"
    return f"the {column.kind} {shown} in {column.column!r}"
