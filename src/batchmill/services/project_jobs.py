"""The verbs of jobs for one caller: its own project's jobs, by their full ids, and results that can be fetched.

Knows no dialect. A job of another project is unknown here, in the same words as one that never was.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import AsyncIterator

import msgspec
from msgspec import Struct

from batchmill.errors import Gone, StorageFull, UnknownName
from batchmill.jobs.pools.resources import veiled
from batchmill.ports import Jobs
from batchmill.services.directory import ModelDirectory
from batchmill.services.files import FileService, Result
from batchmill.services.trace_context import traceparent
from batchmill.states import JobState
from batchmill.types import (
    Amendment,
    Caller,
    JobOrder,
    JobQuery,
    JobView,
    LedgerReport,
    RemoteJob,
    Submitted,
    Wait,
)

SHOWN_CHARS = 64  # of an id nobody knows, in a message
KNOWN_RESULTS_MAX = 10_000  # ended jobs whose result files are remembered
_ID = re.compile(r"job_[0-9a-f]{20}")


class ResultIds(Struct, frozen=True):
    """The files an ended job left, those too that were deleted since: None where it wrote none."""

    output: str | None = None
    errors: str | None = None


NO_RESULTS = ResultIds()


class ProjectJobs:
    """Raises, everywhere: UnknownName (`unknown_job`) for a job that is not this caller's."""

    def __init__(self, jobs: Jobs, files: FileService, directory: ModelDirectory) -> None:
        self._jobs, self._files, self.directory = jobs, files, directory
        self._results: OrderedDict[tuple[str, int, str], ResultIds] = OrderedDict()

    async def submit(self, caller: Caller, order: JobOrder) -> Submitted:
        """As `ports.Jobs.submit`, for the caller's project."""
        order = msgspec.structs.replace(order, project=caller.project)
        if order.origin is not None and (trace := traceparent.get()) is not None:
            order = msgspec.structs.replace(order, origin=order.origin | {"traceparent": trace})
        return await self._jobs.submit(order)

    async def show(self, caller: Caller, job_id: str) -> JobView:
        return (await self._shown(await self._own(caller, job_id)))[0]

    async def show_with_results(self, caller: Caller, job_id: str) -> tuple[JobView, ResultIds]:
        """A job and the files it left; it has ended only once they can be downloaded."""
        return await self._shown(await self._own(caller, job_id))

    async def list(self, caller: Caller, query: JobQuery = JobQuery()) -> list[JobView]:
        return [view for view, _ in await self.list_with_results(caller, query)]

    async def list_with_results(self, caller: Caller, query: JobQuery = JobQuery()) -> list[tuple[JobView, ResultIds]]:
        """The caller's jobs, the newest first. Raises: UnknownName for an `after` that is none of them."""
        if query.after is not None:
            await self._own(caller, query.after)
        views = await self._jobs.list(msgspec.structs.replace(query, project=caller.project))
        return [await self._shown(view) for view in views]

    async def watch(self, caller: Caller, job_id: str, interval_s: float = 0.5) -> AsyncIterator[JobView]:
        """As `ports.Jobs.watch`."""
        await self._own(caller, job_id)
        async for view in self._jobs.watch(job_id, interval_s):
            yield (await self._shown(view))[0]

    async def pause(self, caller: Caller, job_id: str) -> JobView:
        await self._own(caller, job_id)
        return await self._jobs.pause(job_id)

    async def resume(self, caller: Caller, job_id: str) -> JobView:
        await self._own(caller, job_id)
        return await self._jobs.resume(job_id)

    async def cancel(self, caller: Caller, job_id: str) -> JobView:
        await self._own(caller, job_id)
        return (await self._shown(await self._jobs.cancel(job_id)))[0]

    async def retry(self, caller: Caller, job_id: str) -> JobView:
        await self._own(caller, job_id)
        return await self._jobs.retry(job_id)

    async def fail_rows(self, caller: Caller, job_id: str) -> JobView:
        await self._own(caller, job_id)
        return await self._jobs.fail_rows(job_id)

    async def remove(self, caller: Caller, job_id: str) -> JobView:
        """As `ports.Jobs.remove`; who did it is remembered."""
        view = await self._own(caller, job_id)
        return await self._jobs.remove(view.id, caller.in_words)

    async def amend(self, caller: Caller, job_id: str, change: Amendment) -> JobView:
        await self._own(caller, job_id)
        return await self._jobs.amend(job_id, change)

    async def explain(self, caller: Caller, job_id: str) -> Wait:
        await self._own(caller, job_id)
        wait = await self._jobs.explain(job_id)
        reasons = [veiled(each, lambda name: self.directory.sees(caller, name)) for each in wait.reasons]
        return msgspec.structs.replace(wait, reasons=reasons)

    async def partial(self, caller: Caller, job_id: str) -> str:
        """As `ports.Jobs.partial`: the caller removes the file."""
        await self._own(caller, job_id)
        return await self._jobs.partial(job_id)

    async def remote(self, caller: Caller, job_id: str) -> list[RemoteJob]:
        """As `ports.Jobs.remote`."""
        await self._own(caller, job_id)
        return await self._jobs.remote(job_id)

    async def settle_remote(self, caller: Caller, job_id: str, tag: str, remote_id: str | None) -> RemoteJob:
        """As `ports.Jobs.settle_remote`."""
        await self._own(caller, job_id)
        return await self._jobs.settle_remote(job_id, tag, remote_id)

    async def verify(self, caller: Caller, job_id: str) -> LedgerReport:
        await self._own(caller, job_id)
        return await self._jobs.verify(job_id)

    async def results_of(self, view: JobView) -> tuple[Result, Result]:
        """The output and the error file of an ended job, ready to be downloaded; or who deleted them."""
        return await self._files.adopt_results(view)

    async def _own(self, caller: Caller, job_id: str) -> JobView:
        if _ID.fullmatch(job_id):
            try:
                view = await self._jobs.show(job_id)
            except Gone as error:
                if error.project == caller.project:
                    raise
                view = None
            except UnknownName:
                view = None
            if view is not None and view.project == caller.project:
                return view
        raise UnknownName(f"there is no job {job_id[:SHOWN_CHARS]!r}", code="unknown_job")

    async def _shown(self, view: JobView) -> tuple[JobView, ResultIds]:
        """Nobody learns that a job has ended before its results can be fetched.

        On a full disk they cannot be adopted yet: the job is then still finalizing, and the next look tries again.
        """
        if not JobState(view.state).is_at_rest:
            return view, NO_RESULTS
        key = (view.id, view.generation, view.state)
        known = self._results.get(key)
        if known is None:
            try:
                output, errors = await self._files.adopt_results(view)
            except StorageFull as full:
                waiting = msgspec.structs.replace(
                    view, state=JobState.FINALIZING, finished=None, message=full.message, reason="storage_full"
                )
                return waiting, NO_RESULTS
            known = ResultIds(output.id if output else None, errors.id if errors else None)
            self._results[key] = known
            if len(self._results) > KNOWN_RESULTS_MAX:
                self._results.popitem(last=False)
        return view, known
