"""`batchmill results`: prints or writes the results of a job, all or some, in the form that one wants."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
from msgspec.structs import replace

from batchmill.cli.jobs.displays import done
from batchmill.cli.jobs.order_options import output_files
from batchmill.cli.jobs.result_files import Wanted, check_output, open_output, wanted_form, write_rows
from batchmill.cli.session import ResultStream, Session, global_options, job_argument, refuse_non_utf8
from batchmill.cli.text import count
from batchmill.config import Config
from batchmill.errors import InvalidInput, InvalidTransition
from batchmill.jobs.results.result_rows import JSONL_NAME, ResultSource, lines_of
from batchmill.states import JobState
from batchmill.types import JobView
from batchmill.wire.json_bytes import split_object
from batchmill.wire.rows.result_rows import RowShape, added_by, is_openai

OUTPUT_FORMATS = ("jsonl", "csv", "parquet")
WITH_RESULTS = (JobState.COMPLETED, JobState.CANCELLED, JobState.EXPIRED)  # states with result files


@click.command()
@job_argument
@click.option("--partial", is_flag=True, help="The rows finished so far, also while the job runs.")
@click.option("--errors", is_flag=True, help="Only the rows of the error file.")
@click.option("--failed", is_flag=True, help="Only the failed rows.")
@click.option(
    "--columns", metavar="NAME,…", help="Only these columns, in this order. OpenAI rows become rows of a table."
)
@click.option("--join", is_flag=True, help="The columns of the input beside the others; of OpenAI rows, the request.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write to this file instead of standard output (-); its extension sets the format: jsonl, csv, parquet.",
)
@click.option("--output-format", type=click.Choice(OUTPUT_FORMATS), help="The format, if no file name says it.")
@click.option("--csv-safe", is_flag=True, help="Put an apostrophe before CSV cells that a spreadsheet would run.")
@click.option("--overwrite", is_flag=True, help="Replace the file of -o if it exists.")
@global_options
@click.pass_obj
def results(
    session: Session, job_id: str, *, partial: bool, errors: bool, failed: bool, columns: str | None, **form: object
) -> int:
    """Print a job's results; with --json, the paths of the result files."""
    if errors and failed:
        raise InvalidInput("--errors and --failed exclude each other: --failed finds the rows in every file")
    if partial and errors:
        raise InvalidInput("--partial and --errors exclude each other: finished rows include their errors")
    if session.as_json and (partial or errors or failed or columns is not None or any(form.values())):
        raise InvalidInput("--json prints the paths of all results, not the results: leave out the other options")
    shape = RowShape(None if columns is None else named_columns(columns), join=bool(form["join"]))
    wanted = wanted_form(
        form["output"], form["output_format"], shape,
        only_failed=failed, is_safe=bool(form["csv_safe"]), replaces=bool(form["overwrite"]),
    )  # fmt: skip
    return session.run(_results(session, job_id, wanted, partial=partial, errors=errors))


def named_columns(text: str) -> list[str]:
    """The names of --columns. Raises: InvalidInput."""
    names = [refuse_non_utf8(each).strip() for each in text.split(",")]
    for at, name in enumerate(names):
        if not name:
            raise InvalidInput(f"--columns {text!r} names an empty column: separate names with one comma")
        if name in names[:at]:
            raise InvalidInput(f"--columns names {name} twice")
    return names


async def _results(session: Session, job_id: str, wanted: Wanted, *, partial: bool, errors: bool) -> None:
    config = session.config()
    async with session.app.open_jobs(config) as jobs:
        view = await jobs.show(job_id)
    if session.as_json:
        session.emit("results", id=view.id, state=view.state, output=view.output, errors_output=view.errors_output)
        return
    if wanted.output is not None:
        check_output(wanted.output, job_files(view), replaces=wanted.replaces)
    if partial:
        await _write_partial(session, config, view, wanted)
        return
    refuse_early(view, errors=errors)
    if wanted.only_failed and not view.rows_failed:
        session.say(f"no row of the job {view.id} failed: nothing is written")
        return
    await write_results(session, config, view, wanted, errors=errors)


async def write_results(
    session: Session, config: Config, view: JobView, wanted: Wanted, *, errors: bool = False
) -> None:
    """Write the results of a job that has ended. Args: errors: of the error file alone."""
    is_apart = view.errors_output is not None  # then all failed rows are there, and no others
    only_errors = errors or (is_apart and (wanted.only_failed or view.output is None))
    async with session.app.results(config, view, errors=only_errors) as stream:
        if not wanted.must_convert(stream.name):
            await _copy(stream, wanted, view)
            return
        with scratch_folder(wanted.output) as folder:
            source = ResultSource(folder / "source", stream.name)
            await _spool(stream, source.path)
            if wanted.is_table and is_apart and not only_errors:
                source = await _with_errors(session, config, view, source, folder)
            await _write(session, config, view, source, wanted)


