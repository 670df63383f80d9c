"""JobService: the one door to jobs, in the process that owns the data directory. See `ports.Jobs` for its promises."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import sqlalchemy as sa

from batchmill import faults
from batchmill.datasets.sealed import load_seal
from batchmill.errors import BatchmillError, InvalidInput, InvalidTransition, UnknownName
from batchmill.jobs import orders, publishing, recovery, views
from batchmill.jobs.commits import Books
from batchmill.jobs.dispatcher import Dispatcher
from batchmill.jobs.drive import Drive
from batchmill.jobs.job_files import JobFiles, read_spec
from batchmill.jobs.ledger import Ledger
from batchmill.jobs.offload import offload
from batchmill.jobs.plan import PlanReader
from batchmill.ports import Clock, Executor
from batchmill.states import JobState, PauseReason
from batchmill.types import JobOrder, JobView, LedgerReport, Submitted
from batchmill.wire.job_spec import JobSpec

ACTIVE = frozenset(JobState) - {JobState.PAUSED, JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED}


class JobService:
    def __init__(self, data_dir: Path, ledger: Ledger, executor: Executor, clock: Clock) -> None:
        self._data_dir, self._clock = data_dir, clock
        self._books = Books(ledger)
        self._dispatcher = Dispatcher(data_dir, self._books, executor, clock)
        self._drives: dict[str, Drive] = {}
        self._submitting = asyncio.Lock()

    async def recover(self) -> None:
        """What an owner that died left running becomes paused: its rows are safe, and it goes on when asked."""
        for record in await self._call(self._ledger.all_jobs):
            if record["state"] in ACTIVE:
                text = "the process that ran this job ended; resume it and it goes on where it was"
                await self._call(
                    self._ledger.move, record["id"], JobState.PAUSED, reason=PauseReason.INTERRUPTED, message=text
                )

    @property
    def _ledger(self) -> Ledger:
        return self._books.ledger

    @property
    def _call(self):
        return self._books.call

    # -- submitting ---------------------------------------------------------------------------------------------------

    async def submit(self, order: JobOrder) -> Submitted:
        async with self._submitting:
            spec = await asyncio.to_thread(orders.describe, order, self._clock.now())
            known = await self._known(spec, order)
            if known is not None:
                record, how = known
                if how == "resumed":
                    spec = orders.new_id_form(spec, record["id"])
                    await self._update_spec(spec)
                    await self._start(spec, resume=True)
                return Submitted(record["id"], how)
            active = [record for record in await self._call(self._ledger.all_jobs) if record["id"] in self._drives]
            orders.refuse_if_taken(spec, active, overwrite=order.overwrite or order.restart)
            await asyncio.to_thread(JobFiles(self._data_dir, spec.id).write_spec, spec)
            faults.point("after_describe")
            await self._call(self._ledger.create, spec)
            faults.point("after_create")
            await self._start(spec, resume=False)
            return Submitted(spec.id, "started")

    async def _known(self, spec: JobSpec, order: JobOrder) -> tuple[sa.RowMapping, str] | None:
        """The job that this order already is, and what becomes of it; None for a new one."""
        record = await self._call(self._ledger.by_identity, spec.identity)
        if record is None:
            return None
        state, files = JobState(record["state"]), JobFiles(self._data_dir, record["id"])
        finished = state is JobState.COMPLETED
        same = await asyncio.to_thread(orders.same_input, spec, files)
        if finished:
            is_new = not same or order.overwrite or order.restart or read_spec(record["spec"]).code != spec.code
            return None if is_new else (record, "finished")
        if order.restart:
            await self._set_aside(record)
            return None
        if not same:
            if spec.output is None or spec.dataset.paths != read_spec(record["spec"]).dataset.paths:
                return None
            raise InvalidInput(
                f"{', '.join(spec.dataset.paths)} changed since the unfinished job {record['id']} began: "
                "restore it, or start over with --restart",
                code="input_changed",
            )
        earlier = read_spec(record["spec"]).code
        changed = [model for model in spec.models if earlier.get(model.name) != spec.code.get(model.name)]
        if changed:
            raise InvalidInput(
                f"{changed[0].source} changed since the unfinished job {record['id']} began: finish that job with the "
                "code it began with, or start over with --restart",
                code="code_changed",
            )
        return record, "joined" if record["id"] in self._drives else "resumed"

    async def _set_aside(self, record: sa.RowMapping) -> None:
        """End an unfinished job that is started over: it writes no results."""
        drive = self._drives.get(record["id"])
        if drive is not None:
            await drive.pause(PauseReason.ASKED, "about to be started over")
        text = "started over by another job with --restart; its results were not written"
        await self._call(self._ledger.move, record["id"], JobState.CANCELLING, reason=None, message=text)
        await self._call(self._ledger.move, record["id"], JobState.CANCELLED, finished=self._clock.now())

    async def _update_spec(self, spec: JobSpec) -> None:
        """Workers, limits, prices and the budget may differ each time a job is resumed."""
        await asyncio.to_thread(JobFiles(self._data_dir, spec.id).write_spec, spec)
        await self._call(self._ledger.note, spec.id, spec=msgspec.json.encode(spec))

    async def _start(self, spec: JobSpec, *, resume: bool) -> None:
        drive = Drive(spec, self._data_dir, self._books, self._dispatcher, self._clock)
        self._drives[spec.id] = drive
        if resume:
            await drive.reopen()
        drive.task = asyncio.create_task(drive.run())
        drive.task.add_done_callback(lambda _: self._drives.pop(spec.id, None))

    # -- looking ------------------------------------------------------------------------------------------------------

    async def list(self) -> list[JobView]:
        records = await self._call(self._ledger.all_jobs)
        return [await self._view(record) for record in records]

    async def show(self, job_id: str) -> JobView:
        return await self._view(await self._record(job_id))

    async def _record(self, job_id: str) -> sa.RowMapping:
        return await self._call(self._ledger.job, job_id)

    async def _view(self, record: sa.RowMapping) -> JobView:
        errors = await self._call(self._ledger.errors, record["id"])
        view = views.view_of(record, errors)
        drive = self._drives.get(record["id"])
        return view if drive is None else drive.add_to(view)

    async def watch(self, job_id: str, interval_s: float = 0.5) -> AsyncIterator[JobView]:
        while True:
            view = await self.show(job_id)
            drive = self._drives.get(view.id)
            if drive is None:
                yield await self.show(view.id)
                return
            yield view
            done, _ = await asyncio.wait({drive.task}, timeout=interval_s)
            if done:
                self._drives.pop(view.id, None)

    async def partial(self, job_id: str) -> str:
        record = await self._record(job_id)
        files, spec = JobFiles(self._data_dir, record["id"]), read_spec(record["spec"])
        committed = await self._call(self._ledger.committed, spec.id)
        path = files.home / f"partial-{uuid.uuid4().hex}.jsonl"
        order = publishing.gather_order(spec, files, committed, path, cancelled=False)
        await offload("batchmill.jobs.gathering:partial_offloaded", msgspec.json.encode(order), lambda _: None)
        return str(path)

    # -- steering -----------------------------------------------------------------------------------------------------

    async def pause(self, job_id: str) -> JobView:
        record = await self._record(job_id)
        drive = self._drives.get(record["id"])
        if drive is None:
            raise InvalidTransition(f"the job {record['id']} is {record['state']}: only a running job can be paused")
        await drive.pause(PauseReason.ASKED, f"paused; `batchmill resume {record['id']}` goes on")
        return await self.show(record["id"])

    async def resume(self, job_id: str) -> JobView:
        record = await self._record(job_id)
        if record["id"] in self._drives:
            return await self.show(record["id"])
        if record["state"] != JobState.PAUSED:
            raise InvalidTransition(f"the job {record['id']} is {record['state']}: only a paused job can be resumed")
        await self._start(read_spec(record["spec"]), resume=True)
        return await self.show(record["id"])

    async def cancel(self, job_id: str) -> JobView:
        record = await self._record(job_id)
        drive = self._drives.get(record["id"])
        if drive is not None:
            await drive.cancel()
        elif record["state"] == JobState.PAUSED:
            drive = Drive(read_spec(record["spec"]), self._data_dir, self._books, self._dispatcher, self._clock)
            await drive.cancel_paused()
        else:
            raise InvalidTransition(f"the job {record['id']} is {record['state']}: there is nothing left to cancel")
        return await self.show(record["id"])

    async def retry(self, job_id: str) -> JobView:
        record = await self._record(job_id)
        if record["id"] in self._drives or record["state"] not in (JobState.COMPLETED, JobState.CANCELLED):
            raise InvalidTransition(
                f"the job {record['id']} is {record['state']}: rows are retried once it has completed or was cancelled"
            )
        spec = read_spec(record["spec"])
        drive = Drive(spec, self._data_dir, self._books, self._dispatcher, self._clock)
        await drive.open_retry()
        await self._start(spec, resume=False)
        return await self.show(record["id"])

    # -- the ledger itself --------------------------------------------------------------------------------------------

    async def verify(self, job_id: str) -> LedgerReport:
        record = await self._record(job_id)
        files = JobFiles(self._data_dir, record["id"])
        spec = read_spec(record["spec"])
        return await self._call(recovery.verify, self._ledger, spec, files, record["rows"])

    async def rebuild(self, job_id: str) -> LedgerReport:
        record = await self._record_or_files(job_id)
        job_id = record["id"]
        if job_id in self._drives:
            raise InvalidTransition(f"the job {job_id} is running: pause it before its ledger is rebuilt")
        files, spec = JobFiles(self._data_dir, job_id), read_spec(record["spec"])
        before = record["rows_ok"] + record["rows_failed"]
        generations = len(list(files.home.glob("plan-*/plan.json")))
        plan = PlanReader(files.plan(0))
        rows = load_seal(files.dataset).rows
        plan.close()
        found = await self._call(recovery.rebuild, self._ledger, spec, files, generations)
        await self._call(self._ledger.note, job_id, rows=rows, generation=max(0, generations - 1))
        if record["state"] != JobState.CANCELLED:
            text = "the ledger was rebuilt; resume the job: it runs what is missing and writes its results again"
            await self._call(
                self._ledger.note, job_id, state=JobState.PAUSED, reason=PauseReason.INTERRUPTED, message=text
            )
        report = await self.verify(job_id)
        return msgspec.structs.replace(report, adopted=max(0, found - before))

    async def _record_or_files(self, job_id: str) -> sa.RowMapping:
        """The record of a job; made from its description where the database has lost it."""
        try:
            return await self._record(job_id)
        except UnknownName:
            files = JobFiles(self._data_dir, job_id)
            if "/" in job_id or not files.spec.is_file():
                raise
        spec = await asyncio.to_thread(files.read_spec)
        await self._call(self._ledger.create, spec)
        return await self._record(job_id)

    async def close(self, *, at_once: bool = False) -> None:
        """Pause what runs and end every worker."""
        for drive in list(self._drives.values()):
            drive.interrupt()
        tasks = [drive.task for drive in self._drives.values() if drive.task is not None]
        if tasks and not at_once:
            await asyncio.wait(tasks)
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, BatchmillError):
                await task
        await self._dispatcher.close(at_once=at_once)
        self._books.close()
