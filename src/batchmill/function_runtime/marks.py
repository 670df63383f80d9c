"""Marks for user code: `batched` for a function of many rows, `tensor` for the type of a parameter.

User code imports both from `batchmill`; where that is not installed, a stand-in has them.
"""

from __future__ import annotations

import importlib.util
import sys
import types

BATCH_ROWS_MAX = 65_536  # the longest list a function may ask for, and the longest data frame
ROWS_PARAMETER = "rows"  # a batched function with this one parameter gets whole rows

DATATYPES = frozenset(
    [
        "BOOL",
        "UINT8",
        "UINT16",
        "UINT32",
        "UINT64",
        "INT8",
        "INT16",
        "INT32",
        "INT64",
        "FP16",
        "FP32",
        "FP64",
        "BF16",
        "BYTES",
        "STRING",
    ]
)


def batched(size):
    """Mark a function, or a class's `predict`, as one that takes lists of up to `size` rows and returns a list.

    Every parameter gets a list with one value for each row; a function whose only parameter is called `rows` gets a
    list of dicts, the whole rows. A parameter that is a numpy array gets one array, whose first axis is the row.
    """
    if type(size) is not int or not 1 <= size <= BATCH_ROWS_MAX:
        raise ValueError(f"batched(size): size must be a whole number from 1 to {BATCH_ROWS_MAX:,}, not {size!r}")

    def mark(function):
        function.batchmill_list_rows = size
        return function

    return mark


class TensorMark:
    """What `tensor` leaves in an `Annotated[...]`."""

    def __init__(self, datatype, shape):
        self.batchmill_tensor = (datatype, shape)

    def __repr__(self):
        return "batchmill.tensor({!r}, {!r})".format(*self.batchmill_tensor)


def tensor(datatype, shape=(1,)):
    """Say what a parameter or a result is: `Annotated[np.ndarray, tensor("FP32", [-1, 1024])]`.

    Args:
        datatype: of the Open Inference Protocol, or STRING.
        shape: of one row, the axis of the rows left out; -1: any length; [1]: one value.
    """
    if datatype not in DATATYPES:
        raise ValueError(f"tensor(datatype, shape): {datatype!r} is none of {', '.join(sorted(DATATYPES))}")
    shape = list(shape)
    if not shape or not all(type(length) is int and length >= -1 for length in shape):
        raise ValueError(f"tensor(datatype, shape): shape is a list of lengths, -1 for any, not {shape!r}")
    return TensorMark(datatype, shape)


def stand_in():
    """Let user code import `batchmill` where it is not installed."""
    if "batchmill" not in sys.modules and importlib.util.find_spec("batchmill") is None:
        module = types.ModuleType("batchmill", "What functions may use of batchmill, which is not installed here.")
        module.batched, module.tensor = batched, tensor
        sys.modules["batchmill"] = module
