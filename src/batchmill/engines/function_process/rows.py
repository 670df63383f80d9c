"""Rows of jobs as calls of a function, and what it returned as outcomes. Values are cut out of bytes, never decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from batchmill.datasets.text_rules import is_too_deep
from batchmill.errors import BatchmillError
from batchmill.types import Interface, Outcome, Row, RowError
from batchmill.wire.call_forms import ARGUMENTS, form_of_body
from batchmill.wire.calls import CallError
from batchmill.wire.forms import OpenAIForm, usage_of
from batchmill.wire.json_bytes import DEPTH_MAX, decode, join_object, split_object

MESSAGE_CHARS_MAX = 2048
SHALLOW_BYTES_MAX = 2 * DEPTH_MAX  # a result up to here cannot nest too deep
ADDRESSES = ("model", "stream")  # fields of a body that are no arguments, unless the function names them

# What reading a row may raise.
READ_ERRORS = (BatchmillError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_values = msgspec.json.Decoder(list[Raw])
_dicts = msgspec.json.Decoder(list[dict[str, Raw]])


class FormBody(Struct, frozen=True, gc=False):
    """A row whose body is in one of the forms of live calls."""

    form: str
    body: bytes


Read = bytes | FormBody | RowError  # bytes: the JSON object of its arguments


class RowReader:
    """Reads rows for one function. Fields that the function does not name are left out, as columns often are."""

    def __init__(self, interface: Interface) -> None:
        self._interface = interface
        names = [each.name for each in interface.inputs]
        self._is_open = interface.takes_more or (interface.takes != "arguments" and not names)
        fields: list[tuple[str, Any, Any]] = [(f"f{n}", Raw | UnsetType, UNSET) for n in range(len(names))]
        renames = {f"f{n}": name for n, name in enumerate(names)}
        arguments = msgspec.defstruct("Arguments", fields, rename=renames, gc=False)
        line = msgspec.defstruct("Line", [("custom_id", Raw), ("body", arguments), ("url", str)], gc=False)
        self._arguments = msgspec.json.Decoder(list[arguments])  # type: ignore[valid-type]
        self._lines = msgspec.json.Decoder(list[line])  # type: ignore[valid-type]
        self._encode = msgspec.json.Encoder().encode

    def read(self, rows: Sequence[Row]) -> list[Read]:
        """What each row calls."""
        if not self._is_open and (quick := self._read_together(rows)) is not None:
            return quick
        return [self._read_one(row) for row in rows]

    def _read_together(self, rows: Sequence[Row]) -> list[Read] | None:
        """All rows by one call of the decoder; None where one of them is not as most are."""
        form = rows[0].form
        text = b"[" + b",".join([row.raw for row in rows]) + b"]"
        try:
            if type(form) is not OpenAIForm:
                arguments = self._arguments.decode(text)
                return list(map(self._encode, arguments)) if len(arguments) == len(rows) else None
            if b'"data"' in text or b'"inputs"' in text or b"/infer" in text:
                return None
            lines = self._lines.decode(text)
        except READ_ERRORS:
            return None
        if len(lines) != len(rows) or any(row.form is not form for row in rows):
            return None
        for row, line in zip(rows, lines, strict=True):
            row.custom_id = line.custom_id
        return [self._encode(line.body) for line in lines]

    def _read_one(self, row: Row) -> Read:
        try:
            if not isinstance(row.form, OpenAIForm):
                return self._arguments_in(row.raw)
            request = row.form.request(row)
            fields = split_object(request.body)
            form = form_of_body(request.url, fields, self._interface)
            return self._arguments_in(request.body) if form == ARGUMENTS else FormBody(form, request.body)
        except BatchmillError as error:
            return RowError(error.code, error.message)
        except READ_ERRORS as error:
            return RowError("invalid_json", f"the row cannot be read: {error}")

    def _arguments_in(self, body: bytes) -> bytes:
        [fields] = _dicts.decode(b"[" + body + b"]")
        names = {each.name for each in self._interface.inputs}
        kept = {name: value for name, value in fields.items() if name in names or self._is_more(name)}
        return body if len(kept) == len(fields) else join_object(kept)

    def _is_more(self, name: str) -> bool:
        return self._is_open and name not in ADDRESSES


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
