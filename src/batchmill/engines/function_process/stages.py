"""Results of one body that came in stages, put together again."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.errors import ModelFailed
from batchmill.models.function_socket import Buffer
from batchmill.wire.calls import Results

_items = msgspec.json.Decoder(list[Raw])


class _Array(Struct, rename={"place": "$array"}):
    place: tuple[int, str, list[int]]  # number of the buffer, datatype, shape


_columns = msgspec.json.Decoder(dict[str, _Array])


class Stages:
    """Gathers the results of `rows` rows; they may come in any order."""

    def __init__(self, rows: int) -> None:
        self._left = rows
        self._parts: list[tuple[int, Results]] = []

    def add(self, first: int, rows: int, results: Results) -> bool:
        """True: these were the last."""
        self._parts.append((first, results))
        self._left -= rows
        return self._left <= 0

    def whole(self) -> Results:
        """All of them as one. Raises: ModelFailed where their outputs do not go together."""
        parts = [results for _, results in sorted(self._parts, key=lambda part: part[0])]
        if len(parts) == 1:
            return parts[0]
        errors = {row: error for results in parts for row, error in results.errors.items()}
        if all(results.columns for results in parts):
            columns, buffers = _joined_columns(parts)
            return Results(columns=columns, buffers=buffers, errors=errors)
        if any(results.columns for results in parts):
            raise ModelFailed("the function returned arrays for some rows of the body only", code="bad_return")
        values, buffers = _joined_values(parts)
        return Results(values, b"", buffers, errors)


def _joined_values(parts: list[Results]) -> tuple[bytes, list[Buffer]]:
    items: list[Any] = []
    buffers: list[Buffer] = []
    for results in parts:
        if results.buffers:
            items += _moved(msgspec.json.decode(results.values), len(buffers))
            buffers += results.buffers
        else:
            items += _items.decode(results.values)
    return msgspec.json.encode(items), buffers


def _moved(value: Any, by: int) -> Any:
    """The value with the numbers of its buffers raised."""
    if isinstance(value, list):
        return [_moved(each, by) for each in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$array": [int(number), datatype, shape]} if len(value) == 1:
            return {"$array": [number + by, datatype, shape]}
        case {"$object": dict(inner)} if len(value) == 1:
            return {"$object": {name: _moved(each, by) for name, each in inner.items()}}
    return {name: _moved(each, by) for name, each in value.items()}


def _joined_columns(parts: list[Results]) -> tuple[bytes, list[Buffer]]:
    decoded = [_columns.decode(results.columns) for results in parts]
    names = list(decoded[0])
    if any(set(columns) != set(names) for columns in decoded):
        raise ModelFailed("the function returned other outputs for some rows of the body", code="bad_return")
    joined: dict[str, _Array] = {}
    buffers: list[Buffer] = []
    for name in names:
        arrays = [columns[name].place for columns in decoded]
        kinds = {(datatype, tuple(shape[1:])) for _, datatype, shape in arrays}
        if len(kinds) > 1:
            raise ModelFailed(f"the output {name!r} has not the same shape in every row", code="bad_return")
        data = [results.buffers[number] for (number, _, _), results in zip(arrays, parts, strict=True)]
        shape = [sum(shape[0] for _, _, shape in arrays), *arrays[0][2][1:]]
        joined[name] = _Array((len(buffers), arrays[0][1], shape))
        buffers.append(b"".join(data))
    return msgspec.json.encode(joined), buffers
