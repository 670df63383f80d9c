"""Reads rows of JSON and arrays into arguments of user code; errors name missing and unknown fields.

A row function gets one item for each row in `calls`, to be called as `how` says. A function of many rows gets columns.
"""

from __future__ import annotations

import inspect
import operator

from . import installed as json_text
from . import values as arrays
from .arrow.rows import ARROW, ArrowWriter, array_of, items_of, lists_of, read_batch
from .installed import installed
from .row_lines import LAYOUTS, read_lines, stages_of

ONE, STAR, NAMED = "one", "star", "named"  # how a row is called: f(item), f(*item), f(**item)
SHOWN = 20  # names in an error

_READ_ERRORS = (ValueError, TypeError, RecursionError, KeyError, IndexError, AttributeError, arrays.Unreadable)


class Parameters:
    """The parameters of a function.

    Args:
        positional: the names that a position can fill, in order.
        required, names: of all parameters. `names` None: any.
        array_names: parameters that take numpy arrays -> their datatype, or None for any.
        models: parameters that take an object made of a dict -> what makes it; "" for the whole row.
        is_dict: a row is one dict, not arguments.
        defaults: of those that are not required.
    """

    def __init__(self, positional, required, names, *, array_names=None, models=None, is_dict=False, defaults=None):
        self.positional = list(positional)
        self.required = frozenset(required)
        self.names = None if names is None else frozenset(names)
        self.arrays = dict(array_names or {})
        self.models = dict(models or {})
        self.is_dict = is_dict
        self.defaults = dict(defaults or {})
        self.keeps_ids = False  # the ids of rows matter to the function
        self.takes_frame = ""  # what table of all columns a function of many rows takes: see arrow.rows
        self.series = {}  # parameters that take a column in a form of its own -> which one: see arrow.rows
        self.order = self.positional + sorted((self.names or self.required) - set(self.positional))
        last = [at for at, name in enumerate(self.positional) if name in self.required]
        self.fewest = last[-1] + 1 if last else 0  # positions that must be filled
        self.only_named = self.required - set(self.positional)


class Bound:
    """The rows of one request as arguments. `errors` has invalid rows, whose arguments are None.

    `calls` begins with row number `first` of the request.
    """

    __slots__ = ("how", "calls", "errors", "ids", "columns", "writer", "first")

    def __init__(self, how, calls, errors, columns=None):
        self.how, self.calls, self.errors, self.columns = how, calls, errors, columns
        self.ids = None
        self.writer = None  # a LineWriter, if the results leave as lines
        self.first = 0


def read_rows(meta, buffers, parameters, *, as_columns=False):
    """The rows of an `ask` or `open` as calls of a row function; or as columns, if they arrived as valid columns."""
    try:
        if as_columns and meta["layout"] in ("columns", ARROW):
            read = _whole_columns if meta["layout"] == "columns" else _arrow_columns
            bound = read(meta, buffers, parameters)
            if bound is not None:
                return bound
        bound = _read(meta, buffers, parameters)
        if len(bound.calls) != meta["rows"]:
            raise ValueError(f"{meta['rows']} rows were announced, and {len(bound.calls)} arrived")
    except _READ_ERRORS as error:
        return _none_of(0, meta["rows"], ["invalid_json", f"the rows cannot be read: {error}", ""])
    except MemoryError:
        return _refused(meta)
    return bound


def _none_of(first, end, error):
    """Rows of a request of which none can be called."""
    bound = Bound(ONE, [None] * (end - first), dict.fromkeys(range(first, end), error))
    bound.first = first
    return bound


def _refused(meta):
    """The row of a request that there is no memory for. Raises: MemoryError where it has several rows."""
    if meta["rows"] > 1:  # the process ends, and gets fewer rows at once
        raise MemoryError
    return _none_of(0, 1, ["memory_limit", "the function's process was refused the memory to read the row", ""])


