"""Jobs, asked for by the machine's user: of all projects, with the paths of their files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from batchmill.control import operations as own
from batchmill.control.app import Call, Handler
from batchmill.control.operations import LocalFile
from batchmill.ports import Jobs
from batchmill.states import JobState, PauseReason
from batchmill.types import Amendment, JobQuery, JobView, LedgerReport, RemoteJob, Submitted, Wait
from batchmill.wire import operations as table
from batchmill.wire.native import Change, JobPage, ListJobs, RemoteJobList, Settlement, WatchJob
from batchmill.wire.operations import Endpoint


class JobHandlers:
    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def handlers(self) -> Sequence[tuple[Endpoint[Any], Handler]]:
        jobs = self._jobs
        return (
            (own.RUN, self.run),
            (own.PARTIAL, self.partial),
            (own.REBUILD, self.rebuild),
            (table.LIST_JOBS, self.list),
            (table.SHOW_JOB, self.show),
            (table.AMEND_JOB, self.amend),
            (table.EXPLAIN_JOB, self.explain),
            (table.LIST_REMOTE_JOBS, self.remote),
            (table.SETTLE_REMOTE_JOB, self.settle_remote),
            (table.VERIFY_JOB, self.verify),
            (table.REMOVE_JOB, self.remove),
            (table.WATCH_JOB, self.watch),
            *((endpoint, _steering(getattr(jobs, verb))) for verb, endpoint in table.STEERING.items()),
        )

    async def run(self, call: Call) -> Submitted:
        return await self._jobs.submit(call.body)

    async def partial(self, call: Call) -> LocalFile:
        return LocalFile(await self._jobs.partial(call.name))

    async def rebuild(self, call: Call) -> LedgerReport:
        return await self._jobs.rebuild(call.name)

    async def list(self, call: Call) -> JobPage:
        query: ListJobs = call.query
        wanted = JobQuery(
            project=call.project, state=query.state, model=query.model, since=query.since, after=query.after,
            limit=query.limit,
        )  # fmt: skip
        found = await self._jobs.list(wanted)
        return JobPage(found, found[-1].id if len(found) == query.limit else None)

    async def show(self, call: Call) -> JobView:
        return await self._jobs.show(call.name)

    async def amend(self, call: Call) -> JobView:
        change: Change = call.body
        return await self._jobs.amend(call.name, Amendment(change.priority, change.deadline, change.budget))

    async def explain(self, call: Call) -> Wait:
        return await self._jobs.explain(call.name)

    async def remote(self, call: Call) -> RemoteJobList:
        return RemoteJobList(await self._jobs.remote(call.name))

    async def settle_remote(self, call: Call) -> RemoteJob:
        told: Settlement = call.body
        return await self._jobs.settle_remote(call.names["job_id"], call.names["tag"], told.remote_id)

    async def verify(self, call: Call) -> LedgerReport:
        return await self._jobs.verify(call.name)

    async def remove(self, call: Call) -> JobView:
        return await self._jobs.remove(call.name)

    async def watch(self, call: Call) -> AsyncIterator[JobView]:
        """Whoever looks at a job that was interrupted by the end of another owner wants it to go on."""
        query: WatchJob = call.query
        view = await self._jobs.show(call.name)
        if view.state == JobState.PAUSED and view.reason == PauseReason.INTERRUPTED:
            await self._jobs.resume(call.name)
        return self._jobs.watch(call.name, query.interval_s)


def _steering(ask: Callable[[str], Awaitable[JobView]]) -> Handler:
    async def steer(call: Call) -> JobView:
        return await ask(call.name)

    return steer
