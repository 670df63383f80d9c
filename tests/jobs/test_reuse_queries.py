"""A lookup of earlier results reads the newest ended jobs of its project from an index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from fakes.databases import open_database

from batchmill.jobs.intake import reuse_jobs
from batchmill.types import DatasetSpec, ModelSpec, Policy
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm

SPEC = JobSpec(
    id="job_1", dataset=DatasetSpec(["in.jsonl"]), models=[ModelSpec("m", "openai", "m")], form=OpenAIForm(),
    policy=Policy(), output=None, identity="1", code={}, created=0.0,
)  # fmt: skip


def plan_of(db: sa.Connection, query: Callable[[sa.Connection], Any]) -> str:
    """How SQLite runs the statement of a query."""
    ran: list[tuple[str, Any]] = []

    def note(_: object, __: object, statement: str, parameters: Any, *___: object) -> None:
        ran.append((statement, parameters))

    sa.event.listen(db, "before_cursor_execute", note)
    query(db)
    sa.event.remove(db, "before_cursor_execute", note)
    ((statement, parameters),) = ran
    return " ".join(row[-1] for row in db.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters))


async def test_earlier_jobs_come_from_an_index(tmp_path: Path) -> None:
    """Neither finding the newest ended jobs nor the oldest that lookups see sorts, or reads, all jobs of a project."""
    database = open_database(tmp_path / "batchmill.db")
    for query in (
        lambda db: reuse_jobs._ended(db, SPEC, 0.0, 10),
        lambda db: reuse_jobs._oldest_ended(db, "default", 10),
    ):
        plan = await database.read(plan_of, query)
        assert "USING INDEX jobs_by_end (project=?" in plan and "TEMP B-TREE" not in plan, plan
    database.close()
