"""Operations on jobs for one caller: the jobs of its project with results that can be downloaded, and previews.

Knows no dialect. A job of another project gets the same error as a job that does not exist.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.config.entries import ProjectEntry
from batchmill.errors import Gone, StorageFull, UnknownName
from batchmill.jobs.intake import preview
from batchmill.jobs.intake.reuse_orders import settled
from batchmill.jobs.pools.resources import hide_names
from batchmill.ports.jobs import Jobs
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.files.files import FileService, Result
from batchmill.services.trace_context import traceparent
from batchmill.states import JobState
from batchmill.store.disk_room import DiskQuota
from batchmill.types import (
    Amendment,
    Caller,
    JobOrder,
    JobQuery,
    JobView,
    LedgerReport,
    RemoteJob,
    RetryChange,
    ReuseCount,
    Submitted,
    Wait,
)
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.native import Estimated, Planned, SealReport

SHOWN_CHARS = 64  # of an unknown id, in a message
CACHED_RESULTS_MAX = 10_000  # ended jobs whose result ids are cached
PREVIEWS_AT_ONCE = 2  # each reads its whole dataset in its own processes
WAITING_MAX = 16  # per project
_ID = re.compile(r"job_[0-9a-f]{20}")


class ResultIds(Struct, frozen=True):
    """The ids of an ended job's result files, deleted ones too. None: the job did not write this file."""

    output: str | None = None
    errors: str | None = None


NO_RESULTS = ResultIds()


class ProjectJobs:
    """Raises, everywhere: UnknownName (`unknown_job`) for a job that is not this caller's."""

    def __init__(self, jobs: Jobs, files: FileService, directory: ModelDirectory) -> None:
        self._jobs, self._files, self.directory = jobs, files, directory
        self._results: OrderedDict[tuple[str, int, str], ResultIds] = OrderedDict()

    async def submit(self, caller: Caller, order: JobOrder) -> Submitted:
        """As `ports.jobs.Jobs.submit`, for the caller's project."""
        order = msgspec.structs.replace(order, project=caller.project)
        if order.origin is not None and (trace := traceparent.get()) is not None:
            order = msgspec.structs.replace(order, origin=order.origin | {"traceparent": trace})
        return await self._jobs.submit(order)

    async def show(self, caller: Caller, job_id: str) -> JobView:
        return (await self._with_results(await self._find_own(caller, job_id)))[0]

    async def show_with_results(self, caller: Caller, job_id: str) -> tuple[JobView, ResultIds]:
        """Return a job and its result files. It is shown as ended only once they can be downloaded."""
        return await self._with_results(await self._find_own(caller, job_id))

    def show_recent(self, caller: Caller, job_id: str) -> tuple[JobView, ResultIds] | None:
        """As `show_with_results`, without waiting; None: it must be called."""
        view = self._jobs.show_recent(job_id)
        if view is None or view.project != caller.project:
            return None
        if not JobState(view.state).is_at_rest:
            return view, NO_RESULTS
        result_ids = self._results.get(_key_of(view))
        if result_ids is None and (results := self._files.adopted_lately(view)) is not None:
            result_ids = self._remember(view, results)
        return None if result_ids is None else (view, result_ids)

    async def list(self, caller: Caller, query: JobQuery = JobQuery()) -> list[JobView]:
        return [view for view, _ in await self.list_with_results(caller, query)]

    async def list_with_results(self, caller: Caller, query: JobQuery = JobQuery()) -> list[tuple[JobView, ResultIds]]:
        """Return the caller's jobs, newest first. Raises: UnknownName if `after` is not one of them."""
        if query.after is not None:
            await self._find_own(caller, query.after)
        views = await self._jobs.list(msgspec.structs.replace(query, project=caller.project))
        await self._find_results(views)
        return [await self._with_results(view) for view in views]

    async def _find_results(self, views: Sequence[JobView]) -> None:
        """Find the results of the jobs of a list at once."""
        unknown = [view for view in views if _key_of(view) not in self._results]
        found = await self._files.find_results(unknown)
        for view in unknown:
            if view.id in found:
                self._remember(view, found[view.id])

    async def watch(self, caller: Caller, job_id: str, interval_s: float = 0.5) -> AsyncIterator[JobView]:
        """As `ports.jobs.Jobs.watch`."""
        await self._find_own(caller, job_id)
        async for view in self._jobs.watch(job_id, interval_s):
            yield (await self._with_results(view))[0]

    async def pause(self, caller: Caller, job_id: str) -> JobView:
        await self._find_own(caller, job_id)
        return await self._jobs.pause(job_id)

    async def resume(self, caller: Caller, job_id: str) -> JobView:
        await self._find_own(caller, job_id)
        return await self._jobs.resume(job_id)

    async def cancel(self, caller: Caller, job_id: str) -> JobView:
        await self._find_own(caller, job_id)
        return (await self._with_results(await self._jobs.cancel(job_id)))[0]

    async def retry(self, caller: Caller, job_id: str, change: RetryChange = RetryChange()) -> JobView:
        """As `ports.jobs.Jobs.retry`. Raises: UnknownName for a model or adapter that the caller may not use."""
        await self._find_own(caller, job_id)
        named = change.model or change.adapter
        model = None if named is None else self.directory.for_job(caller, named)
        return await self._jobs.retry(job_id, change, model)

    async def fail_rows(self, caller: Caller, job_id: str) -> JobView:
        await self._find_own(caller, job_id)
        return await self._jobs.fail_rows(job_id)

    async def remove(self, caller: Caller, job_id: str) -> JobView:
        """As `ports.jobs.Jobs.remove`. Stores who removed the job."""
        view = await self._find_own(caller, job_id)
        return await self._jobs.remove(view.id, caller.in_words)

    async def amend(self, caller: Caller, job_id: str, change: Amendment) -> JobView:
        await self._find_own(caller, job_id)
        return await self._jobs.amend(job_id, change)

    async def count_reused(self, spec: JobSpec, dataset: str, plan: str) -> ReuseCount:
        """As `ports.jobs.Jobs.count_reused`."""
        return await self._jobs.count_reused(spec, dataset, plan)

    async def explain(self, caller: Caller, job_id: str) -> Wait:
        await self._find_own(caller, job_id)
        wait = await self._jobs.explain(job_id)
        reasons = [hide_names(each, lambda name: self.directory.sees(caller, name)) for each in wait.reasons]
        return msgspec.structs.replace(wait, reasons=reasons)

    async def partial(self, caller: Caller, job_id: str, *, is_numbered: bool = False, sampled: bool = False) -> str:
        """As `ports.jobs.Jobs.partial`: the caller removes the file."""
        await self._find_own(caller, job_id)
        return await self._jobs.partial(job_id, is_numbered=is_numbered, sampled=sampled)

    async def remote(self, caller: Caller, job_id: str) -> list[RemoteJob]:
        """As `ports.jobs.Jobs.remote`."""
        await self._find_own(caller, job_id)
        return await self._jobs.remote(job_id)

    async def settle_remote(self, caller: Caller, job_id: str, tag: str, remote_id: str | None) -> RemoteJob:
        """As `ports.jobs.Jobs.settle_remote`."""
        await self._find_own(caller, job_id)
        return await self._jobs.settle_remote(job_id, tag, remote_id)

    async def verify(self, caller: Caller, job_id: str) -> LedgerReport:
        await self._find_own(caller, job_id)
        return await self._jobs.verify(job_id)

    async def results_of(self, view: JobView) -> tuple[Result, Result]:
        """Return the output and error file of an ended job, ready for download, or who deleted them."""
        return await self._files.adopt_results(view)

    async def _find_own(self, caller: Caller, job_id: str) -> JobView:
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

    async def _with_results(self, view: JobView) -> tuple[JobView, ResultIds]:
        """Return a job as the caller sees it: it has not ended before its results can be downloaded.

        On a full disk the results cannot be adopted yet. The job is then shown as finalizing; the next call retries.
        """
        if not JobState(view.state).is_at_rest:
            return view, NO_RESULTS
        result_ids = self._results.get(_key_of(view))
        if result_ids is None:
            try:
                results = await self._files.adopt_results(view)
            except StorageFull as error:
                finalizing = msgspec.structs.replace(
                    view, state=JobState.FINALIZING, finished=None, message=error.message, reason="storage_full"
                )
                return finalizing, NO_RESULTS
            result_ids = self._remember(view, results)
        return view, result_ids

    def _remember(self, view: JobView, results: tuple[Result, Result]) -> ResultIds:
        output, errors = results
        result_ids = self._results[_key_of(view)] = ResultIds(
            output.id if output else None, errors.id if errors else None
        )
        if len(self._results) > CACHED_RESULTS_MAX:
            self._results.popitem(last=False)
        return result_ids


