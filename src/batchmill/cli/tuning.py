"""Commands about a job that has not ended: why it waits, and what may still be changed of it."""

from __future__ import annotations

import click

from batchmill.cli.order_options import MORE_THAN_NOTHING, deadline_option
from batchmill.cli.run import PRIORITY
from batchmill.cli.session import EXIT_OK, Session, global_options, job_argument
from batchmill.cli.summary import lines
from batchmill.cli.text import clean, count, moment
from batchmill.errors import InvalidInput
from batchmill.wire.native import Change


@click.command()
@job_argument
@click.option("--priority", type=PRIORITY, help="Jobs of a higher one go first.")
@deadline_option
@click.option("--budget", type=MORE_THAN_NOTHING, metavar="USD", help="Pause when so much is spent.")
@global_options
@click.pass_obj
def amend(session: Session, job_id: str, *, priority: int | None, deadline: float | None, budget: float | None) -> int:
    """Change the priority, deadline or budget of a job that has not ended."""
    change = Change(priority, deadline, budget)
    if change == Change():
        raise InvalidInput("nothing is to be changed: give --priority, --deadline or --budget")
    return session.run(_amend(session, job_id, change))


async def _amend(session: Session, job_id: str, change: Change) -> int:
    async with session.app.open_jobs(session.config()) as jobs:
        view = await jobs.amend(job_id, change)
    if session.as_json:
        session.emit("job", job=view)
        return EXIT_OK
    for line in lines(view):
        session.print(line)
    session.print(f"  {'priority':<10}{view.priority}")
    if view.deadline is not None:
        session.print(f"  {'deadline':<10}{moment(view.deadline)}")
    return EXIT_OK


@click.command()
@job_argument
@global_options
@click.pass_obj
def explain(session: Session, job_id: str) -> int:
    """Explain why a job waits, or goes no faster, and by which ways it goes or went."""
    return session.run(_explain(session, job_id))


async def _explain(session: Session, job_id: str) -> int:
    async with session.app.open_jobs(session.config()) as jobs:
        wait = await jobs.explain(job_id)
    if session.as_json:
        session.emit("wait", wait=wait)
        return EXIT_OK
    session.print(f"job {wait.job}: {clean(wait.state)}")
    for reason in wait.reasons or ["nothing holds it up"]:
        session.print(f"  {clean(reason, 2000)}")
    if wait.ahead:
        session.print(f"  {count(wait.ahead, 'job')} get workers before it")
    return EXIT_OK
