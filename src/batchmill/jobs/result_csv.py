"""Results as CSV: strings bare, numbers with the digits they came with, objects and lists as their JSON text."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from batchmill.jobs.gathering import TableSource
from batchmill.jobs.line_files import LineFile
from batchmill.jobs.result_columns import ColumnNames, in_batches
from batchmill.jobs.results import ResultFile
from batchmill.wire.json_bytes import split_object, text_of


class CsvFile:
    """A header and a record for every row. An empty cell is null, an empty string, or a column the row lacks."""

    def __init__(self, output: Path, source: TableSource) -> None:
        self._names = ColumnNames(source)
        self.must_learn = not source.fixed
        self._file = LineFile(output)
        self._columns: list[str] | None = None

    def learn(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            self._names.note(split_object(line))

    def write(self, lines: Sequence[bytes]) -> None:
        columns = self._begin()
        for batch in in_batches(lines):
            records = []
            for line in batch:
                members = split_object(line)
                records.append([text_of(members[name]) if name in members else "" for name in columns])
            self._file.write(_text_of(records), len(batch))

    def publish(self) -> ResultFile:
        self._begin()
        return self._file.publish()

    def discard(self) -> None:
        self._file.discard()

    def _begin(self) -> list[str]:
        """The columns, settled and written as the header: every row has been seen."""
        if self._columns is None:
            self._columns = self._names.all()
            self._file.write(_text_of([self._columns]), 0)
        return self._columns


def _text_of(records: list[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    # A bare CR ends a record for every reader, and csv quotes only what its own line terminator holds.
    careful = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for record in records:
        (careful if any("\r" in cell for cell in record) else writer).writerow(record)
    return text.getvalue().encode()


def create(output: Path, source: TableSource) -> CsvFile:
    return CsvFile(output, source)
