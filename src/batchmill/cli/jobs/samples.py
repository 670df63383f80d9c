"""Shows the rows of a sample: the columns that the prompt uses beside the answers, in the width of the terminal."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchmill.cli.jobs.result_files import Wanted, open_output, write_rows
from batchmill.cli.jobs.results import job_files, scratch_folder, spooled_results
from batchmill.cli.session import Session
from batchmill.cli.text import clean, count
from batchmill.client.job_ends import is_sampled
from batchmill.datasets.readers import open_rows
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.results.result_rows import JSONL_NAME, ResultSource, request_lines
from batchmill.types import JobOrder, JobView, Sample
from batchmill.wire.input_urls import is_input_url
from batchmill.wire.json_bytes import split_object
from batchmill.wire.rows import forms
from batchmill.wire.rows.forms import ERROR, FETCHED, FOLDED_FROM, OUTPUT, WARNINGS_COLUMN
from batchmill.wire.rows.result_rows import Row, added_by, flat, is_openai, row_number
from batchmill.wire.sampling import rows_of

ROWS_MAX = 50  # of a table
JSON_ROWS_MAX = 20_000  # that are held in memory; a sample may have more
INPUTS_MAX, ANSWERS_MAX = 4, 6  # columns of it
INPUT_CHARS_MAX, ANSWER_CHARS_MAX = 200, 400  # of a cell
WIDTH_ELSEWHERE = 100  # characters, where the output is no terminal
SCANNED_MAX = 1_000_000  # requests that are read to find those of a sample, at a server

_cause = msgspec.json.Decoder(dict[str, Any] | str | None)


class Shown(Struct, frozen=True):
    """One row of the table. `problem`: its error, or the warnings of its answer."""

    number: int | None
    inputs: dict[str, str]
    answers: dict[str, str]
    error: str = ""
    warnings: str = ""


async def show_sample(session: Session, view: JobView, order: JobOrder | None) -> None:
    """Print the rows of a sample that has run; with --json, each as an object. Args: order: that of this command."""
    config = session.config()
    with scratch_folder(None) as folder:
        path = folder / "sample"
        with path.open("wb") as file:
            rows = await session.app.partial_results(config, view.id, file, sampled=True)
        with path.open("rb") as file:
            found = _read(file, view, rows, rows if session.as_json else ROWS_MAX)
            if session.as_json:
                while part := list(islice(found, JSON_ROWS_MAX)):
                    for each in _completed(part, session, config.data_dir, view, order):
                        session.emit("row", **msgspec.structs.asdict(each))
                return
            shown = _completed(list(found), session, config.data_dir, view, order)
    for line in table_lines(shown, is_terminal=sys.stdout.isatty()):
        session.print(line)
    if rows > len(shown):
        session.print(
            f"  the first {count(len(shown))} of {count(rows, 'row')}; all: batchmill results {view.id} --partial"
        )
    session.print()


async def write_sample(session: Session, view: JobView, sample: Sample, wanted: Wanted) -> None:
    """Write the result lines of a sample, such as to a pipe.

    Args:
        view: of a job that rests after this sample, or has ended.
        wanted: the form of the lines.
    """
    wanted = msgspec.structs.replace(wanted, shape=msgspec.structs.replace(wanted.shape, added=added_by(view)))
    config = session.config()
    with scratch_folder(wanted.output) as folder:
        source = ResultSource(folder / "source", JSONL_NAME)
        with source.path.open("wb") as file:
            if is_sampled(view):
                await session.app.partial_results(config, view.id, file, sampled=True)
            else:
                (folder / "all").mkdir()
                whole = await spooled_results(session, config, view, folder / "all")
                numbers = frozenset(rows_of(sample, view.rows))
                file.writelines(line + b"\n" for number, line in enumerate(whole.lines()) if number in numbers)
        if wanted.must_convert(JSONL_NAME):
            write_rows(source, wanted, job_files(view), folder)
            return
        with open_output(wanted, job_files(view)) as out, source.path.open("rb") as lines:
            shutil.copyfileobj(lines, out)


def _read(lines: Iterator[bytes], view: JobView, rows: int, most: int) -> Iterator[Shown]:
    """The first rows of a sample. Args: rows: there are, of those that it should have."""
    assert view.sample is not None, "only a sample is shown"
    numbers = rows_of(view.sample, view.rows)
    for index, line in zip(range(most), lines, strict=False):
        members = split_object(line)
        number = numbers[index] if len(numbers) == rows else None
        if is_openai(members):
            yield _of_openai(line, members)
        else:
            yield _of_table(members, added_by(view), number)


def _of_openai(line: bytes, members: Row) -> Shown:
    row = flat(line, members)
    named = {"custom_id": _text(row["custom_id"])}
    return Shown(row_number(members), named, {OUTPUT: _text(row[OUTPUT])}, _text(row[ERROR]))


def _of_table(members: Row, added: Sequence[str], number: int | None) -> Shown:
    inputs = {name: _text(value) for name, value in members.items() if name not in added}
    hidden = (ERROR, WARNINGS_COLUMN, FETCHED, FOLDED_FROM)
    answers = {name: _text(value) for name, value in members.items() if name in added and name not in hidden}
    error = _error(members[ERROR]) if ERROR in members else ""
    warnings = _text(members[WARNINGS_COLUMN]) if WARNINGS_COLUMN in members else ""
    return Shown(number, inputs, answers, error, warnings)


def _error(value: msgspec.Raw) -> str:
    match _cause.decode(value):
        case {"code": str(code), "message": str(message)}:
            return f"{code}: {message}"
        case str(text):
            return text
        case None:
            return ""
        case other:
            return msgspec.json.encode(other).decode()


def _text(value: msgspec.Raw) -> str:
    """A cell: text as it is, null as nothing, all else as JSON."""
    raw = bytes(value)
    if raw == b"null":
        return ""
    return msgspec.json.decode(raw, type=str) if raw[:1] == b'"' else raw.decode()


def _completed(
    shown: list[Shown], session: Session, data_dir: Path, view: JobView, order: JobOrder | None
) -> list[Shown]:
    """With the inputs that are worth showing."""
    return _with_requests(shown if order is None else _chosen(shown, order), session, data_dir, view, order)


def _chosen(shown: list[Shown], order: JobOrder) -> list[Shown]:
    """With the columns that the prompt uses, instead of all."""
    if order.prompt is None:
        return shown
    wanted = dict.fromkeys([*forms.columns(order.system or ""), *forms.columns(order.prompt)])
    return [
        msgspec.structs.replace(each, inputs={name: each.inputs.get(name, "") for name in wanted} or each.inputs)
        for each in shown
    ]


def _with_requests(
    shown: list[Shown], session: Session, data_dir: Path, view: JobView, order: JobOrder | None
) -> list[Shown]:
    """With what OpenAI rows asked, where their requests are here."""
    numbers = [each.number for each in shown if each.number is not None and "custom_id" in each.inputs]
    if len(numbers) < len(shown) or not shown:
        return shown
    if session.server_url is None:
        rows = open_rows(JobFiles(data_dir, view.id).dataset)
        try:
            found = dict(zip(numbers, rows.read_many(numbers), strict=True))
        finally:
            rows.close()
    elif order is not None and not any(map(is_input_url, order.dataset.paths)) and max(numbers) < SCANNED_MAX:
        wanted = frozenset(numbers)
        lines = zip(range(max(numbers) + 1), request_lines(order.dataset.paths), strict=False)
        found = {number: line for number, line in lines if number in wanted}
    else:
        return shown
    return [
        msgspec.structs.replace(each, inputs={**each.inputs, "request": _asked(found.get(each.number or 0, b"{}"))})
        for each in shown
    ]


class _Body(Struct, frozen=True):
    messages: list[dict[str, Any]] = []
    prompt: Any = None
    input: Any = None


class _Request(Struct, frozen=True):
    body: _Body = _Body()


def _asked(line: bytes) -> str:
    """The last message of a request, its prompt or its input."""
    try:
        body = msgspec.json.decode(line, type=_Request).body
    except (msgspec.MsgspecError, RecursionError):
        return ""  # its error says what is wrong with it
    value = body.messages[-1].get("content") if body.messages else body.prompt if body.input is None else body.input
    return value if isinstance(value, str) else "" if value is None else msgspec.json.encode(value).decode()


def table_lines(shown: Sequence[Shown], *, is_terminal: bool) -> list[str]:
    """The lines of the table. An error stands where the answer would be."""
    if not shown:
        return ["no row of the sample has run"]
    inputs = list(dict.fromkeys(name for each in shown for name in each.inputs))
    answers = list(dict.fromkeys(name for each in shown for name in each.answers)) or [OUTPUT]
    answers = [name for name in answers if any(each.answers.get(name) for each in shown)] or answers[:1]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, expand=False)
    has_numbers = all(each.number is not None for each in shown)
    if has_numbers:
        table.add_column("row", justify="right", no_wrap=True, style="dim")
    for name in inputs[:INPUTS_MAX]:
        table.add_column(Text(clean(name, 40)), overflow="fold")
    for name in answers[:ANSWERS_MAX]:
        table.add_column(Text(clean(name, 40)), overflow="fold", header_style="bold cyan")
    for each in shown:
        cells = [Text(f"{(each.number or 0) + 1:,}")] if has_numbers else []
        cells += [Text(clean(each.inputs.get(name, ""), INPUT_CHARS_MAX)) for name in inputs[:INPUTS_MAX]]
        cells += _answer_cells(each, answers[:ANSWERS_MAX])
        table.add_row(*cells)
    out = io.StringIO()
    width = shutil.get_terminal_size().columns if is_terminal else WIDTH_ELSEWHERE
    console = Console(
        file=out,
        width=width,
        markup=False,
        highlight=False,
        force_terminal=is_terminal,
    )
    console.print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    hidden = max(0, len(inputs) - INPUTS_MAX) + max(0, len(answers) - ANSWERS_MAX)
    return [*lines, f"  {count(hidden, 'further column')} not shown"] if hidden else lines


def _answer_cells(shown: Shown, names: Sequence[str]) -> list[Text]:
    cells = [Text(clean(shown.answers.get(name, ""), ANSWER_CHARS_MAX)) for name in names]
    if shown.error:
        cells[0] = Text(f"error: {clean(shown.error, ANSWER_CHARS_MAX)}", style="red")
    elif shown.warnings:
        cells[-1].append(f" [{clean(shown.warnings)}]", style="yellow")
    return cells
