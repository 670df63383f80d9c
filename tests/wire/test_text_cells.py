"""Cells of a CSV as the types that a function takes."""

import pytest

from batchmill.errors import InvalidRow
from batchmill.types import Tensor
from batchmill.wire.rows.text_cells import CellReader

GOOD = [
    ("INT64", [1], " -7 ", -7), ("UINT8", [1], "255", 255), ("FP64", [1], "1.5e3", 1500.0), ("FP32", [1], ".5", 0.5),
    ("BOOL", [1], "True", True), ("BOOL", [1], "0", False), ("STRING", [1], " 7 ", " 7 "), ("BYTES", [1], "", ""),
    (None, [1], "7", "7"), ("INT64", [-1], "[1, 2]", [1, 2]), (None, [-1], '["a"]', ["a"]),
]  # fmt: skip
BAD = [
    ("INT64", [1], "1.5"), ("INT64", [1], "many"), ("INT64", [1], ""), ("UINT8", [1], "256"),
    ("INT64", [1], "9" * 6000),
    ("INT8", [1], "1_0"), ("FP64", [1], "nan"), ("FP64", [1], "1e400"), ("FP16", [1], "1e6"), ("BOOL", [1], "yes"),
    ("INT64", [-1], "1,2"), ("FP64", [1], "\u0663"),
]  # fmt: skip


def test_cells_are_read_as_what_the_function_takes():
    """A cell becomes a value of its input's type; text and inputs without a type stay strings."""
    for datatype, shape, cell, value in GOOD:
        read = CellReader([Tensor("x", datatype, shape)]).read({"x": cell, "note": "1"})
        assert read == {"x": value, "note": "1"} and type(read["x"]) is type(value)


def test_a_cell_that_is_no_such_value_is_refused_by_name():
    """A cell that is not a value of its type is refused with the column, the start of the cell and what is wanted."""
    for datatype, shape, cell in BAD:
        with pytest.raises(InvalidRow, match="'x'") as caught:
            CellReader([Tensor("x", datatype, shape)]).read({"x": cell})
        assert caught.value.code == "invalid_argument" and len(caught.value.message) < 200


def test_an_empty_cell_leaves_the_default():
    """An empty cell of an argument that has a default is left out, so that the default holds."""
    reader = CellReader([Tensor("x", "INT64", required=False), Tensor("y", "STRING", required=False)])
    assert reader.read({"x": " ", "y": ""}) == {"y": ""}
