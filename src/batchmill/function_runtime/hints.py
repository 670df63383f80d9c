"""Read type hints: datatype, shape, whether a value is a numpy array. Unknown hints are ignored."""

from __future__ import annotations

import collections.abc
import inspect
import typing

from .installed import loaded

SCALARS = {int: "INT64", float: "FP64", bool: "BOOL", str: "STRING", bytes: "BYTES"}
ALIASES_MAX = 32  # that refer to one another
DIMENSIONS_MAX = 32  # of lists in lists; an alias may mean a list of itself
_LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)
_NUMPY = {
    "bool": "BOOL", "bool_": "BOOL", "float16": "FP16", "float32": "FP32", "float64": "FP64", "str_": "STRING",
    "bytes_": "BYTES", "object_": "BYTES",
}  # fmt: skip
_NUMPY.update({f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)})


class Hint:
    """`datatype` None: any JSON value. `mark`: it was said with `batchmill.tensor`. `model`: a class of pydantic."""

    def __init__(self, datatype=None, shape=(1,), *, is_array=False, is_optional=False, is_marked=False, model=None):
        self.datatype, self.shape = datatype, list(shape)
        self.is_array, self.is_optional, self.is_marked, self.model = is_array, is_optional, is_marked, model


def hints_of(function):
    """The type hints of a function by name; those that cannot be resolved are left out."""
    owner = function if inspect.isroutine(function) else type(function).__call__
    owner = inspect.unwrap(getattr(owner, "__func__", owner))
    try:
        return typing.get_type_hints(owner, include_extras=True)
    except Exception:  # user code: a name in a hint that is imported only for type checkers, or any expression
        pass
    return {name: hint for name, hint in getattr(owner, "__annotations__", {}).items() if not isinstance(hint, str)}


def read_hint(hint, *, is_column=False):
    """What a hint says. `is_column`: it is that of a list with one value for each row."""
    hint, is_optional = _without_none(hint)
    mark = next((each for each in getattr(hint, "__metadata__", ()) if hasattr(each, "batchmill_tensor")), None)
    if hasattr(hint, "__metadata__"):
        inner = resolve_alias(hint.__origin__)
        if mark is None:
            hint = inner
    if mark is not None:
        datatype, shape = mark.batchmill_tensor
        return Hint(datatype, shape, is_array=_is_ndarray(inner), is_optional=is_optional, is_marked=True)
    if _is_ndarray(hint):
        return Hint(_dtype_of(hint), [-1], is_array=True, is_optional=is_optional)
    if is_column:
        args = typing.get_args(hint)
        hint = resolve_alias(args[0]) if typing.get_origin(hint) in _LISTS and args else None
    read = _read_value(hint)
    read.is_optional = is_optional
    return read


def _read_value(hint):
    dimensions = 0
    hint, _ = _without_none(hint)
    while dimensions < DIMENSIONS_MAX and (typing.get_origin(hint) in _LISTS or hint in (list, tuple)):
        args = [each for each in typing.get_args(hint) if each is not Ellipsis]
        if not args or any(each != args[0] for each in args):
            return Hint(None, [-1])
        hint, dimensions = resolve_alias(args[0]), dimensions + 1
    if typing.get_origin(hint) is typing.Literal:
        kinds = {type(each) for each in typing.get_args(hint)}
        hint = kinds.pop() if len(kinds) == 1 else None
    shape = [-1] * dimensions or [1]
    if is_model(hint):
        return Hint(None, shape, model=None if dimensions else hint)
    if isinstance(hint, type) and hint not in SCALARS:
        numpy = _NUMPY.get(hint.__name__) if hint.__module__ == "numpy" else None
        return Hint(numpy, shape)
    return Hint(SCALARS.get(hint) if isinstance(hint, collections.abc.Hashable) else None, shape)


def is_model(hint):
    """Whether it is a class of pydantic."""
    hint, pydantic = resolve_alias(hint), loaded("pydantic")
    return pydantic is not None and isinstance(hint, type) and issubclass(hint, pydantic.BaseModel)


def is_frame(hint):
    """Whether it is pandas.DataFrame."""
    pandas = loaded("pandas")
    return pandas is not None and _without_none(hint)[0] is pandas.DataFrame


def table_kind(hint):
    """The kind of a hint for a table of all columns, as `arrow.rows` names it; "" for any other hint."""
    return _kind_of(hint, {"Table": "table", "RecordBatch": "batch"}, "DataFrame")


def series_kind(hint):
    """The kind of a hint for one column, as `arrow.rows` names it; "" for any other hint."""
    return _kind_of(hint, {"Array": "array", "ChunkedArray": "chunked"}, "Series")


def _kind_of(hint, of_arrow, of_frames):
    hint, _ = _without_none(hint)
    if not isinstance(hint, type):
        return ""
    package = (hint.__module__ or "").partition(".")[0]
    if package == "pyarrow":
        return of_arrow.get(hint.__name__, "")
    return package if package in ("pandas", "polars") and hint.__name__ == of_frames else ""


def model_fields(model):
    """(name, hint, default, is required) of each field of a pydantic class, of either major version."""
    hints = typing.get_type_hints(model, include_extras=True)
    fields = getattr(model, "model_fields", None) or getattr(model, "__fields__", {})
    described = []
    for name, field in fields.items():
        is_required = field.is_required() if callable(getattr(field, "is_required", None)) else bool(field.required)
        default = None if is_required else getattr(field, "default", None)
        described.append((name, hints.get(name), default, is_required))
    return described


def _without_none(hint):
    """The hint inside an Optional, and whether it was one."""
    hint = resolve_alias(hint)
    if typing.get_origin(hint) is typing.Union or type(hint).__name__ == "UnionType":
        args = typing.get_args(hint)
        rest = [each for each in args if each is not type(None)]
        if len(rest) == 1:
            return resolve_alias(rest[0]), len(rest) < len(args)
        return None, len(rest) < len(args)
    return hint, False


def resolve_alias(hint):
    """The value of an alias of Python 3.12's statement `type`, as `NDArray[float64]` is one of newer numpys."""
    for _ in range(ALIASES_MAX):
        alias = typing.get_origin(hint) or hint
        if type(alias).__name__ != "TypeAliasType":
            return hint
        try:
            hint = _filled(alias, typing.get_args(hint))
        except Exception:  # user code: the value of an alias is any expression, read now for the first time
            return None
    return None  # an alias of itself


def _filled(alias, arguments):
    """The value of an alias with the arguments of its parameters."""
    value = alias.__value__
    wanted = getattr(value, "__parameters__", ())
    if not arguments or not wanted:
        return value
    given = dict(zip(alias.__type_params__, arguments))
    return value[tuple(given.get(each, each) for each in wanted)]


def _is_ndarray(hint):
    numpy = loaded("numpy")
    return numpy is not None and (hint is numpy.ndarray or typing.get_origin(hint) is numpy.ndarray)


def _dtype_of(hint):
    """The datatype of numpy.typing.NDArray[np.float64]."""
    for each in typing.get_args(hint)[1:]:
        for kind in typing.get_args(resolve_alias(each)):
            if isinstance(kind, type):
                return _NUMPY.get(kind.__name__)
    return None
