"""Which positions of one generation have an outcome, and whether a block is valid for its rows."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path

from msgspec import Struct

from batchmill.jobs.ledger.counting import mask_of
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.ledger.ledger import LeasedShard, Ledger, Verdict
from batchmill.jobs.ledger.misfits import CountedMisfits, runs_in
from batchmill.jobs.ledger.plan import PlanReader
from batchmill.jobs.ledger.row_states import STEP_ROWS, RowStates
from batchmill.ports.storage import SegmentSource
from batchmill.store.segments.blocks import open_segments
from batchmill.store.segments.format import Block, gaps_of, read_block, read_head, read_payload, salvage
from batchmill.store.sql.positions import pack_positions
from batchmill.types import Commit, SegmentRef, Shard, Usage
from batchmill.wire.job_spec import JobSpec

OPEN, OK, FAILED = 0, 1, 2
NEWLINE = 10
_DIGITS = bytes.maketrans(bytes((OPEN, OK, FAILED)), b"011")


def block_fault(block: Block, shard: Shard, plan: PlanReader) -> str | None:
    """Why a block does not belong to this shard as planned; None if it does."""
    if not block.n:
        return None
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
    """Why the payload of a block is not one line for each row; None if it is, or if it is columns."""
    if block.is_columnar:  # its checksum has been verified, and its worker checked it before it was written
        return None
    lines = payload.count(b"\n")
    if lines != block.n or not payload.endswith(b"\n" if block.n else b""):
        return f"{lines} lines for {block.n} rows"
    lengths = block.line_lengths()
    if not lengths:
        return None
    ends = list(accumulate(lengths))
    if ends[-1] != len(payload) or any(payload[end - 1] != NEWLINE for end in ends):
        return "lines that are not as long as it says"
    return None


class OutcomeMap:
    """The outcomes of one generation, one byte for each position of its plan. Close it.

    Raises: LedgerBroken when the plan is not what was written; StorageFull.
    Args: in_memory_rows: positions up to which the bytes are in memory.
    """

    def __init__(self, home: Path, generation: int, segments: SegmentSource, *, in_memory_rows: int) -> None:
        self.generation = generation
        self.plan = PlanReader(home)
        self.plan.check()
        self.shards = self.plan.shards()
        self.states = RowStates(home, self.plan.leaders, in_memory_rows=in_memory_rows)
        self._segments = segments

    def close(self) -> None:
        self.states.close()

    def breach(self, block: Block, shard: int) -> str | None:
        """Why a block cannot count for a shard; None if it can."""
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
        return fault or line_fault(block, read_payload(self._segments, block))

    def take(self, block: Block) -> None:
        """Count the rows of a block."""
        self.states.put(block.positions(), bytes((OK if block.ok else FAILED,)) * block.n)

    def bits(self, shard: Shard) -> int:
        """The bitmap of a shard."""
        return int(self.states.read(shard.lo, shard.hi).translate(_DIGITS)[::-1], 2)

    def rows_at(self, shard: Shard, bits: int) -> list[int]:
        """The numbers of a shard's rows whose bit is set."""
        numbers, text = self.plan.row_numbers(shard.lo, shard.hi), bin(bits)[:1:-1]
        return [number for number, bit in zip(numbers, text, strict=False) if bit == "1"]

    def _is_open(self, block: Block) -> bool:
        return not any(self.states.of(block.positions()))


def collect_newest(states: RowStates, maps: Iterable[OutcomeMap]) -> None:
    """OPEN, OK or FAILED for every row, from the oldest generation on: each one opens again the rows it plans."""
    for outcomes in maps:
        for lo in range(0, outcomes.plan.leaders, STEP_ROWS):
            hi = min(lo + STEP_ROWS, outcomes.plan.leaders)
            states.put(outcomes.plan.row_numbers(lo, hi), outcomes.states.read(lo, hi))


def rows_in(states: RowStates, numbers: Sequence[int], *wanted: int) -> Iterator[int]:
    """Those of some rows that have one of these states."""
    return (number for number, state in zip(numbers, states.of(numbers), strict=True) if state in wanted)


log = logging.getLogger("batchmill.owner")

Counted = list[tuple[Commit, float | None]]
ADOPT_ROWS = 65_536  # rows counted in one transaction, about
ADOPT_SHARDS = 512  # of so many shards at most


class _Orphan(Struct, frozen=True, order=True, gc=False):
    """The location of a block that no commit names. Sorted with the newest epoch of a shard first."""

    shard: int
    epoch_back: int  # the epoch, negated
    segment: str
    offset: int
    n: int


class _ShardBlocks(Struct, frozen=True):
    """The blocks of one shard that may be counted, with their positions and what they add to the usage."""

    shard: Shard
    blocks: list[tuple[Block, bytes, Usage]]


