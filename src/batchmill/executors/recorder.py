"""The worker's way from outcomes to commits: lines, blocks in the kernel, bytes on disk, then the word to the owner."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice

import msgspec
from msgspec import Struct, structs

from batchmill import faults
from batchmill.errors import JobPaused
from batchmill.executors.leases import Held, Unsent
from batchmill.models import redaction
from batchmill.ports.storage import SegmentSink
from batchmill.store.segments.format import BlockMeta, BlockRows, error_meta, frame, frame_columns, frame_lines
from batchmill.store.sql.positions import pack_parts
from batchmill.types import ColumnResultBlock, Commit, Outcome, ResultBlock, RowError, Usage
from batchmill.types.position_runs import runs_of

BLOCK_ROWS = 1024
BLOCK_BYTES = 1024 * 1024
MISFITS = 8 * 1024  # of one block
RUN_ROWS = 4 * BLOCK_ROWS  # of lines that an engine has joined, and that need no table
KERNEL_S = 0.05  # an outcome waits at most so long for its block to be written
COMMIT_ROWS = 65_536  # or until so many rows wait
COMMIT_BYTES = 8 * 1024 * 1024

NO_USAGE = Usage()
WRITE_ERRORS = (msgspec.MsgspecError, RecursionError, ValueError)  # what a hostile reply may raise in a form


def _by_lease(outcomes: list[Outcome]) -> Iterator[tuple[Held, list[Outcome]]]:
    """The outcomes of each lease; most often there is one."""
    if len({id(outcome.row.lease) for outcome in outcomes}) == 1:
        yield outcomes[0].row.lease, outcomes
        return
    for held, some in groupby(outcomes, lambda outcome: outcome.row.lease):
        yield held, list(some)


def _write_each(outcomes: list[Outcome]) -> tuple[list[Outcome], list[bytes], list[Outcome]]:
    """(outcomes, their lines, errors for those whose reply cannot be made a line) where one of them cannot."""
    written, lines, unwritable = [], [], []
    for outcome in outcomes:
        row = outcome.row
        try:
            lines.append(row.form.write(outcome))
            written.append(outcome)
        except WRITE_ERRORS as error:
            reason = RowError("bad_reply", f"the reply cannot be made a result: {error}")
            unwritable.append(Outcome(row, error=reason, status=0, usage=outcome.usage))
    return written, lines, unwritable


def _used(outcomes: list[Outcome], before: Usage) -> Usage:
    """The tokens of these outcomes and those counted before."""
    used = [outcome.usage for outcome in outcomes if outcome.usage is not None]
    return sum(used, before) if used else before


def _count_warnings(outcomes: list[Outcome], counts: dict[str, int]) -> None:
    for outcome in outcomes:
        for name in outcome.warnings:
            counts[name] = counts.get(name, 0) + 1


def _without_secrets(errors: list[RowError]) -> list[RowError]:
    """Some of them are shown with their job."""
    return [RowError(each.code, redaction.mask_known(each.message)) for each in errors] if redaction.known() else errors


def _masked(block: ResultBlock) -> ResultBlock:
    """The lines without known secrets."""
    if not redaction.known():
        return block
    lines = redaction.mask_lines([line + b"\n" for line in block.lines[:-1].split(b"\n")])
    return structs.replace(block, lines=b"".join(lines))


def _pieces(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first, end, bytes) of consecutive lines that become one block."""
    size = first = 0
    for at, length in enumerate(lengths):
        if at > first and (at - first == BLOCK_ROWS or size + length > BLOCK_BYTES):
            yield first, at, size
            first, size = at, 0
        size += length
    yield first, len(lengths), size


def empty_rows() -> BlockRows:
    return BlockRows([], [], [])


class _Round(Struct, frozen=True, eq=False):
    """Blocks of these leases are being brought to the disk."""

    leases: frozenset[int]
    done: asyncio.Future[None]


