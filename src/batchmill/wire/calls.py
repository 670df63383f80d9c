"""Calls of a function between the form that they came in and the code that is called: values as JSON, arrays as bytes.

A form reads a body into `ParsedCalls`; the function's process gives `FunctionResults`; the form writes the reply.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from batchmill.errors import BatchmillError, InvalidInput, ModelFailed
from batchmill.types import Interface
from batchmill.wire import forms
from batchmill.wire.json_bytes import DEPTH_MAX, is_too_deep

# How `ParsedCalls.calls` holds its rows. `columns` is for tensors: everything else has an item for each row.
POSITIONAL = "positional"  # [[first, second, …], …]
WITH_IDS = "with_ids"  # [[id, first, second, …], …]: positional arguments behind an id that is not one of them
NAMED = "named"  # [{"name": value, …}, …]
COLUMNS = "columns"  # {"name": [value of each row, …] or an Array, …}


class ParsedCalls(Struct):
    """A request as calls of a function: `rows` of them, which may go into one call of user code or many.

    An array is `{"$array": [number of the buffer, datatype, shape]}` in the JSON, its bytes little-endian and row-major
    in `buffers`. In columns the first axis of a shape is the row. Only inputs that a Tensor calls `is_array`, and
    BYTES that are not UTF-8, are sent so; `datatype` BYTES has a u32 length before each element.
    """

    rows: int
    layout: str
    calls: bytes  # JSON
    buffers: list[bytes | memoryview] = []
    timeout_s: float | None = None  # as the body asks for it
    state: Any = None  # what the form needs again when it writes


class CallError(Struct, frozen=True):
    """Why a row has no result."""

    code: str  # "ValueError", "timeout", "worker_crashed", "memory_limit", "bad_return", "missing_argument"
    message: str
    trace: str = ""  # the traceback of user code


class FunctionResults(Struct):
    """What became of the rows of an Asked.

    `values` is a JSON array with an item for each row, null where `errors` has one; or, only for an Asked in columns
    whose results are arrays: `columns`, a JSON object of Arrays (the first axis is the row) by output name. Arrays in
    `values` too are `{"$array": …}`; an object of the user's with a key that begins with "$" comes in {"$object": …}.
    Values that JSON lacks in an answer to tensors (NaN, infinities, bytes) are Arrays as well; elsewhere they are null,
    and bytes are text.
    """

    values: bytes = b"[]"
    columns: bytes = b""
    buffers: list[bytes | memoryview] = []
    errors: dict[int, CallError] = {}  # row of the Asked -> why


# Codes of a CallError that are ours; any other is the type of an exception that user code raised.
MODEL_CODES = frozenset(["timeout", "worker_crashed", "memory_limit", "bad_return", "model_failed"])
CALLER_CODES = frozenset(
    ["missing_argument", "unknown_argument", "invalid_argument", "invalid_json", "nesting_too_deep", "invalid_encoding"]
)
FUNCTION_ERROR = "function_error"


def parse(decoder: msgspec.json.Decoder, data: Any, what: str = "the body") -> Any:
    """What the decoder reads. Raises: InvalidInput, and nothing else, whatever the bytes are."""
    if is_too_deep(data):
        raise InvalidInput(f"{what} is nested too deep: more than {DEPTH_MAX} levels", code="nesting_too_deep")
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{what} is not as it should be: {error}", code="invalid_field") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what} is not UTF-8: {error}", code="invalid_encoding") from None
    except msgspec.DecodeError as error:
        raise InvalidInput(f"{what} is not JSON: {error}", code="invalid_json") from None


def check_text(body: bytes | memoryview) -> None:
    """Raises: InvalidInput where a body that is only cut, not decoded, is no UTF-8."""
    data = bytes(body)
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"the body is not UTF-8: {error}", code="invalid_encoding") from None


def last_line(error: CallError) -> str:
    """`Type: message` in one line, as a traceback ends."""
    message = " ".join(error.message.split())
    return f"{error.code}: {message}" if message else error.code


def failure(error: CallError, place: str = "") -> BatchmillError:
    """A row's error as that of the whole request. `place` names the row where there are others: "row 3 of 10"."""
    where = f"{place}: " if place else ""
    if error.code in CALLER_CODES:
        return InvalidInput(where + error.message, code=error.code)
    if error.code in MODEL_CODES:
        return ModelFailed(where + error.message, code=error.code)
    lines = [f"in {place}"] if place else []
    trace, last = error.trace.rstrip(), last_line(error)
    if trace:
        lines.append(trace)
    if not trace.rsplit("\n", 1)[-1].endswith(last):  # before the type there may be its module
        lines.append(last)
    return ModelFailed("\n".join(lines), code=FUNCTION_ERROR)


