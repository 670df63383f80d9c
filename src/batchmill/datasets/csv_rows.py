"""Reads CSV: a header, then one row for each record; every cell is a string. Source: RFC 4180."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import islice

import msgspec

from batchmill.datasets.conversion import Converted
from batchmill.datasets.formats import SourceFile
from batchmill.datasets.inflate import Advance, blocks
from batchmill.datasets.orders import RefusedRow
from batchmill.errors import InvalidDataset
from batchmill.types import DatasetSpec

COLUMNS_MAX = 10_000
SHOWN_CHARS = 80
# Separators that programs write instead of commas.
SEPARATORS = ((";", "semicolons", "';'"), ("\t", "tabs", "'\\t'"), ("|", "bars", "'|'"))
PIECE_BYTES = 1024 * 1024
RECORD_LINES = 2  # a record is read up to this many times `line_bytes_max`, so that only its row is refused

_encode = msgspec.json.encode


def columns(source: SourceFile, spec: DatasetSpec) -> list[str]:
    """The names in the header. Raises: InvalidDataset (`invalid_header`, `invalid_csv`)."""
    with _records(source, spec, lambda _: None) as records:
        return _header(source, records)


def convert(source: SourceFile, spec: DatasetSpec, expected: list[str], advance: Advance) -> Iterator[Converted]:
    """Every record as a JSON object. Raises: InvalidDataset if the rest of the file cannot be split into records."""
    with _records(source, spec, advance) as records:
        names = _header(source, records)
        if names != expected:
            raise InvalidDataset(
                f"{source.path} has the columns {', '.join(names)}, and the first file {', '.join(expected)}: "
                "the files of a dataset must have the same columns in the same order",
                code="schema_mismatch",
            )
        piece = _Piece(names, spec.line_bytes_max)
        blank = [""] if len(names) == 1 else None  # with one column, a blank line is a row with an empty cell
        for line, cells, flaw in _parse_records(source, records, blank):
            piece.add(line, cells, flaw)
            if len(piece.data) >= PIECE_BYTES:
                yield piece.take()
        yield piece.take()


def lines_of(source: SourceFile, spec: DatasetSpec, rows: Collection[int]) -> dict[int, int]:
    """The line on which each of these rows of a source begins. A row counts from 0, a line from 1."""
    with _records(source, spec, lambda _: None) as records:
        blank = [""] if len(_header(source, records)) == 1 else None
        parsed = islice(_parse_records(source, records, blank), max(rows) + 1)
        return {row: line for row, (line, _, _) in enumerate(parsed) if row in rows}


class _Piece:
    """Collects converted rows until they are written."""

    def __init__(self, names: list[str], line_bytes_max: int) -> None:
        self._names = names
        self._line_bytes_max = line_bytes_max
        self.data = bytearray()
        self._rows = 0
        self._refused: list[RefusedRow] = []

    def add(self, line: int, cells: list[str], flaw: str) -> None:
        names = self._names
        if flaw:
            self._refuse(line, "invalid_csv", flaw)
        elif len(cells) != len(names):
            message = f"the record has {len(cells)} cells, the header {len(names)}"
            self._refuse(line, "bad_row_width", message)
        row = dict(zip(names, cells, strict=False))
        try:
            data = _encode(row)
        except UnicodeEncodeError:
            if not flaw and len(cells) == len(names):
                self._refuse(line, "invalid_encoding", "a cell is not UTF-8")
            data = _encode({name: cell.encode(errors="replace").decode() for name, cell in row.items()})
        if len(data) > self._line_bytes_max and not flaw and len(cells) == len(names):
            self._refuse(line, "line_too_long", f"the record is longer than {self._line_bytes_max} bytes as JSON")
        self.data += data
        self.data += b"\n"
        self._rows += 1

    def _refuse(self, line: int, code: str, message: str) -> None:
        self._refused.append(RefusedRow(self._rows, line, code, message))

    def take(self) -> Converted:
        piece = Converted(bytes(self.data), self._rows, self._refused)
        self.data, self._rows, self._refused = bytearray(), 0, []
        return piece


class _Stream(io.RawIOBase):
    """A file object over blocks of bytes."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self._source = source
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        if not self._rest:
            self._rest = next(self._source, b"")
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