def _key_of(view: JobView) -> tuple[str, int, str]:
    return view.id, view.generation, view.state


# -- previews ----------------------------------------------------------------------------------------------------------


def _ignore_progress(share: float) -> None:
    """Nothing shows the progress of a preview."""


class PreviewService:
    """Raises, everywhere: InvalidInput if the order cannot run as it is; Unavailable if too many previews wait."""

    def __init__(
        self, data_dir: Path, disk: DiskQuota, jobs: ProjectJobs, projects: Mapping[str, ProjectEntry]
    ) -> None:
        self._data_dir, self._disk, self._jobs, self._projects = data_dir, disk, jobs, projects
        self._semaphore = FairSemaphore(PREVIEWS_AT_ONCE, waiting_max=WAITING_MAX, what="datasets to look at")

    async def validate(self, order: JobOrder) -> SealReport:
        """Check every row."""
        async with self._semaphore.slot(order.project):
            return await preview.validate(order, self._data_dir, _ignore_progress, self._disk)

    async def plan(self, order: JobOrder) -> Planned:
        """Return the order in which the rows would run."""
        async with self._semaphore.slot(order.project):
            order = settled(order, self._projects)
            count = self._jobs.count_reused
            return Planned(*await preview.plan(order, self._data_dir, _ignore_progress, self._disk, count_reused=count))

    async def estimate(self, order: JobOrder, rows_per_s: float | None, jobs: Sequence[JobView]) -> Estimated:
        """Estimate tokens, cost and, at the given rate, time. Args: jobs: earlier ones, the newest first."""
        async with self._semaphore.slot(order.project):
            estimated = await preview.estimate(
                settled(order, self._projects), self._data_dir, _ignore_progress, rows_per_s, self._disk,
                jobs=jobs, count_reused=self._jobs.count_reused,
            )  # fmt: skip
            return Estimated(*estimated)
