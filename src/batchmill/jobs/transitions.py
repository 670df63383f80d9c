"""Transitions: changes of an existing job that a person, its deadline or maintenance asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import msgspec

from batchmill.errors import InvalidInput, InvalidTransition, StorageFull
from batchmill.jobs import early_end, samples
from batchmill.jobs.active_jobs import ActiveJobs
from batchmill.jobs.early_end import EarlyEnd
from batchmill.jobs.intake import orders
from batchmill.jobs.ledger import ledger
from batchmill.jobs.ledger import records as job_records
from batchmill.jobs.ledger.files import read_spec
from batchmill.jobs.maintenance import JobDeadlines
from batchmill.jobs.retention import refuse_compacted
from batchmill.jobs.runner import JobRunner
from batchmill.jobs.runner_tools import RunnerTools
from batchmill.jobs.samples import Samples
from batchmill.states import ENDED, JobState, PauseReason
from batchmill.store.sql.transactions import Record
from batchmill.types import Amendment, ModelSpec, Once, RemoteJob, RetryChange
from batchmill.wire.job_spec import JobSpec

REMOTE_ID_CHARS_MAX = 512


class Transitions:
    def __init__(self, tools: RunnerTools, active: ActiveJobs) -> None:
        self._tools, self._active, self._clock = tools, active, tools.clock
        self._samples, self._read = Samples(tools), tools.database.read
        self.deadlines = JobDeadlines(tools.clock, self._upcoming, self._expire)

    async def _record(self, job_id: str) -> Record:
        return await self._read(job_records.find, job_id)

    async def pause(self, job_id: str) -> None:
        record = await self._record(job_id)
        message = f"paused; `batchmill resume {record['id']}` continues it"
        if await self._stays_paused(record["id"], message):
            return
        runner = self._active.get(record["id"])
        if runner is None or record["state"] == JobState.CANCELLING:
            raise InvalidTransition(f"the job {record['id']} is {record['state']}: only a running job can be paused")
        await runner.pause(PauseReason.REQUESTED, message)
        await self._stays_paused(record["id"], message)  # the end of the owner may have come first

    async def _stays_paused(self, job_id: str, message: str) -> bool:
        """Have a job stay paused that the end of its owner interrupted: who follows it would resume it."""
        async with self._active.lock(job_id):  # a resume that has begun comes first
            record = await self._record(job_id)
            if record["reason"] != PauseReason.INTERRUPTED or self._active.running(job_id) is not None:
                return False
            log = self._tools.commit_log
            await log.write(log.ledger.note, job_id, reason=PauseReason.REQUESTED, message=message)
            return True

    async def fail_rows(self, job_id: str) -> None:
        record = await self._record(job_id)
        orders.check_rows_may_wait(read_spec(record["spec"]), record["state"])
        await self.resume(record["id"])
        if (runner := self._active.running(record["id"])) is not None:
            runner.fail_rows()

    async def resume(self, job_id: str, *, only: Collection[PauseReason] | None = None) -> None:
        """Args: only: for these reasons, of which one may have changed meanwhile."""
        record = await self._record(job_id)
        async with self._active.lock_job(record):
            if await self._active.wait_settled(record["id"]) is None:
                record = await self._record(record["id"])
                if only is not None and record["reason"] not in only:
                    return
                if record["state"] != JobState.PAUSED:
                    raise InvalidTransition(
                        f"the job {record['id']} is {record['state']}: only a paused job is resumed"
                    )
                await self._active.resume(await self._checked(record))
        self.deadlines.changed()

    async def _checked(self, record: Record) -> JobSpec:
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

    async def _refuse_shared_output(self, spec: JobSpec, record: Record) -> None:
        if spec.output is not None:
            others = await self._read(job_records.naming_outputs)
            await asyncio.to_thread(orders.refuse_shared_output, spec, others, record["finished"])

    async def cancel(self, job_id: str) -> None:
        record = await self._record(job_id)
        runner = await self._end_early(record["id"], early_end.CANCELLED)
        if record["frontend"] is None:  # a command waits for the results
            await runner.wait_stopped()

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
                await self._tools.commit_log.move(job_id, JobState.CANCELLING, **fields)
                runner = self._active.runner(spec)
                runner.skips_remote = record["cancelling"] is not None  # the first could not collect results
                return self._active.start(runner)

    async def retry(
        self, job_id: str, change: RetryChange = RetryChange(), model: ModelSpec | None = None,
        once: Once | None = None,
    ) -> None:  # fmt: skip
        record = await self._record(job_id)
        async with self._active.lock_job(record):
            if once is not None and await job_records.known(self._tools.database, once, self._clock.now()) is not None:
                return  # only its reply was lost
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
            job = self._active.resting(msgspec.structs.replace(spec, code=await self._code_now(spec)))
            await job.retry(change, model, once)
            self._active.start(self._active.runner(job.spec))
        self.deadlines.changed()

    async def amend(self, job_id: str, change: Amendment) -> None:
        record = await self._record(job_id)
        async with self._active.lock(record["id"]):
            record = await self._record(record["id"])
            if record["state"] in ENDED or record["cancelling"] is not None:
                raise InvalidTransition(f"the job {record['id']} is {record['state']}: nothing of it can be changed")
            spec = read_spec(record["spec"])
            job = self._active.running(spec.id) or self._active.resting(spec)
            await job.amend(orders.amended(spec, change, self._clock.now()))
        self.deadlines.changed()

    async def _upcoming(self, count: int) -> Sequence[tuple[str, float]]:
        return await self._read(job_records.next_deadlines, count)

    async def _expire(self, job_id: str) -> None:
        try:
            await self._end_early(job_id, early_end.PAST_DEADLINE)
        except StorageFull:
            self._tools.disk_reserve.release()  # so that at least this can be stored
            await self._end_early(job_id, early_end.PAST_DEADLINE)

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
            return await self._tools.database.write(
                ledger.settle, record["id"], record["generation"], tag=tag, remote_id=remote_id,
                now=self._clock.now(),
            )  # fmt: skip
