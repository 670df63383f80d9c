"""The forms "rows" and "arguments". Rows: `{"data": [[id, argument, …], …]}` in, `{"data": [[id, result], …]}` out.

Arguments: a JSON object of arguments by name, answered with the result as JSON. Ids and values are copied as bytes and
never decoded, so an id comes back exactly as it was sent.
Source: Modelbit's REST documentation, and what its SDK sends.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from batchmill.errors import InvalidInput, ModelFailed, TooLarge
from batchmill.types import Interface
from batchmill.wire.calls import (
    CALLER_CODES,
    NAMED,
    POSITIONAL,
    WITH_IDS,
    CallError,
    FunctionResults,
    ParsedCalls,
    check_text,
    failure,
    last_line,
    parse,
)
from batchmill.wire.json_bytes import join_object, shallow

ADDRESSES = ("model", "stream")  # fields for routing and streaming, unless the function has parameters of these names

_argument_members = msgspec.json.Decoder(dict[str, Raw])


class ArgumentsForm:
    """One row for each body. Values are passed on as bytes."""

    def read(self, body: bytes, head: bytes, interface: Interface, *, received_shapes: bool = False) -> ParsedCalls:
        """Raises: InvalidInput if the body is not a JSON object."""
        check_text(body)
        members = parse(_argument_members, body)
        parameters = {each.name for each in interface.inputs}
        routing = [name for name in ADDRESSES if name in members and name not in parameters]
        if routing:
            body = join_object({name: value for name, value in members.items() if name not in routing})
        return ParsedCalls(1, NAMED, b"[" + body + b"]")

    def write(
        self, request: ParsedCalls, results: FunctionResults, spec_name: str, version: str
    ) -> tuple[bytes, bytes]:
        """Raises: ModelFailed, InvalidInput if the row failed."""
        if results.errors:
            raise failure(results.errors[0])
        return only_value(results.values), b""

    def write_pieces(
        self, request: ParsedCalls, results: FunctionResults, spec_name: str, version: str
    ) -> tuple[list[bytes], bytes]:
        body, head = self.write(request, results, spec_name, version)
        return [body], head

    def event(self, request: ParsedCalls, values: bytes, buffers: list[bytes | memoryview]) -> bytes:
        return values


def only_value(values: bytes) -> bytes:
    """Return the only item of a JSON array, as its bytes."""
    data = values.strip()
    if data[:1] != b"[" or data[-1:] != b"]":
        raise ModelFailed("the results are not a list", code="bad_return")
    return bytes(data[1:-1].strip())


ROWS_MAX = 1_000_000  # of one body
ID_CHARS_SHOWN = 60


class RowsBody(Struct, forbid_unknown_fields=True, gc=False):
    """The body of a call. `model` and `stream` are for routing, which reads them."""

    data: Raw
    timeout_seconds: Annotated[int, Meta(gt=0, le=2**31)] | None = None
    row_errors: bool = (
        False  # batchmill's own: a failed row is [id, null, {"error": "Type: message"}], and the others succeed
    )
    model: str | None = None
    stream: bool | None = None


class _Id(Struct, array_like=True, gc=False):
    """The first item of a row."""

    id: Raw


class _State(Struct, gc=False):
    ids: Sequence[_Id] | None  # None: one call, not a batch
    row_errors: bool = False


# Fields for the delivery of a reply. The frontend handles them and removes them from the body.
DELIVERY_FIELDS = ("response_format", "response_webhook", "response_webhook_ignore_timeout")
FIELDS = RowsBody.__struct_fields__
_body = msgspec.json.Decoder(RowsBody)
_members = msgspec.json.Decoder(dict[str, Raw])
_ids = msgspec.json.Decoder(list[_Id])
_items = msgspec.json.Decoder(list[Raw])
_rows = msgspec.json.Decoder(list[list[Raw]])
_encode = msgspec.json.Encoder().encode
_is_batch = re.compile(rb"\s*\[\s*\[").match


class RowsForm:
    """A list whose first item is a list is a batch; anything else is one call."""

    def read(self, body: bytes, head: bytes, interface: Interface, *, received_shapes: bool = False) -> ParsedCalls:
        """Raises: InvalidInput for a body that does not follow Modelbit's format, TooLarge for too many rows."""
        check_text(body)
        fields = body_of(body)
        data, timeout_s = fields.data, fields.timeout_seconds
        if not _is_batch(data):
            state = _State(None, fields.row_errors)
            layout, calls = _single(data, interface)
            return ParsedCalls(1, layout, calls, timeout_s=timeout_s, state=state)
        ids = _ids_of(data)
        layout, calls = WITH_IDS, bytes(data)
        if interface.takes != "arguments":
            layout, calls = _objects(data, interface)
        state = _State(ids, fields.row_errors)
        return ParsedCalls(len(ids), layout, calls, timeout_s=timeout_s, state=state)

    def write(
        self, request: ParsedCalls, results: FunctionResults, spec_name: str, version: str
    ) -> tuple[bytes, bytes]:
        """Raises: ModelFailed, InvalidInput if a row failed and the request does not set `row_errors`."""
        state: _State = request.state
        errors = results.errors
        if errors and not state.row_errors:
            row = min(errors)
            raise failure(errors[row], _row_name(row, state.ids))
        if state.ids is None:
            if errors:
                return b'{"data":null,"error":' + _encode(_text(errors[0])) + b"}", b""
            return b'{"data":' + only_value(results.values) + b"}", b""
        values = _items.decode(results.values)
        ids = [row.id for row in state.ids]
        if not errors:
            return b'{"data":' + _encode(list(zip(ids, values, strict=True))) + b"}", b""
        rows: list[tuple] = list(zip(ids, values, strict=True))
        for row, error in errors.items():
            rows[row] = (ids[row], None, {"error": _text(error)})
        return b'{"data":' + _encode(rows) + b"}", b""

    def write_pieces(
        self, request: ParsedCalls, results: FunctionResults, spec_name: str, version: str
    ) -> tuple[list[bytes], bytes]:
        body, head = self.write(request, results, spec_name, version)
        return [body], head

    def event(self, request: ParsedCalls, values: bytes, buffers: list[bytes | memoryview]) -> bytes:
        return b'{"data":' + values + b"}"


