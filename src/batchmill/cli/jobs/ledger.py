"""`batchmill ledger`: verifies or rebuilds the record of finished rows, and salvages a damaged database."""

from __future__ import annotations

from collections.abc import Iterator

import click

from batchmill.cli.session import EXIT_FAILED, EXIT_OK, Session, global_options, job_argument
from batchmill.cli.text import clean, count, size
from batchmill.types import LedgerReport, SalvagedTable, SalvageReport


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
    session.local_only("ledger rebuild", "run it on the server's machine, in its data directory")
    return session.run(_rebuild(session, job_id))


@ledger.command()
@global_options
@click.pass_obj
def salvage(session: Session) -> int:
    """Rebuild a damaged or missing database from readable data, backups and the jobs' files."""
    session.local_only("ledger salvage", "stop the server and run it on its machine")
    report = session.app.salvage(session.config(), session.say)
    code = EXIT_FAILED if report.failed else EXIT_OK
    if session.as_json:
        session.emit("salvage", exit_code=code, report=report)
        return code
    if report.is_sound:
        session.print("the database is sound: nothing was changed")
        return code
    for line in _salvage_lines(report):
        session.print(clean(line, 1000))
    for text in report.failed:
        session.say(f"  not recovered: {clean(text, 1000)}")
    return code


def _salvage_lines(report: SalvageReport) -> Iterator[str]:
    damaged = [table for table in report.tables if table.is_damaged]
    yield f"the database is repaired; the damaged one is kept in {report.damaged}"
    empty = [table.name for table in damaged if not table.rows + table.from_backup + table.rebuilt]
    if empty:
        yield f"  nothing could be read of {'it' if len(empty) == len(report.tables) else ', '.join(empty)}"
    yield from (_table_line(table) for table in damaged if table.name not in empty)
    if any(table.name == "keys" and table.from_backup for table in damaged):
        yield "  check `batchmill keys list`: keys from the backup are as they were then, even if revoked since"
    if damaged:
        missing = "there was no backup: rows" if report.backup is None else "rows that the backup does not have and"
        yield f"  {missing} that could be neither read nor rebuilt are lost"
    for job_id in report.rebuilt:
        text = f"  {job_id}: its ledger was rebuilt; `batchmill resume {job_id}` continues the job"
        rows = report.reopened.get(job_id)
        yield text + (f" and runs {count(rows, 'row')} again whose results are lost" if rows else "")
    for job_id in report.reduced:
        yield f"  {job_id}: it keeps only its results, and cannot be retried"
    for job_id in report.lost:
        yield f"  {job_id}: its record could not be read, so the job is lost; its order can be sent again"
    for path in report.moved:
        yield f"  {path}: moved there, because nothing refers to it"


def _table_line(table: SalvagedTable) -> str:
    text = f"  {table.name}: "
    if table.rows:
        text += f"some of it could not be read, {count(table.rows, 'row')} could"
        text += f" ({count(table.from_leaves)} of them below damaged pages)" if table.from_leaves else ""
    else:
        text += "nothing of it could be read"
    text += f", {count(table.from_backup)} come from the backup" if table.from_backup else ""
    return text + (f", {count(table.rebuilt)} were rebuilt from what the jobs have left" if table.rebuilt else "")


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
        session.print(f"  {count(report.adopted, 'row')} found that the ledger lacked")
    if report.reopened:
        session.print(f"  {count(report.reopened, 'row')} cannot be read; resuming the job runs them again")
    for text in report.damaged + report.broken:
        session.say(f"  {clean(text)}")
    return code
