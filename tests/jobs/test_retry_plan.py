"""The plan of a retry, of a job whose outcomes fit in memory and of one whose do not."""

from __future__ import annotations

import os
from contextlib import closing

import pytest
from ledgered_job import LedgeredJob
from msgspec.structs import replace

from batchmill.jobs.intake.retry_plan import Opened, RetryOrder, plan_failed
from batchmill.jobs.ledger.plan import PlanReader
from batchmill.store.segments.blocks import open_segments

ROWS = 20


@pytest.fixture
def job(tmp_path):
    made = LedgeredJob(tmp_path, rows=ROWS, shard_rows=5)
    yield made
    made.ledger.close()


def test_rows_that_failed_or_never_ran_are_planned(job):
    """However many rows the job has, the plan has the same bytes, and no other file is left."""
    file = job.segment()
    job.run(file, [0, 2, 1])
    job.run(file, [3, 4], failed=True)
    job.run(file, list(range(5, 10)))
    file.close()
    before = set(os.listdir(job.files.home))
    found = []
    for generation, in_memory_rows in ((1, ROWS), (2, 4)):
        place = job.files.segment_place
        order = RetryOrder(job.spec, str(job.data_dir), None, place, job.ledger.committed("job"), generation)
        with closing(open_segments(place)) as segments:
            assert plan_failed(replace(order, in_memory_rows=in_memory_rows), segments) == Opened(12, 8, {}, [0])
        reader = PlanReader(job.files.plan(generation))
        reader.check()
        found.append((reader.plan, list(reader.row_numbers(0, reader.leaders))))
    assert found[0] == found[1]
    assert found[0][1] == [3, 4, *range(10, 20)]
    assert set(os.listdir(job.files.home)) - before == {"plan-1", "plan-2"}
