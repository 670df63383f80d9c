"""Recovery: what an earlier owner left running is paused, brought to its end, or resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from batchmill.datasets import spooled_inputs
from batchmill.errors import (
    BatchmillError,
    DatabaseUnavailable,
    InvalidTransition,
    StorageFailed,
    StorageFull,
    TermOver,
    UnknownName,
)
from batchmill.jobs.active_jobs import ActiveJobs
from batchmill.jobs.ledger import begun_retries
from batchmill.jobs.ledger import records as job_records
from batchmill.jobs.ledger.core_task import was_cut_off
from batchmill.jobs.ledger.files import clear_unsealed, read_spec, sweep_orphans
from batchmill.jobs.maintenance import StalledJobs
from batchmill.jobs.runner_tools import RunnerTools
from batchmill.jobs.transitions import Transitions
from batchmill.owned_files import OwnedFiles
from batchmill.states import JobState, PauseReason
from batchmill.store.sql.transactions import Record

ENDING_S = 60.0  # a command waits so long for ending jobs; collecting from providers may take longer
INTERRUPTED = "the process that ran this job ended; resume the job to continue"
NOT_REQUESTED = frozenset(PauseReason) - {PauseReason.REQUESTED}


class Recovery:
    def __init__(self, tools: RunnerTools, active: ActiveJobs, stalled: StalledJobs, transitions: Transitions) -> None:
        self._tools, self._active, self._stalled, self._transitions = tools, active, stalled, transitions
        self._read, self._commit_log = tools.database.read, tools.commit_log
        self._ending: set[asyncio.Task[None]] = set()
        self._resuming: asyncio.Task[None] | None = None

    async def take_over(self, *, resume_server_jobs: bool) -> list[str]:
        """Pause the jobs that an earlier owner left running, and bring those that were CANCELLING to their end.

        Returns: the jobs to resume: those that came over HTTP and were cut off.
        """
        to_resume: list[str] = []
        data_dir, owned = self._tools.data_dir, OwnedFiles(self._tools.database.term)
        await self._undo_retries(owned)
        unfinished = await self._read(job_records.unfinished)
        with suppress(TermOver):  # a job that goes on clears its own
            await asyncio.to_thread(clear_unsealed, data_dir, [record["id"] for record in unfinished], owned)
        for record in unfinished:
            state, spec = JobState(record["state"]), read_spec(record["spec"])
            if state is JobState.CANCELLING:
                runner = self._active.start(self._active.runner(spec))
                self._ending |= {runner.task} if runner.task is not None else set()
            elif state is JobState.PAUSED:
                to_resume += [spec.id] if spec.origin and was_cut_off(record) else []
            elif await self._pause_interrupted(spec.id) or resume_server_jobs:
                to_resume += [spec.id] if spec.origin else []
        job_ids = await self._read(job_records.ids)
        with suppress(TermOver):  # the next owner does it
            await asyncio.to_thread(sweep_orphans, data_dir, job_ids, owned)
            await asyncio.to_thread(spooled_inputs.release_unknown, data_dir, job_ids, owned)
        return to_resume

    async def _undo_retries(self, owned: OwnedFiles) -> None:
        """Remove the files of retries that an earlier owner did not store."""
        data_dir = self._tools.data_dir
        for job_id, generation in await asyncio.to_thread(begun_retries.left_in, data_dir):
            with suppress(BatchmillError, OSError):  # the next owner tries again
                record = await self._find(job_id)
                if record is None or record["compacted"] is not None or record["generation"] >= generation:
                    await asyncio.to_thread(begun_retries.forget, data_dir, job_id, generation, owned)
                else:
                    spec = read_spec(record["spec"])
                    job = self._active.resting(replace(spec, is_small=False))
                    await job.undo_retry(spec, generation)

    async def _find(self, job_id: str) -> Record | None:
        try:
            return await self._read(job_records.find, job_id)
        except UnknownName:
            return None

    async def wait_ending(self) -> None:
        """Wait for jobs that are ending, at most `ENDING_S`."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=ENDING_S)

    def resume_all(self, job_ids: Sequence[str]) -> None:
        """Begin to resume these jobs, one after the other."""
        self._resuming = asyncio.create_task(self._resume_all(job_ids))

    async def _resume_all(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            await self.resume_or_note(job_id)

    async def resume_or_note(self, job_id: str) -> None:
        """Resume a paused job, or note in its record why it cannot be resumed."""
        is_stranded = job_id in self._stalled.stranded
        self._stalled.stranded.discard(job_id)
        try:
            if not is_stranded or await self._pause_interrupted(job_id):
                await self._transitions.resume(job_id, only=NOT_REQUESTED)
        except InvalidTransition:
            return  # its state was changed meanwhile
        except (StorageFull, StorageFailed, DatabaseUnavailable):
            self._stalled.stranded.add(job_id)  # maintenance tries again
        except BatchmillError as error:
            await self._commit_log.write(self._commit_log.ledger.note, job_id, message=error.message)

    async def _pause_interrupted(self, job_id: str) -> bool:
        """Store that a job was interrupted. False if the disk is full: its record still has a running state."""
        try:
            if (await self._read(job_records.find, job_id))["state"] != JobState.PAUSED:
                reason = PauseReason.INTERRUPTED
                await self._commit_log.move(job_id, JobState.PAUSED, reason=reason, message=INTERRUPTED)
        except (StorageFull, DatabaseUnavailable):
            self._stalled.stranded.add(job_id)
            return False
        return True

    async def close(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
            await asyncio.wait({self._resuming})
