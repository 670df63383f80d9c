"""Another pass over the rows of an ended job that failed: planned in a child, then opened in the ledger."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
import sqlalchemy as sa

from batchmill.errors import InvalidTransition
from batchmill.jobs import retry
from batchmill.jobs.adapters import AdapterWork
from batchmill.jobs.drive_room import Tools
from batchmill.jobs.job_book import JobBook
from batchmill.jobs.job_files import JobFiles
from batchmill.jobs.specs import columns_of
from batchmill.wire.job_spec import JobSpec

PLAN_RETRY = "batchmill.jobs.retry:plan_offloaded"


def is_planned(record: sa.RowMapping, files: JobFiles) -> bool:
    """Its rows have been counted and ordered."""
    return bool(record["rows"]) and (files.plan(0) / "plan.json").exists()


async def open_retry(spec: JobSpec, tools: Tools) -> JobSpec:
    """Open a generation over the rows that failed; the description that it runs under.

    Raises: InvalidTransition when none may be run again.
    """
    files = JobFiles(tools.data_dir, spec.id)
    book = JobBook(spec.id, tools.books, tools.clock, tools.ballast)
    offload = partial(tools.offload, project=spec.project)
    record = await book.record()
    if not is_planned(record, files):
        raise InvalidTransition(f"the job {spec.id} ended before its rows were planned: submit it again")
    checked = await AdapterWork(tools.adapters, offload).check_again(spec)
    if checked != spec:
        await asyncio.to_thread(files.write_spec, checked)
    blocks = await book.call(book.ledger.committed, spec.id)
    generation = record["generation"] + 1
    order = retry.RetryOrder(checked, str(files.data_dir), blocks, generation)
    answer = await offload(PLAN_RETRY, msgspec.json.encode(order), lambda _: None)
    opened = msgspec.json.decode(answer, type=retry.Opened)
    if opened.rows == 0:
        raise InvalidTransition(f"the job {spec.id} has no failed rows that could be run again")
    await book.call(
        book.ledger.open_generation, spec.id, generation, opened.settled, opened.rows_ok,
        None if (most := tools.quota_of(checked)) is None else (checked.project, most), **columns_of(checked),
    )  # fmt: skip
    return checked