class _Records:
    """Reads the records of a CSV file; `line` is the line on which the last one begins."""

    def __init__(self, text: io.TextIOBase, path: str, line_bytes_max: int) -> None:
        self._text, self._path = text, path
        self._chars_max = RECORD_LINES * line_bytes_max
        self._chars = 0  # of the current record
        # strict: an open quote must not silently swallow the rest of the file
        self._reader = csv.reader(self._lines(), strict=True)
        self.line = 0

    def _lines(self) -> Iterator[str]:
        """The lines of the file. Raises: InvalidDataset when a record is too long to hold in memory."""
        while line := self._text.readline(self._chars_max + 1):
            self._chars += len(line)
            if self._chars > self._chars_max:
                raise InvalidDataset(
                    f"{self._path}: the record that begins on line {self.line} does not end within "
                    f"{self._chars_max:,} characters; is a quote left open?",
                    code="invalid_csv",
                )
            yield line

    def read(self, blank: list[str] | None = None) -> list[str]:
        """The next record. A blank line is `blank`, or is skipped. Raises: csv.Error, StopIteration."""
        while True:
            self.line = self._reader.line_num + 1
            self._chars = 0
            cells = next(self._reader) or blank
            if cells:
                return cells


@contextmanager
def _records(source: SourceFile, spec: DatasetSpec, advance: Advance) -> Iterator[_Records]:
    limit = csv.field_size_limit(spec.line_bytes_max)  # a setting of the whole process
    contents = blocks(source.path, source.codec, advance)
    # Bytes that are not UTF-8 become surrogates, so that only their row is refused.
    raw = io.BufferedReader(_Stream(contents), 1024 * 1024)
    text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
    try:
        yield _Records(text, source.path, spec.line_bytes_max)
    finally:
        text.close()
        contents.close()
        csv.field_size_limit(limit)


def _header(source: SourceFile, records: _Records) -> list[str]:
    try:
        names = records.read()
    except StopIteration:
        raise InvalidDataset(f"{source.path} has no header row", code="invalid_header") from None
    except csv.Error as error:
        raise InvalidDataset(f"{source.path}, line {records.line}: {error}", code="invalid_csv") from None
    _refuse_other_separator(source, names)
    if len(names) > COLUMNS_MAX:
        raise InvalidDataset(
            f"{source.path} has {len(names)} columns; {COLUMNS_MAX} is the most", code="invalid_header"
        )
    seen: set[str] = set()
    for name in names:
        if not name.strip() or not name.isprintable():
            raise InvalidDataset(f"the header of {source.path} has a column {name!r}", code="invalid_header")
        if name in seen:
            raise InvalidDataset(f"the header of {source.path} has {name!r} twice", code="invalid_header")
        seen.add(name)
    return names


def _refuse_other_separator(source: SourceFile, names: list[str]) -> None:
    """Refuse a header without a comma that another separator divides."""
    for separator, noun, quoted in SEPARATORS:
        if len(names) == 1 and separator in names[0]:
            raise InvalidDataset(
                f"the header of {source.path} is one column, {names[0][:SHOWN_CHARS]!r}: the cells seem to be "
                f"separated by {noun}, not commas. Convert the file, for example with `csvformat -d {quoted}` or "
                f"pandas.read_csv(…, sep={separator!r}).to_csv(…, index=False)",
                code="invalid_header",
            )


def _parse_records(
    source: SourceFile, records: _Records, blank: list[str] | None
) -> Iterator[tuple[int, list[str], str]]:
    """Yield (line, cells, flaw) for every record; `blank` is as in `_Records.read`."""
    while True:
        try:
            cells = records.read(blank)
        except StopIteration:
            return
        except csv.Error as error:
            flaw = str(error)
            if "unexpected end of data" in flaw or "field limit" in flaw or "field larger" in flaw:
                raise InvalidDataset(
                    f"{source.path}: the record that begins on line {records.line} does not end: {flaw}; "
                    "is a quote left open?",
                    code="invalid_csv",
                ) from None
            yield records.line, [], f"not CSV: {flaw}"
        else:
            yield records.line, cells, ""
