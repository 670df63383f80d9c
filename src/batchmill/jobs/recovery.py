"""Outcomes that reached a segment but not the ledger are found and counted: nobody pays for them twice."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from batchmill.jobs.job_files import JobFiles
from batchmill.jobs.ledger import Ledger, Standing, Verdict, mask_of
from batchmill.jobs.outcome_map import block_fault
from batchmill.jobs.plan import PlanReader
from batchmill.store.segments import Block, gaps_of, pack_positions, read_block, read_head, salvage
from batchmill.types import Commit, SegmentRef, Shard
from batchmill.wire.job_spec import JobSpec

log = logging.getLogger("batchmill.owner")

Counted = list[tuple[Commit, float | None]]
ADOPT_ROWS = 65_536  # rows counted in one transaction, about
ADOPT_SHARDS = 512  # of so many shards at most


class _Orphan(Struct, frozen=True, order=True, gc=False):
    """Where a block lies that no commit names. In order: the newest epoch of a shard first."""

    shard: int
    epoch_back: int  # the epoch, negated
    path: str
    offset: int
    n: int


class _Find(Struct, frozen=True):
    """The blocks of one shard that may be counted, and the positions of each."""

    shard: Shard
    blocks: list[tuple[Block, bytes]]


def adopt(
    ledger: Ledger, spec: JobSpec, generation: int, plan: PlanReader, files: JobFiles, worker: str | None = None
) -> Counted:
    """Count the sound blocks that no commit names, of one worker or of all; returns what was counted.

    Committed bytes are not read again. Each shard concerned gets a new epoch first, so that whoever wrote the blocks
    can commit nothing any more.
    """
    orphans = sorted(_orphans(ledger, spec, generation, files.segments, worker or ""))
    if not orphans:
        return []
    shards = plan.shards()
    counted: Counted = []
    for batch in _batches(orphans, len(shards)):
        bitmaps = ledger.bitmaps(spec.id, generation, list(batch))
        finds = [_choose(found, shards[number], plan, bitmaps.get(number, 0)) for number, found in batch.items()]
        counted += _count(ledger, spec, generation, [find for find in finds if find.blocks])
    return counted


def _orphans(ledger: Ledger, spec: JobSpec, generation: int, folder: Path, worker: str) -> Iterator[_Orphan]:
    spans = ledger.committed_spans(spec.id, worker)
    for path in sorted(folder.glob(f"{worker or '*'}-*.seg")):
        try:
            found = _orphans_in(path, spec.id, generation, spans.get(path.name, []))
            if found:
                _sync(path)
        except OSError as error:  # final for that file: the rows of what it holds besides what was counted run again
            log.warning("nothing more is adopted of %s: %s", path, error)
        else:
            yield from found


def _orphans_in(path: Path, job: str, generation: int, counted: list[tuple[int, int]]) -> list[_Orphan]:
    head = read_head(path)
    if head is not None and head.job != job:
        return []
    return [
        _Orphan(block.shard, -block.epoch, block.path, block.offset, block.n)
        for start, end in gaps_of(path, counted)
        for block in salvage(path, start, end)
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


def _choose(orphans: list[_Orphan], shard: Shard, plan: PlanReader, bitmap: int) -> _Find:
    """The blocks whose rows have no outcome yet: a shard with none keeps its lease."""
    chosen = []
    for orphan in orphans:
        try:
            block = read_block(orphan.path, orphan.offset)
        except OSError as error:
            log.warning("nothing more is adopted of %s: %s", orphan.path, error)
            continue
        if block_fault(block, shard, plan) is not None:
            continue  # of another plan
        done = pack_positions(block.positions(), shard.lo)
        mask = mask_of(done)
        if not mask & bitmap:  # else its rows were run again meanwhile
            bitmap |= mask
            chosen.append((block, done))
    return _Find(shard, chosen)


def _count(ledger: Ledger, spec: JobSpec, generation: int, finds: list[_Find]) -> Counted:
    if not finds:
        return []
    wanted = [(find.shard, max(block.epoch for block, _ in find.blocks)) for find in finds]
    standings = ledger.lease_all(spec.id, generation, wanted)
    counted: Counted = []
    for find, standing in zip(finds, standings, strict=True):
        price = spec.models[find.shard.model].price
        for index, (block, done) in enumerate(find.blocks):
            commit = _commit_of(block, done, standing, standing.seq + index)
            counted.append((commit, None if price is None else price.cost(block.meta.usage)))
    verdicts = ledger.commit(counted)
    assert all(verdict is Verdict.COUNTED for verdict in verdicts), "the lease is ours and the positions are open"
    return counted


def _commit_of(block: Block, done: bytes, standing: Standing, seq: int) -> Commit:
    return Commit(
        lease=standing.lease, seq=seq, ref=SegmentRef(Path(block.path).name, block.offset, block.length), done=done,
        rows_ok=block.n if block.ok else 0, rows_failed=0 if block.ok else block.n, usage=block.meta.usage,
        errors=block.meta.errors, samples=block.meta.samples,
    )  # fmt: skip


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)
