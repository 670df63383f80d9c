"""RecordedJob: the record of a job that a runner works on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchmill import faults
from batchmill.datasets import layout
from batchmill.datasets.folders import Folder
from batchmill.errors import StorageFailed, StorageFull, TermOver
from batchmill.jobs.finishing import Finish, ended_fields, write_held
from batchmill.jobs.intake import PREPARE
from batchmill.jobs.intake.node_sealing import NodeSealing
from batchmill.jobs.intake.orders import has_run
from batchmill.jobs.intake.preparation import (
    CopyOrder,
    Prepared,
    PrepareOrder,
    needs_keys,
    prepare,
    reuses,
    stays_in_memory,
)
from batchmill.jobs.intake.preview import seal_and_plan, seal_and_plan_at_once
from batchmill.jobs.ledger import ledger, outcome_map, packed
from batchmill.jobs.ledger.core_task import FAILURES_MAX
from batchmill.jobs.ledger.ledger import first_lease
from batchmill.jobs.ledger.packed import NewFolders
from batchmill.jobs.ledger.plan import PlanReader, can_import_at_once, ordering
from batchmill.jobs.ledger.records import NewJob, columns_of
from batchmill.jobs.ledger.sampled_rows import MaskOrder, bitmaps, masks_in
from batchmill.jobs.ledger.storage import JobStorage
from batchmill.jobs.pools.job_run import JobRun
from batchmill.jobs.results.counted_commits import CountedCommits, Results
from batchmill.jobs.results.parts.part_writers import Nodes
from batchmill.jobs.results.publishing import Publishing
from batchmill.jobs.results.results import Manifest
from batchmill.jobs.runner_tools import RunnerTools
from batchmill.owned_files import OwnedFiles
from batchmill.owner_term import Term
from batchmill.part_files import HeldFile, make_folder
from batchmill.run_next import run_next
from batchmill.states import NEXT, JobState, PauseReason
from batchmill.store.media_copies import prefix_of
from batchmill.store.sql.transactions import Record
from batchmill.types import Commit, Once, RemoteJob, SegmentPlace, Shard, Submitted
from batchmill.wire.input_urls import is_fetched
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import TableForm


class NotStored(Exception):
    """A new job is not stored: its order is another job already, or is refused. Who submitted it knows why."""


class Entry(Struct, frozen=True, eq=False):
    """What a new job is stored with, and who waits for that."""

    once: Once | None
    quota: int | None  # as of `records.enter`
    known: asyncio.Future[str | None]  # None: the job is stored; else the id of the job that the order is already
    answer: asyncio.Future[Submitted]  # for who submitted it, who need not wait for what follows from `known`

    def resolve(self, job_id: str, known: str | None) -> None:
        """Say what became of the job. Who waits may have been cancelled, as the owner ends or a client leaves."""
        if not self.known.done():
            self.known.set_result(known)
        if not self.answer.done():
            run_next(self.answer.get_loop(), lambda: self.answer.set_result(answer_of(job_id, known)))


def answer_of(job_id: str, known: str | None) -> Submitted:
    """What is said of an order for this job. Args: known: as of `Entry`."""
    return Submitted(job_id, "started") if known is None else Submitted(known, "repeated")


class RecordedJob:
    """A job, its files and its stored state."""

    def __init__(
        self, spec: JobSpec, tools: RunnerTools, state: JobState | None = None, entry: Entry | None = None
    ) -> None:
        """Args: state: as it is stored; None: it is read. entry: of a job that is not stored yet."""
        self.spec, self.files = spec, tools.scratch.files(spec)
        self._tools, self._clock = tools, tools.clock
        self._stored = JobStorage(tools.stored, self.files)
        self._commit_log, self._ledger = tools.commit_log, tools.commit_log.ledger
        self._term = self._ledger.database.term
        self._owned = OwnedFiles(self._term)  # of what lies in its folder, where a successor goes on
        self._offload = partial(tools.offload, project=spec.project, stores=spec.uses_stores)
        self._counted: CountedCommits | None = None  # of a small job that runs for the first time
        self._unspent_s = 0.0  # running time of a small job that is not stored yet
        self._state = state  # as it was read or written last
        self._entry = entry
        self._run: JobRun | None = None  # the pass over its rows, from QUEUED on
        self._in_use = AsyncExitStack()  # holds its files while it has some: see `_unpack`
        self._is_unpacked = False
        self._prepared_in: NewFolders | None = None  # of a small job that was prepared in memory

    @property
    def _is_fetched(self) -> bool:
        """Whether inputs are downloaded before they are read."""
        return any(map(is_fetched, self.spec.dataset.paths))

    async def _record(self) -> Record:
        return await self._commit_log.call_reader(self._ledger.job, self.spec.id)

    async def _bring(self, record: Record) -> None:
        """Bring what running its rows takes. Raises: JobPaused."""
        await self._bring_class()
        await self._stored.bring(self.spec, record)

    async def _bring_class(self) -> None:
        """Bring the class that validates answers. Raises: JobPaused."""
        if self.spec.form.schema is not None:
            await self._tools.schema_code.bring(self.spec.form.schema)

    async def _remotes(self, generation: int) -> list[RemoteJob]:
        """The provider batches that hold rows of this job."""
        return await self._ledger.database.read(ledger.remote_jobs, self.spec.id, generation)

    async def _move(self, state: JobState, **fields: object) -> None:
        """Store the next state, and running time that is not stored yet, and enter it.

        Raises: InvalidTransition; NotStored of a new job.
        """
        if self._entry is not None:
            await self._enter(state, **fields)
            return
        move = partial(self._ledger.move, spent_s=self._unspent_s)
        write = self._commit_log.write if self._counted is None else self._commit_log.write_short
        try:
            await write(move, self.spec.id, state, **fields)
        except StorageFull:
            if state not in (JobState.PAUSED, JobState.FAILED):
                raise
            self._tools.disk_reserve.release()  # so that at least the reason can be stored
            await self._commit_log.write(move, self.spec.id, state, **fields)
        self._state, self._unspent_s = state, 0.0

    async def _enter(self, state: JobState = JobState.VALIDATING, **fields: Any) -> None:
        """Store a new job, in the state that it has reached. Nothing happens if it is stored. Raises: NotStored."""
        if self._entry is None:
            return
        entry, self._entry = self._entry, None
        job = NewJob(self.spec, entry.once, entry.quota, self._clock.now())
        write = self._commit_log.write_short if "packed" in fields else self._commit_log.write  # else it is not short
        try:
            known = await write(partial(self._ledger.enter, job, state, **fields))
        except asyncio.CancelledError:
            entry.known.cancel()
            raise
        except BaseException as error:
            if not entry.known.done():
                entry.known.set_exception(error)
            raise NotStored from error
        faults.point("after_create")
        entry.resolve(self.spec.id, known)
        if known is not None:
            raise NotStored
        self._state = state

    @asynccontextmanager
    async def _entered_at_last(self) -> AsyncIterator[None]:
        """Store a new job before what fails until then: it fails, or pauses, like any other."""
        try:
            yield
        except NotStored:
            raise
        except BaseException:
            await self._enter()
            raise

    @asynccontextmanager
    async def _using_files(self) -> AsyncIterator[None]:
        """Let go of the files that `_unpack` brings meanwhile."""
        async with AsyncExitStack() as self._in_use:
            try:
                yield
            finally:
                self._is_unpacked, self._prepared_in = False, None

    async def _unpack(self, *, is_new: bool = False) -> None:
        """Have the files of a small job, which most of them never need. `is_new`: none are stored."""
        if not self._is_unpacked:
            await self._in_use.enter_async_context(self._tools.scratch.use(self.spec, is_new=is_new))
            self._is_unpacked = True

    async def _enter_unless_short(self) -> None:
        """Store a new job before its rows are sealed. A short one is sealed and planned first, and stored with that.

        To make requests of the rows of a table takes as long as its prompt says. Raises: NotStored.
        """
        if self._entry is None:
            return
        form = self.spec.form
        is_plain = form.schema is None and not (isinstance(form, TableForm) and form.makes_requests)
        is_short = is_plain and stays_in_memory(self.spec)
        is_short = is_short and packed.is_short(self.spec.dataset, len(self.spec.models))
        if self._tools.stored.is_elsewhere or not is_short:
            await self._enter()

    async def _end(
        self, state: JobState, manifest: Manifest | None = None, held: Sequence[HeldFile] = (), **fields: object
    ) -> None:  # fmt: skip
        """Store the end of the job, with its results if there is a manifest. Args: held: those that are not written."""
        if held:
            log = self._tools.stored.log
            assert log is not None, "results are held for it"
            fields["within"] = partial(write_held, log, held)
        if manifest is not None:
            fields = ended_fields(manifest) | fields
        await self._move(state, reason=None, finished=self._clock.now(), **fields)

    async def _pause(self, reason: PauseReason, message: str) -> None:
        """Store PAUSED. A stored early end stays, and the next owner completes it."""
        record, fields = await self._record(), {}
        stays = reason is PauseReason.INTERRUPTED
        if reason is PauseReason.INTERNAL_ERROR:
            count = record["internal_errors"] + 1
            fields["internal_errors"], stays = count, count < FAILURES_MAX
            if not stays:
                message += f"; such failures while it ran: {count}, so no server resumes it by itself"
        if not (stays and record["state"] == JobState.CANCELLING):
            await self._move(JobState.PAUSED, reason=reason, message=message, **fields)
        elif fields:
            await self._commit_log.write(self._ledger.note, self.spec.id, **fields)

    async def _fail(self, reason: str, message: str, **fields: Any) -> None:
        """Store FAILED: no row of the job ran, and none will."""
        await self._move(JobState.FAILED, reason=reason, message=message, finished=self._clock.now(), **fields)

    async def _may_fail(self, *, unrun: bool) -> bool:
        """Whether the state allows FAILED; `unrun`: and no model produced an outcome."""
        record = await self._record()
        is_begun = record["generation"] > 0 or has_run(record)
        return JobState.FAILED in NEXT[JobState(record["state"])] and not (unrun and is_begun)

    async def _in_thread(
        self, target: str, order: bytes, progress: Callable[[float], None], *, project: str = "", stores: bool = False
    ) -> bytes:
        """An `Offload` for the dataset of a small job, which a thread reads faster than a child gets it."""
        assert target == PREPARE and not stores, "objects are no small jobs"
        return await self._tools.scratch.run(partial(prepare, order, progress), self.spec.project)

    async def _call(self, work: Callable[[], Prepared]) -> Prepared:
        """Call bounded work on a small job in a thread. That on a short one, which is not stored yet, is done here: a
        thread would wait for the interpreter longer.
        """
        if self._entry is None:
            return await self._tools.scratch.run(work, self.spec.project)
        if not can_import_at_once(keys=needs_keys(self.spec)):
            await asyncio.to_thread(ordering, keys=True)
        return work()

    @property
    def _folders(self) -> dict[str, Folder]:
        """The dataset and the plans of a small job."""
        return packed.folders_of(self.files) if self._prepared_in is None else self._prepared_in.by_name()

    async def _make_large(self) -> None:
        """Give the job files in the data directory: it does not fit into the database."""
        await self._enter()
        self.spec, self._prepared_in = replace(self.spec, is_small=False), None
        self.files = self._tools.scratch.files(self.spec)
        self._stored.move(self.files)
        await self._write_spec(self.spec)

    async def _write_spec(self, spec: JobSpec) -> None:
        """Raises: JobPaused where another process may be the owner: the files are its own."""
        await asyncio.to_thread(self.files.write_spec, spec, self._owned)

    async def _store_spec(self) -> None:
        """Store a spec that has changed. Raises: JobPaused, as above."""
        await self._write_spec(self.spec)
        await self._commit_log.write(self._ledger.note, self.spec.id, **columns_of(self.spec))

    async def _clear_unsealed(self) -> None:
        """Remove an unsealed dataset, unless another process may be sealing it by now."""
        with suppress(TermOver):
            await asyncio.to_thread(self.files.clear_unsealed, self._owned)

    async def _segments(self) -> SegmentPlace:
        place = self.files.segment_place
        return replace(place, blocks=await self._commit_log.call_reader(self._ledger.blocks, self.spec.id))

    async def _results(self) -> Results:
        """From memory, or from the ledger."""
        if self._counted is not None and self._run is not None and self._counted.has_all(self._run.plan.leaders):
            return self._counted.results()
        return await self._commit_log.call_reader(self._ledger.results, self.spec.id)

    async def _prepare_publishing(self) -> None:
        """Have what results are written from, and the right to write them. Raises: JobPaused, OSError."""
        await self._stored.bring_segments()
        if (log := self._tools.stored.log) is not None and self.files.plan(1).exists():
            await log.sync()  # second names of results before a retry, which it would make again of the new ones
        self._term.check()

    def _is_planned(self, record: Record) -> bool:
        """Whether the rows have been planned."""
        return bool(record["rows"]) and (self.spec.is_small or (self.files.plan(0) / "plan.json").exists())

    def _reserve(self) -> None:
        """Start the workers while the rows are read, but none for an order that may be refused."""
        models = self.spec.models
        if self._entry is None and len(models) == 1 and not models[0].needs_route and not reuses(self.spec):
            self._tools.dispatcher.reserve(self.spec.id, models, self.spec.code)

    def _first_run(self) -> tuple[JobRun, dict[str, Shard]]:
        """The first run of a small job, whose commits are kept for its results. With it the `shard` that the
        transaction leases that stores a new job, if it has one only.
        """
        new, leased = self._prepared_in, {}
        if new is None:
            run = self._new_run(PlanReader(self.files.plan(0)), 0)
        else:
            index = {name: new.dataset.files[name] for name in layout.INDEX}
            run = self._new_run(PlanReader(new.plan), 0, index=index)
        if self._entry is not None and len(run.plan.shards()) == 1:
            leased["shard"] = run.plan.shards()[0]
            run.first_lease = first_lease(self.spec.id, leased["shard"])
        self._counted = CountedCommits()
        run.counted_hooks.append(self._counted.add)
        run.finishing = self._finish_with
        return run, leased

    def _finish_with(self, commit: Commit) -> Finish | None:
        """The end of a short job whose last rows this commit has; None: its runner ends it."""
        log, run, publishing, now = self._tools.stored.log, self._run, self._publishing, self._clock.now()
        if log is None or run is None or publishing is None or self._counted is None:
            return None
        manifest = self._hold(run, publishing, self._counted.results_with(commit, run.plan.leaders))
        if manifest is None:
            return None
        fields = ended_fields(manifest) | {"finalizing": now, "finished": now, "reason": None}
        fields["spent_s"] = run.elapsed_s
        return Finish(self.spec.id, log, publishing.held, fields, self._tools.end_listeners)

    def _hold_counted(self) -> Manifest | None:
        """Hold the results of a short job whose last commits were counted together; None: they are read and published.

        `_finish_with` does not know of a commit that is being counted.
        """
        run, publishing, counted = self._run, self._publishing, self._counted
        if run is None or publishing is None or counted is None or not counted.has_all(run.plan.leaders):
            return None
        return self._hold(run, publishing, counted.results())

    def _hold(self, run: JobRun, publishing: Publishing, found: Results | None) -> Manifest | None:
        if found is None or run.is_sample or self._tools.stored.log is None:
            return None
        return publishing.hold(self.files.segment_place, *found, run.plan.plan)

    def _enter_ended(self) -> None:
        """The job was stored as ended with its last commit."""
        self._state, self._unspent_s = JobState.COMPLETED, 0.0

    def _new_run(self, plan: PlanReader, generation: int, **more: Any) -> JobRun:
        return JobRun(self.spec, generation, plan, files=self.files, clock=self._clock, **more)

    async def _load(self, run: JobRun, done: dict[int, int]) -> None:
        """Make the open rows of a run ready: those of the sample, if there is one and others are left besides.

        Args: done: shard -> rows done.
        """
        sample, rows_done = self.spec.sample, sum(done.values())
        if sample is None or sample.rows >= run.plan.plan.rows:
            run.load(done)
            return
        await self._unpack()
        order = MaskOrder(str(run.plan.home), str(self.files.plan(0)), sample)
        masks = await masks_in(order, run.plan.plan.rows, self._offload)
        job_id, shards = self.spec.id, [number for number in masks if number in done]
        known = await self._commit_log.call_reader(bitmaps, self._ledger, job_id, run.generation, shards)
        wanted = {number: bits & ~known.get(number, 0) for number, bits in masks.items()}
        if rows_done + sum(bits.bit_count() for bits in wanted.values()) < run.plan.leaders:
            run.load_sample(wanted, rows_done)
        else:
            run.load(done)

    async def _adopt(self, plan: PlanReader, generation: int) -> float:
        """Commit outcomes that are in a segment but in no commit. Returns their cost in USD."""
        await self._stored.bring_segments()
        counted: outcome_map.Counted = []  # also of calls whose connection was lost
        await self._commit_log.call(
            outcome_map.adopt, self._ledger, self.spec, generation, plan, self.files, counted=counted
        )
        for commit, cost in counted:
            if commit.rows_reused:
                model = self.spec.models[plan.shards()[commit.lease.shard].model].name
                self._tools.dispatcher.tallies.count(self.spec.project, model, commit, cost)
        return sum(cost or 0.0 for _, cost in counted)

    async def _offload_owned(self, target: str, order: bytes, progress: Callable[[float], None], **kw: Any) -> bytes:
        """Offload work that writes results: only while this process surely owns the database. Raises: JobPaused."""
        self._term.check()
        return await self._offload(target, order, progress, **kw)

    @property
    def _objects_term(self) -> Term:
        """How long objects may be changed, those of results as well as those of [storage]."""
        stored = self._tools.stored
        return stored.term if stored.is_elsewhere else self._term

    @property
    def _nodes(self) -> Nodes | None:
        return None if self._tools.tasks is None else Nodes(self._tools.tasks, self._tools.stored)

    async def _prepare(self, order: PrepareOrder, progress: Callable[[float], None]) -> Prepared:
        """Seal and plan. Raises: as `seal_and_plan`; StorageFailed."""
        disk_quota = self._tools.disk_quota_of(self.spec)
        if stays_in_memory(self.spec):
            new = self._prepared_in = NewFolders(self.files)
            return await seal_and_plan_at_once(order, new.dataset, new.plan, disk_quota, self._call)
        await self._unpack(is_new=True)
        term = "" if self.spec.is_small else self._term.path  # a small one's folder is its own
        order, sealing = replace(order, copies=self._copies(), term=term), None
        if self._nodes is not None and not self.spec.is_small:
            sealing = NodeSealing(self._nodes, self._objects_term.path)
        offload = self._in_thread if self.spec.is_small else partial(self._offload, downloads=self._is_fetched)
        return await seal_and_plan(order, disk_quota, offload, progress, sealing)

    def _copies(self) -> CopyOrder | None:
        """Where the files that cells name are copied. Raises: StorageFailed if their store is gone."""
        kind, stored = self.spec.dataset.media_copies, self._tools.stored
        if not kind:
            return None
        if kind == "folder":
            return CopyOrder(str(self.files.media), str(self.files.shared_media(self.spec.project)))
        if not stored.url:
            raise StorageFailed(
                f"the media of job {self.spec.id} are to be copied to [storage] objects, which is not set any more: "
                "set it, or start over with --restart"
            )
        return CopyOrder(prefix_of(self.spec.id), store=stored.url, term=stored.term.path)

    async def _clear_refused(self) -> None:
        """Remove what was made of a dataset of which no row runs."""
        await asyncio.to_thread(self.files.clear_refused, self.spec.project, self._owned)
        if self.spec.dataset.media_copies:
            await self._tools.stored.remove(self.files.media)

    async def _end_unplanned(self, state: JobState, **values: Any) -> None:
        await self._clear_refused()
        await self._end(state, **values)

    def _new_publishing(self) -> Publishing:
        if self.spec.is_small:
            make_folder(Path(self.files.results_folder), packed.FOLDER_MODE)
        return Publishing(
            self.spec, self.files, self._offload_owned, self._objects_term.path, self._nodes,
            is_logged=self._tools.stored.log is not None,
        )  # fmt: skip