def adopt(
    ledger: Ledger, spec: JobSpec, generation: int, plan: PlanReader, files: JobFiles, worker: str | None = None,
    *, counted: Counted | None = None,
) -> Counted:  # fmt: skip
    """Count the sound blocks that no commit names, of one worker or of all; returns what was counted.

    Committed bytes are not read again. Each shard concerned gets a new epoch first, so that the worker that wrote
    the blocks can commit nothing any more.

    Args: counted: gets what each transaction counts, and is returned: a call that fails between two of them can be
    repeated with it.
    """
    counted = [] if counted is None else counted
    with closing(open_segments(files.segment_place)) as source:
        _adopt(ledger, spec, generation, plan, source, worker or "", counted)
    return counted


def _adopt(
    ledger: Ledger, spec: JobSpec, generation: int, plan: PlanReader, source: SegmentSource, worker: str,
    counted: Counted,
) -> None:  # fmt: skip
    orphans = sorted(_orphans(ledger, spec, generation, source, worker))
    if not orphans:
        return
    shards = plan.shards()
    for batch in _batches(orphans, len(shards)):
        bitmaps = ledger.bitmaps(spec.id, generation, list(batch))
        misfits = CountedMisfits(ledger.noted_misfits(spec.id, generation, list(batch)))
        finds = [
            _choose(source, found, shards[number], plan, bitmaps.get(number, 0), misfits)
            for number, found in batch.items()
        ]
        counted += _count(ledger, spec, generation, [find for find in finds if find.blocks])


def _orphans(ledger: Ledger, spec: JobSpec, generation: int, source: SegmentSource, worker: str) -> Iterator[_Orphan]:
    names = source.names(worker)
    spans = ledger.committed_spans(spec.id, worker) if names else {}
    for name in names:
        try:
            found = _orphans_in(source, name, spec.id, generation, spans.get(name, []))
            if found:
                source.sync(name)
        except OSError as error:  # final for it: the rows of what it holds besides what was counted run again
            log.warning("nothing more is adopted of %s: %s", source.where(name), error)
        else:
            yield from found


def _orphans_in(
    source: SegmentSource, name: str, job: str, generation: int, counted: list[tuple[int, int]]
) -> list[_Orphan]:
    head = read_head(source, name)
    if head is not None and head.job != job:
        return []
    return [
        _Orphan(block.shard, -block.epoch, name, block.offset, block.n)
        for start, end in gaps_of(source, name, counted)
        for block in salvage(source, name, start, end)
        if isinstance(block, Block) and block.generation == generation
    ]


def _batches(orphans: list[_Orphan], shards: int) -> Iterator[dict[int, list[_Orphan]]]:
    """Orphans by shard, so many of them as go into one transaction; those of no shard of the plan are left out."""
    batch: dict[int, list[_Orphan]] = defaultdict(list)
    rows = 0
    for orphan in orphans:
        if orphan.shard >= shards:
            continue
        if orphan.shard not in batch and (rows >= ADOPT_ROWS or len(batch) >= ADOPT_SHARDS):
            yield batch
            batch, rows = defaultdict(list), 0
        batch[orphan.shard].append(orphan)
        rows += orphan.n
    if batch:
        yield batch


def _choose(
    source: SegmentSource, orphans: list[_Orphan], shard: Shard, plan: PlanReader, bitmap: int, misfits: CountedMisfits
) -> _ShardBlocks:
    """The blocks whose rows have no outcome yet: a shard with none keeps its lease."""
    chosen = []
    for orphan in orphans:
        try:
            block = read_block(source, orphan.segment, orphan.offset)
        except OSError as error:
            log.warning("nothing more is adopted of %s: %s", source.where(orphan.segment), error)
            continue
        if block_fault(block, shard, plan) is not None or misfits.has(block):
            continue  # of another plan, or counted by a worker that read these results after its own
        done = pack_positions(block.positions(), shard.lo)
        mask = mask_of(done)
        if not mask & bitmap:  # else its rows were run again meanwhile
            bitmap |= mask
            chosen.append((block, done, misfits.usage_of(block)))
            misfits.take(block)
    return _ShardBlocks(shard, chosen)


def _count(ledger: Ledger, spec: JobSpec, generation: int, finds: list[_ShardBlocks]) -> Counted:
    if not finds:
        return []
    wanted = [(find.shard, max(block.epoch for block, _, _ in find.blocks)) for find in finds]
    leases = ledger.lease_all(spec.id, generation, wanted)
    counted: Counted = []
    for find, leased in zip(finds, leases, strict=True):
        price = spec.models[find.shard.model].price
        for index, (block, done, usage) in enumerate(find.blocks):
            commit = _commit_of(block, done, usage, leased, leased.seq + index)
            counted.append((commit, None if price is None else price.cost(usage)))
    verdicts = ledger.commit(counted)
    assert all(verdict is Verdict.COUNTED for verdict in verdicts), "the lease is ours and the positions are open"
    return counted


def _commit_of(block: Block, done: bytes, usage: Usage, leased: LeasedShard, seq: int) -> Commit:
    return Commit(
        lease=leased.lease, seq=seq, ref=SegmentRef(block.segment, block.offset, block.length), done=done,
        rows_ok=block.n if block.ok else 0, rows_failed=0 if block.ok else block.n, usage=usage,
        errors=block.meta.errors, samples=block.meta.samples, warnings=block.meta.warnings,
        rows_reused=block.meta.reused, misfits=runs_in(block),
    )  # fmt: skip
