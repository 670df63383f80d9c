"""Submissions: an order becomes a job, either an existing one with the same key or the same content, or a new one."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from msgspec.structs import replace

from batchmill import faults
from batchmill.datasets import spooled_inputs
from batchmill.errors import DatabaseUnavailable, InvalidInput, OverQuota, TermOver
from batchmill.jobs import samples
from batchmill.jobs.active_jobs import ActiveJobs
from batchmill.jobs.failover import with_code
from batchmill.jobs.intake import adapters, orders, retries, routing
from batchmill.jobs.intake.reuse_orders import settled
from batchmill.jobs.job_space import JobSpace
from batchmill.jobs.ledger import packed
from batchmill.jobs.ledger import records as job_records
from batchmill.jobs.ledger.deployed import ModelsRemoved
from batchmill.jobs.ledger.files import JobFiles, read_spec, result_exists
from batchmill.jobs.maintenance import JobDeadlines
from batchmill.jobs.recorded_job import Entry, answer_of
from batchmill.jobs.runner_tools import RunnerTools
from batchmill.jobs.samples import Samples
from batchmill.owned_files import OwnedFiles, discard
from batchmill.part_files import full_disk_named
from batchmill.run_next import answer_with, start_next
from batchmill.states import ENDED, JobState, PauseReason
from batchmill.store.sql.transactions import Record
from batchmill.types import JobOrder, Once, Submitted
from batchmill.wire.job_spec import JobSpec

Answer = asyncio.Future[Submitted]


class Submissions:
    def __init__(self, space: JobSpace, tools: RunnerTools, active: ActiveJobs, deadlines: JobDeadlines) -> None:
        self._space, self._tools, self._active, self._deadlines = space, tools, active, deadlines
        self._samples, self._clock = Samples(tools), tools.clock
        self._database, self._read = tools.database, tools.database.read
        self._running: set[asyncio.Task[None]] = set()

    async def submit(self, order: JobOrder) -> Submitted:
        """As `ports.jobs.Jobs.submit`. A submission that has begun is completed, even if its caller is cancelled: the
        caller waits for that, because it holds the files that are read meanwhile.
        """
        answer: Answer = asyncio.get_running_loop().create_future()
        work = self._submit(settled(order, self._space.projects), answer)
        task = start_next(answer_with(work, answer))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await answer
        except asyncio.CancelledError:
            await asyncio.wait({task})
            raise

    async def _submit(self, order: JobOrder, answer: Answer) -> Submitted:
        """Args: answer: may be given as soon as it is known."""
        once = order.once
        if once is None:
            submitted = await self._match_or_create(order, answer)
        elif order.origin is not None:  # a repeated one is found in the transaction that would create the job
            async with self._active.lock(once.key):
                try:
                    submitted = await self._match_or_create(order, answer)
                except (InvalidInput, OverQuota):  # which says nothing against one that is a job already
                    if (known := await self._known(once)) is None:
                        raise
                    submitted = Submitted(known, "repeated")
        else:
            async with self._active.lock(once.key):
                known = await self._known(once)
                is_new = known is None
                submitted = await self._match_or_create(order, answer) if is_new else await self._go_on(known, order)
        if order.policy.deadline is not None:
            self._deadlines.added(order.policy.deadline)
        return submitted

    async def _known(self, once: Once) -> str | None:
        return await job_records.known(self._database, once, self._clock.now())

    async def _match_or_create(self, order: JobOrder, answer: Answer) -> Submitted:
        if order.origin is not None:  # over a server's API: always another job
            try:
                return await self._create_another(order, answer)
            except ModelsRemoved as error:
                if order.default_model or not (left := error.left_of(order.models)):
                    raise
                # Nothing but a row may name one: such a row is refused as if its model had never been there.
                return await self._match_or_create(replace(order, models=left), answer)
        async with self._active.outputs:
            return await self._match(order, await self._describe(order))

    async def _create_another(self, order: JobOrder, answer: Answer) -> Submitted:
        """Create a job for an order of a server's API. Raises: ModelsRemoved."""
        spec = await self._describe(order)
        if spec.is_small:
            return await self._create_small(spec, order.once, answer)
        if spec.output is None:
            return await self._create(spec, order.once)
        async with self._active.lock(f"outputs of {spec.project}"):
            others = await self._read(job_records.writing_objects)
            await asyncio.to_thread(orders.refuse_shared_output, spec, others)
            spec = await asyncio.to_thread(orders.checked_output, spec, may_replace=order.overwrite)
            return await self._create(spec, order.once)

    async def _describe(self, order: JobOrder) -> JobSpec:
        additions = order.schema, order.template, order.prompt, order.system, order.params
        if order.origin is not None and not any(additions) and packed.is_short(order.dataset, len(order.models)):
            spec = orders.describe(order, self._clock.now())
        else:
            spec = await asyncio.to_thread(orders.describe, order, self._clock.now())
        return orders.placed(spec, self._space.data_dir, self._space.stored, is_shared=self._space.is_shared)

    async def _create(self, spec: JobSpec, once: Once | None) -> Submitted:
        """Create a job. Its folder exists before its ledger record; if that cannot be stored, the folder is removed."""
        await self._check_disk(spec)
        files = self._tools.scratch.files(spec)
        try:
            with full_disk_named(files.home):
                await asyncio.to_thread(files.write_spec, spec, OwnedFiles())  # no successor knows the id
                read = [*spec.dataset.paths, *(model.source for model in spec.models)]
                await asyncio.to_thread(spooled_inputs.keep, self._tools.data_dir, read, spec.id)
            faults.point("after_describe")
            job = job_records.NewJob(spec, once, self._tools.quota_of(spec), self._clock.now())
            known = await self._database.write(job_records.enter_once, job)
        except DatabaseUnavailable:
            self._active.unstored.add(spec.id)  # it may be stored all the same, and then it is resumed
            raise
        except BaseException:
            await self._forget(spec, files)
            raise
        if known is not None:
            await self._forget(spec, files)
            return Submitted(known, "repeated")
        faults.point("after_create")
        self._active.start(self._active.runner(spec, JobState.VALIDATING))
        return Submitted(spec.id, "started")

    async def _check_disk(self, spec: JobSpec) -> None:
        if (disk_quota := self._tools.disk_quota_of(spec)) is not None:
            await disk_quota.check(spec.project)

    async def _create_small(self, spec: JobSpec, once: Once | None, answer: Answer) -> Submitted:
        """Create a small job, which has no folder. Its runner stores it: most often sealed, planned and running."""
        await self._check_disk(spec)
        faults.point("after_describe")
        entry = Entry(once, self._tools.quota_of(spec), asyncio.get_running_loop().create_future(), answer)
        runner = self._active.start(self._active.runner(spec, JobState.VALIDATING, entry), is_next=True)
        assert runner.task is not None, "it has been started"
        runner.task.add_done_callback(lambda _: entry.known.cancel())
        return answer_of(spec.id, await entry.known)

    async def _forget(self, spec: JobSpec, files: JobFiles) -> None:
        """Remove what a job has written that was not stored."""
        await asyncio.to_thread(discard, files.home)
        owned = OwnedFiles(self._database.term)  # other jobs may read the same inputs
        with suppress(TermOver):
            await asyncio.to_thread(spooled_inputs.release, self._tools.data_dir, spec.id, owned)

    async def _match(self, order: JobOrder, spec: JobSpec) -> Submitted:
        """Find the job that an identical order created, unless it must run again."""
        known, is_same = await self._samples.find_existing(spec)
        is_sample = known is not None and orders.is_sample(known)
        if (
            known is not None
            and is_same
            and not (is_sample and samples.has_other_code(known, spec))
            and not await asyncio.to_thread(job_records.must_run_again, known, order)
        ):
            return await self._continue(known, order, spec)
        unfinished = None if known is None or known["state"] == JobState.COMPLETED else known
        if unfinished is not None and not is_same and not order.restart:
            raise InvalidInput(
                f"{', '.join(spec.dataset.paths)} changed since the unfinished job {unfinished['id']} began: "
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
        if unfinished is not None:
            await self._abandon(unfinished)
        return await self._create(spec, order.once)

    async def _go_on(self, job_id: str, order: JobOrder) -> Submitted:
        """Continue the job that an order is already, whatever would begin it again."""
        async with self._active.outputs:
            record = await self._read(job_records.find, job_id)
            if record["state"] in ENDED:
                return Submitted(job_id, "finished")
            return await self._continue(record, order, await self._describe(order))

    async def _continue(self, record: Record, order: JobOrder, spec: JobSpec) -> Submitted:
        """Continue an existing job: it is finished, running, or must be resumed."""
        job_id, earlier = record["id"], read_spec(record["spec"])
        if orders.is_sample(record):
            spec = await self._samples.claim_output(record, spec)
        if order.once is not None and (order.overwrite or order.update):  # later, these would begin it again
            await self._database.write(job_records.note_order, order.once, job_id, self._clock.now())
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
            await self._active.resume(spec)
        return Submitted(job_id, "resumed")

    async def _abandon(self, record: Record) -> None:
        """End an unfinished job that is started over: it writes no results."""
        job_id = record["id"]
        async with self._active.lock(job_id):
            runner = self._active.get(job_id)
            if runner is not None:
                await runner.pause(PauseReason.REQUESTED, "about to be started over")
            text = "started over by another job with --restart; its results were not written"
            now = self._clock.now()
            await self._tools.commit_log.move(job_id, JobState.CANCELLING, reason=None, message=text, cancelling=now)
            await self._tools.commit_log.move(job_id, JobState.CANCELLED, finished=now)

    async def close(self) -> None:
        """Wait until every submission that has begun is completed."""
        if self._running:
            await asyncio.wait(self._running)
