"""RestingJob: a job that has paused or ended, so no runner has it. A new runner goes on with what is changed here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import sqlalchemy as sa
from msgspec.structs import replace

from batchmill import faults
from batchmill.datasets import layout
from batchmill.errors import BatchmillError, DatabaseUnavailable, InvalidTransition, TermOver, UnknownName
from batchmill.jobs.early_end import early_end_of
from batchmill.jobs.intake import retries
from batchmill.jobs.intake.adapters import AdapterWork
from batchmill.jobs.intake.retries import Target
from batchmill.jobs.intake.retry_plan import RetryOrder, plan_retry
from batchmill.jobs.ledger import begun_retries, deployed, packed
from batchmill.jobs.ledger.files import read_spec
from batchmill.jobs.ledger.records import columns_of, note_order, refuse_deleted, refuse_unrecorded
from batchmill.jobs.recorded_job import RecordedJob
from batchmill.jobs.runner_tools import RunnerTools
from batchmill.jobs.samples import moved_columns
from batchmill.states import JobState
from batchmill.store.sql.transactions import Record
from batchmill.types import ModelSpec, Once, Policy, RetryChange, Seal
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
        try:
            record = await self._begin_again()
            await self._stored.bring_plans(record)
            await self._write_spec(self.spec)
            if record["cancelling"] is not None:
                state, reason = JobState.CANCELLING, early_end_of(record).reason
            else:
                state, reason = (JobState.QUEUED if self._is_planned(record) else JobState.VALIDATING), None
            moved = columns_of(self.spec) | moved_columns(record, self.spec)
            await self._move(state, reason=reason, message="", **moved)
        finally:
            self._stored.release()  # its runner brings what it needs

    async def retry(self, change: RetryChange, model: ModelSpec | None, once: Once | None = None) -> None:
        """Queue the failed rows of an ended job again, as `change` says. If it is refused, nothing of it is left.

        Args: once: its key, by which the same request is known later.
        Raises: InvalidTransition, InvalidInput; UnknownName where a version of a function or a connector that they go
        to, the class of the schema, or a file that they are read from, has been removed.
        """
        try:
            record = await self._begin_again()
            await self._bring(record)
            if not self._is_planned(record):
                raise InvalidTransition(f"the job {self.spec.id} ended before its rows were planned: submit it again")
            generation = record["generation"] + 1
            spec, target = retries.prepared(self.spec, change, model, generation, self._clock.now())
            self.spec = await AdapterWork(self._tools.adapters, self._offload).check_again(spec, target.used)
            async with self._begun(record, generation):
                await self._open_generation(generation, target, once)
        finally:
            self._stored.release()

    async def _open_generation(self, generation: int, target: Target, once: Once | None) -> None:
        job_id, packed_files, published = self.spec.id, None, list[Path]()
        blocks = await self._commit_log.call_reader(self._ledger.committed, job_id)
        async with self._tools.scratch.use(self.spec):
            inputs = await asyncio.to_thread(self._inputs_in_place)
            order = RetryOrder.of(self.spec, self.files, await self._segments(), blocks, generation, target.number)
            opened = await plan_retry(replace(order, term=self._term.path), self._offload)
            if self.spec.is_small:
                packed_files = await asyncio.to_thread(lambda: packed.pack(packed.folders_of(self.files)))
            else:
                published.append(self.files.plan(generation))
        limit = self._tools.quota_of(self.spec)
        models = [self.spec.models[number] for number in opened.models]
        uploads = str(self._tools.data_dir / "files")
        async with self._stored.publishing(*published) as name:
            faults.point("after_retry_plan")
            await self._write_spec(self.spec)
            faults.point("after_retry_spec")

            def check(db: sa.Connection) -> None:
                refuse_deleted(db, inputs)
                refuse_unrecorded(db, [path for path in inputs if os.path.dirname(path) == uploads])
                deployed.refuse_removed(db, self.spec, models)
                if once is not None:
                    note_order(db, once, job_id, self._clock.now())
                name(db)

            await self._commit_log.write(
                self._ledger.open_generation, job_id, generation, opened.settled, opened.rows_ok,
                None if limit is None else (self.spec.project, limit), packed=packed_files, within=check,
                **columns_of(self.spec),
            )  # fmt: skip
            faults.point("after_retry")

    def _inputs_in_place(self) -> list[str]:
        """The files of a server that rows are read from. Raises: UnknownName for one that nobody can restore."""
        if self.spec.origin is None:
            return []
        seal = msgspec.json.decode((self.files.dataset / layout.SEAL).read_bytes(), type=Seal)
        paths = [file.path for file in seal.files if file.path.startswith("/")]
        for path in paths:
            if not os.path.exists(path):
                name = os.path.basename(path)
                raise UnknownName(f"the file {name} was deleted: its rows cannot run again", code="unknown_file")
        return paths

    @asynccontextmanager
    async def _begun(self, record: Record, generation: int) -> AsyncIterator[None]:
        """Leave no files of a retry that is refused meanwhile. Those of a small job are in its transaction."""
        if self.spec.is_small:
            yield
            return
        place = self._tools.data_dir, self.spec.id, generation
        await asyncio.to_thread(begun_retries.begin, *place, self._owned)
        try:
            yield
        except DatabaseUnavailable:
            raise  # it may be stored all the same: the next owner knows
        except (BatchmillError, OSError):
            with suppress(BatchmillError, OSError):  # the next owner tries again
                if (await self._record())["generation"] < generation:
                    await self.undo_retry(read_spec(record["spec"]), generation)
            raise
        with suppress(TermOver, OSError):
            await asyncio.to_thread(begun_retries.forget, *place, self._owned)

    async def undo_retry(self, stored: JobSpec, generation: int) -> None:
        """Remove the files of a retry that is not stored. Raises: TermOver, StorageFailed, OSError."""
        await asyncio.to_thread(begun_retries.undo, self.files, stored, generation, self._owned)
        await self._tools.stored.remove(self.files.plan(generation))
        await asyncio.to_thread(begun_retries.forget, self._tools.data_dir, stored.id, generation, self._owned)

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
