"""Rows of many asks as one call of user code, and its one result as a result for each row."""

from __future__ import annotations

import collections.abc

from . import arrays
from .arguments import as_columns, as_dicts, column_of
from .asks import bad_return
from .installed import loaded
from .plain import detached
from .tracebacks import row_error
from .user_code import FRAME, OUTPUT


def prepare(ask, code):
    """Put the rows of an ask into columns, and say what groups they are of: (first, end, key) of its runs."""
    parameters = code.parameters
    if ask.bound.columns is not None:
        ask.columns = ask.bound.columns
    elif code.takes_rows or code.calls == FRAME or (columns := as_columns(ask.bound, parameters)) is None:
        dicts = as_dicts(ask.bound, parameters)
        if code.takes_rows or code.calls == FRAME:
            ask.columns = {"": dicts}
        else:
            empty = dict.fromkeys(parameters.order)
            whole = [empty if row is None else row for row in dicts] if ask.errors else dicts
            ask.columns = {name: column_of(whole, name, parameters) for name in parameters.order}
    else:
        ask.columns = columns
    ask.keep_done()
    if not parameters.arrays:
        return [(first, end, None) for first, end in reversed(ask.runs)]
    return [run for first, end in reversed(ask.runs) for run in _groups(ask, first, end, parameters)]


def _groups(ask, first, end, parameters):
    """Runs of rows whose arrays are of the same shapes and types."""
    columns = [ask.columns[name] for name in parameters.arrays if name in ask.columns]
    numpy = loaded("numpy")
    if all(type(each) is numpy.ndarray for each in columns):
        return [(first, end, tuple((each.shape[1:], each.dtype.str) for each in columns))]
    keys = [
        tuple((getattr(item, "shape", None), getattr(getattr(item, "dtype", None), "str", None)) for item in items)
        for items in zip(*[each[first:end] for each in columns])
    ]
    runs, begin = [], 0
    for at in range(1, len(keys) + 1):
        if at == len(keys) or keys[at] != keys[begin]:
            runs.append((first + begin, first + at, keys[begin]))
            begin = at
    return runs


def arguments_of(parts, code):
    """The arguments, by position and by name, of one call with the rows of all parts."""
    if code.calls == FRAME:
        return (_frame(parts, code),), {}
    if code.takes_rows:
        return (_items(parts, ""),), {}
    is_array, names = code.parameters.arrays, code.parameters.order
    return (), {name: _array(parts, name) if name in is_array else _items(parts, name) for name in names}


def _items(parts, name):
    if len(parts) == 1:
        ask, first, end = parts[0]
        return list(ask.columns[name][first:end])
    return [item for ask, first, end in parts for item in ask.columns[name][first:end]]


def _array(parts, name):
    numpy = loaded("numpy")
    pieces = []
    for ask, first, end in parts:
        piece = ask.columns[name][first:end]
        if type(piece) is not numpy.ndarray:
            piece = numpy.stack(piece) if all(each is not None for each in piece) else piece
        pieces.append(piece)
    if len(pieces) == 1:
        return pieces[0]
    return arrays.joined(pieces)


def _frame(parts, code):
    """A data frame of the rows; its index are their ids where they came with ids."""
    pandas = loaded("pandas")
    rows = [row for ask, first, end in parts for row in ask.columns[""][first:end]]
    index = None
    if all(ask.bound.ids is not None for ask, _, _ in parts):
        index = [each for ask, first, end in parts for each in ask.bound.ids[first:end]]
    data = {name: [row.get(name) for row in rows] for name in code.frame_columns}
    return pandas.DataFrame(data, index=index)


def share_out(parts, rows, result, code):
    """Give every row of the parts its result, or all of them the error of a result that does not fit them."""
    found = _arrays_of(result, rows)
    if found is not None:
        for ask, first, end in parts:
            part, found = _cut(found, end - first)
            ask.pieces.append((first, end - first, part))
            ask.end_rows(first, end)
        return
    items = _list_of(result)
    if items is None or len(items) != rows:
        _refuse(parts, rows, result, items)
        return
    at = 0
    for ask, first, end in parts:
        ask.values[first:end] = items[at : at + end - first]
        at += end - first
        for row in range(first, end) if code.result is not None or _has_errors(ask.values[first:end]) else ():
            settle(ask, row, code)
        ask.end_rows(first, end)


def _has_errors(items):
    return any(isinstance(each, BaseException) for each in items)


def settle(ask, row, code):
    """An exception among the results is that row's error."""
    value = ask.values[row]
    try:
        if isinstance(value, BaseException):
            ask.errors[row] = row_error(value)
        elif code.result is not None:
            ask.values[row] = code.result(value)
            return
        else:
            return
    except Exception as error:  # the result's own code may run here
        ask.errors[row] = bad_return(error)
    ask.values[row] = None


def _arrays_of(result, rows):
    """The result as {name: array} where it is numpy's with the rows on its first axis, else None."""
    numpy = loaded("numpy")
    if numpy is None:
        return None
    if hasattr(result, "detach"):
        result = detached(result)
    if type(result) is dict:
        named = {name: detached(each) if hasattr(each, "detach") else each for name, each in result.items()}
    elif isinstance(result, numpy.ndarray):
        named = {OUTPUT: result}
    else:
        return None
    fits = all(
        isinstance(each, numpy.ndarray) and each.ndim and len(each) == rows and each.dtype.kind in "biuf"
        for each in named.values()
    )
    return named if named and fits else None


def _cut(named, rows):
    return {name: each[:rows] for name, each in named.items()}, {name: each[rows:] for name, each in named.items()}


def _list_of(result):
    """The result as a list of one for each row; None for what is none."""
    pandas = loaded("pandas")
    if pandas is not None and isinstance(result, pandas.DataFrame):
        return result.to_dict(orient="records")
    if hasattr(result, "tolist") and getattr(result, "shape", (1,)) != ():
        return list(result) if getattr(getattr(result, "dtype", None), "kind", "") in "OSUmM" else result.tolist()
    if isinstance(result, collections.abc.Sequence) and not isinstance(result, (str, bytes)):
        return list(result)
    return None


def _refuse(parts, rows, result, items):
    kind = type(result).__name__
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    if items is None:
        message = f"the function returned {article} {kind} for a list of {rows} rows, not a list"
    else:
        message = f"the function returned {len(items)} results for {rows} rows"
    fail(parts, ["bad_return", message, ""])


def fail(parts, error):
    """All rows of the parts have this error."""
    for ask, first, end in parts:
        for row in range(first, end):
            ask.errors[row] = error
        ask.end_rows(first, end)
