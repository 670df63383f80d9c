"""RowReader: reads the rows of a job as calls of a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.errors import BatchmillError
from batchmill.function_runtime.arrow.rows import ARROW
from batchmill.function_runtime.row_lines import OPENAI, TABLE
from batchmill.ports.engines import Columns
from batchmill.types import ColumnBlock, Interface, Row, RowBlock, RowError
from batchmill.wire.calls import ARGUMENTS, form_of_body
from batchmill.wire.json_bytes import encode, join_object, split_object
from batchmill.wire.rows.forms import URLS, OpenAIForm, TableForm
from batchmill.wire.rows.text_cells import CellReader

ADDRESSES = ("model", "stream")  # fields of a body that are not arguments, unless the function names them

# What reading a row may raise.
READ_ERRORS = (BatchmillError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

FORM_FIELDS = ("data", "inputs")  # of a body in the form of a live call
FORM_WORDS = (b'"data"', b'"inputs"', b"/infer")  # a row without them is in no form of live calls

_values = msgspec.json.Decoder(list[Raw])


class FormBody(Struct, frozen=True, gc=False):
    """The body of a row in a live call's form."""

    form: str
    body: bytes


Read = bytes | FormBody | RowError  # bytes: the JSON object of its arguments


class _Line(Struct, gc=False):
    """A line of an OpenAI file with raw members."""

    custom_id: Raw
    url: str
    body: Raw


_lines = msgspec.json.Decoder(list[_Line])


class RowReader:
    """Reads rows for one function. Its process drops fields that the function does not take."""

    def __init__(self, interface: Interface) -> None:
        self._interface = interface
        names = {each.name for each in interface.inputs}
        takes_any = interface.takes_more or (interface.takes != "arguments" and not names)
        self._strange = frozenset(ADDRESSES) - names if takes_any else frozenset()  # would be taken for arguments
        self._cells = CellReader(interface.inputs)
        self._openai_layout = {
            "layout": OPENAI, "drop": sorted(self._strange), "urls": sorted(URLS),
            "forms": [name for name in FORM_FIELDS if not (interface.takes_more or name in names)],
        }  # fmt: skip

    def read(self, rows: Sequence[Row]) -> Sequence[Read]:
        """The call of each row."""
        together = self._read_together(rows)
        return [self._read_one(row) for row in rows] if together is None else together

    def _read_together(self, rows: Sequence[Row]) -> Sequence[Read] | None:
        """Decode all rows in one call; None if a row is unusual."""
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

    def columns(self) -> Columns:
        """The columns that the function takes of a dataset that has some."""
        interface = self._interface
        is_open = interface.takes_more or interface.takes != "arguments"
        if is_open:
            return Columns()
        names = [(each.name, each.required) for each in interface.inputs]
        return Columns(tuple(name for name, _ in names), frozenset(name for name, is_required in names if is_required))

    def block_layout(self, block: RowBlock | ColumnBlock) -> dict[str, Any] | None:
        """How the process reads and writes a block of rows; None if they must be read here, one by one."""
        if block.lease is None or not block.lease.takes_blocks:
            return None
        if isinstance(block, ColumnBlock):
            return {"layout": ARROW}
        if isinstance(block.form, TableForm):
            return None if self._cells.is_needed and block.form.is_text else {"layout": TABLE}
        return self._openai_layout | {"prefix": block.form.id_prefix}


def joined(items: Sequence[bytes]) -> bytes:
    """A JSON array of these items."""
    return b"[" + b",".join(items) + b"]"
