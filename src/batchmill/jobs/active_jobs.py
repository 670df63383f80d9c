"""ActiveJobs: the runners of the jobs that this process runs, and one lock per job for changes of its state."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from batchmill.errors import JobPaused
from batchmill.jobs.recorded_job import Entry
from batchmill.jobs.resting_job import RestingJob
from batchmill.jobs.runner import JobRunner
from batchmill.jobs.runner_tools import RunnerTools
from batchmill.run_next import start_next
from batchmill.states import JobState
from batchmill.store.sql.transactions import Record
from batchmill.wire.job_spec import JobSpec

CLOSE_S = 5.0  # for runners that end at once to store that they paused


class ActiveJobs:
    def __init__(self, tools: RunnerTools) -> None:
        self._tools = tools
        self._runners: dict[str, JobRunner] = {}
        self.unstored: set[str] = set()  # jobs that stopped and could not store that they did
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: defaultdict[str, int] = defaultdict(int)  # lock -> number of tasks that hold it or wait for it
        self.outputs = asyncio.Lock()  # held, before any other, while a job is matched with the file it writes to

    @asynccontextmanager
    async def lock(self, name: str) -> AsyncIterator[None]:
        """Hold the lock of a job, or of any other `name`."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        self._users[name] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._locks[name]

    @asynccontextmanager
    async def lock_job(self, record: Record) -> AsyncIterator[None]:
        """Hold the locks of a job and of its output, if the caller named one, to change the job's state."""
        async with AsyncExitStack() as locks:
            if record["frontend"] is None or "://" in (record["output"] or ""):
                await locks.enter_async_context(self.outputs)
            await locks.enter_async_context(self.lock(record["id"]))
            yield

    def get(self, job_id: str) -> JobRunner | None:
        """The runner of a job, which may have paused or ended."""
        return self._runners.get(job_id)

    def running(self, job_id: str) -> JobRunner | None:
        """The runner of a job that has neither paused nor ended."""
        runner = self._runners.get(job_id)
        return None if runner is None or runner.has_stopped else runner

    def all_running(self) -> list[JobRunner]:
        return [runner for runner in self._runners.values() if not runner.has_stopped]

    def runner(self, spec: JobSpec, state: JobState | None = None, entry: Entry | None = None) -> JobRunner:
        """Make a runner that is not started. Args: as of `RecordedJob`."""
        return JobRunner(spec, self._tools, state, entry)

    def resting(self, spec: JobSpec) -> RestingJob:
        """A job that has no runner."""
        return RestingJob(spec, self._tools)

    def start(self, runner: JobRunner, *, is_next: bool = False) -> JobRunner:
        """Run a job from its stored state. Args: is_next: before what else is ready, since a client waits for it."""
        runner.task = start_next(runner.run()) if is_next else asyncio.create_task(runner.run())
        self._runners[runner.spec.id] = runner
        runner.task.add_done_callback(partial(self._ended, runner))
        return runner

    async def resume(self, spec: JobSpec) -> JobRunner:
        """Run a paused job with this spec."""
        job = self.resting(spec)
        await job.resume()
        return self.start(self.runner(job.spec))

    def _ended(self, runner: JobRunner, task: asyncio.Task[None]) -> None:
        """Forget a runner. What it could not store is its state: its error is that of the disk or the database."""
        self._forget(runner)
        if not task.cancelled() and isinstance(task.exception(), JobPaused):
            self.unstored.add(runner.spec.id)

    def _forget(self, runner: JobRunner) -> None:
        if self._runners.get(runner.spec.id) is runner:
            del self._runners[runner.spec.id]

    async def wait_settled(self, job_id: str) -> JobRunner | None:
        """The runner of a running job; if it is pausing or ending, wait until its workers are released."""
        runner = self._runners.get(job_id)
        if runner is not None and runner.has_stopped:
            await runner.wait_stopped()
            self._forget(runner)
        return self._runners.get(job_id)

    async def close(self, *, at_once: bool) -> None:
        """Interrupt every job; `at_once`: do not wait for rows in flight."""
        runners = list(self._runners.values())
        for runner in runners:
            runner.at_once = at_once
            runner.interrupt()
        if at_once:
            await self._tools.dispatcher.close(at_once=True)
        tasks = [runner.task for runner in runners if runner.task is not None]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=CLOSE_S if at_once else None)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
