"""`batchmill jobs rm` and `jobs prune`: jobs that have ended, and what is kept of them."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import click

from batchmill.cli.session import EXIT_FAILED, EXIT_OK, Session, global_options, refuse_half_text
from batchmill.cli.text import clean, count
from batchmill.errors import BatchmillError, InvalidInput
from batchmill.states import ENDED, JobState
from batchmill.types import JobView

if TYPE_CHECKING:
    from batchmill.cli.clients import Jobs

UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
AGE = re.compile(r"([0-9]{1,6})([mhdw])")


@click.command()
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@global_options
@click.pass_obj
def rm(session: Session, job_ids: tuple[str, ...]) -> int:
    """Remove jobs that have ended, and their results; files that were written elsewhere with -o stay."""
    return session.run(_remove(session, [refuse_half_text(each) for each in job_ids]))


@click.command()
@click.option("--older-than", metavar="AGE", required=True, help="Since their end: 45m, 12h, 30d or 8w.")
@click.option("--state", type=click.Choice(sorted(ENDED)), help="Only those that ended so.")
@click.option("--dry-run", is_flag=True, help="Say which; remove none.")
@global_options
@click.pass_obj
def prune(session: Session, older_than: str, state: str | None, dry_run: bool) -> int:
    """Remove all jobs that ended so long ago, and their results."""
    return session.run(_prune(session, age_s(older_than), state, is_dry=dry_run))


def age_s(text: str) -> float:
    """Raises: InvalidInput."""
    found = AGE.fullmatch(text)
    if found is None:
        raise InvalidInput(f"--older-than is a number and a unit, such as 45m, 12h, 30d or 8w, not {text[:40]!r}")
    return int(found[1]) * UNITS_S[found[2]]


async def _remove(session: Session, job_ids: list[str]) -> int:
    async with session.app.open_jobs(session.config()) as opened:
        return await _remove_each(session, opened, job_ids)


async def _prune(session: Session, age: float, state: str | None, *, is_dry: bool) -> int:
    before = time.time() - age
    async with session.app.open_jobs(session.config()) as opened:
        old = [view for view in await opened.list() if _is_old(view, before, state)]
        if is_dry:
            for view in old:
                _tell(session, view, "would be removed")
            return EXIT_OK
        code = await _remove_each(session, opened, [view.id for view in old])
    if not session.as_json:
        session.print(f"{count(len(old), 'job')} ended so long ago")
    return code


def _is_old(view: JobView, before: float, state: str | None) -> bool:
    has_ended = JobState(view.state).is_at_rest and view.finished is not None and view.finished <= before
    return has_ended and state in (None, view.state)


async def _remove_each(session: Session, opened: Jobs, job_ids: list[str]) -> int:
    """One that cannot be removed does not keep the others."""
    code = EXIT_OK
    for job_id in job_ids:
        try:
            _tell(session, await opened.remove(job_id), "removed")
        except BatchmillError as error:
            if len(job_ids) == 1:
                raise
            code = EXIT_FAILED
            session.say(f"batchmill: {clean(error.message)}")
    return code


def _tell(session: Session, view: JobView, what: str) -> None:
    if session.as_json:
        session.emit("removed" if what == "removed" else "old", job=view)
        return
    kept = f"; {view.output} stays" if view.output is not None and f"/jobs/{view.id}/" not in view.output else ""
    is_path = view.output is not None and view.output.startswith("/")  # a server names its files by their ids
    session.print(clean(f"{view.id}: {what}{kept if is_path else ''}", 4096))
