"""`batchmill run`: submits a job, follows it and prints a summary."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchmill.cli.jobs.displays import Display, display_for, done
from batchmill.cli.jobs.order_options import (
    build_order,
    deadline_option,
    order_for_update,
    order_options,
    sample_options,
)
from batchmill.cli.jobs.own_rows import Followed, again, follow_own_rows, order_once, resumed
from batchmill.cli.jobs.pipes import SAMPLES, is_piped, load, piped_results, spooled_input
from batchmill.cli.jobs.preview import progress_of
from batchmill.cli.jobs.summary import has_sample, show_end
from batchmill.cli.session import Session
from batchmill.cli.text import clean, count
from batchmill.cli.values import COUNT, POSITIVE, NameList
from batchmill.config import Config
from batchmill.errors import InvalidInput, InvalidTransition
from batchmill.types import JobOrder, JobView, Sample, Submitted
from batchmill.types.cluster import EXECUTORS
from batchmill.wire.input_urls import is_input_url
from batchmill.wire.job_spec import EXISTS, NO_SAMPLE, OUTDATED
from batchmill.wire.native import PRIORITY_MAX
from batchmill.wire.replies import FLAWS

if TYPE_CHECKING:
    from batchmill.cli.clients import JobsClient


PREVIEWED_BYTES_MAX = 64 * 1024 * 1024  # of an input that is uploaded to say what --update would do


async def follow(
    jobs: JobsClient, job_id: str, display: Display, *, session: Session, is_shared: bool = False
) -> Followed:
    """Show a job until it is paused or has ended.

    The first Ctrl-C (SIGTERM, SIGHUP) pauses the job and waits; the second cancels this task, which stops at once. For
    a job at a server, Ctrl-C only stops watching: the job continues.

    Args: is_shared: another process runs the job too, so that a message says that a pause concerns it.
    """
    interrupts = session.interrupts
    reaction = _Pause(jobs, job_id, display, is_shared=is_shared) if session.server_url is None else _Leave(display)
    view = None
    with interrupts.first_does(reaction.begin, lambda: display.say("stopping at once")):
        try:
            async with contextlib.aclosing(reaction.watched(jobs.watch(job_id))) as views:
                async for view in views:
                    try:
                        display.update(view)
                    except BrokenPipeError as error:
                        await interrupts.tell_from_closing(error)
            await reaction.settle()
        finally:
            await reaction.abandon()
    assert view is not None, "watch() yields at least one view"
    return Followed(view, interrupts.count > 0)


class _Leave:
    """Reacts to Ctrl-C for a job at a server: stops watching, and changes nothing else."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._left = asyncio.Event()

    def begin(self) -> None:
        self._left.set()
        self._display.say("leaving: the job continues on the server")

    async def watched(self, views: AsyncIterator[JobView]) -> AsyncGenerator[JobView]:
        """Yield views until Ctrl-C, but always the first one."""
        left = asyncio.ensure_future(self._left.wait())
        next_view: asyncio.Future[JobView | None] | None = None
        is_first = True
        try:
            while is_first or not left.done():
                next_view = asyncio.ensure_future(anext(views, None))
                await asyncio.wait({next_view} if is_first else {next_view, left}, return_when=FIRST_COMPLETED)
                if not next_view.done() or (view := next_view.result()) is None:
                    return
                is_first = False
                yield view
        finally:
            for task in filter(None, (left, next_view)):
                task.cancel()
            await asyncio.gather(*filter(None, (left, next_view)), return_exceptions=True)

    async def settle(self) -> None:
        """Do nothing: there is nothing to wait for."""

    async def abandon(self) -> None:
        """Do nothing: there is nothing to end."""


