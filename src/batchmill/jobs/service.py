"""JobService: the only entrance to jobs, in the owner of the data directory. `ports.Jobs` documents it.

An order becomes a job: an existing one with the same key or the same content, or a new one. A `JobRunner` runs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec
import sqlalchemy as sa

from batchmill import faults
from batchmill.children.offload import Children
from batchmill.config import RetentionEntry
from batchmill.datasets import spooled_inputs
from batchmill.errors import (
    BatchmillError,
    DatabaseUnavailable,
    InvalidInput,
    InvalidTransition,
    StorageFailed,
    StorageFull,
    UnknownName,
)
from batchmill.jobs import early_end, samples, views
from batchmill.jobs.active_jobs import ActiveJobs
from batchmill.jobs.audits import Audits
from batchmill.jobs.early_end import EarlyEnd
from batchmill.jobs.failover import with_code
from batchmill.jobs.intake import adapters, orders, retries, routing
from batchmill.jobs.intake.reuse_jobs import EarlierJobs
from batchmill.jobs.intake.reuse_orders import settled
from batchmill.jobs.job_space import JobSpace
from batchmill.jobs.ledger import ledger
from batchmill.jobs.ledger import records as job_records
from batchmill.jobs.ledger.commits import CommitLog
from batchmill.jobs.ledger.core_task import was_cut_off
from batchmill.jobs.ledger.files import (
    JobFiles,
    clear_unsealed,
    full_disk_named,
    read_spec,
    result_exists,
    sweep_orphans,
)
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.jobs.ledger.scratch import Scratch
from batchmill.jobs.maintenance import JobDeadlines, Maintenance, StalledJobs
from batchmill.jobs.pools.dispatcher import Dispatcher
from batchmill.jobs.results import publishing
from batchmill.jobs.retention import Retention, refuse_compacted
from batchmill.jobs.runner import JobRunner
from batchmill.jobs.runner_tools import RunnerTools
from batchmill.jobs.samples import Samples
from batchmill.jobs.turns import Turns
from batchmill.ports import Adapters, Clock, Live
from batchmill.states import ENDED, JobState, PauseReason
from batchmill.store.disk_room import DiskReserve
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

REMOTE_ID_CHARS_MAX = 512
ENDING_S = 60.0  # a command waits so long for ending jobs; collecting from providers may take longer
HERE = "a command on this machine"
INTERRUPTED = "the process that ran this job ended; resume the job to continue"


class JobService:
    def __init__(
        self,
        space: JobSpace,
        commit_log: CommitLog,
        dispatcher: Dispatcher,
        clock: Clock,
        *,
        adapters: Adapters = adapters.NoAdapters(),
        retention: RetentionEntry = RetentionEntry(),
        children: Children | None = None,
    ) -> None:
        """Take over a data directory; `recover` comes next.

        Args:
            commit_log, dispatcher: this service closes them.
            adapters: fetches the adapters that rows name.
            children: for sealing, planning and gathering; this service closes them. None: new ones.
        """
        self._space = space
        data_dir, disk_quota, stored = space.data_dir, space.disk_quota, space.stored
        self._data_dir, self._stored, self._clock = data_dir, stored, clock
        self._commit_log, self._dispatcher, database = commit_log, dispatcher, commit_log.ledger.database
        self._disk_reserve = DiskReserve(data_dir / "disk_reserve")
        self._children = children or Children()
        self._scratch = Scratch(data_dir, database)
        earlier = EarlierJobs(space, commit_log.ledger, clock, self._children.offload)
        self.count_reused = earlier.count
        self._tools = RunnerTools(
            data_dir, self._commit_log, self._dispatcher, clock, self._disk_reserve, self._children.offload,
            adapters, disk_quota, stored, self._scratch, Turns(), space.is_shared, space.tasks, earlier,
        )  # fmt: skip
        self._active, self._audits = ActiveJobs(self._tools), Audits(self._tools)
        self._samples = Samples(self._tools)
        self._submitting: set[asyncio.Task[Submitted]] = set()
        self.retention = Retention(data_dir, database, self._active, clock, retention, stored, earlier.keep)
        self._deadlines = JobDeadlines(clock, self._upcoming, self._expire)
        self._stalled = StalledJobs(data_dir, database, self._active, disk_quota)
        self._maintenance = Maintenance(clock, self._disk_reserve, self._stalled.poll, self._resume_or_note, self._tidy)
        self._resuming: asyncio.Task[None] | None = None

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
        ending: list[JobRunner] = []
        to_resume: list[str] = []
        unfinished = await self._read(job_records.unfinished)
        await asyncio.to_thread(clear_unsealed, self._data_dir, [record["id"] for record in unfinished])
        for record in unfinished:
            state, spec = JobState(record["state"]), read_spec(record["spec"])
            if state is JobState.CANCELLING:
                ending.append(self._active.start(self._active.runner(spec)))
            elif state is JobState.PAUSED:
                to_resume += [spec.id] if spec.origin and was_cut_off(record) else []
            elif await self._pause_interrupted(spec.id) or resume_server_jobs:
                to_resume += [spec.id] if spec.origin else []
        job_ids = await self._read(job_records.ids)
        await asyncio.to_thread(sweep_orphans, self._data_dir, job_ids)
        self._disk_reserve.reserve()
        self._deadlines.start()
        if resume_server_jobs:
            self._maintenance.start()
            self._resuming = asyncio.create_task(self._resume_all(to_resume))
        elif ending:
            await asyncio.wait({each.task for each in ending if each.task is not None}, timeout=ENDING_S)

    async def _pause_interrupted(self, job_id: str) -> bool:
        """Store that a job was interrupted. False if the disk is full: its record still has a running state."""
        try:
            if (await self._record(job_id))["state"] != JobState.PAUSED:
                await self._move(job_id, JobState.PAUSED, reason=PauseReason.INTERRUPTED, message=INTERRUPTED)
        except (StorageFull, DatabaseUnavailable):
            self._stalled.stranded.add(job_id)
            return False
        return True

    async def _resume_all(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            await self._resume_or_note(job_id)

    async def _resume_or_note(self, job_id: str) -> None:
        """Resume a paused job, or note in its record why it cannot be resumed."""
        is_stranded = job_id in self._stalled.stranded
        self._stalled.stranded.discard(job_id)
        try:
            if not is_stranded or await self._pause_interrupted(job_id):
                await self.resume(job_id)
        except InvalidTransition:
            return  # its state was changed meanwhile
        except (StorageFull, StorageFailed, DatabaseUnavailable):
            self._stalled.stranded.add(job_id)  # maintenance tries again
        except BatchmillError as error:
            await self._commit_log.write(self._ledger.note, job_id, message=error.message)

    @property
    def _ledger(self) -> Ledger:
        return self._commit_log.ledger

    @property
    def _read(self):
        return self._ledger.database.read

    async def _move(self, job_id: str, state: JobState, **fields: object) -> None:
        await self._commit_log.write(self._ledger.move, job_id, state, **fields)

    # -- submit -------------------------------------------------------------------------------------------------------

    async def submit(self, order: JobOrder) -> Submitted:
        """As `ports.Jobs.submit`. A submission that has begun is completed, even if its caller is cancelled."""
        task = asyncio.create_task(self._submit(settled(order, self._space.projects)))
        self._submitting.add(task)
        task.add_done_callback(self._submitted)
        return await asyncio.shield(task)

    def _submitted(self, task: asyncio.Task[Submitted]) -> None:
        self._submitting.discard(task)
        if not task.cancelled():
            task.exception()  # the caller gets it, if it still waits

    async def _submit(self, order: JobOrder) -> Submitted:
        once = order.once
        if once is None:
            submitted = await self._match_or_create(order)
        else:
            async with self._active.lock(once.key):
                known = await job_records.known(self._ledger.database, once, self._clock.now())
                submitted = await self._match_or_create(order) if known is None else Submitted(known, "repeated")
        if order.policy.deadline is not None:
            self._deadlines.added(order.policy.deadline)
        return submitted

    async def _match_or_create(self, order: JobOrder) -> Submitted:
        if order.origin is not None:  # over a server's API: always another job
            spec = await self._describe(order)
            if spec.output is None:
                return await self._create(spec, order.once)
            async with self._active.lock(f"outputs of {spec.project}"):
                others = await self._read(job_records.writing_objects)
                await asyncio.to_thread(orders.refuse_shared_output, spec, others)
                spec = await asyncio.to_thread(orders.checked_output, spec, may_replace=order.overwrite)
                return await self._create(spec, order.once)
        async with self._active.outputs:
            return await self._match(order, await self._describe(order))

    async def _describe(self, order: JobOrder) -> JobSpec:
        spec = await asyncio.to_thread(orders.describe, order, self._clock.now())
        return orders.placed(spec, self._space.data_dir, self._space.stored, is_shared=self._space.is_shared)

    async def _create(self, spec: JobSpec, once: Once | None) -> Submitted:
        """Create a job. Its folder exists before its ledger record; if that cannot be stored, the folder is removed."""
        if (disk_quota := self._tools.disk_quota_of(spec)) is not None:
            await disk_quota.check(spec.project)
        files = self._scratch.files(spec)
        try:
            with full_disk_named(files.home):
                if not spec.is_small:
                    await asyncio.to_thread(files.write_spec, spec)
                    read = [*spec.dataset.paths, *(model.source for model in spec.models)]
                    await asyncio.to_thread(spooled_inputs.keep, self._data_dir, read, spec.id)
            faults.point("after_describe")
            await self._ledger.database.write(job_records.enter, spec, once, self._tools.quota_of(spec))
        except BaseException:
            await asyncio.to_thread(files.remove)
            await asyncio.to_thread(spooled_inputs.release, self._data_dir, spec.id)
            raise
        faults.point("after_create")
        self._active.start(self._active.runner(spec, JobState.VALIDATING))
        return Submitted(spec.id, "started")

    async def _match(self, order: JobOrder, spec: JobSpec) -> Submitted:
        """Find the job that an identical order created, unless it must run again."""
        known, is_same = await self._samples.find_existing(spec)
        is_sample = known is not None and orders.is_sample(known)
        if known is not None and is_same and not await asyncio.to_thread(job_records.must_run_again, known, order):
            if not is_sample:
                return await self._continue(known, spec)
            if not samples.has_other_code(known, spec):
                return await self._continue(known, await self._samples.claim_output(known, spec))
        unfinished = known is not None and known["state"] != JobState.COMPLETED
        if unfinished and not is_same and not order.restart:
            raise InvalidInput(
                f"{', '.join(spec.dataset.paths)} changed since the unfinished job {known['id']} began: "
                "restore it, or start over with --restart",
                code="input_changed",
            )
        if spec.output is not None:
            records = await self._read(job_records.naming_outputs)
            earlier = None if is_sample else known
            may_replace = await asyncio.to_thread(orders.may_replace, order, spec, earlier, records, is_same=is_same)
            spec = await asyncio.to_thread(orders.checked_output, spec, may_replace=may_replace)
            others = [record for record in records if known is None or record["id"] != known["id"]]
            await asyncio.to_thread(orders.refuse_shared_output, spec, others)
        if unfinished:
            await self._abandon(known)
        return await self._create(spec, order.once)

    async def _continue(self, record: sa.RowMapping, spec: JobSpec) -> Submitted:
        """Continue an existing job: it is finished, running, or must be resumed."""
        job_id, earlier = record["id"], read_spec(record["spec"])
        kept = adapters.keep_adapters(routing.keep_routes(orders.new_id_form(spec, job_id), earlier), earlier)
        kept = retries.keep_retries(kept, earlier)
        spec = await asyncio.to_thread(with_code, kept)
        if record["state"] == JobState.COMPLETED:
            orders.check_code(earlier, spec.code, "run it again with --overwrite")
            if await asyncio.to_thread(result_exists, record["output"]):
                return Submitted(job_id, "finished")
        elif orders.has_run(record):
            orders.check_code(earlier, spec.code, "finish it with the code it began with, or start over with --restart")
        async with self._active.lock(job_id):
            if await self._active.wait_settled(job_id) is not None:
                return Submitted(job_id, "joined")
            await self._restart(spec)
        return Submitted(job_id, "resumed")

    async def _restart(self, spec: JobSpec) -> None:
        """Resume a paused job with this spec."""
        runner = self._active.runner(spec)
        await runner.resume()
        self._active.start(runner)

    async def _abandon(self, record: sa.RowMapping) -> None:
        """End an unfinished job that is started over: it writes no results."""
        job_id = record["id"]
        async with self._active.lock(job_id):
            runner = self._active.get(job_id)
            if runner is not None:
                await runner.pause(PauseReason.REQUESTED, "about to be started over")
            text = "started over by another job with --restart; its results were not written"
            now = self._clock.now()
            await self._move(job_id, JobState.CANCELLING, reason=None, message=text, cancelling=now)
            await self._move(job_id, JobState.CANCELLED, finished=now)

    # -- views --------------------------------------------------------------------------------------------------------

    async def list(self, query: JobQuery = JobQuery()) -> list[JobView]:
        return [self._view(record, errors) for record, errors in await self._read(job_records.page, query)]

    async def show(self, job_id: str) -> JobView:
        return self._view(*await self._read(job_records.find_with_errors, job_id))

    async def _record(self, job_id: str) -> sa.RowMapping:
        return await self._read(job_records.find, job_id)

    def _view(self, record: sa.RowMapping, errors: job_records.Errors) -> JobView:
        view = views.view_of(record, errors)
        runner = self._active.get(record["id"])
        return view if runner is None else views.view_at_work(view, runner, self._dispatcher)

    async def watch(self, job_id: str, interval_s: float = 0.5) -> AsyncIterator[JobView]:
        while True:
            view = await self.show(job_id)
            runner = self._active.running(view.id)
            if runner is None:
                async with self._active.lock(view.id):  # it may be about to be resumed
                    runner = self._active.running(view.id)
                view = await self.show(view.id)  # it may have changed meanwhile
            if runner is None or runner.task is None:
                yield await self.show(view.id)
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

    # -- changes ------------------------------------------------------------------------------------------------------

    async def pause(self, job_id: str) -> JobView:
        record = await self._record(job_id)
        runner = self._active.get(record["id"])
        if runner is None or record["state"] == JobState.CANCELLING:
            raise InvalidTransition(f"the job {record['id']} is {record['state']}: only a running job can be paused")
        await runner.pause(PauseReason.REQUESTED, f"paused; `batchmill resume {record['id']}` continues it")
        return await self.show(record["id"])

    async def fail_rows(self, job_id: str) -> JobView:
        record = await self._record(job_id)
        orders.check_rows_may_wait(read_spec(record["spec"]), record["state"])
        await self.resume(record["id"])
        if (runner := self._active.running(record["id"])) is not None:
            runner.fail_rows()
        return await self.show(record["id"])

    async def resume(self, job_id: str) -> JobView:
        record = await self._record(job_id)
        async with self._active.lock_job(record):
            if await self._active.wait_settled(record["id"]) is None:
                record = await self._record(record["id"])
                if record["state"] != JobState.PAUSED:
                    raise InvalidTransition(
                        f"the job {record['id']} is {record['state']}: only a paused job is resumed"
                    )
                await self._restart(await self._checked(record))
        self._deadlines.changed()
        return await self.show(record["id"])

    async def _checked(self, record: sa.RowMapping) -> JobSpec:
        """The spec of a job to continue: its original code, and an output that still belongs to it."""
        spec = read_spec(record["spec"])
        if record["cancelling"] is not None:
            return spec  # none of its rows will run
        if orders.is_sample(record):
            spec = await self._samples.go_on(record, spec)
        code = await self._code_now(spec)
        if orders.has_run(record):
            orders.check_code(spec, code, "restore it and resume, or start over with --restart")
        await self._refuse_shared_output(spec, record)
        return msgspec.structs.replace(spec, code=code)

    @staticmethod
    async def _code_now(spec: JobSpec) -> dict[str, str]:
        return await asyncio.to_thread(orders.code_of, spec.models, by_frontend=spec.origin is not None)

    async def _refuse_shared_output(self, spec: JobSpec, record: sa.RowMapping) -> None:
        if spec.output is not None:
            others = await self._read(job_records.naming_outputs)
            await asyncio.to_thread(orders.refuse_shared_output, spec, others, record["finished"])

    async def cancel(self, job_id: str) -> JobView:
        record = await self._record(job_id)
        runner = await self._end_early(record["id"], early_end.CANCELLED)
        if record["frontend"] is None:  # a command waits for the results
            await runner.wait_stopped()
        return await self.show(record["id"])

    async def _end_early(self, job_id: str, early: EarlyEnd) -> JobRunner:
        """End a job without its remaining rows. Returns once that is stored, or if it is too late.

        Raises: InvalidTransition.
        """
        while True:
            runner = self._active.running(job_id)
            if runner is not None:
                await runner.end_early(early)
                if (await self._record(job_id))["state"] != JobState.PAUSED:
                    return runner
            async with self._active.lock(job_id):
                if await self._active.wait_settled(job_id) is not None:
                    continue  # it was resumed meanwhile
                record = await self._record(job_id)
                if record["state"] != JobState.PAUSED:
                    raise InvalidTransition(f"the job {job_id} is {record['state']}: there is nothing left to cancel")
                cancelling = early_end.begins_at(early, record["deadline"], self._clock.now())
                spec, columns = await self._samples.yield_output(record)
                fields = {"reason": early.reason, "message": "", "cancelling": cancelling, **columns}
                await self._move(job_id, JobState.CANCELLING, **fields)
                runner = self._active.runner(spec)
                runner.skips_remote = record["cancelling"] is not None  # the first could not collect results
                return self._active.start(runner)

    async def retry(
        self, job_id: str, change: RetryChange = RetryChange(), model: ModelSpec | None = None
    ) -> JobView:  # fmt: skip
        record = await self._record(job_id)
        async with self._active.lock_job(record):
            runner = await self._active.wait_settled(record["id"])
            record = await self._record(record["id"])
            if runner is not None or record["state"] not in ENDED - {JobState.FAILED}:
                raise InvalidTransition(
                    f"the job {record['id']} is {record['state']}: only rows of an ended job are retried"
                )
            refuse_compacted(record, "a retry")
            spec = samples.whole(orders.without_past_deadline(read_spec(record["spec"]), self._clock.now()))
            await self._refuse_shared_output(spec, record)
            # A retry uses the current code, which may have been fixed.
            runner = self._active.runner(msgspec.structs.replace(spec, code=await self._code_now(spec)))
            await runner.retry(change, model)
            self._active.start(runner)
        self._deadlines.changed()
        return await self.show(record["id"])

    async def amend(self, job_id: str, change: Amendment) -> JobView:
        record = await self._record(job_id)
        async with self._active.lock(record["id"]):
            record = await self._record(record["id"])
            if record["state"] in ENDED or record["cancelling"] is not None:
                raise InvalidTransition(f"the job {record['id']} is {record['state']}: nothing of it can be changed")
            spec = read_spec(record["spec"])
            runner = self._active.running(spec.id) or self._active.runner(spec)
            await runner.amend(orders.amended(spec, change, self._clock.now()))
        self._deadlines.changed()
        return await self.show(record["id"])

    # -- background work ----------------------------------------------------------------------------------------------

    async def _upcoming(self, count: int) -> Sequence[tuple[str, float]]:
        return await self._read(job_records.next_deadlines, count)

    async def _expire(self, job_id: str) -> None:
        try:
            await self._end_early(job_id, early_end.PAST_DEADLINE)
        except StorageFull:
            self._disk_reserve.release()  # so that at least this can be stored
            await self._end_early(job_id, early_end.PAST_DEADLINE)

    async def _tidy(self) -> None:
        await self._ledger.database.write(job_records.forget_old, self._clock.now())

    # -- jobs at providers --------------------------------------------------------------------------------------------

    async def remote(self, job_id: str) -> list[RemoteJob]:
        record = await self._record(job_id)
        return await self._read(ledger.remote_jobs, record["id"])

    async def settle_remote(self, job_id: str, tag: str, remote_id: str | None) -> RemoteJob:
        record = await self._record(job_id)
        if remote_id is not None and not 0 < len(remote_id) <= REMOTE_ID_CHARS_MAX:
            raise InvalidInput("a job at a provider has an id", code="invalid_remote_id")
        async with self._active.lock(record["id"]):
            runner, record = await self._active.wait_settled(record["id"]), await self._record(record["id"])
            if runner is not None or record["state"] != JobState.PAUSED:
                raise InvalidTransition(
                    f"the job {record['id']} is {record['state']}: adopt or forget a submission while the job is paused"
                )
            return await self._ledger.database.write(
                ledger.settle, record["id"], record["generation"], tag=tag, remote_id=remote_id,
                now=self._clock.now(),
            )  # fmt: skip

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
        if self._resuming is not None:
            self._resuming.cancel()
            await asyncio.wait({self._resuming})
        if self._submitting:
            await asyncio.wait(self._submitting)
        await self._maintenance.close()
        await self._deadlines.close()
        await self._active.close(at_once=at_once)
        if not at_once:
            await self._dispatcher.close()
        await self._children.close()
        self._scratch.close()
        self._commit_log.close()
