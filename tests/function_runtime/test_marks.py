import pytest

from batchmill.function_runtime import marks


@pytest.mark.parametrize("size", [0, marks.BATCH_ROWS_MAX + 1, "8"])
def test_batched_bounds_its_size(size):
    """A list size outside 1 to the maximum is refused where it is written."""
    with pytest.raises(ValueError, match="size must be"):
        marks.batched(size)


@pytest.mark.parametrize("size", [1, marks.BATCH_ROWS_MAX])
def test_batched_marks_a_function(size):
    """A marked function is itself, and says how many rows it takes."""

    def f(x): ...

    assert marks.batched(size)(f) is f
    assert f.batchmill_list_rows == size


@pytest.mark.parametrize(("datatype", "shape"), [("FLOAT", [1]), ("FP32", []), ("FP32", [-2]), ("FP32", ["1"])])
def test_tensor_refuses_what_is_none(datatype, shape):
    """A datatype nobody knows and a shape that is none are refused where they are written."""
    with pytest.raises(ValueError, match="tensor"):
        marks.tensor(datatype, shape)