class Recorder:
    """Takes outcomes from the engine; one commit is on its way to the disk at a time, the next one fills meanwhile."""

    def __init__(
        self,
        *,
        commit: Callable[[Commit], None],
        settled: Callable[[Outcome], None],
        spent: Callable[[Held, list[Outcome]], None],
        broken: Callable[[OSError], None],
        refused: Callable[[Held, JobPaused], None],
        pace_s: Callable[[int], float] = lambda _: 0.0,
        until_owned: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Args:
        refused: the store did not take the blocks of a lease; they are in its segment.
        pace_s: the time between two commits while so many rows wait, unless COMMIT_BYTES have been written: an object
            costs money.
        until_owned: waits until objects may be put; None: none are put.
        """
        self._refused, self._pace_s, self._until_owned = refused, pace_s, until_owned
        self._commit, self._settled, self._spent, self._broken = commit, settled, spent, broken
        self._loop = asyncio.get_running_loop()
        self._buffered: dict[int, Held] = {}  # leases with lines that are in no block yet
        self._written: dict[int, Held] = {}  # leases with blocks that no commit names yet
        self._due_at: dict[int, float] = {}  # when the blocks of such a lease must be on disk at the latest
        self._written_rows = self._written_bytes = 0
        self._flush_timer: asyncio.TimerHandle | None = None
        self._due = asyncio.Event()
        self._due_timer: asyncio.TimerHandle | None = None
        self._syncing: list[_Round] = []  # leases whose blocks are on their way to the disk

    def put(self, outcomes: Iterable[Outcome]) -> None:
        """Sink for the engine. Concurrency: on the event loop's thread."""
        for held, done in _by_lease(list(outcomes)):
            failed = [outcome for outcome in done if outcome.error is not None]
            ok = [outcome for outcome in done if outcome.error is None] if failed else done
            try:
                lines = held.job.form.write_all(ok)
            except WRITE_ERRORS:
                ok, lines, unwritable = _write_each(ok)
                failed += unwritable
            self._take(held.ok, ok, redaction.mask_lines(lines))
            held.ok_usage = _used(ok, held.ok_usage)
            _count_warnings(ok, held.ok_warnings)
            if failed:
                self._take(held.failed, failed, redaction.mask_lines(held.job.form.write_all(failed)))
                held.failures += _without_secrets([outcome.error for outcome in failed])
                held.failed_usage = _used(failed, held.failed_usage)
            held.undone -= len(done)
            if held.job.allowance is not None:
                self._spent(held, done)
            full = len(held.ok.rows) >= BLOCK_ROWS or len(held.failed.rows) >= BLOCK_ROWS
            if full or held.undone == 0 or held.isolated:
                self._write(held)
            else:
                self._buffered[id(held)] = held
            if held.isolated:
                self._settled(done[-1])
        if self._buffered and self._flush_timer is None:
            self._flush_timer = self._loop.call_later(KERNEL_S, self._flush_on_time)

    def put_usage(self, held: Held, usage: Usage) -> None:
        """Count what an answer has cost that is no result, before its row is asked for again."""
        if not held.is_left:
            held.ok_usage += usage
            self._write(held)

    def put_misfits(self, held: Held, tag: str, misfits: Mapping[int, Usage]) -> None:
        """As `put_usage` for answers in the results of a remote job, and note which: both count, or neither."""
        self._write(held)
        if held.stale:
            return
        answers = iter([(at, u.input_tokens, u.cached_tokens, u.output_tokens) for at, u in misfits.items()])
        try:
            while some := list(islice(answers, MISFITS)):
                usage = sum((Usage(*tokens) for _, *tokens in some), NO_USAGE)
                self._append(held, empty_rows(), ok=True, meta=BlockMeta(usage, misfits={tag: some}))
        except OSError as error:
            held.stale = True
            self._broken(error)
            return
        self._schedule(held)

    def put_block(self, block: ResultBlock | ColumnResultBlock) -> None:
        """See `ports.engines.BlockSink`."""
        held: Held = block.lease
        held.undone -= len(block.numbers)
        self._buffered.pop(id(held), None)
        if held.stale:
            return
        try:
            if isinstance(block, ColumnResultBlock):
                self._append_columns(held, block)
            else:
                self._append_lines(held, _masked(block))
        except OSError as error:
            held.stale = True
            self._broken(error)
            return
        self._write(held)

    def _append_lines(self, held: Held, block: ResultBlock) -> None:
        lease, positions, numbers = held.lease, block.positions, block.numbers
        is_run = all(isinstance(each, range) and each.step == 1 for each in (positions, numbers))
        is_small = len(numbers) <= RUN_ROWS and len(block.lines) <= BLOCK_BYTES
        lengths = None if is_run and is_small else [len(text) + 1 for text in block.lines[:-1].split(b"\n")]
        view, at = memoryview(block.lines), 0
        for first, end, size in [(0, len(numbers), len(view))] if lengths is None else _pieces(lengths):
            meta = BlockMeta(block.usage if first == 0 else NO_USAGE)  # the first piece has the tokens of all
            data = frame_lines(
                view[at : at + size], None if lengths is None else lengths[first:end],
                positions[first:end], numbers[first:end],
                generation=lease.generation, shard=lease.shard, epoch=lease.epoch, ok=True, meta=meta,
            )  # fmt: skip
            self._append_data(held, data, positions[first:end], ok=True, meta=meta)
            at += size

    def _append_columns(self, held: Held, block: ColumnResultBlock) -> None:
        lease, meta = held.lease, BlockMeta(block.usage)
        data = frame_columns(
            block.columns, block.positions, block.numbers,
            generation=lease.generation, shard=lease.shard, epoch=lease.epoch, meta=meta,
        )  # fmt: skip
        self._append_data(held, data, block.positions, ok=True, meta=meta)

    @staticmethod
    def _take(part: BlockRows, outcomes: list[Outcome], lines: list[bytes]) -> None:
        rows = [outcome.row for outcome in outcomes]
        part.positions += [row.position for row in rows]
        part.rows += [row.number for row in rows]
        part.lines += lines

    def _flush_on_time(self) -> None:
        self._flush_timer = None
        self.flush()

    def flush(self) -> None:
        """Hand every buffered line to the kernel."""
        for held in list(self._buffered.values()):
            self._write(held)

    def flush_lease(self, held: Held) -> None:
        """Hand the buffered lines of one lease to the kernel."""
        if id(held) in self._buffered:
            self._write(held)

    def is_done_with(self, held: Held) -> bool:
        """Nothing of this lease is buffered, written or on its way to the disk."""
        key = id(held)
        return not (key in self._buffered or key in self._written or any(key in each.leases for each in self._syncing))

    async def settle(self, held: Held) -> None:
        """Return once everything put of this lease has been sent to the owner, or never will be."""
        self.flush_lease(held)
        while not held.stale and not self.is_done_with(held):
            under_way = [each.done for each in self._syncing if id(held) in each.leases]
            await (asyncio.wait(under_way) if under_way else self.sync())

    def _write(self, held: Held) -> None:
        self._buffered.pop(id(held), None)
        if held.stale:
            held.ok, held.failed, held.failures = empty_rows(), empty_rows(), []
            return
        try:
            if held.ok.rows or held.ok_usage != NO_USAGE:
                self._append(held, held.ok, ok=True, meta=BlockMeta(held.ok_usage, warnings=held.ok_warnings))
                held.ok, held.ok_usage, held.ok_warnings = empty_rows(), NO_USAGE, {}
            if held.failed.rows:
                self._append(held, held.failed, ok=False, meta=error_meta(held.failures, held.failed_usage))
                held.failed, held.failures, held.failed_usage = empty_rows(), [], NO_USAGE
        except OSError as error:
            held.stale = True
            self._broken(error)
            return
        self._schedule(held)

    def _append(self, held: Held, part: BlockRows, *, ok: bool, meta: BlockMeta) -> None:
        lease = held.lease
        data = frame(part, generation=lease.generation, shard=lease.shard, epoch=lease.epoch, ok=ok, meta=meta)
        self._append_data(held, data, part.positions, ok=ok, meta=meta)

    def _append_data(self, held: Held, data: bytes, positions: Sequence[int], *, ok: bool, meta: BlockMeta) -> None:
        faults.point("before_append")
        ref = held.job.segment.append(data)
        faults.point("after_append")
        n = len(positions)
        last = held.unsent[-1] if held.unsent else None
        if last is None or last.ref.segment != ref.segment or last.ref.offset + last.ref.length != ref.offset:
            last = Unsent(ref, [], 0, 0, NO_USAGE, {}, {}, {}, {})
            held.unsent.append(last)
        else:
            last.ref = type(ref)(ref.segment, last.ref.offset, last.ref.length + ref.length)
        last.positions.append(positions)
        last.rows_ok += n if ok else 0
        last.rows_failed += 0 if ok else n
        last.usage = last.usage + meta.usage
        for code, rows in meta.errors.items():
            last.errors[code] = last.errors.get(code, 0) + rows
        for name, replies in meta.warnings.items():
            last.warnings[name] = last.warnings.get(name, 0) + replies
        last.samples = {**meta.samples, **last.samples}
        for tag, misfits in meta.misfits.items():
            last.misfits[tag] = [*last.misfits.get(tag, ()), *runs_of(position for position, *_ in misfits)]
        self._written_rows += n
        self._written_bytes += len(data)

    def _schedule(self, held: Held) -> None:
        """Say when the blocks written so far must be on disk."""
        self._written[id(held)] = held
        due_at = self._due_at.setdefault(id(held), self._loop.time() + held.job.segment.commit_delay_s)
        if self._written_rows >= COMMIT_ROWS or self._written_bytes >= COMMIT_BYTES or held.undone == 0:
            self._due.set()
            return
        self._set_due_by(due_at)

    def _set_due_by(self, at: float) -> None:
        if self._due_timer is not None and self._due_timer.when() > at:
            self._due_timer.cancel()
            self._due_timer = None
        if self._due_timer is None:
            self._due_timer = self._loop.call_at(at, self._due.set)

    async def run(self) -> None:
        """Bring written blocks to the disk and to the owner, until cancelled."""
        synced_at = -math.inf
        while True:
            await self._due.wait()
            await self._wait_for_turn(synced_at)
            synced_at = self._loop.time()
            await self.sync(waits=self._written_bytes < COMMIT_BYTES)

    async def _wait_for_turn(self, synced_at: float) -> None:
        """Wait until the last time is long enough ago, or until COMMIT_BYTES have been written."""
        while self._written_bytes < COMMIT_BYTES and (left_s := synced_at + self._pause_s - self._loop.time()) > 0:
            self._due.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), left_s)

    @property
    def _pause_s(self) -> float:
        """The least time between two commits: what commits carry need not wait for the disk."""
        delays = [held.job.segment.commit_delay_s for held in self._written.values()]
        return min(self._pace_s(self._written_rows), max(delays, default=0.0))

    async def sync(self, *, waits: bool = False) -> None:
        """Bring everything written so far to the disk and to the owner. Args: waits: but not what may wait."""
        if self._until_owned is not None:
            await self._until_owned()
        self._due.clear()
        if self._due_timer is not None:
            self._due_timer.cancel()
            self._due_timer = None
        helds = self._take_written(waits=waits)
        unsent = [(held, part) for held in helds for part in held.unsent]
        unsent.sort(key=lambda pair: (pair[1].ref.segment, pair[1].ref.offset))
        for held in helds:
            held.unsent = []
        segments = {id(held.job.segment): held.job.segment for held, part in unsent if not _is_carried(held, part)}
        under_way = _Round(frozenset(map(id, helds)), self._loop.create_future())
        self._syncing.append(under_way)
        try:
            if segments:
                await asyncio.to_thread(_sync_all, list(segments.values()))
        except OSError as error:
            for held in helds:
                held.stale = True
            self._broken(error)
            return
        except JobPaused as error:
            for held in [held for held in helds if not held.stale]:
                held.stale = True
                self._refused(held, error)
            return
        finally:
            self._syncing.remove(under_way)
            under_way.done.set_result(None)
        for held, part in unsent:
            if not held.stale:
                self._commit(_commit_of(held, part))
                held.seq += 1
                faults.point("after_send")
            else:
                held.job.segment.acknowledge(part.ref)  # it will never count

    def _take_written(self, *, waits: bool) -> list[Held]:
        """The leases with blocks that no commit names yet.

        Args: waits: without those whose next rows are about to end, and travel in the same commit if it carries them.
        """
        now = self._loop.time()
        left = {
            key: held for key, held in self._written.items() if waits and now < self._due_at[key] and _may_wait(held)
        }
        taken = [held for key, held in self._written.items() if key not in left]
        parts = [part for held in left.values() for part in held.unsent]
        self._written, self._due_at = left, {key: self._due_at[key] for key in left}
        self._written_rows = sum(part.rows_ok + part.rows_failed for part in parts)
        self._written_bytes = sum(part.ref.length for part in parts)
        if left:
            self._set_due_by(min(self._due_at.values()))
        return taken


def _may_wait(held: Held) -> bool:
    """Whether rows of a lease are left, and nothing of it waits for a disk."""
    return held.undone > 0 and not held.stale and all(_is_carried(held, part) for part in held.unsent)


def _sync_all(segments: list[SegmentSink]) -> None:
    for segment in segments:
        segment.sync()
    faults.point("after_sync")


def _is_carried(held: Held, part: Unsent) -> bool:
    return bool(held.job.segment.carried(part.ref))


def _commit_of(held: Held, part: Unsent) -> Commit:
    return Commit(
        lease=held.lease,
        seq=held.seq,
        ref=part.ref,
        done=pack_parts(part.positions, held.base),
        rows_ok=part.rows_ok,
        rows_failed=part.rows_failed,
        usage=part.usage,
        errors=part.errors,
        samples=part.samples,
        warnings=part.warnings,
        blocks=held.job.segment.carried(part.ref),
        misfits=part.misfits,
    )
