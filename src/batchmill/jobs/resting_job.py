"""RestingJob: a job that has paused or ended, so no runner has it. A new runner goes on with what is changed here."""

from __future__ import annotations

import asyncio
from functools import partial

from msgspec.structs import replace

from batchmill.errors import InvalidTransition
from batchmill.jobs.early_end import early_end_of
from batchmill.jobs.intake import retries
from batchmill.jobs.intake.adapters import AdapterWork
from batchmill.jobs.intake.retry_plan import RetryOrder, plan_retry
from batchmill.jobs.ledger import deployed, packed
from batchmill.jobs.ledger.records import columns_of
from batchmill.jobs.recorded_job import RecordedJob
from batchmill.jobs.runner_tools import RunnerTools
from batchmill.jobs.samples import moved_columns
from batchmill.states import JobState
from batchmill.store.sql.transactions import Record
from batchmill.types import ModelSpec, Policy, RetryChange
from batchmill.wire.job_spec import JobSpec


class RestingJob(RecordedJob):
    def __init__(self, spec: JobSpec, tools: RunnerTools) -> None:
        super().__init__(spec, tools)

    async def amend(self, policy: Policy) -> None:
        """Have another policy apply when the job is resumed."""
        self.spec = replace(self.spec, policy=policy)
        await self._store_spec()

    async def resume(self) -> None:
        """Leave PAUSED for the state in which the job continues, with this spec."""
        record = await self._begin_again()
        await self._stored.bring_plans(record)
        await self._write_spec(self.spec)
        if record["cancelling"] is not None:
            state, reason = JobState.CANCELLING, early_end_of(record).reason
        else:
            state, reason = (JobState.QUEUED if self._is_planned(record) else JobState.VALIDATING), None
        await self._move(state, reason=reason, message="", **columns_of(self.spec), **moved_columns(record, self.spec))

    async def retry(self, change: RetryChange, model: ModelSpec | None) -> None:
        """Queue the failed rows of an ended job again, as `change` says.

        Raises: InvalidTransition, InvalidInput; UnknownName where a version of a function that they go to, or of the
        class of the schema, has been removed.
        """
        job_id, record = self.spec.id, await self._begin_again()
        await self._bring(record)
        if not self._is_planned(record):
            raise InvalidTransition(f"the job {job_id} ended before its rows were planned: submit it again")
        generation = record["generation"] + 1
        spec, target = retries.prepared(self.spec, change, model, generation, self._clock.now())
        self.spec = await AdapterWork(self._tools.adapters, self._offload).check_again(spec, target.used)
        blocks = await self._commit_log.call_reader(self._ledger.committed, job_id)
        async with self._tools.scratch.use(self.spec):
            order = RetryOrder.of(self.spec, self.files, await self._segments(), blocks, generation, target.number)
            opened = await plan_retry(replace(order, term=self._term.path), self._offload)
            await self._tools.scratch.store(self.spec)
            if not self.spec.is_small:
                await self._stored.publish(self.files.plan(generation))
        await self._write_spec(self.spec)
        limit = self._tools.quota_of(self.spec)
        models = [self.spec.models[number] for number in opened.models]
        await self._commit_log.write(
            self._ledger.open_generation, job_id, generation, opened.settled, opened.rows_ok,
            None if limit is None else (self.spec.project, limit),
            within=partial(deployed.refuse_removed, spec=self.spec, models=models), **columns_of(self.spec),
        )  # fmt: skip

    async def _begin_again(self) -> Record:
        """The record of a job to continue. A small one that began without a cluster gets files in the data directory.

        Outcomes that it has stay in the database. After a crash the record still has a small job, and the next attempt
        writes the same files.
        """
        if self.spec.is_small and self._tools.is_shared:
            data = await self._ledger.database.read(packed.read, self.spec.id)
            await self._make_large()
            if data is not None:
                folders = await asyncio.to_thread(packed.write, self.files.home, data)
                await self._stored.publish(*folders)
        return await self._record()
