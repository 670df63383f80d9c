"""JobRunner: takes one job from state to state. Each state is written to the ledger first, then its step runs.

    VALIDATING ─► QUEUED ─► RUNNING ─► FINALIZING ─► COMPLETED
                    ▲          │
                    └──────────┤ another route to the model
                               └─► CANCELLING ─► CANCELLED or EXPIRED

If a step raises, the job is PAUSED, or FAILED if none of its rows ran. After a kill, the next owner pauses the job
(`JobService.recover`), and `resume` enters its stored state again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from msgspec.structs import replace

from batchmill import faults
from batchmill.datasets import layout
from batchmill.errors import (
    BatchmillError,
    DatabaseUnavailable,
    DatasetDamaged,
    InputChanged,
    InvalidInput,
    InvalidTransition,
    JobPaused,
    OverQuota,
    StorageFailed,
    StorageFull,
    SubmitUnknown,
    to_storage_error,
)
from batchmill.jobs import early_end
from batchmill.jobs.early_end import ENDS_EARLY, EarlyEnd, EndsEarly, early_end_of
from batchmill.jobs.failover import RouteFailover, with_code
from batchmill.jobs.intake import adapters, routing
from batchmill.jobs.intake.adapters import AdapterWork
from batchmill.jobs.intake.preparation import Prepared, PrepareOrder, listed, reuses
from batchmill.jobs.ledger import ledger, packed
from batchmill.jobs.ledger.plan import PlanReader
from batchmill.jobs.ledger.records import columns_of
from batchmill.jobs.pools.job_run import JobRun
from batchmill.jobs.recorded_job import Entry, NotStored, RecordedJob
from batchmill.jobs.results.publishing import Publishing
from batchmill.jobs.results.results import Manifest
from batchmill.jobs.runner_tools import RunnerTools
from batchmill.jobs.samples import sample_has_run
from batchmill.models import redaction
from batchmill.states import ENDED, JobState, PauseReason
from batchmill.store.disk_room import bytes_in
from batchmill.types import ModelSpec, Policy
from batchmill.wire.job_spec import JobSpec

T = TypeVar("T")


class JobRunner(RecordedJob):
    def __init__(
        self, spec: JobSpec, tools: RunnerTools, state: JobState | None = None, entry: Entry | None = None
    ) -> None:
        super().__init__(spec, tools, state, entry)
        self._dispatcher = tools.dispatcher
        self._adapters = AdapterWork(tools.adapters, self._offload)
        self._routes = RouteFailover(self._ledger.database, tools.clock)
        self._turn = tools.turns.turn_of(spec)
        self.task: asyncio.Task[None] | None = None
        self.at_once = False  # end without waiting for rows in flight
        self.has_stopped = False  # the job has paused or ended; only its workers are still being released
        self.fails_rows = False  # failing rows do not wait until their service recovers
        self.skips_remote = False  # end without the results that providers still have
        self.progress: float | None = None  # share done by its child process, 0..1
        self._publishing: Publishing | None = None  # the results of that pass
        self._copies_reused = False  # results that rows took over are copied while the others run
        self.rows_run: JobRun | None = None  # its rows while the dispatcher has them
        self._child: asyncio.Task[Any] | None = None  # long work that a pause interrupts
        self.stop_reason: BatchmillError | None = None  # the reason of a requested pause
        self._early: EarlyEnd | None = None  # the requested early end
        self._is_cancelling = asyncio.Event()  # set once the early end is stored
        self._writing_end = asyncio.Lock()  # held while the early end is being stored

    # -- requests -----------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Pause because the owner is ending."""
        self._halt(JobPaused("interrupted; run the same command again, or resume it", reason=PauseReason.INTERRUPTED))

    async def pause(self, reason: PauseReason, message: str) -> None:
        self._halt(JobPaused(message, reason=reason))
        await self.wait_stopped()

    def refuse_storage(self, error: StorageFailed) -> None:
        """Pause, because nothing can be stored where the job needs it."""
        self._halt(error)

    def refuse_more(self, error: OverQuota) -> None:
        """Pause a job that runs rows, because there is no room for more results."""
        if self._is_running_rows:
            self._halt(JobPaused(error.message, reason=PauseReason.DISK_QUOTA))

    def _halt(self, error: BatchmillError) -> None:
        self.stop_reason = self.stop_reason or error
        if self.rows_run is not None:
            self.rows_run.pause(error)
        elif self._child is not None:
            self._child.cancel()

    async def end_early(self, early: EarlyEnd) -> None:
        """End without the remaining rows. Returns once that is stored, or if it is too late: check the state."""
        if self._state is JobState.FINALIZING:
            return
        if self._early is None:
            self._early = early
            if (run := self.rows_run) is not None:
                await self._write_cancelling()
                if run is self._run:
                    run.cancel()
            elif self._state in ENDS_EARLY and self._child is not None:
                self._child.cancel()
        if self.task is not None:
            stored = asyncio.create_task(self._is_cancelling.wait())
            await asyncio.wait({self.task, stored}, return_when=asyncio.FIRST_COMPLETED)
            stored.cancel()

    async def wait_stopped(self) -> None:
        """Wait until the runner has stopped."""
        if self.task is not None:
            await asyncio.wait({self.task})

    def fail_rows(self) -> None:
        """Give up rows that failed and wait for another attempt."""
        self.fails_rows = True
        if self._run is not None and self._is_running_rows:
            self._dispatcher.fail_rows(self._run)

    async def amend(self, policy: Policy) -> None:
        """Apply another policy, now or when the job is resumed."""
        before = self.spec.policy
        self._set_policy(policy)
        try:
            await self._store_spec()
        except BatchmillError:
            self._set_policy(before)
            raise

    def _set_policy(self, policy: Policy) -> None:
        self.spec = replace(self.spec, policy=policy)
        if self._run is not None:
            self._run.spec = self.spec
            if self._is_running_rows:
                self._dispatcher.bound(self._run)

    @property
    def _is_running_rows(self) -> bool:
        """Whether workers run rows, and do not just collect results of an ending job from providers."""
        return self._run is not None and self.rows_run is self._run

    @property
    def waits_for(self) -> str:
        """What the job waits for before its rows can run; empty: nothing."""
        return self._turn.waits_for or self._adapters.waiting_for

    @property
    def models(self) -> list[ModelSpec]:
        """The models with rows left to run, as far as known."""
        if (run := self.rows_run) is not None:
            return [self.spec.models[number] for number in run.models_left]
        return self.spec.models if len(self.spec.models) == 1 else []

    # -- states -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run steps until the job pauses or ends, and store why."""
        try:
            await self._advance()
        except NotStored as error:  # nothing of it is left
            if isinstance(error.__cause__, DatabaseUnavailable):
                raise error.__cause__ from None  # it may be stored all the same: see ActiveJobs.unstored
        except JobPaused as error:
            gives_up = error.reason is PauseReason.ENGINE_FAILED and self.spec.policy.on_engine_failure == "fail"
            if gives_up and await self._may_fail(unrun=True):
                await self._fail(error.reason, error.message)
            else:
                await self._pause(error.reason, error.message)
        except asyncio.CancelledError:
            self.at_once = True
            raise
        except (InvalidInput, OverQuota) as error:
            if await self._may_fail(unrun=False):
                await self._fail(error.code, error.message)
            else:  # rows have run: a pause keeps their results
                await self._pause(PauseReason.ENGINE_FAILED, error.message)
        except BatchmillError as error:
            await self._pause(PauseReason.ENGINE_FAILED, error.message)
        except OSError as error:
            storage_error = to_storage_error(error) or StorageFailed(f"a file of the job cannot be used: {error}")
            await self._pause(storage_error.reason, storage_error.message)
        except Exception as error:  # a bug of this program: the job must report it, not look as if it ran
            redaction.print_exception(error)
            await self._pause(PauseReason.ENGINE_FAILED, f"internal error: {type(error).__name__}: {error}")
        finally:
            self.has_stopped = True
            self._stored.release()
            await self._dispatcher.unreserve(self.spec.id, at_once=self.at_once)

    async def _advance(self) -> None:
        """Run the step of each stored state until the job has ended."""
        self._state = self._state or JobState((await self._record())["state"])
        try:
            while self._state not in ENDED:
                if self._state is JobState.QUEUED:
                    await self._take_turn()
                async with self._entered_at_last(), self._using_files():
                    await self._run_steps()
        finally:
            await self._turn.give_back()

    async def _run_steps(self) -> None:
        """Run steps until the job has ended, or is queued and has no turn."""
        try:
            while self._state not in ENDED and (self._turn.is_held or self._state is not JobState.QUEUED):
                before = self._state
                if before not in WITHOUT_FILES:
                    await self._unpack()
                await STEPS[before](self)
                assert self._state is not before, f"the step of {before} stored no other state"
        finally:
            await self._close_run()

    async def _take_turn(self) -> None:
        """Wait until the job may run, or is to end early. It holds no files meanwhile."""
        self._raise_if_stopped()
        try:
            await self._interruptible(self._turn.take())
        except EndsEarly:
            await self._write_cancelling()

    async def _validating(self) -> None:
        """Seal the dataset and plan its rows; a refused dataset fails the job."""
        self._raise_if_stopped()
        await self._enter_unless_short()
        await self._stored.bring_inputs(self.spec)
        self._reserve()
        models = self.spec.models
        try:
            prepared = await self._prepared()
            if prepared.plan is not None and reuses(self.spec):
                taking = self._tools.earlier_jobs.take_over(self.spec, self.files, self._show_progress)
                self._copies_reused, self.spec = await self._interruptible(taking)
        except EndsEarly:
            assert self._early is not None, "an early end was requested"
            await self._end_unplanned(self._early.state, cancelling=self._clock.now())
            return
        finally:  # the child process may have been killed
            if not self.spec.is_small:  # whose files are removed with their folder
                await self._clear_unsealed()
        if (self.spec.models, self.spec.reuse_note) != (models, ""):  # its routes or adapters have changed
            await self._write_spec(self.spec)
        report, plan = prepared.report, prepared.plan
        problems = {"problems": listed(report.problems), "problems_total": report.problems_total}
        if plan is None:
            text = f"{report.problems_total} of {report.seal.rows} rows were refused; no row was run"
            await self._fail("invalid_dataset", text, rows=report.seal.rows, **problems)
            await self._clear_refused()
            return
        columns = columns_of(self.spec)
        counts = {
            "rows": plan.rows, "rows_rejected": plan.rejected, "rows_failed": plan.rejected,
            "rows_folded": plan.followers, **columns, **problems,
        }  # fmt: skip
        if self.spec.is_small:
            await self._begin_small(counts, prepared.rejected)
            return
        await self._interruptible(self._stored.publish(self.files.dataset, self.files.plan(0)))
        size_bytes = await asyncio.to_thread(lambda: bytes_in(self.files.dataset) + bytes_in(self.files.plan(0)))
        await self._move(
            JobState.QUEUED, via=[JobState.PLANNING], errors=prepared.rejected,
            bytes=2 * len(columns["spec"]) + size_bytes + prepared.copied_bytes, **counts,
        )  # fmt: skip

    async def _begin_small(self, counts: dict[str, Any], errors: dict[str, tuple[int, str]]) -> None:
        """Store the plan and begin to run, in one transaction: nothing is to be adopted. Or wait for a turn."""
        await self._routes.measure(self.spec.models)
        await self._bring_class()
        self._raise_if_stopped()
        data = packed.pack(self._folders)
        stored = {"packed": data, "errors": errors, "bytes": len(counts["spec"]) + len(data), **counts}
        if not self._turn.is_free():
            await self._move(JobState.QUEUED, via=[JobState.PLANNING], **stored)
            return
        await self._turn.take()
        is_new, (run, leased) = self._entry is not None, self._first_run()
        via = [JobState.PLANNING, JobState.QUEUED]
        await self._move(JobState.RUNNING, via=via, started=self._clock.now(), **stored, **leased)
        if is_new:
            self._reserve()
        self._run = run
        await self._load(self._run, {})
        self._publishing = self._new_publishing()

    async def _queued(self) -> None:
        """Load the shards with open rows, and start copying results if the plan keeps the order of the input."""
        self._raise_if_stopped()
        await self._close_run()
        await self._routes.measure(self.spec.models)
        record = await self._record()
        await self._bring(record)
        await asyncio.to_thread(layout.check, self.files.dataset)
        generation = record["generation"]
        run = self._run = self._new_run(PlanReader(self.files.plan(generation)), generation)
        run.cost = (record["cost"] or 0.0) + await self._adopt(run.plan, generation)
        done = await self._commit_log.call_reader(self._ledger.progress, self.spec.id, generation)
        await self._load(run, done)
        begun = {"started": self._clock.now()} if record["started"] is None else {}
        await self._move(JobState.RUNNING, **begun)
        self._publishing = self._new_publishing()
        if (done and not self._copies_reused) or generation or run.is_sample or self._tools.stored.has_nodes:
            return
        if run.rows_left:
            committed = await self._commit_log.call_reader(self._ledger.committed, self.spec.id) if done else []
            self._publishing.follow(run, [ref for _, ref in committed])

    async def _running(self) -> None:
        """Have workers run the rows. A model whose route failed gets its next one; then the job is QUEUED again."""
        assert self._run is not None, "a RUNNING job was QUEUED before"
        self._raise_if_stopped()
        failure = await self._run_rows(run := self._run)
        if run.is_finished:
            self._enter_ended()
        elif await self._ends_early(is_cut_off=failure is not None or run.is_cancelled):
            return
        elif (spec := self._routes.next(run, failure)) is not None:
            await self._change_route(run, spec)
        elif failure is not None:
            raise failure
        elif run.is_sample:
            raise sample_has_run(self.spec)
        elif self.spec.is_small:
            self._state = JobState.FINALIZING  # stored together with the end
        else:
            await self._move(JobState.FINALIZING, finalizing=self._clock.now())

    async def _finalizing(self) -> None:
        """Publish the results: every row has its outcome."""
        assert self._publishing is not None, "a FINALIZING job was RUNNING before"
        finalizing, manifest = self._clock.now(), self._hold_counted()
        if manifest is None:
            await self._unpack()
            manifest = await self._publish(self._publishing)
        if self.spec.is_small:
            steps = {"via": [JobState.FINALIZING], "finalizing": finalizing, "held": self._publishing.held}
            await self._end(JobState.COMPLETED, manifest, **steps)
        else:
            await self._end(JobState.COMPLETED, manifest)

    async def _cancelling(self) -> None:
        """Cancel what providers run; finished rows become results, the rest errors."""
        await self._close_run()
        self._raise_if_stopped()
        record = await self._record()
        await self._stored.bring(self.spec, record)
        early = early_end_of(record)
        if not self._is_planned(record):
            await self._end_unplanned(early.state)
            return
        generation = record["generation"]
        plan = PlanReader(self.files.plan(generation))
        await self._cancel_remote(plan, generation, early.why)
        if not self.skips_remote:
            early_end.refuse_uncancelled(await self._remotes(generation))
        await self._commit_log.write(self._ledger.fence, self.spec.id, generation)
        await self._adopt(plan, generation)
        try:
            manifest = await self._publish(self._new_publishing(), early)
        except DatasetDamaged:
            raise  # it can be repaired
        except InputChanged as error:
            await self._end(early.state, message=f"its results were not written: {error.message}")
            return
        message = "; ".join(early_end.leftovers(await self._remotes(generation)))
        await self._end(early.state, manifest, message=message)

    # -- VALIDATING ---------------------------------------------------------------------------------------------------

    async def _prepared(self) -> Prepared:
        """Seal, plan, and fetch the adapters that rows name. Raises: OverQuota, JobPaused, EndsEarly."""
        while True:
            await self._routes.measure(self.spec.models)
            folders = str(self.files.dataset), str(self.files.plan(0))
            order = PrepareOrder(self.spec, *folders, self._clock.now(), self._routes.rates)
            work = self._prepare(order, self._show_progress)
            try:
                prepared = await (self._interruptible(work) if self._entry is None else work)
            except StorageFull:
                if not self.spec.is_small:
                    raise
                await self._make_large()  # the disk may have the room that memory lacks
                continue
            faults.point("after_prepare")
            if self.spec.is_small and prepared.plan and not packed.is_small(self._folders, prepared.plan.rows):
                await self._make_large()
                continue
            if not prepared.wanted:
                break
            await self._enter()
            await self._set_adapters(await self._interruptible(self._adapters.fetch(self.spec, prepared.wanted)))
        if prepared.plan is None:
            return prepared
        spec = adapters.with_used(self.spec, prepared.plan)
        if prepared.choices:
            spec = await asyncio.to_thread(with_code, routing.with_choices(spec, prepared.choices))
        used = adapters.used_by(spec.models, prepared.plan)
        spec = adapters.drop_unused(spec, used)
        if used:
            await self._enter()  # some may have to be fetched
        await self._set_adapters(await self._interruptible(self._adapters.check(spec, used)) if used else spec)
        return prepared

    async def _set_adapters(self, spec: JobSpec) -> None:
        """Replace the spec. The ranks of its adapters may require another engine."""
        ranks = [[model.adapter_rank for model in each.models] for each in (self.spec, spec)]
        self.spec = replace(spec, policy=self.spec.policy)  # it may have been amended meanwhile
        if ranks[0] != ranks[1]:
            await self._dispatcher.unreserve(spec.id)
            self._reserve()

    async def _interruptible(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for long work. Raises: the error that pauses the job meanwhile; EndsEarly before its rows run."""
        ends_early = self._state in ENDS_EARLY
        child = self._child = asyncio.create_task(work)
        if ends_early and (self.stop_reason is not None or self._early is not None):
            child.cancel()
        try:
            return await child
        except asyncio.CancelledError:
            self._raise_if_stopped()
            if ends_early and self._early is not None:
                raise EndsEarly from None
            raise
        finally:
            self._child = None
            self.progress = None

    # -- RUNNING ------------------------------------------------------------------------------------------------------

    async def _close_run(self) -> None:
        """Discard the current run and unfinished result files."""
        if self._publishing is not None:
            await self._publishing.abandon()
        self._run = self._publishing = self._counted = None

    async def _run_rows(self, run: JobRun) -> BatchmillError | None:
        """Have workers run the rows; return what stopped them before the last row, if anything unexpected did."""
        self.rows_run = run
        run.fails_rows, self.fails_rows = self.fails_rows, False
        if self._early is not None:
            run.cancel()
        run.check_budget()
        self._dispatcher.add(run)
        watching = asyncio.create_task(self._routes.watch(run)) if self._routes.may_change(self.spec) else None
        failure = None
        try:
            await asyncio.shield(run.ended)
        except BatchmillError as error:
            failure = error
        finally:
            if watching is not None:
                watching.cancel()
            is_over = self._routes.next(run, failure) is not None  # a changed route ends what the old one has
            run.over = self._early.why if self._early is not None and run.is_cancelled else ""
            await self._dispatcher.remove(run, at_once=self.at_once, is_over=is_over)
            if self.spec.is_small and not run.rows_left:
                self._unspent_s = run.elapsed_s  # stored with the end
            else:
                await self._commit_log.write(self._ledger.spent, self.spec.id, run.elapsed_s)
            self.rows_run = None
        return failure

    async def _change_route(self, run: JobRun, spec: JobSpec) -> None:
        """Queue the job again with other routes, once no batch is left at the previous one.

        Raises: SubmitUnknown if a provider may be running rows that cannot be cancelled.
        """
        await self._cancel_remote(run.plan, run.generation)
        self._raise_if_stopped()
        if await self._ends_early(is_cut_off=True):
            return
        remotes = await self._remotes(run.generation)
        unknown = [each for each in remotes if each.state == ledger.UNKNOWN]
        if unknown:
            raise SubmitUnknown("; ".join(early_end.leftovers(unknown)))
        spec = routing.with_warnings(spec, run.failing, early_end.leftovers(remotes))
        await self._commit_log.write(self._ledger.fence, self.spec.id, run.generation)
        await self._adopt(run.plan, run.generation)
        spec = replace(spec, policy=self.spec.policy)  # it may have been amended meanwhile
        await self._write_spec(spec)
        self.spec = spec
        await self._move(JobState.QUEUED, **columns_of(spec))
        await self._dispatcher.unreserve(spec.id)

    async def _cancel_remote(self, plan: PlanReader, generation: int, over: str = "") -> None:
        """Cancel the remote jobs of a generation and count the outcomes that providers have. Raises: JobPaused."""
        only = ledger.uncollected_shards(await self._remotes(generation))
        if not only or self.skips_remote:
            return
        self._raise_if_stopped()
        run = self.rows_run = self._new_run(plan, generation, is_over=True)
        run.over = over
        try:
            run.load(await self._commit_log.call_reader(self._ledger.progress, self.spec.id, generation), only)
            await early_end.cancel_remote(run, self._dispatcher, is_at_once=self.at_once)
        finally:
            self.rows_run = None

    # -- ending -------------------------------------------------------------------------------------------------------

    async def _ends_early(self, *, is_cut_off: bool) -> bool:
        """Whether the job is CANCELLING, which may be stored while its last rows are counted."""
        async with self._writing_end:
            is_cancelling = self._is_cancelling.is_set()
        return is_cancelling or (is_cut_off and self._early is not None and await self._write_cancelling())

    async def _write_cancelling(self) -> bool:
        """Store that the job ends early. False if every row already has its outcome."""
        async with self._writing_end:
            if self._is_cancelling.is_set() or self._early is None:
                return self._is_cancelling.is_set()
            now = early_end.begins_at(self._early, self.spec.policy.deadline, self._clock.now())
            try:
                await self._move(JobState.CANCELLING, reason=self._early.reason, message="", cancelling=now)
            except InvalidTransition:
                self._early = None
                return False
            except BatchmillError:
                self._early = None  # it could not be stored, so it is refused: the caller gets the error
                raise
            self._is_cancelling.set()
            return True

    async def _publish(self, publishing: Publishing, early: EarlyEnd | None = None) -> Manifest:
        blocks, carried = await self._results()
        faults.point("before_publish")
        await self._prepare_publishing()
        unrun = None if early is None else early.unrun
        segments = replace(self.files.segment_place, blocks=carried)
        manifest = await self._interruptible(publishing.finish(segments, blocks, self._show_progress, unrun=unrun))
        await self._stored.publish_results(manifest)
        faults.point("after_publish")
        return manifest

    def _show_progress(self, share: float) -> None:
        self.progress = share

    def _raise_if_stopped(self) -> None:
        if self.stop_reason is not None:
            raise self.stop_reason


# The step of each state that is not at rest. PLANNING is written only together with QUEUED.
# Steps of small jobs that seldom need files.
WITHOUT_FILES = (JobState.VALIDATING, JobState.RUNNING, JobState.FINALIZING)
STEPS: dict[JobState, Callable[[JobRunner], Awaitable[None]]] = {
    JobState.VALIDATING: JobRunner._validating,
    JobState.QUEUED: JobRunner._queued,
    JobState.RUNNING: JobRunner._running,
    JobState.FINALIZING: JobRunner._finalizing,
    JobState.CANCELLING: JobRunner._cancelling,
}
