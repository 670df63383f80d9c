"""Outcomes that reached a segment but not the ledger are found and counted: nobody pays for them twice."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from batchmill.errors import LedgerBroken
from batchmill.jobs.job_files import JobFiles
from batchmill.jobs.job_run import JobRun
from batchmill.jobs.ledger import Ledger, Verdict, mask_of
from batchmill.jobs.plan import PlanReader
from batchmill.store.segments import Block, pack_positions, read_head, read_ref, scan
from batchmill.types import Commit, LedgerReport, SegmentRef, Shard
from batchmill.wire.job_spec import JobSpec

Counted = list[tuple[Commit, float | None]]
ADOPT_ROWS = 65_536  # rows counted in one transaction


def adopt(
    ledger: Ledger, spec: JobSpec, generation: int, plan: PlanReader, files: JobFiles, worker: str | None = None
) -> Counted:
    """Count the sound blocks that no commit names, of one worker or of all; returns what was counted.

    Each shard concerned gets a new epoch first, so that whoever wrote the blocks can commit nothing any more.
    """
    ends = ledger.committed_ends(spec.id, worker or "")
    orphans = _orphans(files.segments, spec, worker, ends)
    return _count(ledger, spec, generation, plan, (block for block in orphans if block.generation == generation))


def _orphans(folder: Path, spec: JobSpec, worker: str | None, ends: dict[str, int]) -> Iterable[Block]:
    for path in sorted(folder.glob(f"{worker or '*'}-*.seg")):
        head = read_head(path)
        if head is None or head.job != spec.id:
            continue
        blocks = list(scan(path, ends.get(path.name, 0)))
        if blocks:
            _sync(path)
            yield from blocks


def _count(
    ledger: Ledger,
    spec: JobSpec,
    generation: int,
    plan: PlanReader,
    blocks: Iterable[Block],
    *,
    rebuilding: bool = False,
) -> Counted:
    by_shard: dict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        by_shard[block.shard].append(block)
    if not by_shard:
        return []
    shards = {shard.number: shard for shard in plan.shards()}
    counted: Counted = []
    for number, found in sorted(by_shard.items()):
        if number in shards:
            counted += _count_shard(ledger, spec, generation, shards[number], found, rebuilding=rebuilding)
    return counted


def _count_shard(
    ledger: Ledger, spec: JobSpec, generation: int, shard: Shard, blocks: list[Block], *, rebuilding: bool
) -> Counted:
    standing = ledger.lease(spec.id, generation, shard)
    bitmap, seq = standing.bitmap, standing.seq
    price = spec.models[shard.model].price
    found: Counted = []
    for block in sorted(blocks, key=lambda block: block.epoch):
        positions = block.positions()
        if min(positions) < shard.lo or max(positions) >= shard.hi:
            continue  # of another plan
        done = pack_positions(positions, shard.lo)
        mask = mask_of(done)
        if mask.bit_count() != block.n or mask & bitmap:
            continue  # its rows were run again meanwhile
        bitmap |= mask
        commit = Commit(
            lease=standing.lease, seq=seq, ref=SegmentRef(Path(block.path).name, block.offset, block.length),
            done=done, rows_ok=block.n if block.ok else 0,
            rows_failed=0 if block.ok else block.n, usage=block.meta.usage,
            errors=block.meta.errors, samples=block.meta.samples,
        )  # fmt: skip
        found.append((commit, None if price is None else price.cost(block.meta.usage)))
        seq += 1
    verdicts = ledger.commit(found, rebuilding=rebuilding) if found else []
    assert all(verdict is Verdict.COUNTED for verdict in verdicts), "the lease is ours and the positions are open"
    return found


def note_suspect(run: JobRun, path: Path) -> None:
    """Remember the row that ran alone when a careful worker died."""
    try:
        job, generation, _, position = path.read_text().split()
    except (FileNotFoundError, ValueError):
        return
    if job == run.spec.id and int(generation) == run.generation:
        run.suspect(int(position))
        path.unlink()


def verify(ledger: Ledger, spec: JobSpec, files: JobFiles, rows: int) -> LedgerReport:
    """Audit the ledger of a job against its segments and say everything that does not hold. Changes nothing."""
    broken: list[str] = []
    refs = ledger.committed(spec.id)
    done = 0
    sums = ledger.commit_sums(spec.id)
    for record in ledger.shard_records(spec.id):
        key = record["generation"], record["shard"]
        bits = int.from_bytes(record["bitmap"], "little").bit_count()
        if not bits == record["done"] == sums.get(key, 0):
            broken.append(
                f"generation {key[0]}, shard {key[1]}: {bits} rows in the bitmap, {record['done']} counted, "
                f"{sums.get(key, 0)} in commits"
            )
        done += bits
    blocks = 0
    seen: dict[int, bytearray] = defaultdict(lambda: bytearray(-(-max(rows, 1) // 8)))
    for generation, ref in refs:
        try:
            found = read_ref(files.segments, ref)
        except LedgerBroken as error:
            broken.append(error.message)
            continue
        for block in found:
            blocks += block.n
            broken += _audit_block(block, generation, seen[generation], rows)
    outcomes = 0
    for bits in seen.values():
        outcomes |= int.from_bytes(bits, "little")
    if not broken and blocks != done:
        broken.append(f"the segments hold {blocks} rows in committed blocks, the ledger counts {done}")
    return LedgerReport(
        job=spec.id,
        rows=rows,
        rows_done=outcomes.bit_count(),
        commits=len(refs),
        segments=len({ref.segment for _, ref in refs}),
        bytes=sum(ref.length for _, ref in refs),
        broken=broken,
    )


def _audit_block(block: Block, generation: int, seen: bytearray, rows: int) -> list[str]:
    where = f"{block.path} at {block.offset}"
    if block.generation != generation:
        return [f"{where}: a block of generation {block.generation} in a commit of generation {generation}"]
    for row in block.rows():
        if row >= rows:
            return [f"{where}: row {row} of a dataset of {rows}"]
        if seen[row >> 3] & (1 << (row & 7)):
            return [f"{where}: row {row} has two outcomes in generation {generation}"]
        seen[row >> 3] |= 1 << (row & 7)
    return []


def rebuild(ledger: Ledger, spec: JobSpec, files: JobFiles, generations: int) -> int:
    """Forget what the ledger knows of a job and count its segments anew; returns the rows counted."""
    ledger.forget(spec.id)
    rows = 0
    for generation in range(generations):
        plan = PlanReader(files.plan(generation))
        try:
            counted = adopt_all(ledger, spec, generation, plan, files)
        finally:
            plan.close()
        rows += sum(commit.rows_ok + commit.rows_failed for commit, _ in counted)
    return rows


def adopt_all(ledger: Ledger, spec: JobSpec, generation: int, plan: PlanReader, files: JobFiles) -> Counted:
    """Count every sound block of a generation, whatever the ledger knows: the first of a row wins, by epoch."""
    blocks = (block for block in _orphans(files.segments, spec, None, {}) if block.generation == generation)
    return _count(ledger, spec, generation, plan, blocks, rebuilding=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)
