"""Lines of results as rows: OpenAI result lines as rows of a table, the columns that are wanted, and the requests
beside the replies. Commands and the SDK read results with it. It knows JSON only: no files, no jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.errors import InvalidInput
from batchmill.types import JobView
from batchmill.wire.json_bytes import encode, join_object, split_object
from batchmill.wire.rows.forms import (
    ANSWERED_BY,
    ERROR,
    FETCHED,
    FOLDED_FROM,
    OUTPUT,
    RESULT_COLUMNS,
    REUSED_FROM,
    WARNINGS_COLUMN,
    OpenAIForm,
)

OWN = RESULT_COLUMNS  # the columns that every job with a table adds to it
REQUEST = ("method", "url", "body")  # the members of a request that stand beside its reply
FLAT = ("custom_id", OUTPUT, ERROR)  # an OpenAI result line as a row, if no columns are named
MORE = ("id", "response", FOLDED_FROM, REUSED_FROM)  # what may be named besides
COLUMNS_SHOWN = 40  # in a message

Row = dict[str, Raw]
_NULL = Raw(b"null")
_OPENAI = {"id", "custom_id", "response", ERROR, FOLDED_FROM, REUSED_FROM}
_FORM = OpenAIForm()


class _Embedding(Struct):
    embedding: Raw


class _Embeddings(Struct):
    data: list[_Embedding]


class _Reply(Struct):
    status_code: int = 200
    body: Raw = Raw(b"null")


_reply = msgspec.json.Decoder(_Reply | None)
_status = msgspec.json.Decoder(_Reply)
_text = msgspec.json.Decoder(str | None)


def added_by(view: JobView) -> tuple[str, ...]:
    """The columns of a job's results that are not those of its input, in their order."""
    return tuple(view.added_columns) or OWN


def answer_columns(view: JobView) -> tuple[str, ...]:
    """Those of them that hold the answers, and why there is none."""
    not_answers = (WARNINGS_COLUMN, FETCHED, ANSWERED_BY, FOLDED_FROM, REUSED_FROM)
    return tuple(name for name in added_by(view) if name not in not_answers)


def is_openai(members: Row) -> bool:
    """Whether these are the members of an OpenAI result line, not of a row of a table."""
    return "response" in members and "custom_id" in members and members.keys() <= _OPENAI


def has_failed(members: Row) -> bool:
    """Whether a row of a table, or an OpenAI result line, is an error."""
    if bytes(members.get(ERROR, _NULL)) != b"null":
        return True
    reply = members["response"] if is_openai(members) else _NULL
    return bytes(reply)[:1] == b"{" and _status.decode(reply).status_code >= 400


def row_number(members: Row) -> int:
    """The number of the row of an OpenAI result line, counted from 0. Raises: InvalidInput."""
    number = (_text.decode(members.get("id", _NULL)) or "").rpartition("_")[2]
    if not (number.isascii() and number.isdigit()):
        raise InvalidInput("these results have an `id` that names no row: are they batchmill's?", code="invalid_output")
    return int(number)


def number_in(line: bytes) -> int:
    """`row_number` of a line."""
    return row_number(split_object(line))


def flat(line: bytes, members: Row) -> Row:
    """An OpenAI result line with `output`, the text or the vector of the reply, and `error` as `code: message`."""
    if has_failed(members):
        cause = _FORM.cause(line)
        return {**members, OUTPUT: _NULL, ERROR: Raw(encode(f"{cause.code}: {cause.message}"))}
    reply = _reply.decode(members["response"])
    return {**members, OUTPUT: _NULL if reply is None else _content(reply.body), ERROR: _NULL}


def flat_rows(lines: Iterable[bytes]) -> Iterator[Row]:
    """Result lines as rows of a table: OpenAI lines are made flat."""
    for line in lines:
        members = split_object(line)
        yield flat(line, members) if is_openai(members) else members


def _content(body: Raw) -> Raw:
    """The text or the vector of a reply; of another reply all of it."""
    try:
        reply = msgspec.json.decode(body)
    except (RecursionError, msgspec.MsgspecError):
        return body
    match reply:
        case {"choices": [{"message": {"content": str(text)}}]} | {"choices": [{"text": str(text)}]}:
            return Raw(encode(text))
        case {"object": "response", "output": [*items]}:
            return Raw(encode("".join(_texts(items))))
        case {"data": [{"embedding": [*_]}]}:
            return msgspec.json.decode(body, type=_Embeddings).data[0].embedding
        case _:
            return body


