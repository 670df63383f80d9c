"""The rows of two jobs whose answers differ: rows in pairs, by their number or by a column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.types import JobView
from batchmill.wire.json_bytes import decode, encode, split_object, text_of
from batchmill.wire.rows.result_rows import Row, added_by, answer_columns

CUSTOM_ID = "custom_id"
CHARS_SHOWN = 80  # of a value, in a message
AT_ONCE = 100  # differences that are decoded together

_NULL = msgspec.Raw(b"null")


class Difference(Struct, frozen=True):
    """A row whose answers differ between two jobs."""

    row: str  # its number, its custom_id, or the value that it is matched by
    left: dict[str, Any] | None  # the columns of its answer; None: the job has no such row
    right: dict[str, Any] | None


class Pair(Struct, frozen=True):
    """The answers of both jobs to a row: the columns that hold them; None where one has no such row."""

    key: str
    left: Row | None
    right: Row | None
    as_text: bool = False  # values are compared as the text that CSV has of them

    @property
    def differs(self) -> bool:
        if self.left is None or self.right is None:
            return True
        return not _are_same(self.left, self.right, as_text=self.as_text)


def _are_same(left: Row, right: Row, *, as_text: bool) -> bool:
    """Whether two rows have the same values. A value that one has not is null."""
    pairs = ((left.get(name, _NULL), right.get(name, _NULL)) for name in {**left, **right})
    read = _cell if as_text else _value
    return all(bytes(one) == bytes(other) or _is_equal(read(one), read(other)) for one, other in pairs)


def _value(raw: msgspec.Raw) -> Any:
    """The value of JSON; of a number that no machine number holds, its digits."""
    try:
        return decode(raw)
    except msgspec.ValidationError:
        return bytes(raw)


def _cell(raw: msgspec.Raw) -> Any:
    """What a cell of CSV says: text, or the value that it is the JSON of. Null is the empty text."""
    text = text_of(raw)
    try:
        value = decode(text.encode())
    except (msgspec.MsgspecError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def _is_equal(left: Any, right: Any) -> bool:
    """Whether two values of JSON are the same: 1 is 1.0, and true is not 1."""
    match left, right:
        case dict(), dict():
            return left.keys() == right.keys() and all(_is_equal(left[name], right[name]) for name in left)
        case list(), list():
            return len(left) == len(right) and all(map(_is_equal, left, right))
        case _:
            return isinstance(left, bool) == isinstance(right, bool) and left == right


def pairs_of(
    rows: Sequence[Iterator[Row]], views: Sequence[JobView], by: str | None, path: Path, *, as_text: bool
) -> Iterator[Pair]:
    """Pairs of the rows of two jobs, by their number or by a column.

    Args:
        path: a new file for the rows of the left job.
        as_text: results of one job are CSV: the values of both count as the text that they have there.

    Raises, while it is iterated: InvalidInput.
    """
    return _in_step(rows, views, as_text) if by is None else _matched(rows, views, by, path, as_text)


def differences(pairs: Iterable[Pair]) -> Iterator[Difference]:
    return (difference_of(pair) for pair in pairs if pair.differs)


def difference_of(pair: Pair) -> Difference:
    return Difference(pair.key, _decoded(pair.left), _decoded(pair.right))


def take(found: Iterator[Difference]) -> list[Difference]:
    """The next differences; none at the end."""
    return list(islice(found, AT_ONCE))


def _decoded(row: Row | None) -> dict[str, Any] | None:
    return None if row is None else {name: decode(value) for name, value in row.items()}


def _answer_of(row: Row, view: JobView) -> Row:
    return {name: row[name] for name in answer_columns(view) if name in row}


def _in_step(rows: Sequence[Iterator[Row]], views: Sequence[JobView], as_text: bool) -> Iterator[Pair]:
    """Pairs of rows with the same number. Raises: InvalidInput where their inputs are not the same."""
    left, right = views
    for number, (one, other) in enumerate(zip_longest(*rows)):
        if (
            one is None
            or other is None
            or not _are_same(_input_of(one, left), _input_of(other, right), as_text=as_text)
        ):
            raise InvalidInput(
                f"row {number} of the two jobs is not the same input: match rows of different inputs with --by COLUMN "
                "(in Python by=)",
                code="input_differs",
            )
        key = text_of(one[CUSTOM_ID]) if CUSTOM_ID in one else str(number)
        yield Pair(key, _answer_of(one, left), _answer_of(other, right), as_text)


def _input_of(row: Row, view: JobView) -> Row:
    """What a result shows of its input."""
    if not view.added_columns and "response" in row:
        return {CUSTOM_ID: row.get(CUSTOM_ID, _NULL)}
    added = added_by(view)
    return {name: value for name, value in row.items() if name not in added}


def _matched(
    rows: Sequence[Iterator[Row]], views: Sequence[JobView], by: str, path: Path, as_text: bool
) -> Iterator[Pair]:
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
            yield Pair(text_of(row[by]), found, _answer_of(row, right), as_text)
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
    return blake2b(text_of(row[by]).encode(), digest_size=16).digest()


def _repeated(row: Row, by: str) -> InvalidInput:
    return InvalidInput(
        f"several rows of a job have {text_of(row[by])[:CHARS_SHOWN]!r} as {by!r}: match rows by a column whose values "
        "are all different",
        code="repeated_value",
    )