ARGUMENTS, ROWS, TENSORS, INFERLESS_TENSORS = "arguments", "rows", "tensors", "inferless_tensors"
FORMS = {
    ARGUMENTS: "batchmill.wire.modelbit_rows:ArgumentsForm",
    ROWS: "batchmill.wire.modelbit_rows:RowsForm",
    TENSORS: "batchmill.wire.tensors:TensorsForm",
    INFERLESS_TENSORS: "batchmill.wire.tensors:InferlessTensorsForm",
}

ADDRESSES = frozenset(["model", "stream"])
ROWS_FIELDS = frozenset(["data", "timeout_seconds", "row_errors"])
DELIVERY_FIELDS = frozenset(["response_format", "response_webhook", "response_webhook_ignore_timeout"])
TENSORS_FIELDS = frozenset(["id", "inputs", "outputs", "parameters"])
_is_tensors_url = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/infer").fullmatch
_is_rows_url = re.compile(r"(/:5000)?/v1/[a-zA-Z0-9_]+(/[^/]+){1,2}").fullmatch


class CallForm(Protocol):
    """Reads a body as calls and writes their results as the reply's body. Has no state."""

    def read(self, body: bytes, head: bytes, interface: Interface, *, received_shapes: bool = False) -> ParsedCalls:
        """`head` is what came beside the body. Raises: InvalidInput, and nothing else, for what cannot be read."""

    def write(self, asked: ParsedCalls, results: FunctionResults, spec_name: str, version: str) -> tuple[bytes, bytes]:
        """The reply's body, and what is to be said beside it.

        Raises: ModelFailed, InvalidInput where an error of a row fails the request, or a result has no place in the
        reply.
        """

    def event(self, asked: ParsedCalls, values: bytes, buffers: list[bytes | memoryview]) -> bytes:
        """The JSON of one event of a stream; `values` is the JSON of one result. Raises: ModelFailed."""


@lru_cache(maxsize=len(FORMS))
def load_form(name: str) -> CallForm:
    """The form of this name; its module is imported now, as one of them needs numpy. Raises: KeyError."""
    module, _, attribute = FORMS[name].partition(":")
    return getattr(import_module(module), attribute)()


class _CallForms(Mapping[str, CallForm]):
    """The table as a mapping: a form is loaded when it is asked for."""

    def __getitem__(self, name: str) -> CallForm:
        return load_form(name)

    def __contains__(self, name: object) -> bool:
        return name in FORMS

    def __iter__(self) -> Iterator[str]:
        return iter(FORMS)

    def __len__(self) -> int:
        return len(FORMS)


CALL_FORMS: Mapping[str, CallForm] = _CallForms()


def form_of_body(url: str, fields: Collection[str], interface: Interface | None = None) -> str:
    """The form of a job's row: by its `url` where that is one of a dialect's calls, otherwise by the body's fields.

    By fields, a name that the function itself takes is an argument: `{"data": …}` is Modelbit's form, and
    `{"inputs": …}` that of tensors, only for a function that has no parameter `data` (`inputs`) and takes no
    arguments of any name.
    """
    if _is_tensors_url(url):
        return TENSORS
    names = frozenset(fields) - ADDRESSES
    has_address = _is_rows_url(url) and url not in forms.URLS
    if "data" in names and names <= ROWS_FIELDS | DELIVERY_FIELDS and (has_address or not _takes(interface, "data")):
        return ROWS
    if "inputs" in names and names <= TENSORS_FIELDS and not _takes(interface, "inputs"):
        return TENSORS
    return ARGUMENTS


def _takes(interface: Interface | None, name: str) -> bool:
    if interface is None:
        return False
    return interface.takes_more or any(each.name == name for each in interface.inputs)
