"""A dispatcher over a real ledger, with workers that a test plays."""

from __future__ import annotations

from pathlib import Path

import msgspec
from fakes.databases import open_ledger
from fakes.held_clock import HeldClock
from fakes.scripted_workers import ScriptedExecutor, ScriptedWorker
from written_dataset import RowKeys, write_dataset

from batchmill.jobs.ledger.commits import CommitLog
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.ledger.plan import PlanOrder, PlanReader, ShardRows, make
from batchmill.jobs.pools.dispatcher import Dispatcher
from batchmill.jobs.pools.job_run import JobRun
from batchmill.states import JobState
from batchmill.types import DatasetSpec, ModelSpec, Policy
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.messages import Ack, Grant, RequestRows
from batchmill.wire.rows.forms import OpenAIForm

SHARDS, SHARD_ROWS = 3, 4
MODEL = ModelSpec("m", "function", "app.py:f")


class Stage:
    """A dispatcher over a real ledger, with workers that the test plays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.executor = ScriptedExecutor()
        self.commit_log = CommitLog(open_ledger(folder / "batchmill.db"))
        self.clock = HeldClock()
        self.dispatcher = Dispatcher(folder, self.commit_log, self.executor, self.clock)
        self.plans: list[PlanReader] = []

    def open_run(self, name: str, model: ModelSpec = MODEL) -> JobRun:
        """A job whose rows have been planned, going on where the ledger says; its workers are reserved."""
        home = JobFiles(self.folder, name).home
        if not home.exists():
            home.mkdir(parents=True)
            (home / "segments").mkdir()
            written = write_dataset(home, [RowKeys()] * (SHARDS * SHARD_ROWS), keys=False)
            make(PlanOrder([(0, None)], [ShardRows(SHARD_ROWS)]), written.dataset, written.plan, lambda _: None)
            self.commit_log.ledger.create(self.spec(name, model))
            for state in (JobState.PLANNING, JobState.QUEUED, JobState.RUNNING):
                self.commit_log.ledger.move(name, state)
        self.plans.append(PlanReader(home / "plan"))
        files = JobFiles(self.folder, name)
        run = JobRun(self.spec(name, model), 0, self.plans[-1], files=files, clock=self.clock)
        run.load(self.commit_log.ledger.progress(name, 0))
        self.dispatcher.reserve(name, [model])
        return run

    def begin(self, name: str, model: ModelSpec = MODEL, *, project: str = "default") -> JobRun:
        run = self.open_run(name, model)
        run.spec = msgspec.structs.replace(run.spec, project=project)
        self.dispatcher.add(run)
        return run

    @staticmethod
    def spec(name: str, model: ModelSpec) -> JobSpec:
        return JobSpec(
            id=name, dataset=DatasetSpec(["/data/in.jsonl"]), models=[model], form=OpenAIForm(), policy=Policy(),
            output=None, identity=name, code={}, created=1.0,
        )  # fmt: skip

    def rows_ok(self, name: str) -> int:
        return self.commit_log.ledger.job(name)["rows_ok"]

    async def close(self) -> None:
        await self.dispatcher.close(at_once=True)
        self.commit_log.close()


async def grant(worker: ScriptedWorker, *, more_of: str = "") -> Grant:
    """The next grant of a worker; `more_of`: which has room for one more of this job."""
    if more_of:
        worker.say(RequestRows(more_of))
    return await worker.expect(Grant)


def positions(grant: Grant) -> list[int]:
    return list(range(grant.position, grant.position + grant.n))


async def finish(worker: ScriptedWorker, granted: Grant) -> bool:
    """Finish all of a grant; whether it was counted."""
    worker.finish(granted, positions(granted))
    return (await worker.expect(Ack)).counted