class _Pause:
    """Reacts to Ctrl-C for a job on this machine: pauses it while watching continues."""

    def __init__(self, jobs: JobsClient, job_id: str, display: Display, *, is_shared: bool) -> None:
        self._jobs, self._job_id, self._display = jobs, job_id, display
        self._is_shared = is_shared
        self._pausing: asyncio.Task[JobView] | None = None

    def begin(self) -> None:
        self._pausing = asyncio.get_running_loop().create_task(self._pause())
        scope = " the job for all who run or follow it" if self._is_shared else ""
        self._display.say(f"pausing{scope}: storing finished rows; Ctrl-C again stops at once")

    async def _pause(self) -> JobView:
        return await self._jobs.steer(self._job_id, "pause")

    async def watched(self, views: AsyncIterator[JobView]) -> AsyncGenerator[JobView]:
        """Yield all views; the last one shows the pause."""
        async for view in views:
            yield view

    async def settle(self) -> None:
        """Wait for the pause, if any. A job that ended first needs none."""
        if self._pausing is not None:
            with contextlib.suppress(InvalidTransition):
                await self._pausing

    async def abandon(self) -> None:
        """Cancel the request to pause. Its error is dropped: the one that ended the watching is raised."""
        if self._pausing is not None:
            self._pausing.cancel()
            await asyncio.gather(self._pausing, return_exceptions=True)


PRIORITY = click.IntRange(-PRIORITY_MAX, PRIORITY_MAX)


@click.command()
@order_options
@sample_options
@click.option("--together", is_flag=True, help="Write failed OpenAI rows to the same file, in input order.")
@click.option("--budget", type=POSITIVE, metavar="USD", help="Pause before the cost exceeds this amount.")
@click.option("--priority", type=PRIORITY, default=0, show_default=True, help="Jobs with a higher priority run first.")
@deadline_option
@click.option("--label", "labels", metavar="KEY=VALUE", multiple=True, help="A label of your own for the job.")
@click.option("--restart", is_flag=True, help="Start a new job although an unfinished one exists.")
@click.option(
    "--executor", type=click.Choice(EXECUTORS), help="Where workers run, instead of cluster.executor: on a Ray cluster."
)
@click.option(
    "--output-format",
    type=click.Choice(["jsonl", "csv", "parquet"]),
    help="The format of parts, if the output is a folder, or of results on standard output [jsonl].",
)
@click.option("--part-rows", type=COUNT, help="Rows of each part, if the output is a folder [1,000,000].")
@click.option(
    "--fail-on",
    type=NameList(FLAWS),
    metavar="KINDS",
    help="Replies that are errors of their rows: " + ", ".join(FLAWS) + ".",
)
@click.option("--update", is_flag=True, help="Write finished results anew: run what is new, take over the rest.")
@click.option("--overwrite", is_flag=True, help="Run a finished job again and overwrite its results.")
@click.pass_obj
def run(session: Session, **options: Any) -> int:
    """Run every row of a dataset and write the results.

    INPUT is a JSONL file of OpenAI batch rows or a table in JSONL, CSV or Parquet; several files, a folder or a glob
    are one dataset, and - is standard input. Running the same command again resumes the job.
    """
    executor = options.pop("executor")
    if executor is not None and session.server_url is not None:
        raise InvalidInput(f"the server {session.server_url} has workers of its own: leave --executor out")
    config = session.config(executor=executor)
    piped = is_piped(session, options)
    with spooled_input(session, config, options, stays=True):
        return session.run(_run(session, config, options, piped=piped))


async def _run(session: Session, config: Config, options: dict[str, Any], *, piped: bool) -> int:
    async with session.app.open_jobs(config) as jobs:
        order = order_once(await build_order(session, config, options))
        if config.cluster.executor is not None:
            await jobs.require_cluster()
        submitted = await _submit(session, config, jobs, order)
        follow_job = partial(_follow_order, session, config, jobs, submitted, order)
        if not piped:
            return await follow_job()
        kind = options["output_format"] or "jsonl"
        async with piped_results(session, config, jobs, submitted.id, kind, order.sample):
            return await follow_job(is_piped=True)


async def _submit(session: Session, config: Config, jobs: JobsClient, order: JobOrder) -> Submitted:
    try:
        return await jobs.submit(order)
    except InvalidInput as error:
        if error.code == OUTDATED or (error.code == EXISTS and _can_ask_server(session, order)):
            await _show_update(session, config, order)
        raise


def _can_ask_server(session: Session, order: JobOrder) -> bool:
    """Whether what --update would do can be asked of a server: its input is uploaded for that."""
    if session.server_url is None:
        return False
    paths = [Path(path) for path in order.dataset.paths if not is_input_url(path)]
    return sum(path.stat().st_size for path in paths) <= PREVIEWED_BYTES_MAX


