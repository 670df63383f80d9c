"""`ledger rebuild`: computes a job's ledger from its plans, its segments, and the old ledger.

Runs in a child of the owner and writes nothing but the plan of a generation that is needed. The owner puts the result
in the place of what was there in one transaction: killed before it, nothing has changed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing

import msgspec
from msgspec import Struct

from batchmill.errors import LedgerBroken
from batchmill.jobs.intake import fetching
from batchmill.jobs.intake.preparation import seal_order
from batchmill.jobs.ledger import audit
from batchmill.jobs.ledger.audit import AuditOrder, BreachList
from batchmill.jobs.ledger.misfits import CountedMisfits
from batchmill.jobs.ledger.outcome_map import FAILED, OK, OPEN, OutcomeMap, collect_newest, rows_in
from batchmill.jobs.ledger.plan import PLAN, PlanReader, Progress, iter_rejected, plan_again, shard_rows
from batchmill.jobs.ledger.row_states import STEP_ROWS, RowStates
from batchmill.jobs.ledger.snapshot import CommitRecord, Counters, Rebuilt, ShardRecord
from batchmill.part_files import make_folder
from batchmill.store.segments.blocks import open_segments
from batchmill.store.segments.format import (
    Block,
    Damage,
    gaps_of,
    merged,
    read_block,
    read_head,
    read_payload,
    salvage,
    where,
)
from batchmill.types import Shard, Usage

Key = tuple[int, int]  # generation, shard
MARKED = 1


class _Orphan(Struct, frozen=True, order=True, gc=False):
    """The location of a valid block that no commit names. Sorted with the newest epoch of a shard first.

    Where two blocks hold the same row the newer one is right: the rows of an older lease that counted are left out of
    a newer one.
    """

    generation: int
    shard: int
    epoch_back: int  # the epoch, negated
    segment: str
    offset: int


def rebuild_offloaded(order: bytes, progress: Progress) -> bytes:
    """Offloaded: AuditOrder in, Rebuilt out, both as JSON."""
    return msgspec.json.encode(rebuild(msgspec.json.decode(order, type=AuditOrder), progress))


def rebuild(order: AuditOrder, progress: Progress) -> Rebuilt:
    """Keep every valid block: first those that were committed, then those that no commit names.

    Raises: LedgerBroken for a damaged plan, which no longer says which row an outcome belongs to.
    """
    work = _Rebuild(order)
    try:
        if not (work.files.plan(0) / PLAN).exists():
            return work.unplanned()
        work.rebuild_dataset()
        work.keep_committed(lambda share: progress(share * 0.7))
        work.keep_orphans()
        return work.result()
    finally:
        work.close()


class _Rebuild:
    def __init__(self, order: AuditOrder) -> None:
        self.files = order.files
        self._spec, self._before, self._in_memory_rows = order.spec, order.before, order.in_memory_rows
        self._open = ExitStack()
        self._segments = self._open.enter_context(closing(open_segments(order.segments)))
        self._maps: dict[int, OutcomeMap] = {}
        self._commits: dict[Key, list[CommitRecord]] = defaultdict(list)
        self._epochs: dict[Key, int] = defaultdict(int)  # the highest that a lease or a block of the shard had
        self._usage = Usage()
        self._warnings: Counter[str] = Counter()
        self._misfits = CountedMisfits({})
        self._reused = 0  # rows
        self._failed: list[_Orphan] = []  # the blocks of errors that count
        self._damaged = BreachList()
        for shard in order.before.shards:
            self._epochs[shard.generation, shard.shard] = shard.epoch

    def unplanned(self) -> Rebuilt:
        """Rebuild a job that was stopped before its plan was written: none of its rows ran."""
        if self._before.commits or self._segments.names():
            raise LedgerBroken(f"the plan in {self.files.plan(0)} is gone: restore it", code="plan_broken")
        return Rebuilt(0, Counters(), [], [], {})

    def close(self) -> None:
        self._open.close()

    def rebuild_dataset(self) -> None:
        """Rebuild the index of a damaged dataset. Raises: InputChanged if its input is missing."""
        order = seal_order(self._spec)
        order = msgspec.structs.replace(order, dataset=fetching.kept(order.dataset, self.files.dataset))
        for wrong in audit.rebuild_dataset(order, self.files, lambda _: None):
            self._damaged.add(f"{self.files.dataset}: {wrong}; it was rebuilt from the input")

    # -- what there is ------------------------------------------------------------------------------------------------

    def keep_committed(self, progress: Progress) -> None:
        """Keep every valid committed block; a commit that is complete keeps its range and its cost."""
        total, done = sum(commit.length for commit in self._before.commits), 0
        for commit in self._before.commits:
            kept: list[tuple[Block, Usage]] = []
            for block in self._read_commit(commit):
                usage = self._misfits.usage_of(block)
                if self._take(block, "counted"):
                    kept.append((block, usage))
            if sum(block.length for block, _ in kept) == commit.length:
                ok = sum(block.n for block, _ in kept if block.ok)
                failed = sum(block.n for block, _ in kept if not block.ok)
                whole = msgspec.structs.replace(commit, rows_ok=ok, rows_failed=failed)
                self._count(whole, commit.generation, commit.shard)
            else:
                for block, usage in kept:
                    self._count_block(block, usage)
            done += commit.length
            progress(done / total)

    def _read_commit(self, commit: CommitRecord) -> Iterator[Block]:
        place, end = self._segments.where(commit.segment), commit.offset + commit.length
        rows, reached = commit.rows_ok + commit.rows_failed, commit.offset
        try:
            for found in salvage(self._segments, commit.segment, commit.offset, end):
                reached = found.offset + found.length
                if isinstance(found, Damage):
                    self._damaged.add(str(found))
                else:
                    yield found
        except FileNotFoundError:
            self._damaged.add(f"{place} is gone: {rows} rows of generation {commit.generation}, shard {commit.shard}")
            return
        if reached < end:
            self._damaged.add(f"{place} ends at byte {reached}; {end - reached} bytes behind it were committed")

    def keep_orphans(self) -> None:
        """Keep every valid uncommitted block whose rows have no outcome, the newest of a shard first."""
        spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for commit in self._before.commits:
            spans[commit.segment].append((commit.offset, commit.offset + commit.length))
        orphans = []
        for name in self._segments.names():
            head = read_head(self._segments, name)
            if head is not None and head.job != self._spec.id:
                self._damaged.add(f"{self._segments.where(name)} is a segment of the job {head.job}")
                continue
            for start, end in gaps_of(self._segments, name, merged(spans[name])):
                orphans += self._scan(name, start, end)
        used = set()
        for orphan in sorted(orphans):
            block = read_block(self._segments, orphan.segment, orphan.offset)
            usage = self._misfits.usage_of(block)
            if not self._misfits.has(block) and self._take(block):
                self._count_block(block, usage)
                used.add(orphan.segment)
        for name in used:
            self._segments.sync(name)

    def _scan(self, name: str, start: int, end: int | None) -> Iterator[_Orphan]:
        for found in salvage(self._segments, name, start, end):
            if isinstance(found, Block):
                yield _orphan(found)
            elif found.rows is not None or not found.is_tail:  # a tail that is torn was being written: no damage
                self._damaged.add(str(found))

    def _take(self, block: Block, named: str = "") -> bool:
        """Count the rows of a block if the block is valid for them; `named`: record it as a problem if not."""
        key = block.generation, block.shard
        outcomes = self._map(block.generation)
        if block.shard < len(outcomes.shards):
            self._epochs[key] = max(self._epochs[key], block.epoch)
        fault = outcomes.breach(block, block.shard)
        if fault is not None:
            if named:
                self._damaged.add(f"{where(self._segments, block)} was {named}, but holds {fault}")
            return False
        outcomes.take(block)
        self._usage += self._misfits.usage_of(block)
        self._misfits.take(block)
        self._warnings.update(block.meta.warnings)
        self._reused += block.meta.reused
        if not block.ok:
            self._failed.append(_orphan(block))
        return True

    def _map(self, generation: int) -> OutcomeMap:
        if generation not in self._maps:
            home = self.files.plan(generation)
            outcomes = OutcomeMap(home, generation, self._segments, in_memory_rows=self._in_memory_rows)
            self._maps[generation] = self._open.enter_context(closing(outcomes))
        return self._maps[generation]

    def _count_block(self, block: Block, usage: Usage) -> None:
        shard = self._map(block.generation).shards[block.shard]
        price = self._spec.models[shard.model].price
        record = CommitRecord(
            generation=block.generation, shard=block.shard, seq=0, epoch=0, segment=block.segment,
            offset=block.offset, length=block.length, rows_ok=block.n if block.ok else 0,
            rows_failed=0 if block.ok else block.n, cost=None if price is None else price.cost(usage),
        )  # fmt: skip
        self._count(record, block.generation, block.shard)

    def _count(self, record: CommitRecord, generation: int, shard: int) -> None:
        commits = self._commits[generation, shard]
        commits.append(msgspec.structs.replace(record, seq=len(commits)))

    # -- what follows from it -----------------------------------------------------------------------------------------

    def result(self) -> Rebuilt:
        generation = max(self._before.generation, *self._maps, 0)
        maps = [self._map(number) for number in range(generation + 1)]
        plan = maps[0].plan.plan
        states = self._row_states(plan.rows)
        collect_newest(states, maps)
        shards = list(self._shard_records())
        epochs = {(shard.generation, shard.shard): shard.epoch for shard in shards}
        commits = [
            msgspec.structs.replace(commit, epoch=epochs[key])
            for key in sorted(self._commits)
            for commit in self._commits[key]
        ]
        costs = [commit.cost for commit in commits if commit.cost is not None]
        adopted, reopened = self._compare(states)
        return Rebuilt(
            generation=self._reach_open_rows(maps, states),
            counters=Counters(
                rows=plan.rows, rows_ok=states.count(OK), rows_failed=states.count(FAILED) + plan.rejected,
                rows_folded=plan.followers, rows_reused=self._reused, rows_rejected=plan.rejected, usage=self._usage,
                warnings=dict(self._warnings),
                cost=sum(costs) if costs else None,
            ),
            shards=shards, commits=commits, errors=self._errors(states, plan.rejected), adopted=adopted,
            reopened=reopened, damaged=self._damaged.all(),
            misfits=[(*place, runs) for place, runs in self._misfits.all.items()],
        )  # fmt: skip

    def _shard_records(self) -> Iterator[ShardRecord]:
        """Shard records with a new epoch, so that earlier lease holders cannot commit."""
        for generation, number in sorted(self._epochs):
            outcomes = self._map(generation)
            if number >= len(outcomes.shards):
                self._damaged.add(
                    f"generation {generation}, shard {number}: the plan has {len(outcomes.shards)} shards"
                )
                continue
            shard, bits = self._shard(generation, number)
            yield ShardRecord(
                generation=generation, shard=number, lo=shard.lo, hi=shard.hi,
                epoch=self._epochs[generation, number] + 1, seq=len(self._commits[generation, number]),
                done=bits.bit_count(), bitmap=ShardRecord.packed(bits, shard),
            )  # fmt: skip

    def _shard(self, generation: int, number: int) -> tuple[Shard, int]:
        shard = self._map(generation).shards[number]
        return shard, self._map(generation).bits(shard)

    def _row_states(self, rows: int) -> RowStates:
        states = RowStates(self.files.home, rows, in_memory_rows=self._in_memory_rows)
        return self._open.enter_context(closing(states))

    def _compare(self, states: RowStates) -> tuple[int, int]:
        """(rows whose outcome the ledger did not have, rows without an outcome that it counted), each row once."""
        known = {(shard.generation, shard.shard): shard for shard in self._before.shards}
        found, lost = self._row_states(len(states)), self._row_states(len(states))
        for generation, number in self._epochs:
            if number >= len(self._map(generation).shards):
                continue
            shard, bits = self._shard(generation, number)
            record = known.get((generation, number))
            before = 0 if record is None else record.bits & (1 << shard.hi - shard.lo) - 1
            for changed, marks in ((bits & ~before, found), (before & ~bits, lost)):
                if changed:
                    rows = self._map(generation).rows_at(shard, changed)
                    marks.put(rows, bytes((MARKED,)) * len(rows))
        return found.count(MARKED), _count_open(lost, states)

    def _reach_open_rows(self, maps: list[OutcomeMap], states: RowStates) -> int:
        """The generation to continue: a new one if the newest does not plan every row without an outcome."""
        newest_plan, first = maps[-1].plan, maps[0].plan
        if newest_plan is first or _open_rows(newest_plan, states) == _open_rows(first, states):
            return len(maps) - 1
        home = self.files.plan(len(maps))
        make_folder(home)
        rows = _open_rows(first, states)
        sizes = [shard_rows(model, rows) for model in self._spec.models]
        plan_again(first, lambda numbers: rows_in(states, numbers, OPEN), sizes, home)
        return len(maps)

    def _errors(self, states: RowStates, rejected: int) -> dict[str, tuple[int, str]]:
        """Error code -> (rows, one message) of the rows whose newest outcome is an error, refused ones included."""
        rows: Counter[str] = Counter()
        samples: dict[str, str] = {}
        has_error = self._row_states(len(states))
        for place in sorted(self._failed, key=lambda place: -place.generation):
            block = read_block(self._segments, place.segment, place.offset)
            outcomes = zip(states.of(block.rows()), has_error.of(block.rows()), strict=True)
            current = [state == FAILED and not is_marked for state, is_marked in outcomes]
            has_error.put(block.rows(), bytes((MARKED,)) * block.n)
            for code, count, sample in self._causes(block, current):
                rows[code] += count
                samples.setdefault(code, sample)
        for refused in iter_rejected(self.files.dataset) if rejected else ():
            rows[refused.code] += 1
            samples.setdefault(refused.code, refused.message)
        return {code: (count, samples[code]) for code, count in rows.items()}

    def _causes(self, block: Block, current: list[bool]) -> Iterator[tuple[str, int, str]]:
        if all(current):
            for code, count in block.meta.errors.items():
                yield code, count, block.meta.samples.get(code, "")
        elif any(current):
            for line, counts in zip(read_payload(self._segments, block).split(b"\n")[:-1], current, strict=True):
                if counts:
                    error = self._spec.form.cause(line)
                    yield error.code, 1, error.message


def _orphan(block: Block) -> _Orphan:
    return _Orphan(block.generation, block.shard, -block.epoch, block.segment, block.offset)


def _open_rows(plan: PlanReader, states: RowStates) -> int:
    """The number of rows of a plan without an outcome."""
    steps = range(0, plan.leaders, STEP_ROWS)
    return sum(states.of(plan.row_numbers(lo, min(lo + STEP_ROWS, plan.leaders))).count(OPEN) for lo in steps)


def _count_open(marked: RowStates, states: RowStates) -> int:
    """The number of marked rows without an outcome."""
    rows = 0
    for lo in range(0, len(states), STEP_ROWS):
        hi = min(lo + STEP_ROWS, len(states))
        if any(marks := marked.read(lo, hi)):
            rows += sum(1 for mark, state in zip(marks, states.read(lo, hi), strict=True) if mark and state == OPEN)
    return rows
