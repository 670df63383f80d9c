"""How the tensors of a request are rows of a function's calls: whether their first axis counts rows, and what is left.

A request is one row when its shapes are those of the function's inputs. One axis more counts rows. Of a function that
takes many rows at once, without a schema, the first axis always does.
"""

from __future__ import annotations

from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.types import Interface, Tensor
from batchmill.wire.datatypes import DATATYPES, FLOAT, INT, Datatype, wire_name
from batchmill.wire.tensor_request import Received, TensorRequest

NONE, LEADING, FLAT = "none", "leading", "flat"  # axis of the rows: there is none; before the shape; in its stead


class Layout(Struct, frozen=True):
    """`axis` says how outputs get their shapes back."""

    rows: int = 1
    axis: str = NONE

    def dimensions(self, received: Received) -> list[int]:
        """The shape of one row of this input."""
        if self.axis == NONE:
            return received.shape
        return received.shape[1:] if self.axis == LEADING and len(received.shape) > 1 else [1]


def pair(request: TensorRequest, interface: Interface) -> list[tuple[Received, Tensor | None]]:
    """Each tensor with the input that it is; None for one that only a function of any argument takes.

    Raises: InvalidInput, with Triton's words, where an input is missing or nobody knows one.
    """
    known = {each.name: each for each in interface.inputs}
    came = [each.name for each in request.inputs]
    unknown = [name for name in came if name not in known]
    if unknown and not interface.takes_more:
        message = f"unexpected inference input '{unknown[0]}'; the function takes {list(known)}"
        raise InvalidInput(message, code="unknown_argument")
    missing = [name for name, each in known.items() if each.required and name not in came]
    if missing:
        raise InvalidInput(_missing(known, came, missing), code="missing_argument")
    return [(each, known.get(each.name)) for each in request.inputs]


def _missing(known: dict[str, Tensor], came: list[str], missing: list[str]) -> str:
    least = sum(each.required for each in known.values())
    expected = f"{least}" if least == len(known) else f"between {least} and {len(known)}"
    return (
        f"expected {expected} inputs but got {len(came)} inputs. Got input(s) {came}, but missing required input(s)"
        f" {missing}. Please provide all required input(s)."
    )


def lay(pairs: list[tuple[Received, Tensor | None]], interface: Interface, *, received_shapes: bool) -> Layout:
    """Raises: InvalidInput where a shape does not fit, or inputs do not have equally many rows."""
    options = []
    for received, tensor in pairs:
        found = _options(received.shape, tensor, interface)
        if not found:
            assert tensor is not None
            raise _misfit(received, tensor)
        options.append(found)
    if received_shapes or all(NONE in found for found in options):
        return Layout()
    for axis in (LEADING, FLAT):
        if all(axis in found for found in options):
            return _with_axis(axis, pairs)
    if all(LEADING in found or FLAT in found for found in options):
        return _with_axis(LEADING, pairs)
    names = ", ".join(f"'{received.name}' {received.shape}" for received, _ in pairs)
    raise InvalidInput(f"the inputs do not have equally many rows: {names}", code="shape_mismatch")


def _with_axis(axis: str, pairs: list[tuple[Received, Tensor | None]]) -> Layout:
    counts = {received.shape[0] for received, _ in pairs}
    if len(counts) > 1:
        names = ", ".join(f"'{received.name}' {received.shape}" for received, _ in pairs)
        raise InvalidInput(f"the inputs do not have equally many rows: {names}", code="shape_mismatch")
    rows = counts.pop()
    if rows == 0:
        raise InvalidInput("the batch has no rows: the first dimension of its tensors is 0", code="invalid_shape")
    return Layout(rows, axis)


def _options(shape: list[int], tensor: Tensor | None, interface: Interface) -> set[str]:
    """What the first axis of this tensor can be."""
    rank = len(shape)
    if tensor is None or (not interface.has_schema and (tensor.datatype is None or tensor.is_array)):
        return _untyped(rank, interface)
    declared, found = tensor.shape, set()
    if fits(shape, declared):
        found.add(NONE)
    if rank and fits(shape[1:], declared) and rank > 1:
        found.add(LEADING)
    if interface.has_schema:
        return found
    many = interface.calls != "row"
    if declared == [1] and rank == 1:
        found = {FLAT} if many else found | {FLAT}
    if not found:  # a hint is no rule
        found = {LEADING} if rank > len(declared) and rank > 1 else {NONE}
    return found


def _untyped(rank: int, interface: Interface) -> set[str]:
    if interface.calls == "row":
        return {NONE, LEADING} if rank > 1 else ({NONE, FLAT} if rank else {NONE})
    return {LEADING} if rank > 1 else ({FLAT} if rank else {NONE})


def fits(shape: list[int], declared: list[int]) -> bool:
    """Whether a shape is one that a declaration, of which -1 is any dimension, allows. No dimension is one value."""
    shape = shape or [1]
    return len(shape) == len(declared) and all(there in (-1, here) for here, there in zip(shape, declared, strict=True))


def declared_datatype(tensor: Tensor | None) -> Datatype | None:
    return None if tensor is None else DATATYPES.get(tensor.datatype or "")


def _misfit(received: Received, tensor: Tensor) -> InvalidInput:
    message = (
        f"unexpected shape for input '{tensor.name}': expected {tensor.shape}, or rows of it {[-1, *tensor.shape]},"
        f" got {received.shape}"
    )
    return InvalidInput(message, code="invalid_shape")


def check_datatype(received: Received, tensor: Tensor | None, *, has_schema: bool = True) -> None:
    """Raises: InvalidInput where a tensor has another datatype than its input declares; a hint means any width."""
    declared = declared_datatype(tensor)
    if tensor is None or declared is None:
        return
    here, there = wire_name(received.datatype.name), wire_name(declared.name)
    kinds = (received.datatype.kind, declared.kind)
    is_hinted = not has_schema and (kinds[0] == kinds[1] or kinds == (INT, FLOAT))
    if here != there and not is_hinted:
        message = f"unexpected datatype for input '{tensor.name}': expected {there}, got {here}"
        raise InvalidInput(message, code="invalid_datatype")