def read_stages(meta, data, parameters):
    """The rows of an `ask` of lines for a row function: some at a time, each when the earlier ones have been called.

    All that it yields together has as many rows as the request.
    """
    first, total = 0, meta["rows"]
    try:
        for lines in stages_of(data):
            bound = _of_lines(meta, lines, parameters, first)
            end = first + len(bound.calls)
            if end > total:
                break
            yield bound
            first = end
        if first != total:
            raise ValueError(f"{total} rows were announced, and others arrived")
    except _READ_ERRORS as error:
        yield _none_of(first, total, ["invalid_json", f"the rows cannot be read: {error}", ""])
    except MemoryError:
        yield _refused(meta)


def as_columns(bound, parameters):
    """A list for each parameter; None if the rows must be read one by one."""
    names = parameters.positional
    if bound.errors or parameters.is_dict or len(parameters.names) != len(names):
        return None
    if bound.how == ONE:
        return {names[0]: bound.calls}
    if bound.how == STAR and set(map(len, bound.calls)) == {len(names)}:
        return dict(zip(names, map(list, zip(*bound.calls))))
    return None


def as_dicts(bound, parameters):
    """The rows, each as a dict by name."""
    if bound.how == NAMED or parameters.is_dict:
        return bound.calls
    names = parameters.positional
    if bound.how == ONE:
        name = names[0]
        return [None if row in bound.errors else {name: item} for row, item in enumerate(bound.calls)]
    return [None if item is None else dict(zip(names, item)) for item in bound.calls]


def _read(meta, buffers, parameters):
    if meta["layout"] in LAYOUTS:
        return _of_lines(meta, buffers[0], parameters, 0)
    if meta["layout"] == ARROW:
        return _of_batch(read_batch(buffers[0]), parameters)
    calls, layout = json_text.load(buffers[0]), meta["layout"]
    extra = buffers[1:]
    if layout == "columns":
        return _of_columns(calls, meta["rows"], extra, parameters, meta["from_job"])
    skip = layout == "with_ids"
    if layout == "named":
        return _named(_with_arrays(calls, extra, parameters), parameters, is_lenient=meta["from_job"])
    if parameters.is_dict or extra or parameters.arrays or parameters.models:
        rows = [_dict_of(row[skip:], parameters) for row in calls]
        bound = _named(_with_arrays(rows, extra, parameters), parameters, is_lenient=False)
    else:
        bound = _positional(calls, skip, parameters)
    if skip and parameters.keeps_ids:
        bound.ids = [row[0] for row in calls]
    return bound


def _of_lines(meta, data, parameters, first):
    rows, errors, writer = read_lines(meta, data, first)
    bound = _named(rows, parameters, is_lenient=True)
    if first and bound.errors:
        bound.errors = {first + row: error for row, error in bound.errors.items()}
    bound.errors.update(errors)
    bound.writer, bound.first = writer, first
    return bound


def _of_batch(batch, parameters):
    """The rows of an Arrow batch, one by one."""
    lists, names = lists_of(batch), parameters.positional
    is_plain = names and not (parameters.is_dict or parameters.models or parameters.arrays)
    if is_plain and parameters.names is not None and set(lists) == parameters.names == set(names):
        bound = Bound(ONE, lists[names[0]], {}) if len(names) == 1 else None
        bound = bound or Bound(STAR, list(zip(*[lists[name] for name in names])), {})
    else:
        rows = list(map(dict, zip(*[[(name, value) for value in lists[name]] for name in lists])))
        bound = _named(rows or [{} for _ in range(batch.num_rows)], parameters, is_lenient=True)
    bound.writer = ArrowWriter()
    return bound


