"""Leaf pages of a damaged database that no readable page refers to: the rows below a damaged inner page.

Every page belongs to a table or an index, or is free. So a leaf that is not free, and that no readable page refers to,
lies below a damaged page. Where the list of free pages is not whole, such a leaf may be free, with rows as they were
once: then none is taken. Source: https://www.sqlite.org/fileformat2.html.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from msgspec import Struct

INNER, LEAF = 0x05, 0x0D  # types of a table's pages
INNER_BYTES, LEAF_BYTES = 12, 8  # of their headers
FIRST_BYTES = 100  # of the first page, before its header as a page
FREE_AT = 32  # of the file's header: the first page that lists free ones, and how many there are
VARINT_BYTES = 9


class Leaf(Struct, frozen=True):
    """A page of rows. Their row ids lie between the first and the last, which no other leaf of its table shares."""

    page: int
    first: int
    last: int
    columns: int


class Pages:
    """The pages of a database whose write-ahead log is empty."""

    def __init__(self, data: bytes, page_bytes: int, roots: Sequence[int]) -> None:
        """Args: roots: the first pages of all its tables."""
        self._data, self._page_bytes, self._count = data, page_bytes, len(data) // page_bytes
        self._seen: dict[int, int] = {}  # page -> the first page of its table
        self.broken: set[int] = set()  # the first pages of tables with a page that cannot be read
        for root in (1, *roots):
            if not self._walk(root):
                self.broken.add(root)

    def orphans(self) -> list[Leaf]:
        """The leaves that are in use, and that no readable page refers to. None where free pages are not known."""
        free = self._free()
        if free is None:
            return []
        others = (page for page in range(2, self._count + 1) if page not in self._seen and page not in free)
        return [leaf for page in others if (leaf := self._leaf(page)) is not None]

    def leaves(self, root: int) -> list[Leaf]:
        """The leaves of a table that readable pages refer to."""
        pages = (page for page, table in self._seen.items() if table == root)
        return [leaf for page in pages if page > 1 and (leaf := self._leaf(page)) is not None]

    def _page(self, number: int) -> bytes:
        return self._data[(number - 1) * self._page_bytes : number * self._page_bytes]

    def _walk(self, root: int) -> bool:
        """Note the pages of a table. Returns whether all can be read."""
        waiting, is_whole = [root], True
        while waiting:
            number = waiting.pop()
            if not 1 <= number <= self._count or number in self._seen:
                is_whole = False
                continue
            self._seen[number] = root
            page, at = self._page(number), FIRST_BYTES if number == 1 else 0
            try:
                if page[at] == INNER:
                    offsets = _offsets(page, at, INNER_BYTES)
                    children = [struct.unpack_from(">I", page, place)[0] for place in (*offsets, at + 8)]
                    waiting += children
                elif page[at] != LEAF:
                    is_whole = False
            except (struct.error, ValueError):
                is_whole = False
        return is_whole

    def _free(self) -> set[int] | None:
        """The free pages; None if their list is not whole."""
        number, count = struct.unpack_from(">II", self._data, FREE_AT)
        free: set[int] = set()
        while number:
            if not 2 <= number <= self._count or number in free:
                return None
            free.add(number)
            number, leaves, *listed = struct.unpack(f">{self._page_bytes // 4}I", self._page(number))
            if leaves > len(listed):
                return None
            free |= set(listed[:leaves])
        is_whole = (
            len(free) == count and not free & self._seen.keys() and all(2 <= each <= self._count for each in free)
        )
        return free if is_whole else None

    def _leaf(self, number: int) -> Leaf | None:
        """A page, if it is one of rows that have as many columns each."""
        page = self._page(number)
        if page[0] != LEAF:
            return None
        try:
            rows = [_row(page, offset) for offset in _offsets(page, 0, LEAF_BYTES)]
        except (IndexError, struct.error, ValueError):
            return None
        ids, columns = [row_id for row_id, _ in rows], {columns for _, columns in rows}
        if len(columns) != 1 or ids != sorted(set(ids)):
            return None
        return Leaf(number, ids[0], ids[-1], columns.pop())


def apart(leaves: Sequence[Leaf], known: Sequence[int]) -> Iterator[Leaf]:
    """The leaves of one table that share no row id with another, nor with rows that can be read: of others, one is
    older, and nothing says which. Args: known: the row ids of those rows, ascending.
    """
    spans = sorted([*((leaf.first, leaf.last) for leaf in leaves), *((row, row) for row in known)])
    shared: set[tuple[int, int]] = set()
    widest = spans[0] if spans else (0, 0)
    for span in spans[1:]:
        if span[0] <= widest[1]:
            shared |= {span, widest}
        widest = max(widest, span, key=lambda each: each[1])
    return (leaf for leaf in leaves if (leaf.first, leaf.last) not in shared)


def _offsets(page: bytes, at: int, header_bytes: int) -> Sequence[int]:
    """Where the cells of a page begin. Raises: struct.error, ValueError if the page cannot be one."""
    cells = struct.unpack_from(">H", page, at + 3)[0]
    begin = at + header_bytes
    offsets = struct.unpack_from(f">{cells}H", page, begin)
    if any(not begin + 2 * cells <= offset < len(page) for offset in offsets):
        raise ValueError("a cell lies outside of its page")
    return offsets


def _row(page: bytes, at: int) -> tuple[int, int]:
    """The row id of a cell, and how many columns it has."""
    _, at = _varint(page, at)
    row_id, at = _varint(page, at)
    begin = at
    header_bytes, at = _varint(page, at)
    columns = 0
    while at < begin + header_bytes:
        _, at = _varint(page, at)
        columns += 1
    if at != begin + header_bytes:
        raise ValueError("the head of a row ends within a number")
    return row_id, columns


def _varint(page: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next begins. Row ids of ours are positive."""
    value = 0
    for index in range(VARINT_BYTES - 1):
        byte = page[at + index]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + index + 1
    return value << 8 | page[at + VARINT_BYTES - 1], at + VARINT_BYTES
