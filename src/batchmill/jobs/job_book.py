"""One job's record in the ledger: what its drive reads there and writes down, every stop on the way."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from batchmill.errors import StorageFull
from batchmill.jobs import shard_notes
from batchmill.jobs.commits import Books
from batchmill.jobs.endings import EarlyEnd, begins_at
from batchmill.jobs.job_run import JobRun
from batchmill.jobs.orders import has_run
from batchmill.jobs.preparation import Prepared, listed
from batchmill.jobs.results import Manifest
from batchmill.ports import Clock
from batchmill.states import NEXT, JobState, PauseReason
from batchmill.store.ballast import Ballast
from batchmill.types import RemoteJob


class JobBook:
    def __init__(self, job_id: str, books: Books, clock: Clock, ballast: Ballast) -> None:
        self._id, self._books, self._clock, self._ballast = job_id, books, clock, ballast

    @property
    def ledger(self):
        return self._books.ledger

    @property
    def call(self):
        return self._books.call

    async def record(self) -> sa.RowMapping:
        return await self._books.look(self.ledger.job, self._id)

    async def remotes(self, generation: int) -> list[RemoteJob]:
        """The jobs at providers that hold rows of it."""
        return await self.ledger.database.read(shard_notes.remote_jobs, self._id, generation)

    async def move(self, state: JobState, **fields: object) -> None:
        """Take the job to another state. Raises: InvalidTransition."""
        await self.call(self.ledger.move, self._id, state, **fields)

    async def _move_surely(self, state: JobState, **fields: object) -> None:
        """As `move`; on a full disk there is the ballast, so that at least the reason can be written down."""
        try:
            await self.move(state, **fields)
        except StorageFull:
            self._ballast.release()
            await self.move(state, **fields)

    async def prepared(self, prepared: Prepared, spec: bytes, size_bytes: int) -> None:
        """The rows are sealed, and planned unless they were refused: then the job has failed."""
        report, plan = prepared.report, prepared.plan
        problems = {"problems": listed(report.problems), "problems_total": report.problems_total}
        if plan is None:
            text = f"{report.problems_total} of {report.seal.rows} rows were refused; no row was run"
            await self.fail("invalid_dataset", text, rows=report.seal.rows, **problems)
            return
        await self.move(
            JobState.QUEUED, via=JobState.PLANNING, errors=prepared.rejected, spec=spec,
            rows=plan.rows, rows_rejected=plan.rejected, rows_failed=plan.rejected, rows_folded=plan.followers,
            bytes=2 * len(spec) + size_bytes, **problems,
        )  # fmt: skip

    async def begin_ending(self, early: EarlyEnd, deadline: float | None) -> None:
        """The job is to end without the rows that have not run. Raises: InvalidTransition."""
        now = begins_at(early, deadline, self._clock.now())
        await self.move(JobState.CANCELLING, reason=early.reason, message="", cancelling=now)

    async def end_unwritten(self, state: JobState, **fields: object) -> None:
        """The job has ended, and there are no results."""
        await self.move(state, reason=None, finished=self._clock.now(), **fields)

    async def end(self, state: JobState, manifest: Manifest, message: str = "") -> None:
        """The job has ended, and its results are there."""
        await self.move(
            state, errors=manifest.causes, reason=None, message=message, finished=self._clock.now(),
            rows_ok=manifest.ok, rows_failed=manifest.failed,
            output=manifest.output.path, errors_output=None if manifest.errors is None else manifest.errors.path,
        )  # fmt: skip

    async def keep_time(self, run: JobRun) -> None:
        """Add the time that a run took."""
        await self.call(self.ledger.spent, self._id, run.elapsed_s)

    async def rest(self, reason: PauseReason, message: str) -> None:
        """The job is paused. That it is to end early stays written down: the next owner goes on with it."""
        is_ending = (await self.record())["state"] == JobState.CANCELLING
        if not (is_ending and reason is PauseReason.INTERRUPTED):
            await self._move_surely(JobState.PAUSED, reason=reason, message=message)

    async def fail(self, reason: str, message: str, **fields: Any) -> None:
        """No row of the job ran, and none will."""
        await self._move_surely(JobState.FAILED, reason=reason, message=message, finished=self._clock.now(), **fields)

    async def may_fail(self, *, unrun: bool) -> bool:
        """Whether the job's state allows it to fail; `unrun`: and no outcome of it came from a model."""
        record = await self.record()
        is_begun = record["generation"] > 0 or has_run(record)
        return JobState.FAILED in NEXT[JobState(record["state"])] and not (unrun and is_begun)
