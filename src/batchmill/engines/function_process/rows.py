"""Rows of jobs as calls of a function, and what it returned as outcomes. Values are cut out of bytes, never decoded."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw, Struct

from batchmill.errors import BatchmillError
from batchmill.types import Interface, Outcome, Row, RowError
from batchmill.wire.call_forms import ARGUMENTS, form_of_body
from batchmill.wire.calls import CallError
from batchmill.wire.forms import OpenAIForm, usage_of
from batchmill.wire.json_bytes import DEPTH_MAX, decode, encode, is_too_deep, join_object, split_object
from batchmill.wire.text_cells import CellReader

MESSAGE_CHARS_MAX = 2048
SHALLOW_BYTES_MAX = 2 * DEPTH_MAX  # a result up to here cannot nest too deep
ADDRESSES = ("model", "stream")  # fields of a body that are no arguments, unless the function names them

# What reading a row may raise.
READ_ERRORS = (BatchmillError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

FORM_WORDS = (b'"data"', b'"inputs"', b"/infer")  # a row without them is in no form of live calls

_values = msgspec.json.Decoder(list[Raw])


class FormBody(Struct, frozen=True, gc=False):
    """A row whose body is in one of the forms of live calls."""

    form: str
    body: bytes


Read = bytes | FormBody | RowError  # bytes: the JSON object of its arguments


class _Line(Struct, gc=False):
    """A line of an OpenAI file, its parts uncut."""

    custom_id: Raw
    url: str
    body: Raw


_lines = msgspec.json.Decoder(list[_Line])


class RowReader:
    """Reads rows for one function. Fields that it does not take are left out by its process, as columns often are."""

    def __init__(self, interface: Interface) -> None:
        self._interface = interface
        names = {each.name for each in interface.inputs}
        takes_any = interface.takes_more or (interface.takes != "arguments" and not names)
        self._strange = frozenset(ADDRESSES) - names if takes_any else frozenset()  # would be taken for arguments
        self._cells = CellReader(interface.inputs)

    def read(self, rows: Sequence[Row]) -> Sequence[Read]:
        """What each row calls."""
        together = self._read_together(rows)
        return [self._read_one(row) for row in rows] if together is None else together

    def _read_together(self, rows: Sequence[Row]) -> Sequence[Read] | None:
        """All rows by one call of the decoder; None where one of them is not as most are."""
        form, raws = rows[0].form, [row.raw for row in rows]
        text = joined(raws)
        try:
            if type(form) is not OpenAIForm:
                if self._cells.is_needed and any(row.form.is_text for row in rows):
                    return None
                return raws if len(_values.decode(text)) == len(rows) else None
            if self._strange or any(word in text for word in FORM_WORDS):
                return None
            lines = _lines.decode(text)
        except READ_ERRORS:
            return None
        if len(lines) != len(rows) or any(row.form is not form for row in rows):
            return None
        for row, line in zip(rows, lines, strict=True):
            row.custom_id = line.custom_id  # type: ignore[assignment]  # Raw has the buffer that % wants
        return [bytes(line.body) for line in lines]

    def _read_one(self, row: Row) -> Read:
        try:
            if not isinstance(row.form, OpenAIForm):
                if self._cells.is_needed and row.form.is_text:
                    return encode(self._cells.read(row.form.arguments(row)))
                split_object(row.raw)
                return row.raw
            request = row.form.request(row)
            fields = split_object(request.body)
            form = form_of_body(request.url, fields, self._interface)
            if form != ARGUMENTS:
                return FormBody(form, request.body)
            if self._strange.isdisjoint(fields):
                return request.body
            return join_object({name: value for name, value in fields.items() if name not in self._strange})
        except BatchmillError as error:
            return RowError(error.code, error.message)
        except READ_ERRORS as error:
            return RowError("invalid_json", f"the row cannot be read: {error}")


def outcome_of(row: Row, body: bytes) -> Outcome:
    """The outcome of a row whose call returned this JSON."""
    if len(body) > SHALLOW_BYTES_MAX and is_too_deep(body, DEPTH_MAX):
        message = f"the function returned a value nested deeper than {DEPTH_MAX} levels"
        return Outcome(row, error=RowError("bad_return", message), status=0)
    if b'"usage"' in body and body[:1] == b"{":
        return Outcome(row, body, None, 200, usage_of(decode(body)))
    return Outcome(row, body)


def outcomes_of(rows: Sequence[Row], values: bytes, errors: dict[int, CallError]) -> list[Outcome]:
    """Outcomes of rows that were called one after another; `errors` by their place here."""
    bodies = _values.decode(values)
    if len(bodies) != len(rows):
        wrong = RowError("bad_return", f"the function's process answered {len(bodies)} of {len(rows)} rows")
        return [Outcome(row, error=wrong, status=0) for row in rows]
    if not errors and b'"usage"' not in values and len(values) <= SHALLOW_BYTES_MAX:
        return [Outcome(row, bytes(body)) for row, body in zip(rows, bodies, strict=True)]
    return [
        failed(row, errors[place]) if place in errors else outcome_of(row, bytes(body))
        for place, (row, body) in enumerate(zip(rows, bodies, strict=True))
    ]


def failed(row: Row, error: CallError) -> Outcome:
    """The outcome of a row that has no result."""
    message = error.message[:MESSAGE_CHARS_MAX].encode("utf-8", "backslashreplace").decode()
    return Outcome(row, error=RowError(error.code, message), status=0)


def joined(items: Sequence[bytes]) -> bytes:
    """A JSON array of these items."""
    return b"[" + b",".join(items) + b"]"
