"""When a job's rows leave a provider because they would come too late."""

from __future__ import annotations

import asyncio

import pytest
from dispatcher_stage import SHARD_ROWS, SHARDS, Stage
from msgspec.structs import replace

from batchmill.errors import JobPaused
from batchmill.jobs.failover import RouteFailover
from batchmill.jobs.pools.job_run import JobRun
from batchmill.states import PauseReason
from batchmill.types import Limits, ModelSpec, Policy

ROWS = SHARDS * SHARD_ROWS
ONLINE = ModelSpec("n", "http", "gpt", base_url="http://x/v1", limits=Limits(requests_per_minute=ROWS))  # a minute
FAR = ModelSpec("m", "provider_batch", "gpt", provider="openai", routes=[ONLINE])


@pytest.fixture
async def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    await made.close()


def due_in(stage: Stage, seconds: float, model: ModelSpec = FAR) -> tuple[RouteFailover, JobRun]:
    run = stage.open_run("job", model)
    run.spec = replace(run.spec, policy=Policy(deadline=stage.clock.now() + seconds))
    return RouteFailover(stage.commit_log.ledger.database, stage.clock), run


async def test_rows_leave_in_time(stage):
    """A minute and a half before the deadline, rows that the other way needs a minute for go there."""
    ways, run = due_in(stage, 600)
    start = stage.clock.now()
    await ways.watch(run)
    assert 510 <= stage.clock.now() - start < 600
    with pytest.raises(JobPaused) as raised:
        await run.ended
    assert raised.value.reason is PauseReason.ROUTE_FAILED and run.failing == {0}
    moved = ways.next(run, raised.value)
    assert moved is not None and moved.models[0].engine == "http" and moved.models[0].name == "m"
    assert "deadline" in moved.routing["m"][-1]


@pytest.mark.parametrize("seconds", [30, -5])
async def test_too_late_for_both(stage, seconds):
    """What no way finishes in time stays where it is."""
    ways, run = due_in(stage, seconds)
    watching = asyncio.create_task(ways.watch(run))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not run.ended.done()
    watching.cancel()


async def test_other_failures_change_no_way(stage):
    """Only a way that has failed is left: refused credentials are for the caller to mend."""
    ways, run = due_in(stage, 600)
    run.failing.add(0)
    assert ways.next(run, JobPaused("401", reason=PauseReason.AUTH)) is None
    assert ways.next(run, None) is None
    assert not ways.may_change(replace(run.spec, models=[ONLINE])) and ways.may_change(run.spec)
