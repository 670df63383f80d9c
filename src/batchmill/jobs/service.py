"""JobService: the only entrance to jobs, in the owner of the data directory. `ports.jobs.Jobs` documents it.

`Submissions` make jobs of orders, `Transitions` change them, and a `JobRunner` runs each. Here they are put together,
and here jobs are looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from batchmill.children.offload import Children
from batchmill.config import RetentionEntry
from batchmill.errors import InvalidTransition, StorageFailed, UnknownName
from batchmill.jobs import samples, views
from batchmill.jobs.active_jobs import ActiveJobs
from batchmill.jobs.audits import Audits
from batchmill.jobs.finishing import EndListener
from batchmill.jobs.intake import adapters
from batchmill.jobs.intake.reuse_jobs import EarlierJobs
from batchmill.jobs.intake.schema_code import NoSchemaCode, SchemaCode
from batchmill.jobs.job_space import JobSpace
from batchmill.jobs.ledger import ledger
from batchmill.jobs.ledger import records as job_records
from batchmill.jobs.ledger.commits import CommitLog
from batchmill.jobs.ledger.files import JobFiles, read_spec
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.jobs.ledger.scratch import Scratch
from batchmill.jobs.maintenance import Maintenance, StalledJobs
from batchmill.jobs.pools.dispatcher import Dispatcher
from batchmill.jobs.recent_jobs import RecentJobs
from batchmill.jobs.recovery import Recovery
from batchmill.jobs.results import publishing
from batchmill.jobs.retention import Retention, refuse_compacted
from batchmill.jobs.runner_tools import RunnerTools
from batchmill.jobs.submissions import Submissions
from batchmill.jobs.transitions import Transitions
from batchmill.jobs.turns import Turns
from batchmill.ports.clock import Clock
from batchmill.ports.jobs import Adapters, Live
from batchmill.states import PauseReason
from batchmill.store.disk_room import DiskReserve
from batchmill.store.sql.transactions import Record
from batchmill.types import (
    Amendment,
    JobOrder,
    JobQuery,
    JobView,
    LedgerReport,
    ModelSpec,
    Once,
    RemoteJob,
    RetryChange,
    Submitted,
    Wait,
)
from batchmill.wire.job_spec import JobSpec

HERE = "a command on this machine"


class JobService:
    def __init__(
        self,
        space: JobSpace,
        commit_log: CommitLog,
        dispatcher: Dispatcher,
        clock: Clock,
        *,
        adapters: Adapters = adapters.NoAdapters(),
        schema_code: SchemaCode = NoSchemaCode(),
        retention: RetentionEntry = RetentionEntry(),
        children: Children | None = None,
    ) -> None:
        """Take over a data directory; `recover` comes next.

        Args:
            commit_log, dispatcher: this service closes them.
            adapters: fetches the adapters that rows name.
            schema_code: brings the classes that validate answers.
            children: for sealing, planning and gathering; this service closes them. None: new ones.
        """
        data_dir, disk_quota, stored = space.data_dir, space.disk_quota, space.stored
        self._data_dir, self._clock = data_dir, clock
        self._commit_log, self._dispatcher, database = commit_log, dispatcher, commit_log.ledger.database
        self._disk_reserve = DiskReserve(data_dir / "disk_reserve", database.term)
        self._children = children or Children()
        self._scratch = Scratch(data_dir, database)
        earlier = EarlierJobs(space, commit_log.ledger, clock, self._children.offload, self._scratch)
        self.count_reused = earlier.count
        self._tools = RunnerTools(
            data_dir, self._commit_log, self._dispatcher, clock, self._disk_reserve, self._children.offload,
            adapters, schema_code, disk_quota, stored, self._scratch, Turns(), space.is_shared, space.tasks, earlier,
            [],
        )  # fmt: skip
        self._recent = RecentJobs(database)
        self._active, self._audits = ActiveJobs(self._tools), Audits(self._tools)
        self.retention = Retention(data_dir, database, self._active, clock, retention, stored, earlier)
        self._transitions = Transitions(self._tools, self._active)
        self._deadlines = self._transitions.deadlines
        self._submissions = Submissions(space, self._tools, self._active, self._deadlines)
        self._stalled = StalledJobs(data_dir, database, self._active, disk_quota, stored.term)
        self._recovery = Recovery(self._tools, self._active, self._stalled, self._transitions)
        self._maintenance = Maintenance(
            clock, self._disk_reserve, self._stalled.poll, self._recovery.resume_or_note, self._tidy
        )

    def listen_ends(self, listener: EndListener) -> None:
        """Have something stored with the end of each short job."""
        self._tools.end_listeners.append(listener)

    def refuse_storage(self, error: StorageFailed) -> None:
        """Pause every job, because nothing can be stored."""
        for runner in self._active.all_running():
            runner.refuse_storage(error)

    @property
    def dispatcher(self) -> Dispatcher:
        """For observers: it counts rows, and knows the state of every model."""
        return self._dispatcher

    @property
    def counts(self) -> bool:
        """Whether outcomes are still counted."""
        return not self._commit_log.is_broken

    async def wait_failed(self) -> None:
        """Return once the dispatcher or the commit log has ended: then no job goes on."""
        tasks = {self._dispatcher.dispatching.task, self._commit_log.draining.task}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    @property
    def live(self) -> Live:
        return self._dispatcher.live

    async def recover(self, *, resume_server_jobs: bool = False) -> None:
        """Pause the jobs that an earlier owner left running, and bring those that were CANCELLING to their end.

        If the disk is full, nothing can be stored, but jobs can be read. `resume_server_jobs`: resume the jobs that
        came over HTTP, also those that wait for disk space, but none that core tasks keep failing over.
        """
        await self._dispatcher.quarantine.load()
        await self.retention.finish()
        to_resume = await self._recovery.take_over(resume_server_jobs=resume_server_jobs)
        self._disk_reserve.reserve()
        self._deadlines.start()
        if resume_server_jobs:
            self._maintenance.start()
            self._recovery.resume_all(to_resume)
        else:
            await self._recovery.wait_ending()

    async def _tidy(self) -> None:
        await self._ledger.database.write(job_records.forget_old, self._clock.now())
        await self._tools.schema_code.remove_unused()

    @property
    def _ledger(self) -> Ledger:
        return self._commit_log.ledger

    @property
    def _read(self):
        return self._ledger.database.read

    async def submit(self, order: JobOrder) -> Submitted:
        return await self._submissions.submit(order)

    # -- views --------------------------------------------------------------------------------------------------------

    async def list(self, query: JobQuery = JobQuery()) -> list[JobView]:
        return [self._at_work(view) for view in await self._read(job_records.page, query, views.view_of)]

    async def show(self, job_id: str) -> JobView:
        view = self._recent.get(job_id)
        return self._at_work(await self._recent.read(job_id) if view is None else view)

    def show_recent(self, job_id: str) -> JobView | None:
        view = self._recent.get(job_id)
        return None if view is None else self._at_work(view)

    async def _record(self, job_id: str) -> Record:
        return await self._read(job_records.find, job_id)

    def _at_work(self, view: JobView) -> JobView:
        runner = self._active.get(view.id)
        return view if runner is None else views.view_at_work(view, runner, self._dispatcher)

    async def watch(self, job_id: str, interval_s: float = 0.5) -> AsyncIterator[JobView]:
        while True:
            view = self._at_work(await self._recent.read(job_id))  # which waits: a resume that has begun gets its lock
            runner = self._active.running(view.id)
            if runner is None:
                async with self._active.lock(view.id):  # it may be about to be resumed
                    runner = self._active.running(view.id)
                view = await self.show(view.id)  # it may have changed meanwhile
                if runner is None and self._active.running(view.id) is not None:
                    continue  # this is no end: it has been resumed
            if runner is None or runner.task is None:
                yield view
                return
            yield view
            await asyncio.wait({runner.task}, timeout=interval_s)

    async def explain(self, job_id: str) -> Wait:
        view = await self.show(job_id)
        runner = self._active.running(view.id)
        if runner is None:
            return views.wait_without_runner(view, is_stranded=view.id in self._stalled.stranded)
        return views.wait_with_runner(view, runner, self._dispatcher, self._clock.monotonic())

    async def partial(self, job_id: str, *, is_numbered: bool = False, sampled: bool = False) -> str:
        record = await self._record(job_id)
        refuse_compacted(record, "--partial")
        spec = read_spec(record["spec"])
        sample = samples.checked(spec) if sampled else None
        committed = await self._commit_log.call_reader(self._ledger.committed, spec.id)
        async with self._audits.use(record, is_running=self._is_running(spec.id)) as files:  # which brings all of it
            place = await self._audits.segments(spec)
            return await publishing.write_partial(
                spec, files, place, committed, self._children.offload, is_numbered=is_numbered, sample=sample
            )

    async def remote(self, job_id: str) -> list[RemoteJob]:
        record = await self._record(job_id)
        return await self._read(ledger.remote_jobs, record["id"])

    # -- changes ------------------------------------------------------------------------------------------------------

    async def pause(self, job_id: str) -> JobView:
        await self._transitions.pause(job_id)
        return await self.show(job_id)

    async def fail_rows(self, job_id: str) -> JobView:
        await self._transitions.fail_rows(job_id)
        return await self.show(job_id)

    async def resume(self, job_id: str) -> JobView:
        await self._transitions.resume(job_id)
        return await self.show(job_id)

    async def resume_interrupted(self, job_id: str) -> None:
        await self._transitions.resume(job_id, only={PauseReason.INTERRUPTED})

    async def cancel(self, job_id: str) -> JobView:
        await self._transitions.cancel(job_id)
        return await self.show(job_id)

    async def retry(
        self, job_id: str, change: RetryChange = RetryChange(), model: ModelSpec | None = None,
        once: Once | None = None,
    ) -> JobView:  # fmt: skip
        await self._transitions.retry(job_id, change, model, once)
        return await self.show(job_id)

    async def amend(self, job_id: str, change: Amendment) -> JobView:
        await self._transitions.amend(job_id, change)
        return await self.show(job_id)

    async def settle_remote(self, job_id: str, tag: str, remote_id: str | None) -> RemoteJob:
        return await self._transitions.settle_remote(job_id, tag, remote_id)

    # -- ledger -------------------------------------------------------------------------------------------------------

    async def remove(self, job_id: str, by: str = HERE) -> JobView:
        await self.retention.remove((view := await self.show(job_id)).id, by)
        return view

    async def verify(self, job_id: str) -> LedgerReport:
        record = await self._record(job_id)
        refuse_compacted(record, "an audit")
        report = await self._audits.verify(record, is_running=self._is_running(record["id"]))
        # If it was compacted meanwhile, the audit missed files.
        refuse_compacted(await self._record(record["id"]), "an audit")
        return report

    def _is_running(self, job_id: str) -> bool:
        return self._active.running(job_id) is not None

    async def rebuild(self, job_id: str) -> LedgerReport:
        spec = await self._spec_or_file(job_id)
        self._refuse_running(spec.id)
        if JobFiles(self._data_dir, spec.id).ending.exists():
            refuse_compacted(await self._record(spec.id), "a rebuild")
        async with self._audits.rebuild(spec) as (before, rebuilt), self._active.lock(spec.id):
            self._refuse_running(spec.id)
            await self._audits.store_plans(spec)
            await self._commit_log.write(self._ledger.replace, spec, before, rebuilt)
        report = await self.verify(spec.id)
        return msgspec.structs.replace(
            report, adopted=rebuilt.adopted, reopened=rebuilt.reopened, damaged=rebuilt.damaged
        )

    def _refuse_running(self, job_id: str) -> None:
        if self._is_running(job_id):
            raise InvalidTransition(f"the job {job_id} is running: pause it before its ledger is rebuilt")

    async def _spec_or_file(self, job_id: str) -> JobSpec:
        """The spec of a job, from its file if the database has lost it."""
        try:
            return read_spec((await self._record(job_id))["spec"])
        except UnknownName:
            files = JobFiles(self._data_dir, job_id)
            if "/" in job_id or not files.spec.is_file():
                raise
        return await asyncio.to_thread(files.read_spec)

    async def close(self, *, at_once: bool = False) -> None:
        """Pause running jobs and end every worker; `at_once`: do not wait for rows in flight."""
        await self._recovery.close()
        await self._submissions.close()
        await self._maintenance.close()
        await self._deadlines.close()
        await self._active.close(at_once=at_once)
        if not at_once:
            await self._dispatcher.close()
        await self._children.close()
        self._scratch.close()
        self._commit_log.close()
