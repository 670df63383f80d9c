"""What type hints say of a value."""

from typing import Annotated, Optional, TypeVar

import numpy as np
from typing_extensions import TypeAliasType

from batchmill.function_runtime.hints import read_hint
from batchmill.function_runtime.marks import tensor

T = TypeVar("T")
U = TypeVar("U")


def says(hint, **fields):
    read = read_hint(hint, **fields)
    return read.datatype, read.shape, read.is_array, read.is_optional


def test_an_alias_is_what_it_stands_for():
    """A hint named by the statement `type`, as newer numpys name NDArray, says what the hint itself would."""
    array = TypeAliasType("array", np.ndarray[tuple[int, ...], np.dtype[T]], type_params=(T,))
    vector = TypeAliasType("vector", list[T], type_params=(T,))
    number = TypeAliasType("number", float)
    maybe = TypeAliasType("maybe", Optional[vector[number]])  # noqa: UP045
    swapped = TypeAliasType("swapped", dict[U, T], type_params=(T, U))
    assert says(array[np.float32]) == ("FP32", [-1], True, False)
    assert says(array[np.float32] | None) == ("FP32", [-1], True, True)
    assert says(vector[vector[number]]) == ("FP64", [-1, -1], False, False)
    assert says(maybe) == ("FP64", [-1], False, True)
    assert says(list[number], is_column=True) == ("FP64", [1], False, False)
    assert says(TypeAliasType("marked", Annotated[array[np.int8], tensor("INT8", [2])])) == ("INT8", [2], True, False)
    assert says(Annotated[array[np.int8], tensor("INT8", [2])]) == ("INT8", [2], True, False)
    assert says(swapped[int, str]) == (None, [1], False, False)


def test_an_alias_of_itself_says_nothing():
    """An alias that never comes to an end, or whose value cannot be read, is a hint that nobody knows."""
    itself = TypeAliasType("itself", "itself")
    scope = {"TypeAliasType": TypeAliasType}
    exec("nested = TypeAliasType('nested', list['nested'])", scope)
    assert says(itself) == (None, [1], False, False)
    assert says(scope["nested"]) == (None, [-1], False, False)
