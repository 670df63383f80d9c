"""Pages of a database file, and damage to them."""

from __future__ import annotations

import contextlib
import sqlite3
import struct
from pathlib import Path

PAGE = 4096
INNER = 0x05


def root(path: Path, table: str) -> int:
    """The first page of a table."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (table,)).fetchone()[0]


def children(path: Path, page: int) -> list[int]:
    """The pages that an inner page of a table refers to; none of a leaf."""
    data = path.read_bytes()[(page - 1) * PAGE : page * PAGE]
    if data[0] != INNER:
        return []
    cells = struct.unpack_from(">H", data, 3)[0]
    offsets = struct.unpack_from(f">{cells}H", data, 12)
    return [struct.unpack_from(">I", data, at)[0] for at in (*offsets, 8)]


def all_pages(path: Path, table: str) -> list[int]:
    """The pages of a table, its first page first."""
    pages = [root(path, table)]
    for page in pages:
        pages += children(path, page)
    return pages


def overwrite(path: Path, page: int) -> None:
    with open(path, "r+b") as file:
        file.seek((page - 1) * PAGE)
        file.write(b"\xa5" * PAGE)
