"""One job on its way from its description to its results; every stop on the way is in the ledger first."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill import faults
from batchmill.errors import BatchmillError, InputChanged, InvalidInput, InvalidTransition, JobPaused, StorageFull
from batchmill.jobs import recovery, retry
from batchmill.jobs.commits import Books
from batchmill.jobs.dispatcher import Dispatcher
from batchmill.jobs.endings import EarlyEnd, begins_at, early_end_of
from batchmill.jobs.job_files import JobFiles
from batchmill.jobs.job_run import JobRun
from batchmill.jobs.offload import offload
from batchmill.jobs.plan import PlanReader
from batchmill.jobs.preparation import Prepared, PrepareOrder, listed
from batchmill.jobs.publishing import Publishing
from batchmill.jobs.results import Manifest
from batchmill.jobs.specs import columns_of, with_used
from batchmill.jobs.views import add_run
from batchmill.ports import Clock
from batchmill.states import NEXT, JobState, PauseReason
from batchmill.store.ballast import Ballast
from batchmill.types import JobView, ModelSpec
from batchmill.wire.job_spec import JobSpec

PREPARE, PLAN_RETRY = "batchmill.jobs.preparation:prepare", "batchmill.jobs.retry:plan_offloaded"
T = TypeVar("T")


class Tools(Struct, frozen=True):
    """What every drive of a data directory works with."""

    data_dir: Path
    books: Books
    dispatcher: Dispatcher
    clock: Clock
    ballast: Ballast


class Drive:
    def __init__(self, spec: JobSpec, tools: Tools) -> None:
        self.spec, self.files = spec, JobFiles(tools.data_dir, spec.id)
        self._books, self._dispatcher, self._clock = tools.books, tools.dispatcher, tools.clock
        self._ballast = tools.ballast
        self.at_once = False  # end without waiting for rows in flight
        self.is_resting = False  # the job is paused or has ended; only the workers are still to be let go
        self.task: asyncio.Task[None] | None = None
        self._run: JobRun | None = None
        self._progress: float | None = None
        self._stop: BatchmillError | None = None  # asked to pause before the run began
        self._early: EarlyEnd | None = None  # asked to end without the rows that have not run
        self._is_ending = asyncio.Event()  # and that is written down
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

    async def end_early(self, early: EarlyEnd) -> None:
        """End without the rows that have not run. Returns once that is written down, or too late: see its state."""
        if self._is_final:
            return
        if self._early is None:
            self._early = early
            if (run := self._run) is not None:
                await self._begin_ending()
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

    def amend(self, spec: JobSpec) -> None:
        """Go on under another policy."""
        self.spec = spec
        if self._run is not None:
            self._run.spec = spec
            self._run.check_budget()

    def _halt(self, error: BatchmillError) -> None:
        self._stop = self._stop or error
        if self._run is not None:
            self._run.pause(error)
        elif self._child is not None:
            self._child.cancel()

    def add_to(self, view: JobView) -> JobView:
        """The view of this job with what only its drive knows."""
        view = msgspec.structs.replace(view, progress=self._progress)
        stats = [worker.stats for worker in self._dispatcher.workers_of(self.models)]
        if self._run is None:
            notes = list(dict.fromkeys(each.note for each in stats if each.note))
            return msgspec.structs.replace(view, notes=notes)
        return add_run(view, self._run, stats)

    @property
    def models(self) -> list[ModelSpec]:
        """The models that have rows left to run, as far as that is known."""
        if self._run is not None:
            return [self.spec.models[number] for number in self._run.models_left]
        return self.spec.models if len(self.spec.models) == 1 else []

    # -- the way ------------------------------------------------------------------------------------------------------

    async def reopen(self) -> None:
        """A paused job goes on where it was, be it to its early end."""
        record = await self._record()
        if record["cancelling"] is not None:
            await self._move(JobState.CANCELLING, reason=early_end_of(record).reason, message="")
        else:
            await self._move(
                JobState.QUEUED if self._is_planned(record) else JobState.VALIDATING, reason=None, message=""
            )

    def _is_planned(self, record: sa.RowMapping) -> bool:
        return bool(record["rows"]) and (self.files.plan(0) / "plan.json").exists()

    async def run(self) -> None:
        """Take the job as far as it goes."""
        try:
            await self._go()
        except JobPaused as error:
            if not await self._gave_up(error):
                await self._rest(error.reason, error.message)
        except asyncio.CancelledError:
            self.at_once = True
            raise
        except InvalidInput as error:
            await self._refuse(error)
        except BatchmillError as error:
            await self._rest(PauseReason.ENGINE_FAILED, error.message)
        except Exception as error:  # our own bug: the job must say so, not look as if it ran
            traceback.print_exc()
            await self._rest(PauseReason.ENGINE_FAILED, f"internal error: {type(error).__name__}: {error}")
        finally:
            self.is_resting = True
            await self._dispatcher.unreserve(self.spec.id, at_once=self.at_once)

    async def _go(self) -> None:
        record = await self._record()
        if record["state"] == JobState.CANCELLING:
            await self._end_early()
            return
        if record["state"] == JobState.VALIDATING and not await self._prepare():
            return
        plan = PlanReader(self.files.plan(record["generation"]))
        try:
            run = JobRun(self.spec, record["generation"], plan, files=self.files, clock=self._clock)
            await self._work(run, record)
        finally:
            plan.close()

    async def _prepare(self) -> bool:
        """Seal and plan. False when the dataset was refused, or the job ended meanwhile."""
        self._raise_if_stopped()
        if len(self.spec.models) == 1:
            self._dispatcher.reserve(self.spec.id, self.spec.models)  # they get ready while the rows are read
        answer = None
        if self._early is None:
            order = PrepareOrder(self.spec, str(self.files.dataset), str(self.files.plan(0)))
            self._is_preparing = True
            answer = await self._heeding(offload(PREPARE, msgspec.json.encode(order), self._show))
            self._is_preparing = False
        if answer is None:
            now = self._clock.now()
            assert self._early is not None, "only an early end leaves no answer"
            await self._move(self._early.state, cancelling=now, finished=now)
            return False
        faults.point("after_prepare")
        prepared = msgspec.json.decode(answer, type=Prepared)
        report = prepared.report
        problems = {"problems": listed(report.problems), "problems_total": report.problems_total}
        if prepared.plan is None:
            text = f"{report.problems_total} of {report.seal.rows} rows were refused; no row was run"
            await self._move(
                JobState.FAILED, reason="invalid_dataset", message=text, rows=report.seal.rows,
                finished=self._clock.now(), **problems,
            )  # fmt: skip
            return False
        await self._move(JobState.PLANNING)
        if prepared.rejected:
            await self._call(self._ledger.set_errors, self.spec.id, prepared.rejected)
        plan = prepared.plan
        self.spec = with_used(self.spec, plan)
        await self._move(
            JobState.QUEUED, spec=msgspec.json.encode(self.spec),
            rows=plan.rows, rows_rejected=plan.rejected, rows_failed=plan.rejected, rows_folded=plan.followers,
            **problems,
        )  # fmt: skip
        return True

    async def _heeding(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of long work; None when the job is to end early. Raises JobPaused when it is to pause."""
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
            self._progress = None

    async def _work(self, run: JobRun, record: sa.RowMapping) -> None:
        """Run every row that is undone, then write the results."""
        self._raise_if_stopped()
        run.cost = record["cost"] or 0.0
        adopted = await self._call(recovery.adopt, self._ledger, self.spec, run.generation, run.plan, self.files)
        run.cost += sum(cost or 0.0 for _, cost in adopted)
        done = await self._call(self._ledger.progress, self.spec.id, run.generation)
        run.load(done)
        if run.rows_left and self._early is None:
            self._dispatcher.reserve(self.spec.id, [self.spec.models[number] for number in run.models_left])
        begun = {"started": self._clock.now()} if record["started"] is None else {}
        await self._move(JobState.RUNNING, **begun)
        publishing = Publishing(self.spec, self.files)
        if not done and run.generation == 0 and run.rows_left:
            publishing.follow(run)
        try:
            failure = await self._run_rows(run)
            is_cut = failure is not None or run.is_cancelled
            if self._is_ending.is_set() or (is_cut and self._early is not None and await self._begin_ending()):
                await publishing.abandon()
                await self._end_early()
                return
            if failure is not None:
                raise failure
        except BaseException:
            await publishing.abandon()
            raise
        await self._move(JobState.FINALIZING, finalizing=self._clock.now())
        await self._publish(publishing)

    async def _run_rows(self, run: JobRun) -> BatchmillError | None:
        """Let workers run the rows; what stopped them before the last one, unless they were to stop."""
        self._run = run
        if self._early is not None:
            run.cancel()
        run.check_budget()
        self._dispatcher.add(run)
        failure = None
        try:
            await asyncio.shield(run.ended)
        except BatchmillError as error:
            failure = error
        finally:
            await self._dispatcher.remove(run, at_once=self.at_once)
            await self._keep_time(run)
            self._run = None
        return failure

    async def _keep_time(self, run: JobRun) -> None:
        record = await self._record()
        await self._call(self._ledger.note, self.spec.id, elapsed_s=record["elapsed_s"] + run.elapsed_s)

    async def _publish(self, publishing: Publishing) -> None:
        """Write the results of a job whose rows have all run."""
        blocks = await self._call(self._ledger.committed, self.spec.id)
        faults.point("before_publish")
        self._is_final = True
        manifest = await self._heeding(publishing.finish(blocks, self._show))
        assert manifest is not None, "nothing ends a job early that is finalizing"
        await self._end(JobState.COMPLETED, manifest)

    async def _end(self, state: JobState, manifest: Manifest) -> None:
        """The results are there: say so."""
        faults.point("after_publish")
        await self._call(self._ledger.set_errors, self.spec.id, manifest.causes)
        await self._move(
            state, rows_ok=manifest.ok, rows_failed=manifest.failed, finished=self._clock.now(),
            output=manifest.output.path, errors_output=None if manifest.errors is None else manifest.errors.path,
        )  # fmt: skip

    # -- ending early -------------------------------------------------------------------------------------------------

    async def _begin_ending(self) -> bool:
        """Write down that the job is to end early. False when every row has its outcome already."""
        if self._is_ending.is_set() or self._early is None:
            return self._is_ending.is_set()
        early = self._early
        cancelling = begins_at(early, self.spec.policy.deadline, self._clock.now())
        try:
            await self._move(JobState.CANCELLING, reason=early.reason, message="", cancelling=cancelling)
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
        record = await self._record()
        early = early_end_of(record)
        if not self._is_planned(record):
            await self._move(early.state, reason=None, finished=self._clock.now())
            return
        generation = record["generation"]
        await self._call(self._ledger.fence, self.spec.id, generation)
        plan = PlanReader(self.files.plan(generation))
        try:
            await self._call(recovery.adopt, self._ledger, self.spec, generation, plan, self.files)
        finally:
            plan.close()
        blocks = await self._call(self._ledger.committed, self.spec.id)
        faults.point("before_publish")
        try:
            work = Publishing(self.spec, self.files).finish(blocks, self._show, unrun=early.unrun)
            manifest = await self._heeding(work)
        except InputChanged as error:
            text = f"its results were not written: {error.message}"
            await self._move(early.state, reason=None, message=text, finished=self._clock.now())
            return
        assert manifest is not None, "nothing ends a job twice"
        await self._end(early.state, manifest)

    async def open_retry(self) -> None:
        """Open a generation over the rows that failed. Raises: InvalidTransition when none may be run again."""
        record = await self._record()
        spec = self.spec
        blocks = await self._call(self._ledger.committed, spec.id)
        generation = record["generation"] + 1
        order = retry.RetryOrder(spec, str(self.files.data_dir), blocks, generation)
        answer = await offload(PLAN_RETRY, msgspec.json.encode(order), lambda _: None)
        opened = msgspec.json.decode(answer, type=retry.Opened)
        if opened.rows == 0:
            raise InvalidTransition(f"the job {spec.id} has no failed rows that could be run again")
        await self._call(
            self._ledger.open_generation, spec.id, generation, opened.settled, opened.rows_ok, **columns_of(spec)
        )

    # -- the ledger ---------------------------------------------------------------------------------------------------

    @property
    def _ledger(self):
        return self._books.ledger

    @property
    def _call(self):
        return self._books.call

    async def _record(self) -> sa.RowMapping:
        return await self._books.look(self._ledger.job, self.spec.id)

    async def _move(self, state: JobState, **fields: object) -> None:
        await self._call(self._ledger.move, self.spec.id, state, **fields)

    def _show(self, share: float) -> None:
        self._progress = share

    def _raise_if_stopped(self) -> None:
        if self._stop is not None:
            raise self._stop

    async def _rest(self, reason: PauseReason, message: str) -> None:
        if reason is PauseReason.INTERRUPTED and (await self._record())["state"] == JobState.CANCELLING:
            return  # that it is to end stays written down: the next owner goes on with it
        await self._move_surely(JobState.PAUSED, reason=reason, message=message)

    async def _move_surely(self, state: JobState, **fields: object) -> None:
        """As `_move`; on a full disk there is the ballast, so that at least the reason can be written down."""
        try:
            await self._move(state, **fields)
        except StorageFull:
            self._ballast.release()
            await self._move(state, **fields)

    async def _gave_up(self, error: JobPaused) -> bool:
        """End a job whose engine never started, where its caller asked for that rather than for a pause."""
        if error.reason is not PauseReason.ENGINE_FAILED or self.spec.policy.on_engine_failure != "fail":
            return False
        record = await self._record()
        has_run = record["generation"] or record["rows_ok"] + record["rows_failed"] > record["rows_rejected"]
        if has_run or JobState.FAILED not in NEXT[JobState(record["state"])]:
            return False
        await self._move_surely(JobState.FAILED, reason=error.reason, message=error.message, finished=self._clock.now())
        return True

    async def _refuse(self, error: InvalidInput) -> None:
        """What the caller gave cannot be run. Once rows have run it is a pause: nothing of them is given up."""
        record = await self._record()
        if JobState.FAILED not in NEXT[JobState(record["state"])]:
            await self._rest(PauseReason.ENGINE_FAILED, error.message)
            return
        await self._move_surely(JobState.FAILED, reason=error.code, message=error.message, finished=self._clock.now())