def _arrow_columns(meta, buffers, parameters):
    """The columns of an Arrow batch, for a function that takes columns; None if rows must be read one by one."""
    if parameters.models or (parameters.is_dict and not parameters.takes_frame):
        return None
    batch = read_batch(buffers[0])
    if batch.num_rows != meta["rows"]:
        raise ValueError(f"{meta['rows']} rows were announced, and {batch.num_rows} arrived")
    if parameters.takes_frame:
        whole = {"": batch}
    elif not parameters.required.issubset(batch.schema.names):
        return None
    else:
        whole = {name: _arrow_column(batch, name, parameters) for name in parameters.order}
        if any(column is None for column in whole.values()):  # found row by row
            return None
    bound = Bound(NAMED, [], {}, columns=whole)
    bound.writer = ArrowWriter()
    return bound


def _arrow_column(batch, name, parameters):
    if name not in batch.schema.names:
        return [parameters.defaults[name]] * batch.num_rows
    column = batch.column(name)
    if name in parameters.series:
        return column
    return array_of(column, parameters.arrays[name]) if name in parameters.arrays else items_of(column)


def _positional(calls, skip, parameters):
    names = parameters.positional
    if len(names) == 1 and not parameters.only_named:
        try:  # every row has just this one
            return Bound(ONE, [item for _, item in calls] if skip else [item for (item,) in calls], {})
        except ValueError:
            pass
    most, fewest = len(names) + skip, parameters.fewest + skip
    lengths = set(map(len, calls))
    is_fit = not parameters.only_named and all(fewest <= length <= most for length in lengths)
    rows = [row[skip:] for row in calls] if skip else calls
    if is_fit:
        return Bound(STAR, rows, {})
    errors = {}
    for number, row in enumerate(rows):
        misfit = _misfit(len(row), parameters)
        if misfit is not None:
            errors[number] = misfit
            rows[number] = None
    return Bound(STAR, rows, errors)


def _misfit(count, parameters):
    """Why this number of positional arguments does not fit, or None."""
    names = parameters.positional
    if count > len(names):
        return ["invalid_argument", f"the function got {count} arguments and takes {_list(names)}", ""]
    missing = [name for name in names[count:] if name in parameters.required] + sorted(parameters.only_named)
    if missing:
        return ["missing_argument", f"the function needs {_list(missing)} and got {_count(count)}", ""]
    return None


def _dict_of(row, parameters):
    """Arguments by position, by name; or what is wrong with them."""
    if parameters.is_dict and len(row) == 1 and isinstance(row[0], dict):
        return row[0]
    if len(row) > len(parameters.positional):
        return _misfit(len(row), parameters)
    return dict(zip(parameters.positional, row))


def _named(rows, parameters, *, is_lenient):
    """Named arguments. `is_lenient`: unknown fields are dropped, as a table may have more columns."""
    whole = _all_alike(rows, parameters)
    if whole is not None:
        return whole
    errors, required, names = {}, parameters.required, parameters.names
    for number, row in enumerate(rows):
        if type(row) is not dict:
            errors[number] = row if type(row) is list else _no_object(row)
        elif required and not row.keys() >= required:
            missing = [name for name in parameters.order if name in required and name not in row]
            text = f"the function needs {_list(missing)}, and the row has {_list(row) if row else 'nothing'}"
            errors[number] = ["missing_argument", text, ""]
        elif names is not None and not names.issuperset(row):
            if is_lenient:
                rows[number] = {name: value for name, value in row.items() if name in names}
            else:
                strange = _list([name for name in row if name not in names])
                text = f"the function does not take {strange}; it takes {_list(parameters.order)}"
                errors[number] = ["unknown_argument", text, ""]
    for number in errors:
        rows[number] = None
    if parameters.models or parameters.arrays:
        _convert(rows, parameters, errors)
    if parameters.is_dict:
        return Bound(ONE, rows, errors)
    return Bound(NAMED, rows, errors)


