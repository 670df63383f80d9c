"""Commands about jobs that exist: list, show, results, and steering them."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, BinaryIO

import click

from batchmill.cli.jobs.displays import Display, display_for, done
from batchmill.cli.jobs.order_options import deadline_option, written_by
from batchmill.cli.jobs.result_files import kind_of, must_convert, write_as, written_whole
from batchmill.cli.jobs.run import PRIORITY, attend, follow
from batchmill.cli.jobs.summary import lines, pause_lines, show_problems
from batchmill.cli.session import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_PAUSED,
    ResultStream,
    Session,
    global_options,
    job_argument,
    refuse_half_text,
)
from batchmill.cli.text import brief, clean, count, moment, short, table
from batchmill.cli.values import LONG_TIME, MORE_THAN_NOTHING, Past
from batchmill.config import Config
from batchmill.errors import BatchmillError, InvalidInput, InvalidTransition
from batchmill.states import ENDED, JobState
from batchmill.types import JobQuery, JobView, Submitted
from batchmill.wire.native import Change

if TYPE_CHECKING:
    from batchmill.cli.clients import JobsClient


@click.command()
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@global_options
@click.pass_obj
def rm(session: Session, job_ids: tuple[str, ...]) -> int:
    """Remove ended jobs and their results. Files written with -o stay."""
    return session.run(_remove(session, [refuse_half_text(each) for each in job_ids]))


@click.command()
@click.option(
    "--older-than",
    type=LONG_TIME,
    metavar="AGE",
    required=True,
    help="Time since the end of the job: 45m, 12h, 30d or 8w.",
)
@click.option("--state", type=click.Choice(sorted(ENDED)), help="Only jobs that ended in this state.")
@click.option("--dry-run", is_flag=True, help="List the jobs; remove none.")
@global_options
@click.pass_obj
def prune(session: Session, older_than: float, state: str | None, dry_run: bool) -> int:
    """Remove all jobs that ended longer ago than this, and their results."""
    return session.run(_prune(session, older_than, state, is_dry=dry_run))


async def _remove(session: Session, job_ids: list[str]) -> int:
    async with session.app.open_jobs(session.config()) as opened:
        return await _remove_each(session, opened, job_ids)


async def _prune(session: Session, age: float, state: str | None, *, is_dry: bool) -> int:
    before = time.time() - age
    async with session.app.open_jobs(session.config()) as opened:
        old = [view for view in await opened.list() if _is_old(view, before, state)]
        if is_dry:
            for view in old:
                _print_removed(session, view, "would be removed")
            return EXIT_OK
        code = await _remove_each(session, opened, [view.id for view in old])
    if not session.as_json:
        session.print(f"{count(len(old), 'job')} ended so long ago")
    return code


def _is_old(view: JobView, before: float, state: str | None) -> bool:
    has_ended = JobState(view.state).is_at_rest and view.finished is not None and view.finished <= before
    return has_ended and state in (None, view.state)


async def _remove_each(session: Session, opened: JobsClient, job_ids: list[str]) -> int:
    """One that cannot be removed does not keep the others."""
    code = EXIT_OK
    for job_id in job_ids:
        try:
            _print_removed(session, await opened.remove(job_id), "removed")
        except BatchmillError as error:
            if len(job_ids) == 1:
                raise
            code = EXIT_FAILED
            session.say(f"batchmill: {clean(error.message)}")
    return code


def _print_removed(session: Session, view: JobView, what: str) -> None:
    if session.as_json:
        session.emit("removed" if what == "removed" else "old", job=view)
        return
    kept = f"; {view.output} stays" if view.output is not None and f"/jobs/{view.id}/" not in view.output else ""
    is_path = view.output is not None and view.output.startswith("/")  # a server names its files by their ids
    session.print(clean(f"{view.id}: {what}{kept if is_path else ''}", 4096))


@click.command()
@job_argument
@click.option("--priority", type=PRIORITY, help="Jobs with a higher priority run first.")
@deadline_option
@click.option("--budget", type=MORE_THAN_NOTHING, metavar="USD", help="Pause before the cost exceeds this amount.")
@global_options
@click.pass_obj
def amend(session: Session, job_id: str, *, priority: int | None, deadline: float | None, budget: float | None) -> int:
    """Change the priority, deadline or budget of an unfinished job."""
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
    """Explain why a job waits or is slow, and which routes it used."""
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


PARTIAL = "partial.jsonl"  # what results that are not all there would be called
PIECE_BYTES = 1024 * 1024
LINE_CHARS_MAX = 80
STATE_CHARS_MAX = 22  # paused (engine_failed)
LISTED, LISTED_MAX = 100, 10_000  # jobs of one list
EXACT_MAX = 10_000  # counts from here on are shown with three figures
QUIET_S = 2.0  # after so long, the reason for waiting is printed


@click.group(invoke_without_command=True)
@click.option("--state", type=click.Choice([str(state) for state in JobState]), help="Only jobs in this state.")
@click.option("--model", metavar="NAME", help="Only jobs with rows for this model or adapter.")
@click.option("--project", metavar="NAME", help="Only jobs of this project, on this machine.")
@click.option("--since", type=Past(), metavar="WHEN", help="Only jobs created since: 2d, 2026-12-31T18:00.")
@click.option(
    "--limit", type=click.IntRange(1, LISTED_MAX), default=LISTED, show_default=True, help="The most jobs to list."
)
@global_options
@click.pass_context
def jobs(
    ctx: click.Context, *, state: str | None, model: str | None, project: str | None, since: float | None, limit: int
) -> int | None:
    """List the jobs, the newest first; `rm` and `prune` remove those that have ended."""
    session: Session = ctx.obj
    if ctx.invoked_subcommand is not None:
        return None
    for text in (model, project):
        refuse_half_text(text or "")
    query = JobQuery(state=state, model=model, since=since, limit=limit + 1)
    return session.run(_list(session, query, project))


jobs.add_command(rm)
jobs.add_command(prune)


async def _list(session: Session, query: JobQuery, project: str | None) -> None:
    async with session.app.open_jobs(session.config(), project) as opened:
        *views, more = [*await opened.list(query), None]
    if len(views) == query.limit:
        more = views.pop()
    if session.as_json:
        for view in views:
            session.emit("job", job=view)
        return
    if not views:
        is_narrowed = project is not None or query != JobQuery(limit=query.limit)
        session.print("there are no such jobs" if is_narrowed else "there are no jobs")
        return
    head = ["ID", "STATE", "DONE", "FAILED", "CREATED", "MODEL"]
    for line in table([head, *(_columns(view) for view in views)]):
        session.print(clean(line, LINE_CHARS_MAX))
    if more is not None:
        session.say(f"there are more than {count(len(views))}: --limit, --state, --model and --since choose")


def _columns(view: JobView) -> list[str]:
    state = f"{view.state} ({view.reason})" if view.state == JobState.PAUSED and view.reason else view.state
    return [
        view.id, clean(state, STATE_CHARS_MAX), f"{_few(done(view))}/{_few(view.rows)}", _few(view.rows_failed),
        brief(view.created), clean(view.model, 40),
    ]  # fmt: skip


def _few(number: int) -> str:
    return str(number) if number < EXACT_MAX else short(number)


@click.command()
@job_argument
@global_options
@click.pass_obj
def show(session: Session, job_id: str) -> int:
    """Show a job: its rows, errors by cause, cost and files. A unique prefix of an ID is enough."""
    return session.run(_show(session, job_id))


async def _show(session: Session, job_id: str) -> None:
    async with session.app.open_jobs(session.config()) as opened:
        view = await opened.show(job_id)
    if session.as_json:
        session.emit("job", job=view)
        return
    for line in lines(view):
        session.print(line)
    session.print(f"  {'model':<10}{clean(view.model)}")
    for sentence in view.routing:
        session.print(f"  {'route':<10}{clean(sentence, 2000)}")
    for path in view.input:
        session.print(f"  {'input':<10}{clean(path, 4096)}")
    session.print(f"  {'created':<10}{moment(view.created)}")
    if view.generation:
        session.print(f"  {'retries':<10}{view.generation}")
    if view.state == JobState.PAUSED:
        for line in pause_lines(view):
            session.print(line)
    show_problems(session, view.problems, view.problems_total)


@click.command()
@job_argument
@click.option("--partial", is_flag=True, help="The rows finished so far, as JSON lines.")
@click.option("--errors", is_flag=True, help="Print the error file instead.")
@click.option("--failed", is_flag=True, help="Only the failed rows, as JSON lines.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    help="Write to this file instead of the terminal; its extension sets the format: jsonl, csv, parquet.",
)
@global_options
@click.pass_obj
def results(session: Session, job_id: str, *, partial: bool, errors: bool, failed: bool, output: str | None) -> int:
    """Print a job's results; with --json, the paths of the result files."""
    if errors and failed:
        raise InvalidInput("--errors and --failed do not go together: --failed finds the rows in every file")
    if partial and errors:
        raise InvalidInput("--partial and --errors do not go together: finished rows come with their errors")
    if session.as_json and (partial or errors or failed or output is not None):
        raise InvalidInput("--json says where all results lie and prints none: leave out every other option")
    if output is not None:
        kind_of(output)  # refuses a name before anything is looked at
    return session.run(_results(session, job_id, output, partial=partial, errors=errors, failed=failed))


