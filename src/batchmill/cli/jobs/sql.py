"""`batchmill sql`: a query over the results and the input of a job, by DuckDB in this process, never on a server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Raw

from batchmill.cli.jobs.result_files import (
    COPY_BYTES,
    Wanted,
    check_output,
    open_output,
    refuse_compression,
    wanted_form,
)
from batchmill.cli.jobs.results import OUTPUT_FORMATS, job_files, refuse_early, scratch_folder, spooled_results
from batchmill.cli.session import Session, global_options, job_argument
from batchmill.client.queries import (
    INPUT,
    OPENAI_COLUMNS,
    RESULTS,
    add_table,
    connected,
    restrict,
    selected,
    unique_names,
)
from batchmill.client.result_copies import ends_of
from batchmill.config import Config
from batchmill.datasets import formats
from batchmill.errors import InvalidInput
from batchmill.jobs.results.result_rows import CSV, JSONL, PARQUET, ResultSource, ShapedRows, kind_of
from batchmill.optional import require
from batchmill.types import DatasetSpec, JobView
from batchmill.wire.rows.result_rows import FLAT, RowShape, added_by

ROWS_AT_ONCE = 1000

_encode = msgspec.json.Encoder(enc_hook=str).encode


@click.command()
@job_argument
@click.argument("query", metavar="QUERY")
@click.option("-o", "--output", type=click.Path(dir_okay=False, allow_dash=True), help="Write to this file.")
@click.option("--output-format", type=click.Choice(OUTPUT_FORMATS), help="The format on standard output [jsonl].")
@click.option("--overwrite", is_flag=True, help="Replace the file of -o if it exists.")
@global_options
@click.pass_obj
def sql(
    session: Session, job_id: str, query: str, *, output: str | None, output_format: str | None, overwrite: bool
) -> int:
    """Query the tables `results` and `input` of a job that has ended, with DuckDB on this machine.

    For example: batchmill sql ID "select output, count(*) from results group by output"
    """
    if session.as_json:
        raise InvalidInput("a query prints JSON lines anyway: leave --json out")
    require("duckdb", "batchmill sql", InvalidInput)
    wanted = wanted_form(output, output_format, RowShape(), only_failed=False, is_safe=False, replaces=overwrite)
    if wanted.output is not None:
        refuse_compression(wanted.output)
    return session.run(_query(session, job_id, query, wanted))


async def _query(session: Session, job_id: str, query: str, wanted: Wanted) -> None:
    config = session.config()
    async with session.app.open_jobs(config) as jobs:
        view = await jobs.show(job_id)
    refuse_early(view)
    if wanted.output is not None:
        check_output(wanted.output, job_files(view), replaces=wanted.replaces)
    with scratch_folder(wanted.output) as folder, connected(folder) as connection:
        _add_results(connection, await spooled_results(session, config, view, folder), folder, added_by(view))
        inputs = await _add_input(session, config, connection, view, folder)
        restrict(connection, folder, inputs)
        _write(connection, query, wanted, job_files(view), folder)


def _add_results(connection: Any, source: ResultSource, folder: Path, added: tuple[str, ...]) -> None:
    if kind_of(source.name)[0] == PARQUET:
        add_table(connection, RESULTS, [str(source.path)], PARQUET)
        return
    path = folder / "results.jsonl"
    shaped = ShapedRows(source, RowShape(added=added), only_failed=False)
    if shaped.names == list(FLAT):
        shaped = ShapedRows(source, RowShape(list(OPENAI_COLUMNS)), only_failed=False)
    with path.open("wb") as file:
        for line in shaped:
            file.write(line + b"\n")
    add_table(connection, RESULTS, [str(path)], JSONL)


async def _add_input(session: Session, config: Config, connection: Any, view: JobView, folder: Path) -> list[str]:
    """Add the table of the input. Without a copy of it here, the query has the results alone, which is said.

    Returns: the paths that the query reads, as they are called and as they are.
    """
    (folder / "inputs").mkdir()
    try:
        found = await session.app.inputs(config, view, folder / "inputs")
        links = list(_linked(found, folder))
        kind = formats.classify(DatasetSpec(links))[0].format
    except InvalidInput as error:
        session.say(f"there is no table {INPUT}: {error.message}")
        return []
    add_table(connection, INPUT, links, kind)
    return [*links, *map(os.path.realpath, links)]


def _linked(paths: list[str], folder: Path) -> Iterator[str]:
    """Links in the folder that the query may read. DuckDB would take some characters of a path for a pattern."""
    for number, path in enumerate(paths):
        if not os.path.isabs(path):
            raise InvalidInput(f"it is in {path}: query it there", code="no_copy_here")
        link = folder / f"input-{number:06d}{ends_of(path)}"
        link.symlink_to(path)
        yield str(link)


def _write(connection: Any, query: str, wanted: Wanted, protected: list[str], folder: Path) -> None:
    kind = wanted.kind or JSONL
    if kind == JSONL:
        rows = selected(connection.execute, query)
        with open_output(wanted, protected) as out:
            for line in _lines(rows):
                out.write(line + b"\n")
        return
    relation = selected(connection.sql, query)
    table = folder / f"query.{kind}"
    if kind == CSV:
        relation.to_csv(str(table), header=True)
    else:
        relation.to_parquet(str(table))
    with open_output(wanted, protected) as out, table.open("rb") as file:
        while piece := file.read(COPY_BYTES):
            out.write(piece)


def _lines(result: Any) -> Iterator[bytes]:
    names = unique_names([column[0] for column in result.description])
    is_json = [str(column[1]) == "JSON" for column in result.description]
    while rows := result.fetchmany(ROWS_AT_ONCE):
        for row in rows:
            values = [
                Raw(value.encode()) if known and value is not None else value
                for value, known in zip(row, is_json, strict=True)
            ]
            yield _encode(dict(zip(names, values, strict=True)))
