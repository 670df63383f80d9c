"""Commands about existing jobs: list and show them, print results, pause, resume or cancel them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click

from batchmill.cli.jobs.displays import Display, display_for, done
from batchmill.cli.jobs.order_options import deadline_option, model_of, request_fields
from batchmill.cli.jobs.own_rows import sample_to_resume
from batchmill.cli.jobs.run import PRIORITY, follow, follow_to_end
from batchmill.cli.jobs.summary import lines, pause_lines, show_problems
from batchmill.cli.session import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_PAUSED,
    Session,
    global_options,
    job_argument,
    refuse_non_utf8,
)
from batchmill.cli.text import brief, clean, count, moment, short, table
from batchmill.cli.values import LONG_TIME, POSITIVE, Past
from batchmill.errors import BatchmillError, InvalidInput
from batchmill.object_store.urls import is_object_url
from batchmill.states import ENDED, JobState
from batchmill.types import JobQuery, JobView, Retried, RetryChange, Submitted
from batchmill.wire.json_bytes import DEPTH_MAX
from batchmill.wire.native import Change

if TYPE_CHECKING:
    from batchmill.cli.clients import JobsClient
    from batchmill.client.calls import Steering


@click.command()
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@global_options
@click.pass_obj
def rm(session: Session, job_ids: tuple[str, ...]) -> int:
    """Remove ended jobs and their results. Files written with -o stay."""
    return session.run(_remove(session, [refuse_non_utf8(each) for each in job_ids]))


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
    async with session.app.open_jobs(session.config()) as jobs:
        return await _remove_each(session, jobs, job_ids)


async def _prune(session: Session, age: float, state: str | None, *, is_dry: bool) -> int:
    before = time.time() - age
    async with session.app.open_jobs(session.config()) as jobs:
        old = [view for view in await jobs.list() if _is_old(view, before, state)]
        if is_dry:
            for view in old:
                _print_removed(session, view, "would be removed")
            return EXIT_OK
        code = await _remove_each(session, jobs, [view.id for view in old])
    if not session.as_json:
        session.print(f"{count(len(old), 'job')} ended so long ago")
    return code


def _is_old(view: JobView, before: float, state: str | None) -> bool:
    has_ended = JobState(view.state).is_at_rest and view.finished is not None and view.finished <= before
    return has_ended and state in (None, view.state)


async def _remove_each(session: Session, jobs: JobsClient, job_ids: list[str]) -> int:
    """Remove each job, even if another cannot be removed."""
    code = EXIT_OK
    for job_id in job_ids:
        try:
            _print_removed(session, await jobs.remove(job_id), "removed")
        except BatchmillError as error:
            if len(job_ids) == 1:
                raise
            code = EXIT_FAILED
            session.say(f"batchmill: {clean(error.message)}")
    return code


def _print_removed(session: Session, view: JobView, outcome: str) -> None:
    if session.as_json:
        session.emit("removed" if outcome == "removed" else "old", job=view)
        return
    note = f"; {view.output} stays" if view.output is not None and f"/jobs/{view.id}/" not in view.output else ""
    # a server names its files by their ids
    is_path = view.output is not None and (view.output.startswith("/") or is_object_url(view.output))
    session.print(clean(f"{view.id}: {outcome}{note if is_path else ''}", 4096))


@click.command()
@job_argument
@click.option("--priority", type=PRIORITY, help="Jobs with a higher priority run first.")
@deadline_option
@click.option("--budget", type=POSITIVE, metavar="USD", help="Pause before the cost exceeds this amount.")
@global_options
@click.pass_obj
def amend(session: Session, job_id: str, *, priority: int | None, deadline: float | None, budget: float | None) -> int:
    """Change the priority, deadline or budget of an unfinished job."""
    change = Change(priority, deadline, budget)
    if change == Change():
        raise InvalidInput("nothing to change: give --priority, --deadline or --budget")
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


PARTIAL = "partial.jsonl"  # the name of incomplete results
PIECE_BYTES = 1024 * 1024
LINE_CHARS_MAX = 80
STATE_CHARS_MAX = 22  # paused (engine_failed)
LISTED, LISTED_MAX = 100, 10_000  # the most jobs in a list: default, maximum
EXACT_MAX = 10_000  # larger counts are shown with three digits
QUIET_S = 2.0  # after this time, the reason for waiting is printed


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
        refuse_non_utf8(text or "")
    query = JobQuery(state=state, model=model, since=since, limit=limit + 1)
    return session.run(_list(session, query, project))


jobs.add_command(rm)
jobs.add_command(prune)


async def _list(session: Session, query: JobQuery, project: str | None) -> None:
    async with session.app.open_jobs(session.config(), project) as jobs:
        *views, more = [*await jobs.list(query), None]
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
        session.say(f"there are more than {count(len(views))}: use --limit, --state, --model or --since")


def _columns(view: JobView) -> list[str]:
    state = f"{view.state} ({view.reason})" if view.state == JobState.PAUSED and view.reason else view.state
    return [
        view.id, clean(state, STATE_CHARS_MAX), f"{_short_count(done(view))}/{_short_count(view.rows)}",
        _short_count(view.rows_failed), brief(view.created), clean(view.model, 40),
    ]  # fmt: skip


def _short_count(number: int) -> str:
    return str(number) if number < EXACT_MAX else short(number)


@click.command()
@job_argument
@global_options
@click.pass_obj
def show(session: Session, job_id: str) -> int:
    """Show a job: its rows, errors by cause, cost and files. A unique prefix of an ID is enough."""
    return session.run(_show(session, job_id))


async def _show(session: Session, job_id: str) -> None:
    async with session.app.open_jobs(session.config()) as jobs:
        view = await jobs.show(job_id)
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
    for retried in view.retries:
        session.print(f"  {'retry ' + str(retried.generation):<10}{clean(_changes(retried), 2000)}")
    if view.state == JobState.PAUSED:
        for line in pause_lines(view):
            session.print(line)
    show_problems(session, view.problems, view.problems_total)


def _changes(retried: Retried) -> str:
    named = {"model": retried.model, "adapter": retried.adapter}
    changes = [f"{kind} {name}" for kind, name in named.items() if name is not None]
    return ", ".join([*changes, *(f"{name}={json.dumps(value)}" for name, value in retried.params.items())])


@click.command()
@job_argument
@global_options
@click.pass_obj
def cancel(session: Session, job_id: str) -> int:
    """Cancel a job. Finished rows are kept and written; the rest become errors."""
    return session.run(_steer(session, job_id, lambda jobs: jobs.steer(job_id, "cancel")))


@click.command()
@job_argument
@global_options
@click.pass_obj
def pause(session: Session, job_id: str) -> int:
    """Pause a job. Rows in flight may finish; `resume` continues it."""
    return session.run(_steer(session, job_id, lambda jobs: jobs.steer(job_id, "pause")))


@click.command()
@job_argument
@global_options
@click.pass_obj
def resume(session: Session, job_id: str) -> int:
    """Resume a paused job and follow it to its end."""
    return session.run(_resume(session, job_id, "resume"))


@click.command()
@job_argument
@click.option(
    "--set",
    "params",
    metavar="KEY=VALUE",
    multiple=True,
    help="Change a field of their requests, such as max_tokens; VALUE is JSON or text.",
)
@click.option("--model", metavar="NAME", help="Another language model, which answers them.")
@click.option("--adapter", metavar="NAME", help="An adapter, of that model or of the job's, which answers them.")
@global_options
@click.pass_obj
def retry(session: Session, job_id: str, params: tuple[str, ...], model: str | None, adapter: str | None) -> int:
    """Run the failed rows of a job again and rewrite its results."""
    change = RetryChange(request_fields(params, DEPTH_MAX, "--set"), model, adapter)
    return session.run(_retry(session, job_id, change))


async def _retry(session: Session, job_id: str, change: RetryChange) -> int:
    async with session.app.open_jobs(session.config()) as jobs:
        is_named = change.model is not None and session.server_url is None
        model = await model_of(session, session.config(), change.model) if is_named else None
        view = await jobs.retry(job_id, change, model)
        return await follow_to_end(session, jobs, Submitted(view.id, "retried"), None)


async def _resume(session: Session, job_id: str, verb: Steering) -> int:
    async with session.app.open_jobs(session.config()) as jobs:
        before = await jobs.show(job_id)
        view = await jobs.steer(job_id, verb)
        return await follow_to_end(session, jobs, Submitted(view.id, "resumed"), sample_to_resume(before))


@click.command()
@job_argument
@global_options
@click.pass_obj
def fail(session: Session, job_id: str) -> int:
    """Give up the rows of a job that their service answered with failures: they become errors now.

    Use it for a job that waits although the service works for other rows. A paused job is resumed. Until a row is
    answered again, further rows that fail are not tried again either. Rows without a reply keep waiting.
    """
    return session.run(_resume(session, job_id, "fail_rows"))


async def _steer(session: Session, job_id: str, change: Callable[[JobsClient], Awaitable[JobView]]) -> int:
    """Change the state of a job and wait until it has ended or paused."""
    async with session.app.open_jobs(session.config()) as jobs:
        display = display_for(session)
        try:
            changed = await _await_change(change(jobs), jobs, job_id, display)
            view = (await follow(jobs, changed.id, display, session=session)).view
        finally:
            display.close()
    is_stopped = view.state == JobState.PAUSED and view.cancelling is not None  # a provider could not be reached
    code = EXIT_PAUSED if is_stopped else EXIT_OK
    if session.as_json:
        session.emit("summary", exit_code=code, job=view)
        return code
    for line in lines(view):
        session.print(line)
    for line in pause_lines(view) if is_stopped else ():
        session.say(line)
    return code


async def _await_change(change: Awaitable[JobView], jobs: JobsClient, job_id: str, display: Display) -> JobView:
    """Wait for a change of the job; if it takes long, show the job meanwhile."""
    request = asyncio.ensure_future(change)
    try:
        await asyncio.wait({request}, timeout=QUIET_S)
        if not request.done():
            display.say("rows in flight may still finish, and providers cancel their part of a cancelled job")
            async for view in jobs.watch(job_id):
                display.update(view)
                if request.done():
                    break
        return await request
    finally:
        request.cancel()
