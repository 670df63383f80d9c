"""`batchmill remote`: lists the provider jobs of a job, and settles unknown submissions."""

from __future__ import annotations

import click

from batchmill.cli.session import EXIT_OK, Session, global_options, job_argument
from batchmill.cli.text import clean, count, moment, table
from batchmill.cli.values import utf8
from batchmill.types import RemoteJob

LIST = "list"  # the command of `batchmill remote JOB`


class _Remote(click.Group):
    """Treats a first argument that is not a command as a job."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = [word for word in args if not word.startswith("-")]
        is_known = bool(words) and words[0] in self.commands
        return super().parse_args(ctx, args if is_known or not words else [LIST, *args])


@click.group(cls=_Remote)
def remote() -> None:
    """List the provider jobs of a job: `batchmill remote ID`."""


@remote.command(LIST, hidden=True)
@job_argument
@global_options
@click.pass_obj
def list_remote(session: Session, job_id: str) -> int:
    """List the provider jobs of a job, in the order of creation."""
    return session.run(_list_remote(session, job_id))


async def _list_remote(session: Session, job_id: str) -> int:
    async with session.app.open_jobs(session.config()) as jobs:
        remote_jobs = await jobs.remote(job_id)
    if session.as_json:
        for each in remote_jobs:
            session.emit("remote_job", remote_job=each)
        return EXIT_OK
    if not remote_jobs:
        session.print("no provider has rows of this job")
        return EXIT_OK
    head = ["TAG", "PROVIDER", "STATE", "ID", "ROWS", "DONE", "FAILED", "SUBMITTED", "ASKED"]
    for line in table([head, *(_columns(each) for each in remote_jobs)]):
        session.print(line)
    for each in remote_jobs:
        if each.message:
            session.print(f"{clean(each.tag, 80)}: {clean(each.message, 2000)}")
    return EXIT_OK


def _columns(job: RemoteJob) -> list[str]:
    state = f"{job.state} ({clean(job.remote_state, 40)})" if job.remote_state else job.state
    return [
        clean(job.tag, 80), clean(job.provider, 40), state, clean(job.id, 80), count(job.rows), count(job.completed),
        count(job.failed), "" if job.submitted is None else moment(job.submitted),
        "" if not job.attempt else f"again ({job.attempt})",
    ]  # fmt: skip


tag_argument = click.argument("tag", metavar="TAG", callback=utf8)


@remote.command()
@job_argument
@tag_argument
@click.argument("remote_id", metavar="REMOTE_ID", callback=utf8)
@global_options
@click.pass_obj
def adopt(session: Session, job_id: str, tag: str, remote_id: str) -> int:
    """Declare that an unknown submission became the provider's job REMOTE_ID. `resume` continues with it."""
    return session.run(_settle(session, job_id, tag, remote_id))


@remote.command()
@job_argument
@tag_argument
@global_options
@click.pass_obj
def forget(session: Session, job_id: str, tag: str) -> int:
    """Declare that an unknown submission failed. `resume` submits its rows again."""
    return session.run(_settle(session, job_id, tag, None))


async def _settle(session: Session, job_id: str, tag: str, remote_id: str | None) -> int:
    async with session.app.open_jobs(session.config()) as jobs:
        settled = await jobs.settle_remote(job_id, tag, remote_id)
    if session.as_json:
        session.emit("remote_job", remote_job=settled)
        return EXIT_OK
    outcome = (
        "is forgotten" if remote_id is None else f"is the job {clean(settled.id, 80)} of {clean(settled.provider)}"
    )
    session.print(f"{clean(settled.tag, 80)} {outcome}; `batchmill resume {clean(job_id, 64)}` continues the job")
    return EXIT_OK
