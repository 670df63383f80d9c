"""One job on its way from its description to its results; every stop on the way is in the ledger first."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from batchmill import faults
from batchmill.errors import BatchmillError, InputChanged, InvalidInput, InvalidTransition, JobPaused, StorageFull
from batchmill.jobs import recovery, retry
from batchmill.jobs.commits import Books
from batchmill.jobs.dispatcher import Dispatcher
from batchmill.jobs.job_files import JobFiles
from batchmill.jobs.job_run import JobRun
from batchmill.jobs.offload import offload
from batchmill.jobs.plan import PlanReader
from batchmill.jobs.preparation import Prepared, PrepareOrder, listed
from batchmill.jobs.publishing import Publishing
from batchmill.jobs.views import add_run
from batchmill.ports import Clock
from batchmill.states import NEXT, JobState, PauseReason
from batchmill.store.ballast import Ballast
from batchmill.types import JobView
from batchmill.wire.job_spec import JobSpec

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
        self._cancelled = False
        self._child: asyncio.Task[Any] | None = None

    # -- what others ask ----------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Pause because the owner ends."""
        self._halt(JobPaused("interrupted; run the same command again, or resume it", reason=PauseReason.INTERRUPTED))

    async def pause(self, reason: PauseReason, message: str) -> None:
        self._halt(JobPaused(message, reason=reason))
        await self._wait()

    async def cancel(self) -> None:
        self._cancelled = True
        if self._run is not None:
            self._run.cancel()
        elif self._child is not None:
            self._child.cancel()
        await self._wait()

    def _halt(self, error: BatchmillError) -> None:
        self._stop = self._stop or error
        if self._run is not None:
            self._run.pause(error)
        elif self._child is not None:
            self._child.cancel()

    async def _wait(self) -> None:
        if self.task is not None:
            await asyncio.wait({self.task})

    def add_to(self, view: JobView) -> JobView:
        """The view of this job with what only its drive knows."""
        view = msgspec.structs.replace(view, progress=self._progress)
        stats = [worker.stats for worker in self._dispatcher.workers_of(self.spec.models)]
        if self._run is None:
            notes = list(dict.fromkeys(each.note for each in stats if each.note))
            return msgspec.structs.replace(view, notes=notes)
        return add_run(view, self._run, stats)

    # -- the way ------------------------------------------------------------------------------------------------------

    async def reopen(self) -> None:
        """A paused job goes on where it was."""
        record = await self._call(self._ledger.job, self.spec.id)
        planned = record["rows"] and (self.files.plan(0) / "plan.json").exists()
        await self._move(JobState.QUEUED if planned else JobState.VALIDATING, reason=None, message="")

    async def run(self) -> None:
        """Take the job as far as it goes."""
        try:
            await self._go()
        except JobPaused as error:
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
        record = await self._call(self._ledger.job, self.spec.id)
        if record["state"] == JobState.VALIDATING and not await self._prepare():
            return
        if record["started"] is None:
            await self._call(self._ledger.note, self.spec.id, started=self._clock.now())
        plan = PlanReader(self.files.plan(record["generation"]))
        try:
            run = JobRun(self.spec, record["generation"], plan, files=self.files, clock=self._clock)
            await self._work(run, record["cost"] or 0.0)
        finally:
            plan.close()

    async def _prepare(self) -> bool:
        """Seal and plan. False when the dataset was refused or the job cancelled meanwhile."""
        self._raise_if_stopped()
        self._dispatcher.reserve(self.spec.id, self.spec.models)  # they get ready while the rows are read
        order = PrepareOrder(self.spec, str(self.files.dataset), str(self.files.plan(0)))
        work = offload("batchmill.jobs.preparation:prepare", msgspec.json.encode(order), self._show)
        answer = await self._heeding(work)
        if answer is None:
            await self._move(JobState.CANCELLED, finished=self._clock.now())
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
        plan = prepared.plan
        await self._call(self._ledger.set_errors, self.spec.id, prepared.rejected)
        await self._move(
            JobState.QUEUED,
            rows=plan.rows, rows_rejected=plan.rejected, rows_failed=plan.rejected, rows_folded=plan.followers,
            **problems,
        )  # fmt: skip
        return True

    async def _heeding(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of long work; None when the job was cancelled meanwhile. Raises JobPaused when it is to pause."""
        self._child = asyncio.create_task(work)
        try:
            return await self._child
        except asyncio.CancelledError:
            self._raise_if_stopped()
            if self._cancelled:
                return None
            raise
        finally:
            self._child = None
            self._progress = None

    async def _work(self, run: JobRun, spent: float) -> None:
        """Run every row that is undone, then write the results."""
        self._raise_if_stopped()
        run.cost = spent
        adopted = await self._call(recovery.adopt, self._ledger, self.spec, run.generation, run.plan, self.files)
        run.cost += sum(cost or 0.0 for _, cost in adopted)
        done = await self._call(self._ledger.progress, self.spec.id, run.generation)
        run.load(done)
        if run.rows_left:
            self._dispatcher.reserve(self.spec.id, self.spec.models)
        await self._move(JobState.RUNNING)
        publishing = Publishing(self.spec, self.files)
        if not done and run.generation == 0 and run.rows_left:
            publishing.follow(run)
        self._run = run
        if self._cancelled:
            run.cancel()
        run.check_budget()
        self._dispatcher.add(run)
        try:
            ending = await asyncio.shield(run.ended)
        except BaseException:
            await publishing.abandon()
            raise
        finally:
            await self._dispatcher.remove(run, at_once=self.at_once)
            await self._keep_time(run)
            self._run = None
        if ending.cancelled:
            await publishing.abandon()
        await self._move(JobState.CANCELLING if ending.cancelled else JobState.FINALIZING)
        await self._publish(publishing, cancelled=ending.cancelled)

    async def _keep_time(self, run: JobRun) -> None:
        record = await self._call(self._ledger.job, self.spec.id)
        await self._call(self._ledger.note, self.spec.id, elapsed_s=record["elapsed_s"] + run.elapsed_s)

    async def _publish(self, publishing: Publishing, *, cancelled: bool) -> None:
        """Write the results of a job that is finalizing or being cancelled, and end it."""
        blocks = await self._call(self._ledger.committed, self.spec.id)
        faults.point("before_publish")
        work = publishing.finish(blocks, cancelled=cancelled, progress=self._show)
        if cancelled:
            try:
                manifest = await work
            except InputChanged as error:
                text = f"its results were not written: {error.message}"
                await self._move(JobState.CANCELLED, message=text, finished=self._clock.now())
                return
        else:
            manifest = await self._heeding(work)
            if manifest is None:  # cancelled when every row had its outcome already: there is nothing left to cancel
                manifest = await Publishing(self.spec, self.files).finish(blocks, cancelled=False, progress=self._show)
        faults.point("after_publish")
        await self._call(self._ledger.set_errors, self.spec.id, manifest.causes)
        await self._move(
            JobState.CANCELLED if cancelled else JobState.COMPLETED,
            rows_ok=manifest.ok, rows_failed=manifest.failed, finished=self._clock.now(), output=manifest.output.path,
            errors_output=None if manifest.errors is None else manifest.errors.path,
        )  # fmt: skip

    async def cancel_paused(self) -> None:
        """Cancel a job that nobody runs: its finished rows become its results."""
        await self._move(JobState.CANCELLING, reason=None, message="")
        await self.finish_cancel()

    async def finish_cancel(self) -> None:
        """Bring a job that is being cancelled to its end."""
        if not (self.files.plan(0) / "plan.json").exists():
            await self._move(JobState.CANCELLED, finished=self._clock.now())
            return
        record = await self._call(self._ledger.job, self.spec.id)
        plan = PlanReader(self.files.plan(record["generation"]))
        try:
            await self._call(recovery.adopt, self._ledger, self.spec, record["generation"], plan, self.files)
        finally:
            plan.close()
        await self._publish(Publishing(self.spec, self.files), cancelled=True)

    async def open_retry(self) -> None:
        """Open a generation over the rows that failed. Raises: InvalidTransition when none may be run again."""
        record = await self._call(self._ledger.job, self.spec.id)
        blocks = await self._call(self._ledger.committed, self.spec.id)
        generation = record["generation"] + 1
        order = retry.RetryOrder(self.spec, str(self.files.data_dir), blocks, generation)
        answer = await offload("batchmill.jobs.retry:plan_offloaded", msgspec.json.encode(order), lambda _: None)
        opened = msgspec.json.decode(answer, type=retry.Opened)
        if opened.rows == 0:
            raise InvalidTransition(f"the job {self.spec.id} has no failed rows that could be run again")
        await self._call(self._ledger.open_generation, self.spec.id, generation, opened.settled, opened.rows_ok)

    # -- the ledger ---------------------------------------------------------------------------------------------------

    @property
    def _ledger(self):
        return self._books.ledger

    @property
    def _call(self):
        return self._books.call

    async def _move(self, state: JobState, **fields: object) -> None:
        await self._call(self._ledger.move, self.spec.id, state, **fields)

    def _show(self, share: float) -> None:
        self._progress = share

    def _raise_if_stopped(self) -> None:
        if self._stop is not None:
            raise self._stop

    async def _rest(self, reason: PauseReason, message: str) -> None:
        try:
            await self._move(JobState.PAUSED, reason=reason, message=message)
        except StorageFull:
            self._ballast.release()  # so that at least the reason can be written down
            await self._move(JobState.PAUSED, reason=reason, message=message)

    async def _refuse(self, error: InvalidInput) -> None:
        """What the caller gave cannot be run. Once rows have run it is a pause: nothing of them is given up."""
        record = await self._call(self._ledger.job, self.spec.id)
        if JobState.FAILED not in NEXT[JobState(record["state"])]:
            await self._rest(PauseReason.ENGINE_FAILED, error.message)
            return
        await self._move(JobState.FAILED, reason=error.code, message=error.message, finished=self._clock.now())
