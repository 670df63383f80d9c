"""Rows that were read before an engine takes them."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from batchmill.ports.engines import Columns
from batchmill.types import ColumnBlock, RowBlock

Block = RowBlock | ColumnBlock


class ReadAhead(Struct, frozen=True):
    """Rows of a grant that were read in a thread and not taken yet.

    The lines of a RowBlock begin at byte `at`, the rows of a ColumnBlock's stream at row `at`.
    """

    first: int  # index in the grant
    columns: Columns | None
    block: Block
    at: int = 0

    @property
    def last(self) -> int:
        return self.first + len(self.block)

    def take(self, rows: int) -> Block:
        """The first rows."""
        block = self.block
        if rows == len(block) and not self.at:
            return block
        if isinstance(block, ColumnBlock):
            data = block.lease.job.rows.cut_columns(block.data, self.at, self.at + rows)
            return msgspec.structs.replace(
                block, data=data, positions=block.positions[:rows], numbers=block.numbers[:rows]
            )
        return rows_of(block, self.at, line_end(block.lines, self.at, rows), 0, rows)

    def without(self, rows: int) -> ReadAhead | None:
        """Those that are left when the first ones were taken."""
        block = self.block
        if rows == len(block):
            return None
        at = self.at + rows if isinstance(block, ColumnBlock) else line_end(block.lines, self.at, rows)
        block = msgspec.structs.replace(block, positions=block.positions[rows:], numbers=block.numbers[rows:])
        return ReadAhead(self.first + rows, self.columns, block, at)


def line_end(lines: bytes, at: int, rows: int) -> int:
    for _ in range(rows):
        at = lines.index(b"\n", at) + 1
    return at


def rows_of(block: RowBlock, start: int, end: int, first: int, last: int) -> RowBlock:
    """Rows first <= n < last of a block; their lines are from `start` to `end`."""
    return msgspec.structs.replace(
        block, lines=block.lines[start:end], positions=block.positions[first:last], numbers=block.numbers[first:last]
    )
