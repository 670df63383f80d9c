"""`batchmill diff`: the rows of two jobs whose answers differ, side by side."""

from __future__ import annotations

from collections.abc import Iterator

import click
import msgspec
from msgspec.structs import asdict

from batchmill.cli.jobs.results import refuse_early, scratch_folder, spooled_results
from batchmill.cli.session import EXIT_OK, Session, global_options, refuse_non_utf8
from batchmill.cli.text import clean, count
from batchmill.client.differences import Pair, difference_of, pairs_of
from batchmill.config import Config
from batchmill.errors import BatchmillError, InvalidInput
from batchmill.jobs.results.result_rows import CSV, ResultSource, kind_of
from batchmill.types import JobView
from batchmill.wire.json_bytes import join_object, text_of
from batchmill.wire.rows.result_rows import ERROR, OUTPUT, Row, flat_rows

EXIT_DIFFERENT = 1  # as of diff(1)
KEY_CHARS, CELL_CHARS = 16, 30  # of a line that is shown

_NULL = msgspec.Raw(b"null")


@click.command()
@click.argument("left", metavar="JOB", callback=lambda ctx, param, value: refuse_non_utf8(value))
@click.argument("right", metavar="JOB", callback=lambda ctx, param, value: refuse_non_utf8(value))
@click.option("--by", metavar="COLUMN", help="Match rows by this column, for jobs over different inputs.")
@global_options
@click.pass_obj
def diff(session: Session, *, left: str, right: str, by: str | None) -> int:
    """Show the rows whose answers differ between two jobs, side by side.

    Both jobs have ended. Rows are matched by their number in the same input. The exit status is 0 if all answers are
    the same, 1 if some differ.
    """
    try:
        return session.run(_diff(session, left, right, by))
    except BatchmillError as error:  # its exit status must not be that of a difference
        raise InvalidInput(error.message, code=error.code) from error


async def _diff(session: Session, left: str, right: str, by: str | None) -> int:
    config = session.config()
    with scratch_folder(None) as folder:
        sources: list[ResultSource] = []
        views: list[JobView] = []
        for number, job_id in enumerate((left, right)):
            (home := folder / str(number)).mkdir()
            view = await _ended(session, config, job_id)
            views.append(view)
            sources.append(await spooled_results(session, config, view, home))
        rows = [flat_rows(source.lines()) for source in sources]
        as_text = any(kind_of(source.name)[0] == CSV for source in sources)
        pairs = pairs_of(rows, views, by, folder / "left", as_text=as_text)
        return _show(session, pairs, [view.id for view in views])


async def _ended(session: Session, config: Config, job_id: str) -> JobView:
    async with session.app.open_jobs(config) as jobs:
        view = await jobs.show(job_id)
    refuse_early(view)
    return view


def _show(session: Session, pairs: Iterator[Pair], names: list[str]) -> int:
    rows = different = 0
    for pair in pairs:
        rows += 1
        if not pair.differs:
            continue
        if not different and not session.as_json:
            session.print(_line("ROW", *names))
        different += 1
        if session.as_json:
            session.emit("difference", **asdict(difference_of(pair)))
        else:
            session.print(_line(pair.key, _cell(pair.left), _cell(pair.right)))
    session.say(f"{count(different)} of {count(rows, 'row')} differ{'s' if different == 1 else ''}")
    return EXIT_DIFFERENT if different else EXIT_OK


def _line(key: str, left: str, right: str) -> str:
    return f"{clean(key, KEY_CHARS):<{KEY_CHARS}}  {clean(left, CELL_CHARS):<{CELL_CHARS}}  {clean(right, CELL_CHARS)}"


def _cell(row: Row | None) -> str:
    if row is None:
        return "(no such row)"
    error = text_of(row.get(ERROR, _NULL))
    if error:
        return f"error: {error}"
    fields = {name: value for name, value in row.items() if name not in (OUTPUT, ERROR)}
    return join_object(fields).decode() if fields else text_of(row.get(OUTPUT, _NULL))
