"""`ledger verify` compares a job's ledger with its plans and segments; a damaged index of the dataset is rebuilt.

Runs in a child of the owner. Only `reseal` writes, and only to the folder of the dataset.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from contextlib import closing, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.datasets import layout
from batchmill.datasets.folders import folder_of
from batchmill.datasets.orders import SealOrder
from batchmill.datasets.readers import open_rows
from batchmill.datasets.sealed import load_seal
from batchmill.datasets.sealing import seal_with_retry
from batchmill.errors import InputChanged, InvalidDataset, LedgerBroken
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.ledger.misfits import CountedMisfits
from batchmill.jobs.ledger.outcome_map import FAILED, OK, OPEN, OutcomeMap, collect_newest
from batchmill.jobs.ledger.plan import PLAN, Progress
from batchmill.jobs.ledger.row_states import IN_MEMORY_ROWS, RowStates
from batchmill.jobs.ledger.snapshot import CommitRecord, ShardRecord, Snapshot
from batchmill.part_files import make_folder, sync_folder
from batchmill.states import JobState
from batchmill.store.segments.blocks import open_segments
from batchmill.store.segments.format import Block, read_head, read_ref, where
from batchmill.types import LedgerReport, SegmentPlace, SegmentRef, Usage
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import TableForm

ANEW = "dataset.new"
ROWS = 4096  # read at once
LAST = (layout.SUMS, layout.SEAL)


def flaws(home: Path) -> list[str]:
    """The damage of a sealed dataset, copied or converted rows included; the input itself is not read."""
    found = layout.faults(home)
    if found:
        return found
    seal = load_seal(home)
    if not any(Path(file.path).parent == home for file in seal.files):
        return []
    rows = open_rows(home, seal)
    try:
        for first in range(0, rows.rows, ROWS):
            rows.read(first, min(first + ROWS, rows.rows))
    except InputChanged as error:
        return [error.message]
    finally:
        rows.close()
    return []


def rebuild_dataset(order: SealOrder, files: JobFiles, progress: Progress) -> list[str]:
    """Make a damaged dataset anew; what was wrong with it, nothing where it is sound.

    Raises: InputChanged if the input is not what was sealed, or that can no longer be checked.
    """
    wrong = flaws(files.dataset)
    if not wrong:
        return []
    anew = files.home / ANEW
    shutil.rmtree(anew, ignore_errors=True)
    anew.mkdir()
    try:
        seal_with_retry(order, anew, progress)
        if not _is_same(files.dataset, anew, order):
            raise InputChanged(
                f"the index of the dataset in {files.dataset} is damaged ({'; '.join(wrong)}), and its input "
                f"{', '.join(order.dataset.paths)} is not what was sealed, or cannot be known to be: restore it, or "
                "start over with --restart"
            )
        _move_in(files.dataset, anew)
    finally:
        shutil.rmtree(anew, ignore_errors=True)
    return wrong


def _is_same(home: Path, anew: Path, order: SealOrder) -> bool:
    """Whether the input has the sealed digest, or, if that is lost, every block its checksum.

    The digest says nothing of files that cells name: with media the rows, which hold theirs, must be the same.
    """
    new = load_seal(anew)
    has_media = isinstance(order.form, TableForm) and bool(order.form.media)
    with suppress(InputChanged, InvalidDataset):  # it cannot be read
        old = load_seal(home)
        if (old.digest, old.rows) == (new.digest, new.rows) and not has_media:
            return True
    checksums = home / layout.CHECKSUMS
    return checksums.exists() and checksums.read_bytes() == (anew / layout.CHECKSUMS).read_bytes()


def _move_in(home: Path, anew: Path) -> None:
    """Move the new dataset into place, the seal last."""
    seal = (anew / layout.SEAL).read_bytes()
    moved = seal.replace(msgspec.json.encode(str(anew))[1:-1] + b"/", msgspec.json.encode(str(home))[1:-1] + b"/")
    if moved != seal:
        folder_of(anew).write(layout.SEAL, moved)
        layout.write_sums(anew, moved)
    make_folder(home)
    names = sorted(path.name for path in anew.iterdir())
    for name in (*(name for name in names if name not in LAST), *LAST):
        os.replace(anew / name, home / name)
    sync_folder(home)


BREACHES_MAX = 1000  # listed one by one; the others are counted


class AuditOrder(Struct, frozen=True):
    """The input of an audit or a rebuild."""

    spec: JobSpec
    data_dir: str
    segments: SegmentPlace
    before: Snapshot
    scratch: str | None = None  # of a small job: see JobFiles
    in_memory_rows: int = IN_MEMORY_ROWS

    @property
    def files(self) -> JobFiles:
        return JobFiles(Path(self.data_dir), self.spec.id, None if self.scratch is None else Path(self.scratch))


class BreachList:
    """Findings; at most `BREACHES_MAX` are kept as text."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._total = 0

    def add(self, text: str) -> None:
        self._total += 1
        if self._total <= BREACHES_MAX:
            self._lines.append(text)

    def all(self) -> list[str]:
        left = self._total - len(self._lines)
        return [*self._lines, f"and {left} more like these"] if left else list(self._lines)


