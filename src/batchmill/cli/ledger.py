"""`batchmill ledger`: the record of which rows are done, audited or made anew."""

from __future__ import annotations

import click

from batchmill.cli.session import EXIT_FAILED, EXIT_OK, Session, global_options, job_argument
from batchmill.cli.text import clean, count, size
from batchmill.types import LedgerReport


@click.group()
def ledger() -> None:
    """Verify or rebuild the record of which rows are done."""


@ledger.command()
@job_argument
@global_options
@click.pass_obj
def verify(session: Session, job_id: str) -> int:
    """Check the ledger against the segments; changes nothing. Exit code 1 when they do not agree."""
    return session.run(_verify(session, job_id))


@ledger.command()
@job_argument
@global_options
@click.pass_obj
def rebuild(session: Session, job_id: str) -> int:
    """Make the ledger anew from the job's description and its segments."""
    session.local_only("ledger rebuild", "who looks after the server runs it there, in its data directory")
    return session.run(_rebuild(session, job_id))


async def _verify(session: Session, job_id: str) -> int:
    async with session.app.open_jobs(session.config()) as jobs:
        return _print(session, await jobs.verify(job_id))


async def _rebuild(session: Session, job_id: str) -> int:
    async with session.app.open_jobs(session.config()) as jobs:
        return _print(session, await jobs.rebuild(job_id))


def _print(session: Session, report: LedgerReport) -> int:
    code = EXIT_FAILED if report.broken else EXIT_OK
    if session.as_json:
        session.emit("ledger", exit_code=code, report=report)
        return code
    session.print(f"ledger of job {report.job}: {'sound' if not report.broken else 'broken'}")
    session.print(
        f"  {count(report.rows_done)} of {count(report.rows)} rows done in {count(report.commits, 'commit')}, "
        f"{count(report.segments, 'segment')}, {size(report.bytes)}"
    )
    if report.adopted:
        session.print(f"  {count(report.adopted, 'row')} found that the ledger did not know")
    if report.reopened:
        session.print(f"  {count(report.reopened, 'row')} cannot be read; resuming the job runs them again")
    for text in report.damaged + report.broken:
        session.say(f"  {clean(text)}")
    return code