async def _copy(stream: ResultStream, wanted: Wanted, view: JobView) -> None:
    """Write a result file as it is. On a terminal, of what is not text only the name is printed."""
    is_text = stream.name.endswith((".jsonl", ".csv"))
    if wanted.output is None and not is_text and click.get_text_stream("stdout").isatty():
        click.echo(stream.name)
        return
    with open_output(wanted, job_files(view)) as out:
        skipped = wanted.skipped_bytes
        async for piece in stream.pieces:
            out.write(piece[skipped:])
            skipped = max(0, skipped - len(piece))


async def spooled_results(session: Session, config: Config, view: JobView, folder: Path) -> ResultSource:
    """Copy all results of a job that has ended to a folder: successful and failed rows."""
    is_apart = view.errors_output is not None
    async with session.app.results(config, view, errors=is_apart and view.output is None) as stream:
        source = ResultSource(folder / "source", stream.name)
        await _spool(stream, source.path)
    if is_apart and view.output is not None:
        return await _with_errors(session, config, view, source, folder)
    return source


async def _with_errors(
    session: Session, config: Config, view: JobView, source: ResultSource, folder: Path
) -> ResultSource:
    async with session.app.results(config, view, errors=True) as errors:
        await _spool(errors, folder / "errors")
    return ResultSource(source.path, source.name, folder / "errors")


async def _spool(stream: ResultStream, path: Path) -> None:
    with path.open("wb") as file:
        async for piece in stream.pieces:
            file.write(piece)


async def _write(session: Session, config: Config, view: JobView, source: ResultSource, wanted: Wanted) -> int:
    folder = source.path.parent
    wanted = replace(wanted, shape=replace(wanted.shape, added=added_by(view)), schema=view.schema)
    if wanted.shape.join and _is_openai(source):
        (folder / "inputs").mkdir()
        inputs = await session.app.inputs(config, view, folder / "inputs")
        source = ResultSource(source.path, source.name, source.errors, inputs)
    return write_rows(source, wanted, job_files(view), folder)


def _is_openai(source: ResultSource) -> bool:
    first = next(lines_of(source.path, source.name), None)
    return first is not None and is_openai(split_object(first))


async def _write_partial(session: Session, config: Config, view: JobView, wanted: Wanted) -> None:
    if not wanted.must_convert(JSONL_NAME):
        with open_output(wanted, job_files(view)) as out:
            rows = await session.app.partial_results(config, view.id, out)
    else:
        with scratch_folder(wanted.output) as folder:
            source = ResultSource(folder / "source", JSONL_NAME)
            with source.path.open("wb") as file:
                await session.app.partial_results(config, view.id, file)
            rows = await _write(session, config, view, source, wanted)
    state = "have failed so far" if wanted.only_failed else "are finished"
    session.say(f"{count(rows)} of {count(view.rows, 'row')} {state}")


@contextlib.contextmanager
def scratch_folder(output: str | None) -> Iterator[Path]:
    """A folder for files on their way to `output`: beside it, so that the disk that must hold them does.

    Raises: InvalidInput where none can be made.
    """
    parent = Path(os.path.realpath(output)).parent if output is not None else None
    if parent is not None and not os.access(parent, os.W_OK):
        parent = None  # a device such as /dev/stdout: use the folder for temporary files
    try:
        scratch = tempfile.TemporaryDirectory(dir=parent, prefix=".batchmill-results-")
    except OSError as error:
        place = tempfile.gettempdir() if parent is None else parent
        raise InvalidInput(f"nothing can be written to {place}: {error.strerror}", code="invalid_output") from None
    with scratch as folder:
        yield Path(folder)


def job_files(view: JobView) -> list[str]:
    """The files that the job reads and writes, including those that it has yet to write."""
    is_path = view.output is not None and os.path.isabs(view.output)  # a server names its files by their ids
    return [*view.input, *(output_files(view.output) if is_path and view.output is not None else [])]


def refuse_early(view: JobView, *, errors: bool = False) -> None:
    """Raises: InvalidTransition before the job has ended, InvalidInput if it has no such file."""
    if view.state not in WITH_RESULTS:
        raise InvalidTransition(
            f"the job {view.id} is {view.state}, {count(done(view))} of {count(view.rows)} rows are done: "
            "--partial prints those"
        )
    file = view.errors_output if errors else view.output or view.errors_output
    if file is None and errors and view.output is not None:
        reason = (
            "its failed rows are among the others, with the cause in `error`: --failed prints those"
            if view.rows_failed
            else "none of its rows failed"
        )
        raise InvalidInput(f"the job {view.id} has no error file: {reason}", code="no_file")
    if file is None:
        raise InvalidInput(f"the job {view.id} has no {'error' if errors else 'result'} file", code="no_file")
