"""Records of CSV results as JSON lines. Cells are text; an empty cell in a column that batchmill added is null."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from batchmill.wire.rows.result_rows import OWN

CELL_BYTES_MAX = 1024 * 1024 * 1024  # the most for a cell of a result file

_encode = msgspec.json.encode


def csv_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Args: lines: of the file, without their line feeds."""
    limit = csv.field_size_limit(CELL_BYTES_MAX)
    try:
        records = csv.reader((f"{line.decode()}\n" for line in lines), strict=True)
        names = next(records, [])
        for cells in records:
            row: dict[str, Any] = dict(zip(names, cells, strict=True))
            for name in OWN:
                if row.get(name) == "":
                    row[name] = None
            yield _encode(row)
    finally:
        csv.field_size_limit(limit)
