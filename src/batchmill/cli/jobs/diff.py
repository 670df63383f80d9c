"""`batchmill diff`: the rows of two jobs whose answers differ, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click
import msgspec
from blake3 import blake3
from msgspec import Struct

from batchmill.cli.jobs.results import refuse_early, scratch_folder, spooled_results
from batchmill.cli.session import EXIT_OK, Session, global_options, refuse_non_utf8
from batchmill.cli.text import clean, count
from batchmill.config import Config
from batchmill.errors import BatchmillError, InvalidInput
from batchmill.jobs.results.result_rows import ResultSource
from batchmill.types import JobView
from batchmill.wire.json_bytes import decode, encode, join_object, split_object, text_of
from batchmill.wire.result_rows import ERROR, OUTPUT, Row, added_by, answer_columns, flat, is_openai

EXIT_DIFFERENT = 1  # as of diff(1)
KEY_CHARS, CELL_CHARS = 16, 30  # of a line that is shown
CUSTOM_ID = "custom_id"

_NULL = msgspec.Raw(b"null")


class Pair(Struct, frozen=True):
    """The answers of both jobs to a row: the columns that hold them; None where one has no such row."""

    key: str
    left: Row | None
    right: Row | None

    @property
    def differs(self) -> bool:
        if self.left is None or self.right is None:
            return True
        names = {*self.left, *self.right}
        return any(_is_other(self.left.get(name, _NULL), self.right.get(name, _NULL)) for name in names)


def _is_other(left: msgspec.Raw, right: msgspec.Raw) -> bool:
    return bytes(left) != bytes(right) and decode(left) != decode(right)


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
        rows = [_rows(source) for source in sources]
        pairs = _in_step(rows, views) if by is None else _matched(rows, views, by, folder / "left")
        return _show(session, pairs, [view.id for view in views])


async def _ended(session: Session, config: Config, job_id: str) -> JobView:
    async with session.app.open_jobs(config) as jobs:
        view = await jobs.show(job_id)
    refuse_early(view)
    return view


def _rows(source: ResultSource) -> Iterator[Row]:
    for line in source.lines():
        members = split_object(line)
        yield flat(line, members) if is_openai(members) else members


def _answer_of(row: Row, view: JobView) -> Row:
    return {name: row[name] for name in answer_columns(view) if name in row}


def _in_step(rows: Sequence[Iterator[Row]], views: Sequence[JobView]) -> Iterator[Pair]:
    """Pairs of rows with the same number. Raises: InvalidInput where their inputs are not the same."""
    left, right = views
    for number, (one, other) in enumerate(zip_longest(*rows)):
        if one is None or other is None or _input_of(one, left) != _input_of(other, right):
            raise InvalidInput(
                f"row {number} of the two jobs is not the same input: match rows of different inputs with --by COLUMN",
                code="input_differs",
            )
        key = text_of(one[CUSTOM_ID]) if CUSTOM_ID in one else str(number)
        yield Pair(key, _answer_of(one, left), _answer_of(other, right))


def _input_of(row: Row, view: JobView) -> dict[str, Any]:
    """What a result shows of its input."""
    if not view.added_columns and "response" in row:
        return {CUSTOM_ID: bytes(row.get(CUSTOM_ID, _NULL))}
    added = added_by(view)
    return {name: bytes(value) for name, value in row.items() if name not in added}


def _matched(rows: Sequence[Iterator[Row]], views: Sequence[JobView], by: str, path: Path) -> Iterator[Pair]:
    """Pairs of rows with the same value of a column. Of each left row the memory holds a digest and an offset.

    Args: path: a new file for the left rows.
    """
    left, right = views
    places: dict[bytes, int] = {}
    with path.open("w+b") as file:
        for row in rows[0]:
            digest = _digest(row, by, left)
            if digest in places:
                raise _repeated(row, by)
            places[digest] = file.tell()
            file.write(encode([row[by], _answer_of(row, left)]) + b"\n")
        taken: set[bytes] = set()
        for row in rows[1]:
            digest = _digest(row, by, right)
            if digest in taken:
                raise _repeated(row, by)
            taken.add(digest)
            place = places.pop(digest, None)
            found = None if place is None else _read(file, place)[1]
            yield Pair(text_of(row[by]), found, _answer_of(row, right))
        for place in places.values():
            key, answer = _read(file, place)
            yield Pair(text_of(key), answer, None)


def _read(file: Any, place: int) -> tuple[msgspec.Raw, Row]:
    """What a left row is matched by, and its answer."""
    file.seek(place)
    key, answer = decode(file.readline(), type=list[msgspec.Raw])
    return key, split_object(bytes(answer))


def _digest(row: Row, by: str, view: JobView) -> bytes:
    if by not in row:
        known = [name for name in row if name not in added_by(view)]
        raise InvalidInput(
            f"a row has no column {by!r} to match it by; it has {', '.join(known)}", code="unknown_column"
        )
    return blake3(text_of(row[by]).encode()).digest(16)


def _repeated(row: Row, by: str) -> InvalidInput:
    return InvalidInput(
        f"several rows of a job have {clean(text_of(row[by]))!r} as {by!r}: match rows by a column whose values are "
        "all different",
        code="repeated_value",
    )


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
            session.emit("difference", row=pair.key, left=_answer(pair.left), right=_answer(pair.right))
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


def _answer(row: Row | None) -> dict[str, Any] | None:
    return None if row is None else {name: decode(value) for name, value in row.items()}