async def _results(
    session: Session, job_id: str, output: str | None, *, partial: bool, errors: bool, failed: bool
) -> None:
    config = session.config()
    async with session.app.open_jobs(config) as opened:
        view = await opened.show(job_id)
    if partial:
        await _write_partial(session, config, view, output, failed=failed)
        return
    if session.as_json:
        session.emit("results", id=view.id, state=view.state, output=view.output, errors_output=view.errors_output)
        return
    _refuse_early(view, errors=errors)
    if failed and not view.rows_failed:
        session.say(f"no row of the job {view.id} failed: nothing is written")
        return
    if failed:
        errors = view.errors_output is not None
    async with session.app.results(config, view, errors=errors) as found:
        if failed or (output is not None and must_convert(found.name, output)):
            await write_as(found.name, found.pieces, output, _files_of(view), only_failed=failed)
        elif output is not None:
            with written_whole(output, _files_of(view)) as out:
                async for piece in found.pieces:
                    out.write(piece)
        elif sys.stdout.isatty():
            await _print_file(session, found)
        else:
            async for piece in found.pieces:
                sys.stdout.buffer.write(piece)


async def _write_partial(session: Session, config: Config, view: JobView, output: str | None, *, failed: bool) -> None:
    if failed or (output is not None and must_convert(PARTIAL, output)):
        with tempfile.TemporaryFile() as file:
            await session.app.partial_results(config, view.id, file)
            file.seek(0)
            rows = await write_as(PARTIAL, _pieces(file), output, _files_of(view), only_failed=failed)
    elif output is not None:
        with written_whole(output, _files_of(view)) as out:
            rows = await session.app.partial_results(config, view.id, out)
    else:
        rows = await session.app.partial_results(config, view.id, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    what = "have failed so far" if failed else "are finished"
    session.say(f"{count(rows)} of {count(view.rows, 'row')} {what}")


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece


def _files_of(view: JobView) -> list[str]:
    """What the job reads and writes, the files that it is only going to make included."""
    is_path = view.output is not None and os.path.isabs(view.output)  # a server names its files by their ids
    return [*view.input, *(written_by(view.output) if is_path else [])]


def _refuse_early(view: JobView, *, errors: bool) -> None:
    """Raises: InvalidTransition before the job has ended, InvalidInput where it left no such file."""
    if view.state not in (JobState.COMPLETED, JobState.CANCELLED, JobState.EXPIRED):
        raise InvalidTransition(
            f"the job {view.id} is {view.state}, {count(done(view))} of {count(view.rows)} rows are done: "
            "--partial prints those"
        )
    is_there = view.errors_output if errors else view.output or view.errors_output
    if is_there is None and errors and view.output is not None:
        why = (
            "its failed rows are among the others, with the cause in `error`: --failed prints those"
            if view.rows_failed
            else "none of its rows failed"
        )
        raise InvalidInput(f"the job {view.id} has no error file: {why}", code="no_file")
    if is_there is None:
        raise InvalidInput(f"the job {view.id} has no {'error' if errors else 'result'} file", code="no_file")


async def _print_file(session: Session, found: ResultStream) -> None:
    """Results on a terminal: text, line by line, without what could steer it; other formats by their name."""
    if not found.name.endswith((".jsonl", ".csv")):
        session.print(found.name)
        return
    rest = b""
    async for piece in found.pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            session.print(clean(line.decode(errors="replace"), chars_max=len(line)))
    if rest:
        session.print(clean(rest.decode(errors="replace"), chars_max=len(rest)))


@click.command()
@job_argument
@global_options
@click.pass_obj
def cancel(session: Session, job_id: str) -> int:
    """Cancel a job. Finished rows are kept and written; the rest become errors."""
    return session.run(_steer(session, job_id, lambda opened: opened.steer(job_id, "cancel")))


@click.command()
@job_argument
@global_options
@click.pass_obj
def pause(session: Session, job_id: str) -> int:
    """Pause a job. Rows in flight may finish; `resume` continues it."""
    return session.run(_steer(session, job_id, lambda opened: opened.steer(job_id, "pause")))


@click.command()
@job_argument
@global_options
@click.pass_obj
def resume(session: Session, job_id: str) -> int:
    """Resume a paused job and follow it to its end."""
    return session.run(_go_on(session, lambda opened: opened.steer(job_id, "resume"), "resumed"))


@click.command()
@job_argument
@global_options
@click.pass_obj
def retry(session: Session, job_id: str) -> int:
    """Run the failed rows of a job again and rewrite its results."""
    return session.run(_go_on(session, lambda opened: opened.steer(job_id, "retry"), "retried"))


@click.command()
@job_argument
@global_options
@click.pass_obj
def fail(session: Session, job_id: str) -> int:
    """Give up the rows of a job that their service answered with failures: they become errors now.

    For a job that waits for a service which works, but for these rows. A paused job is resumed. Until a row is answered
    again, further rows that fail are not tried again either. Rows that had no reply go on waiting.
    """
    return session.run(_go_on(session, lambda opened: opened.steer(job_id, "fail_rows"), "resumed"))


async def _steer(session: Session, job_id: str, ask: Callable[[JobsClient], Awaitable[JobView]]) -> int:
    """Ask for something and wait until the job has come to rest."""
    async with session.app.open_jobs(session.config()) as opened:
        display = display_for(session)
        try:
            request = await _answered(ask(opened), opened, job_id, display)
            view = (await follow(opened, request.id, display, session=session)).view
        finally:
            display.close()
    is_stopped = view.state == JobState.PAUSED and view.cancelling is not None  # a provider was not to be reached
    code = EXIT_PAUSED if is_stopped else EXIT_OK
    if session.as_json:
        session.emit("summary", exit_code=code, job=view)
        return code
    for line in lines(view):
        session.print(line)
    for line in pause_lines(view) if is_stopped else ():
        session.say(line)
    return code


async def _answered(asking: Awaitable[JobView], jobs: JobsClient, job_id: str, display: Display) -> JobView:
    """What was asked for; while that takes long, how the job is."""
    request = asyncio.ensure_future(asking)
    try:
        await asyncio.wait({request}, timeout=QUIET_S)
        if not request.done():
            display.say("rows in flight may still finish, and providers end what they have of a job that is cancelled")
            async for view in jobs.watch(job_id):
                display.update(view)
                if request.done():
                    break
        return await request
    finally:
        request.cancel()


async def _go_on(session: Session, ask: Callable[[JobsClient], Awaitable[JobView]], how: str) -> int:
    async with session.app.open_jobs(session.config()) as opened:
        view = await ask(opened)
        return await attend(session, opened, Submitted(view.id, how))
