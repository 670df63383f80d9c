"""Calls of a function between the form that they came in and the code that is called: values as JSON, arrays as bytes.

A form reads a body into `Asked`; what runs the function gives `Results`; the form writes them as the reply's body.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

# How `Asked.calls` holds its rows. `columns` is for tensors: everything else has an item for each row.
POSITIONAL = "positional"  # [[first, second, …], …]
WITH_IDS = "with_ids"  # [[id, first, second, …], …]: positional arguments behind an id that is not one of them
NAMED = "named"  # [{"name": value, …}, …]
COLUMNS = "columns"  # {"name": [value of each row, …] or an Array, …}


class Asked(Struct):
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
    told: Any = None  # what the form needs again when it writes


class CallError(Struct, frozen=True):
    """Why a row has no result."""

    code: str  # "ValueError", "timeout", "worker_crashed", "memory_limit", "bad_return", "missing_argument"
    message: str
    trace: str = ""  # the traceback of user code


class Results(Struct):
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
