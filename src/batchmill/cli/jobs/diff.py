"""`batchmill diff`: the rows of two jobs whose answers differ, side by side."""

from __future__ import annotations

from collections.abc import Iterator
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
from batchmill.wire.json_bytes import decode, encode, split_object, text_of
from batchmill.wire.result_rows import ERROR, OUTPUT, OWN, Row, flat, is_openai

EXIT_DIFFERENT = 1  # as of diff(1)
KEY_CHARS, CELL_CHARS = 16, 30  # of a line that is shown
CUSTOM_ID = "custom_id"

_NULL = msgspec.Raw(b"null")


class Pair(Struct, frozen=True):
    """A row of both jobs; None where one has no such row."""

    key: str
    left: Row | None
    right: Row | None

    @property
    def differs(self) -> bool:
        if self.left is None or self.right is None:
            return True
        return any(_is_other(self.left.get(name, _NULL), self.right.get(name, _NULL)) for name in (OUTPUT, ERROR))


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
        names: list[str] = []
        for number, job_id in enumerate((left, right)):
            (home := folder / str(number)).mkdir()
            view = await _ended(session, config, job_id)
            names.append(view.id)
            sources.append(await spooled_results(session, config, view, home))
        rows = (_rows(sources[0]), _rows(sources[1]))
        pairs = _in_step(*rows) if by is None else _matched(*rows, by, folder / "left")
        return _show(session, pairs, names)


async def _ended(session: Session, config: Config, job_id: str) -> JobView:
    async with session.app.open_jobs(config) as jobs:
        view = await jobs.show(job_id)
    refuse_early(view)
    return view


def _rows(source: ResultSource) -> Iterator[Row]:
    for line in source.lines():
        members = split_object(line)
        yield flat(line, members) if is_openai(members) else members


def _in_step(left: Iterator[Row], right: Iterator[Row]) -> Iterator[Pair]:
    """Pairs of rows with the same number. Raises: InvalidInput where their inputs are not the same."""
    for number, (one, other) in enumerate(zip_longest(left, right)):
        if one is None or other is None or _input_of(one) != _input_of(other):
            raise InvalidInput(
                f"row {number} of the two jobs is not the same input: match rows of different inputs with --by COLUMN",
                code="input_differs",
            )
        yield Pair(text_of(one[CUSTOM_ID]) if CUSTOM_ID in one else str(number), one, other)


def _input_of(row: Row) -> dict[str, Any]:
    """What a result shows of its input."""
    if "response" in row:
        return {CUSTOM_ID: bytes(row.get(CUSTOM_ID, _NULL))}
    return {name: bytes(value) for name, value in row.items() if name not in OWN}


def _matched(left: Iterator[Row], right: Iterator[Row], by: str, path: Path) -> Iterator[Pair]:
    """Pairs of rows with the same value of a column. Of each left row the memory holds a digest and an offset.

    Args: path: a new file for the left rows.
    """
    places: dict[bytes, int] = {}
    with path.open("w+b") as file:
        for row in left:
            digest = _digest(row, by)
            if digest in places:
                raise _repeated(row, by)
            places[digest] = file.tell()
            file.write(encode({name: row[name] for name in (by, OUTPUT, ERROR) if name in row}) + b"\n")
        taken: set[bytes] = set()
        for row in right:
            digest = _digest(row, by)
            if digest in taken:
                raise _repeated(row, by)
            taken.add(digest)
            place = places.pop(digest, None)
            yield Pair(text_of(row[by]), None if place is None else _read(file, place), row)
        for place in places.values():
            row = _read(file, place)
            yield Pair(text_of(row[by]), row, None)


def _read(file: Any, place: int) -> Row:
    file.seek(place)
    return split_object(file.readline())


def _digest(row: Row, by: str) -> bytes:
    if by not in row:
        known = [name for name in row if name not in (OUTPUT, ERROR)]
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
    return f"error: {error}" if error else text_of(row.get(OUTPUT, _NULL))


def _answer(row: Row | None) -> dict[str, Any] | None:
    return None if row is None else {name: decode(row.get(name, _NULL)) for name in (OUTPUT, ERROR)}