def body_of(body: bytes) -> RowsBody:
    """Decode the fields of a body, except `data`. Raises: InvalidInput; for an unknown field with the nearest one."""
    try:
        return _body.decode(shallow(body))
    except msgspec.ValidationError as error:
        members = parse(_members, body)
        for name in members:
            if name not in FIELDS:
                raise _unknown(name) from None
        if "data" not in members:
            raise InvalidInput('the body lacks "data"', code="invalid_field") from None
        raise InvalidInput(_explained(str(error)), code="invalid_field") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return parse(_body, body)


def _unknown(name: str) -> InvalidInput:
    if name in DELIVERY_FIELDS:
        return InvalidInput(
            f"{name!r} is not supported here: the reply to the call has the answer", code="unsupported_parameter"
        )
    nearest = difflib.get_close_matches(name, FIELDS, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(FIELDS)}"
    return InvalidInput(f"the body has an unknown field {name[:ID_CHARS_SHOWN]!r}; {hint}", code="unknown_field")


def _explained(message: str) -> str:
    """Turn msgspec's message into one for this form."""
    if "timeout_seconds" in message:
        return "timeout_seconds must be a positive integer"
    return f"the body is invalid: {message}"


def _ids_of(data: Raw) -> list[_Id]:
    try:
        ids = _ids.decode(data)
    except msgspec.ValidationError:
        raise _odd_row(data) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        ids = parse(_ids, data)
    if len(ids) > ROWS_MAX:
        raise TooLarge(f"the body has {len(ids):,} rows; at most {ROWS_MAX:,} are supported")
    return ids


def _odd_row(data: Raw) -> InvalidInput:
    """The error for the first row of a batch that is not `[id, argument, …]`."""
    for number, item in enumerate(_items.decode(data)):
        text = bytes(item).lstrip()
        if text[:1] != b"[" or text[1:].lstrip()[:1] == b"]":
            shown = text[:ID_CHARS_SHOWN].decode(errors="replace")
            message = f"row {number + 1} must be a list [id, argument, …], like the first one, not {shown}"
            return InvalidInput(message, code="invalid_field")
    raise AssertionError("a batch was refused, and every row of it is a list with an id")


def _single(data: Raw, interface: Interface) -> tuple[str, bytes]:
    """Return layout and calls of a single call: the bare value for one parameter, a list or an object for several."""
    value, inputs = bytes(data).strip(), interface.inputs
    is_object, is_list = value[:1] == b"{", value[:1] == b"["
    if interface.takes != "arguments":
        return NAMED, b"[" + _object(value, interface, "data") + b"]"
    if interface.calls == "frame" or (len(inputs) == 1 and not interface.takes_more):
        return POSITIONAL, b"[[" + value + b"]]"
    if is_object:
        return NAMED, b"[" + value + b"]"
    if is_list and inputs:
        return POSITIONAL, b"[" + value + b"]"
    if not inputs and value in (b"null", b"[]"):
        return POSITIONAL, b"[[]]"
    if sum(each.required for each in inputs) == 1 or len(inputs) == 1:
        return POSITIONAL, b"[[" + value + b"]]"
    names = ", ".join(each.name for each in inputs)
    message = f"the function takes {names}: data must be a list of them, in this order, or an object"
    if not inputs:
        message = "the function has no parameters: data must be null, [] or {}"
    raise InvalidInput(message, code="invalid_argument")


def _objects(data: Raw, interface: Interface) -> tuple[str, bytes]:
    """Read a batch for a function that takes a dict: `[id, {name: value}]`, or `[id, value]` for one input."""
    calls = []
    for number, row in enumerate(parse(_rows, data)):
        if len(row) != 2:
            return _positions(data, interface)
        calls.append(_object(bytes(row[1]).strip(), interface, f"row {number + 1}"))
    return NAMED, b"[" + b",".join(calls) + b"]"


def _positions(data: Raw, interface: Interface) -> tuple[str, bytes]:
    """Read the rows of a batch whose values have the order of a dict's inputs."""
    names = [each.name for each in interface.inputs]
    calls = []
    for number, row in enumerate(parse(_rows, data)):
        if len(row) - 1 > len(names):
            message = f"row {number + 1} has {len(row) - 1} arguments; the function takes {len(names)}"
            raise InvalidInput(message, code="invalid_argument")
        calls.append(dict(zip(names, row[1:], strict=False)))
    return NAMED, _encode(calls)


def _object(value: bytes, interface: Interface, owner: str) -> bytes:
    if value[:1] == b"{":
        return value
    if len(interface.inputs) == 1:
        return _encode({interface.inputs[0].name: Raw(value)})
    names = ", ".join(each.name for each in interface.inputs)
    raise InvalidInput(f"{owner} must be an object with the inputs {names or 'by name'}", code="invalid_argument")


def _row_name(row: int, ids: Sequence[_Id] | None) -> str:
    if ids is None or len(ids) == 1:
        return ""
    shown = bytes(ids[row].id).decode(errors="replace")[:ID_CHARS_SHOWN]
    return f"row {row + 1} of {len(ids)} (id {shown})"


def _text(error: CallError) -> str:
    """Render a row's error as one line."""
    if error.code in CALLER_CODES:
        return f"InvalidInput: {' '.join(error.message.split())}"
    return last_line(error)
