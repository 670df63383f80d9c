"""Which positions of one generation have their outcome, and whether a block may stand for the rows it names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from batchmill.errors import LedgerBroken
from batchmill.jobs.plan import PlanReader
from batchmill.store.segments import Block, SegmentReader
from batchmill.types import Shard

OPEN, OK, FAILED = 0, 1, 2
CHUNK_ROWS = 1024 * 1024
NEWLINE = 10
_DIGITS = bytes.maketrans(bytes((OPEN, OK, FAILED)), b"011")


def block_fault(block: Block, shard: Shard, plan: PlanReader) -> str | None:
    """Why a block is not one of this shard as it was planned; None when it is."""
    positions = block.positions()
    lo, hi = min(positions), max(positions) + 1
    if lo < shard.lo or hi > shard.hi:
        return f"positions {lo} to {hi - 1} of a shard of {shard.lo} to {shard.hi - 1}"
    if len(set(positions)) != block.n:
        return "a position twice"
    planned, rows = plan.row_numbers(lo, hi), block.rows()
    if isinstance(positions, range):
        agree = list(planned) == list(rows) if planned is not rows else True
    else:
        agree = [planned[position - lo] for position in positions] == list(rows)
    return None if agree else "rows that the plan does not have at their positions"


def line_fault(block: Block, payload: bytes) -> str | None:
    """Why the payload of a block is not one line for each of its rows; None when it is."""
    lines = payload.count(b"\n")
    if lines != block.n or payload[-1] != NEWLINE:
        return f"{lines} lines for {block.n} rows"
    lengths = block.line_lengths()
    if lengths is None:
        return None
    ends = list(accumulate(lengths))
    if ends[-1] != len(payload) or any(payload[end - 1] != NEWLINE for end in ends):
        return "lines that are not as long as it says"
    return None


class OutcomeMap:
    """The outcomes of one generation, one byte for each position of its plan.

    Raises: LedgerBroken when the plan is not what was written.
    """

    def __init__(self, home: Path, generation: int) -> None:
        self.generation = generation
        self.plan = PlanReader(home)
        try:
            self.plan.check()
        except LedgerBroken:
            self.plan.close()
            raise
        self.shards = self.plan.shards()
        self.states = bytearray(self.plan.leaders)
        self._reader = SegmentReader()

    def breach(self, block: Block, shard: int) -> str | None:
        """Why a block cannot count for a shard; None when it can."""
        if block.generation != self.generation or block.shard != shard:
            return f"a block of generation {block.generation}, shard {block.shard}"
        if shard >= len(self.shards):
            return f"shard {shard} of a plan of {len(self.shards)}"
        errors = sum(block.meta.errors.values())
        if errors != (0 if block.ok else block.n):
            return f"causes of {errors} errors for {0 if block.ok else block.n} rows that failed"
        fault = block_fault(block, self.shards[shard], self.plan)
        if fault is None and not self._is_open(block):
            fault = "a row that has its outcome already"
        return fault or line_fault(block, self._reader.payload(block))

    def take(self, block: Block) -> None:
        """Count the rows of a block."""
        value, positions = OK if block.ok else FAILED, block.positions()
        if isinstance(positions, range):
            self.states[positions.start : positions.stop] = bytes((value,)) * block.n
        else:
            for position in positions:
                self.states[position] = value

    def bits(self, shard: Shard) -> int:
        """The bitmap of a shard."""
        return int(self.states[shard.lo : shard.hi].translate(_DIGITS)[::-1], 2)

    def rows_at(self, shard: Shard, bits: int) -> list[int]:
        """The numbers of a shard's rows whose bit is set."""
        numbers, text = self.plan.row_numbers(shard.lo, shard.hi), bin(bits)[:1:-1]
        return [number for number, bit in zip(numbers, text, strict=False) if bit == "1"]

    def close(self) -> None:
        self.plan.close()
        self._reader.close()

    def _is_open(self, block: Block) -> bool:
        positions = block.positions()
        if isinstance(positions, range):
            return self.states.count(OPEN, positions.start, positions.stop) == block.n
        return not any(self.states[position] for position in positions)


def newest(maps: Iterable[OutcomeMap], rows: int) -> bytearray:
    """OPEN, OK or FAILED for every row, from the oldest generation on: each one opens again the rows it plans."""
    states = bytearray(rows)
    for outcomes in maps:
        for lo in range(0, outcomes.plan.leaders, CHUNK_ROWS):
            hi = min(lo + CHUNK_ROWS, outcomes.plan.leaders)
            put(states, outcomes.plan.row_numbers(lo, hi), outcomes.states[lo:hi])
    return states


def put(states: bytearray, numbers: Sequence[int], values: bytes | bytearray) -> None:
    """Set the state of each row."""
    if isinstance(numbers, range):
        states[numbers.start : numbers.stop] = values
        return
    for number, value in zip(numbers, values, strict=True):
        states[number] = value
