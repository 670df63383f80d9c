"""`batchmill run`: submit, follow, sum up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from batchmill.cli.displays import Display, display_for, done
from batchmill.cli.following import follow
from batchmill.cli.order_options import MORE_THAN_NOTHING, build_order, deadline_option, order_options
from batchmill.cli.session import Session
from batchmill.cli.summary import show_end
from batchmill.cli.text import clean, count
from batchmill.config import Config
from batchmill.types import Submitted
from batchmill.wire.native import PRIORITY_MAX

if TYPE_CHECKING:
    from batchmill.cli.clients import Jobs

PRIORITY = click.IntRange(-PRIORITY_MAX, PRIORITY_MAX)


@click.command()
@order_options
@click.option("--together", is_flag=True, help="OpenAI rows that failed stand among the others, in the input's order.")
@click.option("--budget", type=MORE_THAN_NOTHING, metavar="USD", help="Pause when so much is spent.")
@click.option("--priority", type=PRIORITY, default=0, show_default=True, help="Jobs of a higher one go first.")
@deadline_option
@click.option("--label", "labels", metavar="KEY=VALUE", multiple=True, help="Your own words about the job.")
@click.option("--restart", is_flag=True, help="Start over although an unfinished job exists.")
@click.option("--overwrite", is_flag=True, help="Run again although the job is finished, over its results.")
@click.pass_obj
def run(session: Session, **options: Any) -> int:
    """Run every row of a dataset and write the results.

    INPUT is a JSONL file of OpenAI batch rows or a table in JSONL, CSV or Parquet; several files, a folder or a glob
    are one dataset. The same command run again goes on where the last one stopped.
    """
    config = session.config()
    return session.run(_run(session, config, options))


async def _run(session: Session, config: Config, options: dict[str, Any]) -> int:
    async with session.app.open_jobs(config) as jobs:
        order = await build_order(session, config, options)
        submitted = await jobs.submit(order)
        return await attend(session, jobs, submitted)


async def attend(session: Session, jobs: Jobs, submitted: Submitted) -> int:
    """Show a job that is under way to its end and sum it up; returns the exit code."""
    display = display_for(session)
    try:
        await _announce(session, jobs, submitted, display)
        is_shared = submitted.how == "joined"
        followed = await follow(jobs, submitted.id, display, session=session, is_shared=is_shared)
    finally:
        display.close()
    return show_end(session, followed.view, was_interrupted=followed.was_interrupted)


async def _announce(session: Session, jobs: Jobs, submitted: Submitted, display: Display) -> None:
    if session.as_json:
        session.emit("submitted", id=submitted.id, how=submitted.how)
        return
    view = await jobs.show(submitted.id)
    rows = f": {count(done(view))} of {count(view.rows)} rows are done" if view.rows else ""
    told = {
        "started": f"job {submitted.id}",
        "resumed": f"resuming job {submitted.id}{rows}",
        "retried": f"retrying {count(view.rows - done(view), 'row')} of job {submitted.id}",
        "joined": f"joining job {submitted.id}, which is running{rows}; this command's flags for workers, limits, "
        "prices and budget have no effect on it, and Ctrl-C pauses it for everybody",
        "finished": f"job {submitted.id} is finished already; --overwrite runs it again",
    }
    display.say(clean(told.get(submitted.how, f"job {submitted.id}: {submitted.how}")))