def _texts(items: list[Any]) -> Iterable[str]:
    for item in items:
        content = item.get("content") if isinstance(item, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "output_text" and isinstance(part.get("text"), str):
                yield part["text"]


def beside_request(row: Row, request: bytes | None, number: int) -> Row:
    """A flat row with the request that it answers. Raises: InvalidInput if the input is not that of the results."""
    if request is None:
        raise InvalidInput(f"the input has no row {number}: it is not as it was when the job ran", code="input_changed")
    try:
        members = split_object(request)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        members = {}  # validation refused the line, and its error says so
    known, given = bytes(row.get("custom_id", _NULL)), bytes(members.get("custom_id", _NULL))
    if known != b"null" and msgspec.json.decode(known) != msgspec.json.decode(given):
        raise InvalidInput(
            f"row {number} of the input has the custom_id {given.decode()}, its result {known.decode()}: the input is "
            "not as it was when the job ran",
            code="input_changed",
        )
    return {**row, **{name: members.get(name, _NULL) for name in REQUEST}}


class RowPicker:
    """Makes the wanted rows of result lines that arrive one after the other, each with its request if it needs one.

    The columns of a table are known only when all rows were seen: `finish` refuses one that no row had.
    """

    def __init__(self, shape: RowShape, *, only_failed: bool) -> None:
        self._shape, self._only_failed = shape, only_failed
        self._missing = set(shape.columns or ())
        self._known: dict[str, None] = {}

    def number(self, line: bytes) -> int | None:
        """The number of the request that must stand beside this line; None: it needs none."""
        members = split_object(line)
        is_wanted = self._shape.join and is_openai(members) and (has_failed(members) or not self._only_failed)
        return row_number(members) if is_wanted else None

    def pick(self, line: bytes, request: bytes | None = None) -> dict[str, Any] | None:
        """The row, or None if it is not wanted. Raises: InvalidInput."""
        members = split_object(line)
        if self._only_failed and not has_failed(members):
            return None
        if is_openai(members):
            self._missing.clear()
            names = self._shape.names((), openai=True)
            row = flat(line, members)
            if self._shape.join:
                row = beside_request(row, request, row_number(members))
            return _decoded(projected(row, names))
        self._missing -= members.keys()
        self._known.update(dict.fromkeys(members))
        if self._shape.columns is None:
            return _decoded(members)
        inputs = [each for each in members if each not in self._shape.added] if self._shape.join else []
        return _decoded(projected(members, list(dict.fromkeys([*inputs, *self._shape.columns]))))

    def finish(self) -> None:
        """Raises: InvalidInput for a column that none of the rows had."""
        if self._missing and self._known:
            raise unknown_column(min(self._missing), list(self._known))


def _decoded(row: Row) -> dict[str, Any]:
    return msgspec.json.decode(join_object(row))


class RowShape(Struct, frozen=True):
    """The columns that are wanted of rows.

    Args:
        columns: in this order; None: those of the row, and of a flat OpenAI row `FLAT`.
        join: the columns of the input as well, before those named.
        added: as `added_by` the job: all others of a table are the input's.
    """

    columns: list[str] | None = None
    join: bool = False
    added: tuple[str, ...] = OWN

    @property
    def is_whole(self) -> bool:
        """Whether rows are wanted as they are."""
        return self.columns is None and not self.join

    def ordered(self, known: Iterable[str]) -> list[str]:
        """These columns of a table: the input's, then those that results add."""
        names = list(known)
        return [*(each for each in names if each not in self.added), *(each for each in self.added if each in names)]

    def names(self, known: Sequence[str], *, openai: bool) -> list[str]:
        """The columns of the output, of rows with these. Raises: InvalidInput for one that no row has."""
        if openai:
            known = [*FLAT, *MORE, *(REQUEST if self.join else ())]
        for name in self.columns or ():
            if name not in known:
                raise unknown_column(name, known, needs_join=openai and name in REQUEST)
        given = REQUEST if openai else tuple(each for each in known if each not in self.added)
        if self.columns is None and not openai:
            return list(known)
        if self.columns is None:
            return [FLAT[0], *(given if self.join else ()), *FLAT[1:]]
        return list(dict.fromkeys([*(given if self.join else ()), *self.columns]))


def unknown_column(name: str, known: Sequence[str], *, needs_join: bool = False) -> InvalidInput:
    more = f" and {len(known) - COLUMNS_SHOWN:,} more" if len(known) > COLUMNS_SHOWN else ""
    hint = "; join adds those of the request" if needs_join else ""
    return InvalidInput(
        f"the results have no column {name!r}; they have {', '.join(known[:COLUMNS_SHOWN])}{more}{hint}",
        code="unknown_column",
    )


def projected(row: Row, names: Sequence[str]) -> Row:
    """These columns of a row, in this order; null for one that it lacks."""
    return {name: row.get(name, _NULL) for name in names}
