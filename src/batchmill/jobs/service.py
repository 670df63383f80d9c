"""JobService: the one door to jobs, in the process that owns the data directory. See `ports.Jobs` for its promises."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import sqlalchemy as sa

from batchmill import faults
from batchmill.errors import BatchmillError, InvalidInput, InvalidTransition, StorageFull, UnknownName
from batchmill.jobs import orders, publishing, views
from batchmill.jobs.audit import AuditOrder
from batchmill.jobs.commits import Books
from batchmill.jobs.dispatcher import Dispatcher
from batchmill.jobs.drive import Drive, Tools
from batchmill.jobs.job_files import JobFiles, read_spec
from batchmill.jobs.ledger import Ledger
from batchmill.jobs.ledger_snapshot import Rebuilt
from batchmill.jobs.offload import offload
from batchmill.ports import Clock, Executor
from batchmill.states import JobState, PauseReason
from batchmill.store.ballast import Ballast
from batchmill.types import JobOrder, JobView, LedgerReport, Submitted
from batchmill.wire.job_spec import JobSpec

CLOSE_S = 5.0  # drives that are to end at once have so long to write down that they paused


class JobService:
    def __init__(self, data_dir: Path, ledger: Ledger, executor: Executor, clock: Clock) -> None:
        self._data_dir, self._clock = data_dir, clock
        self._books = Books(ledger)
        self._dispatcher = Dispatcher(data_dir, self._books, executor, clock)
        self._ballast = Ballast(data_dir / "ballast")
        self._tools = Tools(data_dir, self._books, self._dispatcher, clock, self._ballast)
        self._drives: dict[str, Drive] = {}
        self._steering = asyncio.Lock()  # one command at a time decides what becomes of a job

    async def recover(self) -> None:
        """What an owner that died left running becomes paused: its rows are safe, and it goes on when asked.

        What it was cancelling is cancelled. On a full disk nothing can be written down, but all can be looked at.
        """
        for record in await self._call(self._ledger.all_jobs):
            state = JobState(record["state"])
            with contextlib.suppress(StorageFull):
                if state is JobState.CANCELLING:
                    await self._end_cancel(record)
                elif state is not JobState.PAUSED and not state.is_at_rest:
                    text = "the process that ran this job ended; resume it and it goes on where it was"
                    reason = PauseReason.INTERRUPTED
                    await self._call(self._ledger.move, record["id"], JobState.PAUSED, reason=reason, message=text)
        self._ballast.reserve()

    async def _end_cancel(self, record: sa.RowMapping) -> None:
        try:
            await Drive(read_spec(record["spec"]), self._tools).finish_cancel()
        except BatchmillError as error:
            reason = PauseReason.INTERRUPTED
            await self._call(self._ledger.move, record["id"], JobState.PAUSED, reason=reason, message=error.message)

    @property
    def _ledger(self) -> Ledger:
        return self._books.ledger

    @property
    def _call(self):
        return self._books.call

    # -- submitting ---------------------------------------------------------------------------------------------------

    async def submit(self, order: JobOrder) -> Submitted:
        async with self._steering:
            spec = await asyncio.to_thread(orders.describe, order, self._clock.now())
            known, is_same = await self._known(spec)
            if known is not None and is_same and not self._is_anew(known, order):
                return await self._take_up(known, spec)
            unfinished = known is not None and known["state"] != JobState.COMPLETED
            if unfinished and not is_same and not order.restart:
                raise InvalidInput(
                    f"{', '.join(spec.dataset.paths)} changed since the unfinished job {known['id']} began: "
                    "restore it, or start over with --restart",
                    code="input_changed",
                )
            if known is None and not order.overwrite:
                await asyncio.to_thread(orders.refuse_if_there, spec)
            records = await self._call(self._ledger.all_jobs)
            others = [record for record in records if known is None or record["id"] != known["id"]]
            await asyncio.to_thread(orders.refuse_if_taken, spec, others)
            if unfinished:
                await self._set_aside(known)
            await asyncio.to_thread(JobFiles(self._data_dir, spec.id).write_spec, spec)
            faults.point("after_describe")
            await self._call(self._ledger.create, spec)
            faults.point("after_create")
            self._start(Drive(spec, self._tools))
            return Submitted(spec.id, "started")

    async def _known(self, spec: JobSpec) -> tuple[sa.RowMapping | None, bool]:
        """The job that a description is already, and whether its input is the same.

        A job over other input is another job, unless the two would write to one output from the same files.
        """
        changed = None
        for record in await self._call(self._ledger.by_identity, spec.identity):
            if await asyncio.to_thread(orders.same_input, spec, JobFiles(self._data_dir, record["id"])):
                return record, True
            if spec.output is not None and spec.dataset.paths == read_spec(record["spec"]).dataset.paths:
                changed = changed or record
        return changed, False

    @staticmethod
    def _is_anew(record: sa.RowMapping, order: JobOrder) -> bool:
        """The caller wants the known job to be run from its beginning again."""
        return order.restart or (order.overwrite and record["state"] == JobState.COMPLETED)

    async def _take_up(self, record: sa.RowMapping, spec: JobSpec) -> Submitted:
        """Go on with a job where it is: finished, running, or to be resumed."""
        job_id, earlier = record["id"], read_spec(record["spec"])
        if record["state"] == JobState.COMPLETED:
            orders.check_code(earlier, spec.code, "run it again with --overwrite")
            if os.path.exists(record["output"]):
                return Submitted(job_id, "finished")
        elif self._has_run(record):
            orders.check_code(earlier, spec.code, "finish it with the code it began with, or start over with --restart")
        await self._let_rest(job_id)
        if job_id in self._drives:
            return Submitted(job_id, "joined")
        spec = orders.new_id_form(spec, job_id)
        await self._reopen(spec)
        return Submitted(job_id, "resumed")

    @staticmethod
    def _has_run(record: sa.RowMapping) -> bool:
        return record["rows_ok"] + record["rows_failed"] > record["rows_rejected"]

    async def _set_aside(self, record: sa.RowMapping) -> None:
        """End an unfinished job that is started over: it writes no results."""
        drive = self._drives.get(record["id"])
        if drive is not None:
            await drive.pause(PauseReason.ASKED, "about to be started over")
        text = "started over by another job with --restart; its results were not written"
        await self._call(self._ledger.move, record["id"], JobState.CANCELLING, reason=None, message=text)
        await self._call(self._ledger.move, record["id"], JobState.CANCELLED, finished=self._clock.now())

    async def _let_rest(self, job_id: str) -> None:
        """Wait for a drive that has paused its job already and is only tidying up."""
        drive = self._drives.get(job_id)
        if drive is not None and drive.is_resting and drive.task is not None:
            await asyncio.wait({drive.task})
            self._forget(drive)

    async def _reopen(self, spec: JobSpec) -> None:
        await self._save(spec)
        drive = Drive(spec, self._tools)
        await drive.reopen()
        self._start(drive)

    async def _save(self, spec: JobSpec) -> None:
        """Workers, limits, prices and the budget may differ each time a job goes on."""
        await asyncio.to_thread(JobFiles(self._data_dir, spec.id).write_spec, spec)
        await self._call(self._ledger.note, spec.id, spec=msgspec.json.encode(spec))

    def _start(self, drive: Drive) -> None:
        drive.task = asyncio.create_task(drive.run())
        self._drives[drive.spec.id] = drive
        drive.task.add_done_callback(lambda _: self._forget(drive))

    def _forget(self, drive: Drive) -> None:
        if self._drives.get(drive.spec.id) is drive:
            del self._drives[drive.spec.id]

    # -- looking ------------------------------------------------------------------------------------------------------

    async def list(self) -> list[JobView]:
        records = await self._call(self._ledger.all_jobs)
        views = [await self._view(record) for record in records]
        return [msgspec.structs.replace(view, problems=[]) for view in views]

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
            if drive is None or drive.task is None or drive.is_resting:
                yield await self.show(view.id)
                return
            yield view
            done, _ = await asyncio.wait({drive.task}, timeout=interval_s)
            if done:
                self._forget(drive)

    async def partial(self, job_id: str) -> str:
        record = await self._record(job_id)
        files, spec = JobFiles(self._data_dir, record["id"]), read_spec(record["spec"])
        committed = await self._call(self._ledger.committed, spec.id)
        path = files.home / f"partial-{uuid.uuid4().hex}.jsonl"
        order = publishing.gather_order(spec, files, committed, path, cancelled=False)
        try:
            await offload("batchmill.jobs.gathering:partial_offloaded", msgspec.json.encode(order), lambda _: None)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
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
        async with self._steering:
            record = await self._record(job_id)
            await self._let_rest(record["id"])
            if record["id"] not in self._drives:
                record = await self._record(record["id"])
                if record["state"] != JobState.PAUSED:
                    raise InvalidTransition(
                        f"the job {record['id']} is {record['state']}: only a paused job is resumed"
                    )
                spec = await self._checked(record, "restore it and resume, or start over with --restart")
                await self._reopen(spec)
        return await self.show(record["id"])

    async def _checked(self, record: sa.RowMapping, way_out: str) -> JobSpec:
        """The description of a job that is to go on: the code it began with, an output that is still its own."""
        spec = read_spec(record["spec"])
        code = await asyncio.to_thread(orders.code_of, spec.models)
        if self._has_run(record):
            orders.check_code(spec, code, way_out)
        records = await self._call(self._ledger.all_jobs)
        await asyncio.to_thread(orders.refuse_if_taken, spec, records, record["finished"])
        return msgspec.structs.replace(spec, code=code)

    async def cancel(self, job_id: str) -> JobView:
        record = await self._record(job_id)
        drive = self._drives.get(record["id"])
        if drive is not None and not drive.is_resting:
            await drive.cancel()
            return await self.show(record["id"])
        async with self._steering:
            await self._let_rest(record["id"])
            record = await self._record(record["id"])
            if record["state"] != JobState.PAUSED:
                raise InvalidTransition(f"the job {record['id']} is {record['state']}: there is nothing left to cancel")
            await Drive(read_spec(record["spec"]), self._tools).cancel_paused()
        return await self.show(record["id"])

    async def retry(self, job_id: str) -> JobView:
        async with self._steering:
            record = await self._record(job_id)
            await self._let_rest(record["id"])
            if record["id"] in self._drives or record["state"] not in (JobState.COMPLETED, JobState.CANCELLED):
                raise InvalidTransition(
                    f"the job {record['id']} is {record['state']}: only rows of an ended job are retried"
                )
            spec = read_spec(record["spec"])
            records = await self._call(self._ledger.all_jobs)
            await asyncio.to_thread(orders.refuse_if_taken, spec, records, record["finished"])
            # Code that was mended is what a retry is for.
            spec = msgspec.structs.replace(spec, code=await asyncio.to_thread(orders.code_of, spec.models))
            drive = Drive(spec, self._tools)
            await drive.open_retry()
            await self._save(spec)
            self._start(drive)
        return await self.show(record["id"])

    # -- the ledger itself --------------------------------------------------------------------------------------------

    async def verify(self, job_id: str) -> LedgerReport:
        record = await self._record(job_id)
        order = await self._audit_order(read_spec(record["spec"]))
        work = offload("batchmill.jobs.audit:verify_offloaded", msgspec.json.encode(order), lambda _: None)
        return msgspec.json.decode(await work, type=LedgerReport)

    async def _audit_order(self, spec: JobSpec) -> AuditOrder:
        return AuditOrder(spec, str(self._data_dir), await self._call(self._ledger.snapshot, spec.id))

    async def rebuild(self, job_id: str) -> LedgerReport:
        spec = await self._spec_or_file(job_id)
        self._refuse_running(spec.id)
        order = await self._audit_order(spec)
        work = offload("batchmill.jobs.repair:rebuild_offloaded", msgspec.json.encode(order), lambda _: None)
        rebuilt = msgspec.json.decode(await work, type=Rebuilt)
        async with self._steering:
            self._refuse_running(spec.id)
            await self._call(self._ledger.replace, spec, order.before, rebuilt)
        report = await self.verify(spec.id)
        return msgspec.structs.replace(
            report, adopted=rebuilt.adopted, reopened=rebuilt.reopened, damaged=rebuilt.damaged
        )

    def _refuse_running(self, job_id: str) -> None:
        drive = self._drives.get(job_id)
        if drive is not None and not drive.is_resting:
            raise InvalidTransition(f"the job {job_id} is running: pause it before its ledger is rebuilt")

    async def _spec_or_file(self, job_id: str) -> JobSpec:
        """The description of a job; from its file where the database has lost it."""
        try:
            return read_spec((await self._record(job_id))["spec"])
        except UnknownName:
            files = JobFiles(self._data_dir, job_id)
            if "/" in job_id or not files.spec.is_file():
                raise
        return await asyncio.to_thread(files.read_spec)

    async def close(self, *, at_once: bool = False) -> None:
        """Pause what runs and end every worker; `at_once`: without waiting for rows in flight."""
        drives = list(self._drives.values())
        for drive in drives:
            drive.at_once = at_once
            drive.interrupt()
        if at_once:
            await self._dispatcher.close(at_once=True)
        tasks = [drive.task for drive in drives if drive.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S if at_once else None)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        if not at_once:
            await self._dispatcher.close()
        self._books.close()
