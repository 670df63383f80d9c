"""One job on its way from its description to its results; every stop on the way is in the ledger first."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from batchmill import faults
from batchmill.datasets import soundness
from batchmill.errors import (
    BatchmillError,
    DatasetDamaged,
    InputChanged,
    InvalidInput,
    InvalidTransition,
    JobPaused,
    OverQuota,
    StorageFailed,
    SubmitUnknown,
    of_system,
)
from batchmill.jobs import adapters, recovery, routing, shard_notes, winding_up
from batchmill.jobs.adapters import AdapterWork
from batchmill.jobs.drive_room import Tools, preparing
from batchmill.jobs.endings import EarlyEnd, early_end_of
from batchmill.jobs.job_book import JobBook
from batchmill.jobs.job_files import JobFiles
from batchmill.jobs.job_run import JobRun
from batchmill.jobs.plan import PlanReader
from batchmill.jobs.preparation import Prepared, PrepareOrder
from batchmill.jobs.publishing import Publishing
from batchmill.jobs.reopening import is_planned
from batchmill.jobs.specs import columns_of, with_used
from batchmill.jobs.ways import Ways, with_code
from batchmill.models import redaction
from batchmill.states import JobState, PauseReason
from batchmill.types import ModelSpec, Policy
from batchmill.wire.job_spec import JobSpec

PREPARE = "batchmill.jobs.preparation:prepare"
T = TypeVar("T")


class Drive:
    def __init__(self, spec: JobSpec, tools: Tools) -> None:
        self.spec, self.files = spec, JobFiles(tools.data_dir, spec.id)
        self._dispatcher, self._clock = tools.dispatcher, tools.clock
        self._book = JobBook(spec.id, tools.books, tools.clock, tools.ballast)
        self._tools = tools
        self._offload = partial(tools.offload, project=spec.project)
        self._adapters = AdapterWork(tools.adapters, self._offload)
        self.at_once = False  # end without waiting for rows in flight
        self.is_resting = False  # the job is paused or has ended; only the workers are still to be let go
        self.task: asyncio.Task[None] | None = None
        self.fails_rows = False  # rows that fail are not to wait for their service
        self.leaves_remote = False  # end without what providers still have
        self._ways = Ways(tools.books.ledger.database, tools.clock)
        self._run: JobRun | None = None
        self._winding: JobRun | None = None  # what providers have is being collected for the last time
        self.progress: float | None = None
        self._stop: BatchmillError | None = None  # asked to pause before the run began
        self._early: EarlyEnd | None = None  # asked to end without the rows that have not run
        self._is_ending = asyncio.Event()  # and that is written down
        self._asking = asyncio.Lock()  # held while it is being written down
        self._child: asyncio.Task[Any] | None = None
        self._is_preparing = False  # its rows are being sealed and planned
        self._is_final = False  # every row has its outcome: there is nothing left to cut off

    # -- what others ask ----------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Pause because the owner ends."""
        self._halt(JobPaused("interrupted; run the same command again, or resume it", reason=PauseReason.INTERRUPTED))

    async def pause(self, reason: PauseReason, message: str) -> None:
        self._halt(JobPaused(message, reason=reason))
        await self.rest()

    def refuse_more(self, error: OverQuota) -> None:
        """Pause while rows run: there is no room for further results. What is prepared or ends is left alone."""
        if self._run is not None:
            self._halt(JobPaused(error.message, reason=PauseReason.DISK_QUOTA))

    async def end_early(self, early: EarlyEnd) -> None:
        """End without the rows that have not run. Returns once that is written down, or too late: see its state."""
        if self._is_final:
            return
        if self._early is None:
            self._early = early
            if (run := self.rows_run) is not None:
                await self._begin_ending()
                if run is self._run:
                    run.cancel()
            elif self._is_preparing and self._child is not None:
                self._child.cancel()
        if self.task is not None:
            written = asyncio.create_task(self._is_ending.wait())
            await asyncio.wait({self.task, written}, return_when=asyncio.FIRST_COMPLETED)
            written.cancel()

    async def rest(self) -> None:
        """Wait until nothing of the job is done any more."""
        if self.task is not None:
            await asyncio.wait({self.task})

    def fail_rows(self) -> None:
        """Rows that failed and wait are given up."""
        self.fails_rows = True
        if self._run is not None:
            self._dispatcher.fail_rows(self._run)

    def amend(self, policy: Policy) -> None:
        """Go on under another policy."""
        self.spec = msgspec.structs.replace(self.spec, policy=policy)
        if self._run is not None:
            self._run.spec = self.spec
            self._dispatcher.bound(self._run)

    def _halt(self, error: BatchmillError) -> None:
        self._stop = self._stop or error
        if (run := self.rows_run) is not None:
            run.pause(error)
        elif self._child is not None:
            self._child.cancel()

    @property
    def rows_run(self) -> JobRun | None:
        """Its rows while workers run them."""
        return self._run or self._winding

    @property
    def waits_for(self) -> str:
        """What must be there before its rows can run; empty: nothing."""
        return self._adapters.told

    @property
    def models(self) -> list[ModelSpec]:
        """The models that have rows left to run, as far as that is known."""
        if (run := self.rows_run) is not None:
            return [self.spec.models[number] for number in run.models_left]
        return self.spec.models if len(self.spec.models) == 1 else []

    # -- the way ------------------------------------------------------------------------------------------------------

    async def reopen(self) -> None:
        """A paused job goes on where it was, be it to its early end."""
        record = await self._book.record()
        if record["cancelling"] is not None:
            await self._book.move(JobState.CANCELLING, reason=early_end_of(record).reason, message="")
        else:
            await self._book.move(
                JobState.QUEUED if self._is_planned(record) else JobState.VALIDATING, reason=None, message=""
            )

    def _is_planned(self, record: sa.RowMapping) -> bool:
        return is_planned(record, self.files)

    async def run(self) -> None:
        """Take the job as far as it goes."""
        try:
            await self._go()
        except JobPaused as error:
            gives_up = error.reason is PauseReason.ENGINE_FAILED and self.spec.policy.on_engine_failure == "fail"
            if gives_up and await self._book.may_fail(unrun=True):
                await self._book.fail(error.reason, error.message)
            else:
                await self._book.rest(error.reason, error.message)
        except asyncio.CancelledError:
            self.at_once = True
            raise
        except (InvalidInput, OverQuota) as error:
            if await self._book.may_fail(unrun=False):
                await self._book.fail(error.code, error.message)
            else:  # once rows have run it is a pause: nothing of them is given up
                await self._book.rest(PauseReason.ENGINE_FAILED, error.message)
        except BatchmillError as error:
            await self._book.rest(PauseReason.ENGINE_FAILED, error.message)
        except OSError as error:
            told = of_system(error) or StorageFailed(f"a file of the job cannot be used: {error}")
            await self._book.rest(told.reason, told.message)
        except Exception as error:  # our own bug: the job must say so, not look as if it ran
            redaction.print_exception(error)
            await self._book.rest(PauseReason.ENGINE_FAILED, f"internal error: {type(error).__name__}: {error}")
        finally:
            self.is_resting = True
            await self._dispatcher.unreserve(self.spec.id, at_once=self.at_once)

    async def _go(self) -> None:
        record = await self._book.record()
        if record["state"] == JobState.CANCELLING:
            await self._end_early()
            return
        if record["state"] == JobState.VALIDATING and not await self._prepare():
            return
        plan = PlanReader(self.files.plan(record["generation"]))
        try:
            await self._ways.measure(self.spec.models)
            while not await self._work(self._new_run(plan, record["generation"]), await self._book.record()):
                pass
        finally:
            plan.close()

    def _new_run(self, plan: PlanReader, generation: int, *, is_over: bool = False) -> JobRun:
        return JobRun(self.spec, generation, plan, files=self.files, clock=self._clock, is_over=is_over)

    async def _prepare(self) -> bool:
        """Seal and plan. False when the dataset was refused, or the job ended meanwhile."""
        self._raise_if_stopped()
        self._reserve()
        models = self.spec.models
        self._is_preparing = True
        try:
            prepared = await self._sealed()
        finally:  # its child may have been killed
            await asyncio.to_thread(self.files.clear_unsealed)
        if prepared is None:
            assert self._early is not None, "only an early end leaves nothing"
            await asyncio.to_thread(self.files.clear_refused)
            await self._book.end_unwritten(self._early.state, cancelling=self._clock.now())
            return False
        self._is_preparing = False
        if self.spec.models != models:  # it goes by other ways, or to other adapters, than it was ordered with
            await asyncio.to_thread(self.files.write_spec, self.spec)
        size_bytes = await asyncio.to_thread(self.files.prepared_bytes)
        await self._book.prepared(prepared, msgspec.json.encode(self.spec), size_bytes)
        if prepared.plan is None:
            await asyncio.to_thread(self.files.clear_refused)
        return prepared.plan is not None

    def _reserve(self) -> None:
        """Let the workers that it will need get ready while its rows are read."""
        if len(self.spec.models) == 1 and self.spec.models[0].engine != routing.ROUTES:
            self._dispatcher.reserve(self.spec.id, self.spec.models, self.spec.code)

    async def _sealed(self) -> Prepared | None:
        """Its rows sealed and planned, and the adapters that they name at hand; None: it is to end early."""
        while self._early is None:
            self._raise_if_stopped()
            await self._ways.measure(self.spec.models)
            answer = await self._offload_preparation()
            if answer is None:
                return None
            prepared = msgspec.json.decode(answer, type=Prepared)
            faults.point("after_prepare")
            if not prepared.wanted:
                return prepared if await self._describe_anew(prepared) else None
            spec = await self._heeding(self._adapters.fetch(self.spec, prepared.wanted))
            if spec is None:
                return None
            await self._describe(spec)
        return None

    async def _offload_preparation(self) -> bytes | None:
        """What the child says that seals and plans; None: it is to end early. Raises: OverQuota, JobPaused."""
        folders = str(self.files.dataset), str(self.files.plan(0))
        async with preparing(self._tools.room_of(self.spec), self.spec.project, self.files.dataset) as room:
            order = PrepareOrder(
                self.spec, *folders, self._clock.now(), self._ways.rates, room.bytes_left, room.no_room
            )  # fmt: skip

            def show(share: float) -> None:
                self._show(share)
                room.look(lambda: self._child and self._child.cancel())

            try:
                answer = await self._heeding(self._offload(PREPARE, msgspec.json.encode(order), show))
            except asyncio.CancelledError:
                if room.over is None:
                    raise
                answer = None
            if room.over is not None:
                raise room.over
            return answer

    async def _describe(self, spec: JobSpec) -> None:
        """Go on with this description. An engine that has room for the ranks of its adapters may be another."""
        ranks = [[model.adapter_rank for model in each.models] for each in (self.spec, spec)]
        self.spec = spec
        if ranks[0] != ranks[1]:
            await self._dispatcher.unreserve(spec.id)
            self._reserve()

    async def _describe_anew(self, prepared: Prepared) -> bool:
        """Put into the description what is known once there is a plan. False: the job is to end early."""
        if prepared.plan is None:
            return True
        spec = with_used(self.spec, prepared.plan)
        if prepared.choices:
            spec = await asyncio.to_thread(with_code, routing.with_choices(spec, prepared.choices))
        used = adapters.used_by(spec.models, prepared.plan)
        spec = adapters.only_used(spec, used)
        checked = await self._heeding(self._adapters.check(spec, used)) if used else spec
        if checked is None:
            return False
        await self._describe(checked)
        return True

    async def _heeding(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of long work; None when the job is to end early. Raises JobPaused when it is to pause."""
        if self._is_preparing and (self._stop is not None or self._early is not None):
            work.close()
            self._raise_if_stopped()
            return None
        self._child = asyncio.create_task(work)
        try:
            return await self._child
        except asyncio.CancelledError:
            self._raise_if_stopped()
            if self._is_preparing:
                return None
            raise
        finally:
            self._child = None
            self.progress = None

    async def _work(self, run: JobRun, record: sa.RowMapping) -> bool:
        """Run every row that is undone, then write the results. False: some of them are to go another way."""
        self._raise_if_stopped()
        await asyncio.to_thread(soundness.check, self.files.dataset)
        run.cost = record["cost"] or 0.0
        ledger = self._book.ledger
        adopted = await self._book.call(recovery.adopt, ledger, self.spec, run.generation, run.plan, self.files)
        run.cost += sum(cost or 0.0 for _, cost in adopted)
        done = await self._book.call(ledger.progress, self.spec.id, run.generation)
        run.load(done)
        begun = {"started": self._clock.now()} if record["started"] is None else {}
        if record["state"] != JobState.RUNNING:
            await self._book.move(JobState.RUNNING, **begun)
        publishing = Publishing(self.spec, self.files, self._offload)
        if not done and run.generation == 0 and run.rows_left:
            publishing.follow(run)
        try:
            failure = await self._run_rows(run)
            if await self._is_cut_off(is_cut=failure is not None or run.is_cancelled):
                await publishing.abandon()
                await self._end_early()
                return True
            if (spec := self._ways.next(run, failure)) is not None:
                await publishing.abandon()
                return await self._go_another_way(run, spec)
            if failure is not None:
                raise failure
            await self._book.move(JobState.FINALIZING, finalizing=self._clock.now())
            await self._publish(publishing)
            return True
        except BaseException:
            await publishing.abandon()
            raise

    async def _is_cut_off(self, *, is_cut: bool) -> bool:
        """Whether the job ends early: that may be being written down while its last rows are counted."""
        async with self._asking:
            is_ending = self._is_ending.is_set()
        return is_ending or (is_cut and self._early is not None and await self._begin_ending())

    async def _run_rows(self, run: JobRun) -> BatchmillError | None:
        """Let workers run the rows; what stopped them before the last one, unless they were to stop."""
        self._run = run
        run.fails_rows, self.fails_rows = self.fails_rows, False
        if self._early is not None:
            run.cancel()
        run.check_budget()
        self._dispatcher.add(run)
        watching = asyncio.create_task(self._ways.watch(run)) if self._ways.may_change(self.spec) else None
        failure = None
        try:
            await asyncio.shield(run.ended)
        except BatchmillError as error:
            failure = error
        finally:
            if watching is not None:
                watching.cancel()
            is_over = self._ways.next(run, failure) is not None  # what goes another way is not left where it is
            await self._dispatcher.remove(run, at_once=self.at_once, is_over=is_over)
            await self._book.keep_time(run)
            self._run = None
        return failure

    async def _go_another_way(self, run: JobRun, spec: JobSpec) -> bool:
        """Go on under a description whose models go another way, once nothing is left of the way before.

        True where the job has ended instead. Raises: SubmitUnknown where a provider may run rows that nobody can end.
        """
        await self._wind_up(run.plan, run.generation)
        self._raise_if_stopped()
        if await self._is_cut_off(is_cut=True):
            await self._end_early()
            return True
        remotes = await self._book.remotes(run.generation)
        doubtful = [each for each in remotes if each.state == shard_notes.UNKNOWN]
        if doubtful:
            raise SubmitUnknown("; ".join(winding_up.leftovers(doubtful)))
        spec = routing.warned(spec, run.failing, winding_up.leftovers(remotes))
        ledger = self._book.ledger
        await self._book.call(ledger.fence, self.spec.id, run.generation)
        await self._book.call(recovery.adopt, ledger, self.spec, run.generation, run.plan, self.files)
        await asyncio.to_thread(self.files.write_spec, spec)
        await self._book.call(ledger.note, spec.id, **columns_of(spec))
        self.spec = spec
        await self._dispatcher.unreserve(spec.id)
        return False

    async def _wind_up(self, plan: PlanReader, generation: int) -> None:
        """Have providers end what they still run of the job, and count what they have. Raises: JobPaused."""
        only = shard_notes.uncollected_shards(await self._book.remotes(generation))
        if not only or self.leaves_remote:
            return
        self._raise_if_stopped()
        run = self._winding = self._new_run(plan, generation, is_over=True)
        try:
            run.load(await self._book.call(self._book.ledger.progress, self.spec.id, generation), only)
            await winding_up.wind_up(run, self._dispatcher, is_at_once=self.at_once)
        finally:
            self._winding = None

    async def _publish(self, publishing: Publishing) -> None:
        """Write the results of a job whose rows have all run."""
        blocks = await self._book.call(self._book.ledger.committed, self.spec.id)
        faults.point("before_publish")
        self._is_final = True
        manifest = await self._heeding(publishing.finish(blocks, self._show))
        assert manifest is not None, "nothing ends a job early that is finalizing"
        faults.point("after_publish")
        await self._book.end(JobState.COMPLETED, manifest)

    # -- ending early -------------------------------------------------------------------------------------------------

    async def _begin_ending(self) -> bool:
        """Write down that the job is to end early. False when every row has its outcome already."""
        async with self._asking:
            if self._is_ending.is_set() or self._early is None:
                return self._is_ending.is_set()
            try:
                await self._book.begin_ending(self._early, self.spec.policy.deadline)
            except InvalidTransition:
                self._early = None
                return False
            except BatchmillError:
                self._early = None  # it could not be written down, so it was not taken: whoever asked is told
                raise
            self._is_ending.set()
            return True

    async def _end_early(self) -> None:
        """Bring a job that is CANCELLING to its end: finished rows become its results, the rest errors."""
        self._raise_if_stopped()
        record = await self._book.record()
        early = early_end_of(record)
        if not self._is_planned(record):
            await self._book.end_unwritten(early.state)
            return
        generation = record["generation"]
        plan = PlanReader(self.files.plan(generation))
        try:
            await self._wind_up(plan, generation)
            if not self.leaves_remote:
                winding_up.refuse_orphans(await self._book.remotes(generation))
            await self._book.call(self._book.ledger.fence, self.spec.id, generation)
            await self._book.call(recovery.adopt, self._book.ledger, self.spec, generation, plan, self.files)
        finally:
            plan.close()
        blocks = await self._book.call(self._book.ledger.committed, self.spec.id)
        faults.point("before_publish")
        try:
            work = Publishing(self.spec, self.files, self._offload).finish(blocks, self._show, unrun=early.unrun)
            manifest = await self._heeding(work)
        except DatasetDamaged:
            raise  # it can be mended
        except InputChanged as error:
            await self._book.end_unwritten(early.state, message=f"its results were not written: {error.message}")
            return
        assert manifest is not None, "nothing ends a job twice"
        faults.point("after_publish")
        left = winding_up.leftovers(await self._book.remotes(generation))
        await self._book.end(early.state, manifest, "; ".join(left))

    def _show(self, share: float) -> None:
        self.progress = share

    def _raise_if_stopped(self) -> None:
        if self._stop is not None:
            raise self._stop