def verify_offloaded(order: bytes, progress: Progress) -> bytes:
    """Offloaded: AuditOrder in, LedgerReport out, both as JSON."""
    return msgspec.json.encode(verify(msgspec.json.decode(order, type=AuditOrder), progress))


def verify(order: AuditOrder, progress: Progress) -> LedgerReport:
    """Report everything that does not hold."""
    audit = _Audit(order)
    try:
        audit.check_dataset()
        audit.check_plans()
        audit.check_shards()
        audit.check_segments()
        audit.check_commits(progress)
        audit.check_bitmaps()
        audit.check_counters()
        return audit.report()
    finally:
        audit.close()


class _Audit:
    def __init__(self, order: AuditOrder) -> None:
        self._spec, self._before, self._in_memory_rows = order.spec, order.before, order.in_memory_rows
        self._files = order.files
        self._segments = open_segments(order.segments)
        self._stored = order.segments.blocks.keys()
        self._found = BreachList()
        self._maps: dict[int, OutcomeMap] = {}
        self._shards = {(shard.generation, shard.shard): shard for shard in order.before.shards}
        self._rows_done = 0
        self._usage = Usage()
        self._misfits = CountedMisfits({})
        self._reused = 0  # rows

    def check_dataset(self) -> None:
        """The index of the dataset is what was written, and so are rows that were copied or converted."""
        if (self._files.plan(0) / PLAN).exists():
            for flaw in flaws(self._files.dataset):
                self._found.add(f"{self._files.dataset}: {flaw}")

    def check_plans(self) -> None:
        """Every generation has the plan that was written for it, of the dataset that the job has."""
        rows = self._before.counters.rows
        if rows == 0 and not (self._files.plan(0) / PLAN).exists():
            return  # it was never planned
        for generation in range(self._before.generation + 1):
            try:
                home = self._files.plan(generation)
                outcomes = OutcomeMap(home, generation, self._segments, in_memory_rows=self._in_memory_rows)
            except LedgerBroken as error:
                self._found.add(error.message)
                continue
            self._maps[generation] = outcomes
            if outcomes.plan.plan.rows != rows:
                self._found.add(
                    f"generation {generation}: a plan of {outcomes.plan.plan.rows} rows, the job has {rows}"
                )

    def check_shards(self) -> None:
        """Every shard is one of its plan, and its sums are those of its commits."""
        commits: dict[tuple[int, int], list[CommitRecord]] = defaultdict(list)
        for commit in self._before.commits:
            commits[commit.generation, commit.shard].append(commit)
        for key in commits.keys() - self._shards.keys():
            self._found.add(f"generation {key[0]}, shard {key[1]}: commits of a shard that was never leased")
        for key, shard in self._shards.items():
            for fault in self._shard_faults(shard, commits[key]):
                self._found.add(f"generation {key[0]}, shard {key[1]}: {fault}")

    def _shard_faults(self, shard: ShardRecord, commits: list[CommitRecord]) -> list[str]:
        faults = []
        outcomes = self._maps.get(shard.generation)
        if outcomes is not None:
            planned = outcomes.shards[shard.shard] if shard.shard < len(outcomes.shards) else None
            if planned is None or (planned.lo, planned.hi) != (shard.lo, shard.hi):
                faults.append(f"positions {shard.lo} to {shard.hi - 1} are not a shard of the plan")
        bits = shard.bits
        rows = sum(commit.rows_ok + commit.rows_failed for commit in commits)
        if not bits.bit_count() == shard.done == rows:
            faults.append(f"{bits.bit_count()} rows in the bitmap, {shard.done} counted, {rows} in commits")
        if bits.bit_length() > shard.hi - shard.lo:
            faults.append(f"the bitmap has bits beyond its {shard.hi - shard.lo} rows")
        if [commit.seq for commit in commits] != list(range(shard.seq)):
            faults.append(f"{len(commits)} commits do not count from 0 to {shard.seq - 1} without a gap")
        if any(commit.epoch > shard.epoch for commit in commits):
            faults.append(f"a commit of an epoch later than {shard.epoch}")
        return faults

    def check_segments(self) -> None:
        """Segments are this job's, and no byte of them is committed twice."""
        ends: dict[str, int] = {}
        for commit in sorted(self._before.commits, key=lambda commit: (commit.segment, commit.offset)):
            if commit.offset < ends.get(commit.segment, 0):
                self._found.add(f"{commit.segment}: bytes from {commit.offset} on are committed twice")
            ends[commit.segment] = max(ends.get(commit.segment, 0), commit.offset + commit.length)
        for name in ends.keys() - self._stored:  # those in the database are stored with their job, and have no head
            try:
                head = read_head(self._segments, name)
            except FileNotFoundError:
                continue  # that is said for each of its commits
            if head is None or head.job != self._spec.id:
                fault = "its head is damaged" if head is None else f"of the job {head.job}"
                self._found.add(f"{self._segments.where(name)}: {fault}")

    def check_commits(self, progress: Progress) -> None:
        """Every committed range holds sound blocks of its shard, with the rows that the commit counts."""
        total, done = sum(commit.length for commit in self._before.commits), 0
        for commit in self._before.commits:
            place = f"generation {commit.generation}, shard {commit.shard}, commit {commit.seq}"
            try:
                blocks = read_ref(self._segments, SegmentRef(commit.segment, commit.offset, commit.length))
            except LedgerBroken as error:
                self._found.add(f"{place}: {error.message}")
                continue
            for block in blocks:
                self._usage += self._misfits.usage_of(block)
                self._misfits.take(block)
                self._reused += block.meta.reused
                fault = self._block_fault(block, commit)
                if fault is not None:
                    self._found.add(f"{place}: {where(self._segments, block)}: {fault}")
            ok = sum(block.n for block in blocks if block.ok)
            rows = sum(block.n for block in blocks)
            if (ok, rows - ok) != (commit.rows_ok, commit.rows_failed):
                counted = f"{commit.rows_ok} rows ok and {commit.rows_failed} failed"
                self._found.add(f"{place}: counts {counted}, its blocks hold {ok} and {rows - ok}")
            done += commit.length
            progress(done / total)

    def _block_fault(self, block: Block, commit: CommitRecord) -> str | None:
        if block.epoch > commit.epoch:
            return f"a block of epoch {block.epoch} in a commit of epoch {commit.epoch}"
        outcomes = self._maps.get(commit.generation)
        if outcomes is None:
            return None  # the missing plan has been reported
        fault = outcomes.breach(block, commit.shard)
        if fault is None:
            outcomes.take(block)
        return fault

    def check_bitmaps(self) -> None:
        """The rows that the bitmaps count are the rows in committed blocks."""
        for (generation, number), record in self._shards.items():
            outcomes = self._maps.get(generation)
            if outcomes is None or number >= len(outcomes.shards):
                continue
            bits, found = record.bits, outcomes.bits(outcomes.shards[number])
            if bits != found:
                self._found.add(
                    f"generation {generation}, shard {number}: {(bits & ~found).bit_count()} rows in the bitmap are in "
                    f"no sound block, {(found & ~bits).bit_count()} in blocks are not in the bitmap"
                )

    def check_counters(self) -> None:
        """The sums of the job are those of its rows."""
        sums, state = self._before.counters, self._before.state
        if len(self._maps) != self._before.generation + 1:
            return  # without a plan the newest outcome of a row is unknown
        plan = self._maps[0].plan.plan
        with closing(RowStates(self._files.home, plan.rows, in_memory_rows=self._in_memory_rows)) as states:
            collect_newest(states, self._maps.values())
            ok, failed = states.count(OK), states.count(FAILED) + plan.rejected
            self._rows_done = plan.rows - states.count(OPEN)
        message = f"the job counts {sums.rows_ok} rows ok and {sums.rows_failed} failed"
        published = state in (JobState.COMPLETED, JobState.CANCELLED) and sums.rows_ok + sums.rows_failed == sums.rows
        if published:
            if sums.rows_ok < ok:
                self._found.add(f"{message}, but {ok} of those that ran are ok")
            if self._before.errors != sums.rows_failed:
                self._found.add(f"{message}, and causes of {self._before.errors} errors")
        elif state == JobState.COMPLETED:
            self._found.add(f"{message} of {sums.rows}, and is completed")
        elif (sums.rows_ok, sums.rows_failed) != (ok, failed):
            self._found.add(f"{message}, its blocks hold {ok} and {failed}")
        if (sums.rows_folded, sums.rows_rejected) != (plan.followers, plan.rejected):
            self._found.add(
                f"the job counts {sums.rows_folded} rows folded and {sums.rows_rejected} refused, the plan has "
                f"{plan.followers} and {plan.rejected}"
            )
        if sums.rows_reused != self._reused:
            self._found.add(f"the job counts {sums.rows_reused} rows as reused, its blocks {self._reused}")
        if sums.usage != self._usage:
            self._found.add(f"the job counts {_tokens(sums.usage)} tokens, its blocks {_tokens(self._usage)}")

    def report(self) -> LedgerReport:
        commits = self._before.commits
        return LedgerReport(
            job=self._spec.id,
            rows=self._before.counters.rows,
            rows_done=self._rows_done,
            commits=len(commits),
            segments=len({commit.segment for commit in commits}),
            bytes=sum(commit.length for commit in commits),
            broken=self._found.all(),
        )

    def close(self) -> None:
        self._segments.close()
        for outcomes in self._maps.values():
            outcomes.close()


def _tokens(usage: Usage) -> str:
    return f"{usage.input_tokens} input, {usage.cached_tokens} cached and {usage.output_tokens} output"
