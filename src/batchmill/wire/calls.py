"""Calls of a function and their results, in the common format of all request forms: values as JSON, arrays as bytes.

A form reads a body into `ParsedCalls`; the function's process returns `FunctionResults`; the form writes the reply.
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
from batchmill.wire.json_bytes import DEPTH_MAX, is_too_deep
from batchmill.wire.rows import forms

# The layouts of `ParsedCalls.calls`. `columns` is for tensors; the others have an item for each row.
POSITIONAL = "positional"  # [[first, second, …], …]
WITH_IDS = "with_ids"  # [[id, first, second, …], …]: positional arguments after an id, which is not an argument
NAMED = "named"  # [{"name": value, …}, …]
COLUMNS = "columns"  # {"name": [value of each row, …] or an Array, …}


class ParsedCalls(Struct):
    """A request as `rows` calls of a function; they may become one call of user code or many.

    An array is `{"$array": [number of the buffer, datatype, shape]}` in the JSON; its bytes are in `buffers`,
    little-endian and row-major. In columns the first axis of a shape is the row. Only inputs whose Tensor says
    `is_array`, and BYTES that are not UTF-8, are sent as arrays; BYTES has a u32 length before each element.
    """

    rows: int
    layout: str
    calls: bytes  # JSON
    buffers: list[bytes | memoryview] = []
    timeout_s: float | None = None  # as the body says
    state: Any = None  # for the form, which needs it to write the reply


class CallError(Struct, frozen=True):
    """Why a row has no result."""

    code: str  # "ValueError", "timeout", "worker_crashed", "memory_limit", "bad_return", "missing_argument"
    message: str
    trace: str = ""  # the traceback of user code


class FunctionResults(Struct):
    """The results of the rows of a ParsedCalls.

    `values` is a JSON array with an item for each row, null where `errors` has one. Calls in columns whose results are
    arrays have `columns` instead: a JSON object of arrays (the first axis is the row) by output name. Arrays in
    `values` are also `{"$array": …}`. A user's object with a key that begins with "$" is wrapped in {"$object": …}. In
    answers to tensors, values that JSON lacks (NaN, infinities, bytes) are arrays as well; elsewhere NaN and infinities
    are null, and bytes are text.
    """

    values: bytes = b"[]"
    columns: bytes = b""
    buffers: list[bytes | memoryview] = []
    errors: dict[int, CallError] = {}  # row -> why it has no result


# Codes of a CallError that batchmill makes; any other code is the type of an exception that user code raised.
MODEL_CODES = frozenset(["timeout", "worker_crashed", "gpu_lost", "memory_limit", "bad_return", "model_failed"])
CALLER_CODES = frozenset(
    ["missing_argument", "unknown_argument", "invalid_argument", "invalid_json", "nesting_too_deep", "invalid_encoding"]
)
FUNCTION_ERROR = "function_error"


def parse(decoder: msgspec.json.Decoder, data: Any, what: str = "the body") -> Any:
    """Decode JSON. Raises: only InvalidInput, for any bytes."""
    if is_too_deep(data):
        raise InvalidInput(f"{what} nests too deep: more than {DEPTH_MAX} levels", code="nesting_too_deep")
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{what} is invalid: {error}", code="invalid_field") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what} is not UTF-8: {error}", code="invalid_encoding") from None
    except msgspec.DecodeError as error:
        raise InvalidInput(f"{what} is not JSON: {error}", code="invalid_json") from None


def check_text(body: bytes | memoryview) -> None:
    """Raises: InvalidInput if a body, which is only split and not decoded, is not UTF-8."""
    data = bytes(body)
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"the body is not UTF-8: {error}", code="invalid_encoding") from None


def last_line(error: CallError) -> str:
    """Return `Type: message` as one line, like the last line of a traceback."""
    message = " ".join(error.message.split())
    return f"{error.code}: {message}" if message else error.code


def failure(error: CallError, row_name: str = "") -> BatchmillError:
    """Turn a row's error into an error of the whole request. `row_name` names one of several rows: "row 3 of 10"."""
    where = f"{row_name}: " if row_name else ""
    if error.code in CALLER_CODES:
        return InvalidInput(where + error.message, code=error.code)
    if error.code in MODEL_CODES:
        return ModelFailed(where + error.message, code=error.code)
    lines = [f"in {row_name}"] if row_name else []
    trace, last = error.trace.rstrip(), last_line(error)
    if trace:
        lines.append(trace)
    if not trace.rsplit("\n", 1)[-1].endswith(last):  # a traceback may name the module before the type
        lines.append(last)
    return ModelFailed("\n".join(lines), code=FUNCTION_ERROR)


ARGUMENTS, ROWS, TENSORS, INFERLESS_TENSORS = "arguments", "rows", "tensors", "inferless_tensors"
FORMS = {
    ARGUMENTS: "batchmill.wire.rows.modelbit_rows:ArgumentsForm",
    ROWS: "batchmill.wire.rows.modelbit_rows:RowsForm",
    TENSORS: "batchmill.wire.tensors.forms:TensorsForm",
    INFERLESS_TENSORS: "batchmill.wire.tensors.forms:InferlessTensorsForm",
}

ADDRESSES = frozenset(["model", "stream"])
ROWS_FIELDS = frozenset(["data", "timeout_seconds", "row_errors"])
DELIVERY_FIELDS = frozenset(["response_format", "response_webhook", "response_webhook_ignore_timeout"])
TENSORS_FIELDS = frozenset(["id", "inputs", "outputs", "parameters"])
_is_tensors_url = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/infer").fullmatch
_is_rows_url = re.compile(r"(/:5000)?/v1/[a-zA-Z0-9_]+(/[^/]+){1,2}").fullmatch


class CallForm(Protocol):
    """Reads a body as calls, and writes their results as the reply's body. It has no state."""

    def read(self, body: bytes, head: bytes, interface: Interface, *, received_shapes: bool = False) -> ParsedCalls:
        """Read a body. `head` is the header beside it. Raises: only InvalidInput, for any bytes."""

    def write(
        self, request: ParsedCalls, results: FunctionResults, spec_name: str, version: str
    ) -> tuple[bytes, bytes]:
        """Write the reply's body, and the header beside it.

        Raises: ModelFailed, InvalidInput if the error of a row fails the request, or the reply cannot hold a result.
        """

    def write_pieces(
        self, request: ParsedCalls, results: FunctionResults, spec_name: str, version: str
    ) -> tuple[list[bytes], bytes]:
        """As `write`, with the body in pieces: one, or several where joining them would copy large arrays."""

    def event(self, request: ParsedCalls, values: bytes, buffers: list[bytes | memoryview]) -> bytes:
        """Write one event of a stream as JSON; `values` is the JSON of one result. Raises: ModelFailed."""


@lru_cache(maxsize=len(FORMS))
def load_form(name: str) -> CallForm:
    """Load the form of this name. Its module is imported only now, since one of them needs numpy. Raises: KeyError."""
    module, _, attribute = FORMS[name].partition(":")
    return getattr(import_module(module), attribute)()


class _CallForms(Mapping[str, CallForm]):
    """The forms by name. A form is loaded on its first use."""

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
    """Return the form of a job's row: by its `url` if that is a dialect's call, otherwise by the body's fields.

    By fields, a parameter of the function is an argument: `{"data": …}` is Modelbit's form, and `{"inputs": …}` the
    form of tensors, only if the function has no parameter `data` (`inputs`) and does not accept arbitrary names.
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
