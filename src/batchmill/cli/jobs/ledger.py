"""`batchmill ledger`: the record of which rows are done, audited or made anew."""

from __future__ import annotations

from collections.abc import Iterator

import click

from batchmill.cli.session import EXIT_FAILED, EXIT_OK, Session, global_options, job_argument
from batchmill.cli.text import clean, count, size
from batchmill.types import LedgerReport, SalvageReport


@click.group()
def ledger() -> None:
    """Verify or rebuild the record of finished rows; salvage a damaged database."""


@ledger.command()
@job_argument
@global_options
@click.pass_obj
def verify(session: Session, job_id: str) -> int:
    """Compare the ledger with the segments; change nothing. Exit code 1 if they differ."""
    return session.run(_verify(session, job_id))


@ledger.command()
@job_argument
@global_options
@click.pass_obj
def rebuild(session: Session, job_id: str) -> int:
    """Rebuild the ledger from the job's description and its segments."""
    session.local_only("ledger rebuild", "who looks after the server runs it there, in its data directory")
    return session.run(_rebuild(session, job_id))


@ledger.command()
@global_options
@click.pass_obj
def salvage(session: Session) -> int:
    """Rebuild a damaged or missing database from readable data, backups and the jobs' files."""
    session.local_only("ledger salvage", "who looks after the server stops it and runs it there")
    report = session.app.salvage(session.config(), session.say)
    code = EXIT_FAILED if report.failed else EXIT_OK
    if session.as_json:
        session.emit("salvage", exit_code=code, report=report)
        return code
    if report.is_sound:
        session.print("the database is sound: nothing was changed")
        return code
    for line in _salvaged(report):
        session.print(clean(line, 1000))
    for text in report.failed:
        session.say(f"  not had: {clean(text, 1000)}")
    return code


def _salvaged(report: SalvageReport) -> Iterator[str]:
    lost = [table for table in report.tables if table.is_damaged]
    yield f"the database is whole again; what it was lies in {report.damaged}"
    nothing = [table.name for table in lost if not table.rows and not table.from_backup]
    if nothing:
        yield f"  nothing could be read of {'it' if len(nothing) == len(report.tables) else ', '.join(nothing)}"
    for table in lost:
        if table.name in nothing:
            continue
        text = f"  {table.name}: some of it could not be read, {count(table.rows, 'row')} could"
        yield text + (f", {count(table.from_backup)} come from the backup" if table.from_backup else "")
    if any(table.name == "keys" and table.from_backup for table in lost):
        yield "  look at `batchmill keys list`: keys of the backup are as they were then, revoked since or not"
    if lost and report.backup is None:
        yield "  there was no backup: rows that could not be read are lost, unless the jobs' own files tell them"
    for job_id in report.rebuilt:
        yield f"  {job_id}: its ledger was made anew; `batchmill resume {job_id}` goes on with it"
    for path in report.moved:
        yield f"  {path}: it belonged to nothing, and was moved there"


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