def _all_alike(rows, parameters):
    """The rows by position, if each has every parameter and nothing else."""
    names = parameters.positional
    is_plain = names and parameters.names is not None and len(parameters.names) == len(names)
    if not is_plain or parameters.is_dict or parameters.models or parameters.arrays:
        return None
    if set(map(type, rows)) != {dict} or set(map(len, rows)) != {len(names)}:
        return None
    try:
        return Bound(ONE if len(names) == 1 else STAR, list(map(operator.itemgetter(*names), rows)), {})
    except KeyError:
        return None


def _no_object(row):
    return ["invalid_argument", f"a row must be an object of arguments by name, not {type(row).__name__}", ""]


def _convert(rows, parameters, errors):
    """Convert lists to arrays and dicts to objects if the function takes them."""
    for number, row in enumerate(rows):
        if row is None:
            continue
        try:
            for name in parameters.arrays:
                if name in row:
                    row[name] = as_array(row[name], parameters.arrays[name])
            for name, make in parameters.models.items():
                if not name:
                    rows[number] = make(row)
                elif isinstance(row.get(name), dict):
                    row[name] = make(row[name])
        except BaseException as error:  # user code: the validators of its classes
            errors[number] = ["invalid_argument", f"{name + ': ' if name else ''}{error}", ""]
            rows[number] = None


def as_array(value, datatype):
    """A numpy array of an encoded array or of nested lists."""
    numpy = installed("numpy")
    if type(value) is numpy.ndarray:
        return value
    array = numpy.asarray(value, dtype=None if datatype is None else arrays.DTYPES.get(datatype))
    if array.dtype == object and datatype is None and not isinstance(value, (str, bytes)):
        raise ValueError("its lists are of different lengths")
    return array


def _with_arrays(rows, buffers, parameters):
    """The rows with encoded arrays decoded."""
    if buffers:
        for row in rows:
            for name, value in row.items() if type(row) is dict else ():
                if arrays.is_array(value):
                    row[name] = _array(value, name, buffers, parameters)
    return rows


def _array(value, name, buffers, parameters):
    if name in parameters.arrays:
        return arrays.read(value, buffers)
    return arrays.read_list(value, buffers)


def _of_columns(columns, rows, buffers, parameters, from_job):
    names, lists = list(columns), []
    for name, column in columns.items():
        if arrays.is_array(column):
            column = _array(column, name, buffers, parameters)
        elif buffers:
            column = [_array(each, name, buffers, parameters) if arrays.is_array(each) else each for each in column]
        if len(column) != rows:
            raise ValueError(f"{name} has {len(column)} values for {rows} rows")
        lists.append(column)
    dicts = [dict(zip(names, values)) for values in zip(*lists)] if lists else [{} for _ in range(rows)]
    return _named(dicts, parameters, is_lenient=from_job)


def _whole_columns(meta, buffers, parameters):
    """Columns as received, for a function that takes columns; None if rows must be read one by one."""
    columns, extra, rows = json_text.load(buffers[0]), buffers[1:], meta["rows"]
    names = parameters.names
    is_fit = not (parameters.models or parameters.is_dict) and names.issuperset(columns)
    if not is_fit or not parameters.required.issubset(columns):
        return None
    whole = {}
    for name in parameters.order:
        column = columns.get(name)
        if name not in columns:
            column = [parameters.defaults[name]] * rows
        elif arrays.is_array(column):
            column = _array(column, name, extra, parameters)
        elif name in parameters.arrays or extra:
            return None
        if len(column) != rows:
            raise ValueError(f"{name} has {len(column)} values for {rows} rows")
        whole[name] = column
    return Bound(NAMED, [], {}, columns=whole)


def column_of(dicts, name, parameters):
    """The values of one parameter in rows by name, defaults filled in."""
    default = parameters.defaults.get(name, inspect.Parameter.empty)
    if default is inspect.Parameter.empty:
        return [row[name] for row in dicts]
    return [row.get(name, default) for row in dicts]


def _list(names):
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) or "nothing") + more


def _count(count):
    return {0: "none", 1: "one"}.get(count, str(count))