async def _show_update(session: Session, config: Config, order: JobOrder) -> None:
    """Say what --update would do."""
    with progress_of(session, "planning") as progress:
        _, plan = await session.app.preview_plan(order_for_update(order), config, progress)
    if plan is None:
        return
    if session.as_json:
        session.emit("plan", plan=plan)
        return
    rows = f"{count(plan.run - plan.reused, 'row')} to run, {count(plan.reused)} to take over"
    session.say(f"with --update: {rows}" + (f", {count(plan.folded)} folded" if plan.folded else ""))


async def follow_to_end(session: Session, jobs: JobsClient, submitted: Submitted, sample: Sample | None) -> int:
    """Show a job until it ends or pauses, and print its summary. Returns: the exit code.

    Args: sample: which it is to run; None: all rows, also if another command has it run a sample meanwhile.
    """
    followed = await _follow(session, jobs, submitted, sample, partial(resumed, jobs, submitted))
    return await _show_end(session, followed, None)


async def _follow_order(
    session: Session, config: Config, jobs: JobsClient, submitted: Submitted, order: JobOrder, *, is_piped: bool = False
) -> int:
    """As `follow_to_end`, for the job of an order."""
    go_on = partial(_submit, session, config, jobs, again(order))
    followed = await _follow(session, jobs, submitted, order.sample, go_on)
    return await _show_end(session, followed, order, is_piped=is_piped)


async def _follow(
    session: Session,
    jobs: JobsClient,
    submitted: Submitted,
    sample: Sample | None,
    go_on: Callable[[], Awaitable[Submitted]],
) -> Followed:
    display = display_for(session)

    async def follow_one(submitted: Submitted) -> Followed:
        is_shared = submitted.how == "joined"
        return await follow(jobs, submitted.id, display, session=session, is_shared=is_shared)

    try:
        await _announce(session, jobs, submitted, sample, display)
        is_alone = session.server_url is not None
        return await follow_own_rows(submitted, sample, follow=follow_one, go_on=None if is_alone else go_on)
    finally:
        display.close()


async def _show_end(session: Session, followed: Followed, order: JobOrder | None, *, is_piped: bool = False) -> int:
    """Print the summary of a job that has ended or is paused. Returns: the exit code.

    Args:
        order: of this command.
        is_piped: the rows of a sample go to a pipe, and are not shown.
    """
    is_asked = order is None or order.sample is not None
    if is_asked and has_sample(followed.view) and not is_piped:
        try:
            await load(SAMPLES).show_sample(session, followed.view, order)
        except InvalidInput as error:
            if error.code != NO_SAMPLE:
                raise
            session.say(f"another command has gone on with the job: batchmill show {followed.view.id}")
    return show_end(session, followed.view, was_interrupted=followed.was_interrupted)


async def _announce(
    session: Session, jobs: JobsClient, submitted: Submitted, sample: Sample | None, display: Display
) -> None:
    """Args: sample: of this command."""
    view = await jobs.show(submitted.id)
    if submitted.how == "joined" and view.sample not in (None, sample):
        session.say(f"job {submitted.id} runs a sample for another command: this one goes on after it")
    if session.as_json:
        session.emit("submitted", id=submitted.id, how=submitted.how)
        return
    rows = f": {count(done(view))} of {count(view.rows)} rows are done" if view.rows else ""
    announcements = {
        "started": f"job {submitted.id}",
        "resumed": f"resuming job {submitted.id}{rows}",
        "retried": f"retrying {count(view.rows - done(view), 'row')} of job {submitted.id}",
        "joined": f"joining job {submitted.id}, which is running{rows}; this command's flags for workers, limits, "
        "prices and budget have no effect on it, and Ctrl-C pauses it for everybody",
        "finished": f"job {submitted.id} is finished already; {_ways_on(view)}",
    }
    display.say(clean(announcements.get(submitted.how, f"job {submitted.id}: {submitted.how}")))


def _ways_on(view: JobView) -> str:
    """What may be done with a job that has ended."""
    again = "--overwrite runs it again"
    return (
        f"batchmill retry {view.id} runs its failed rows, {again}" if view.rows_failed > view.rows_rejected else again
    )
