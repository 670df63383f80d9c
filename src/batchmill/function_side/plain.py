"""Results of user code as values that JSON holds; in an answer to tensors, arrays and what JSON lacks go as buffers.

The rules are Modelbit's: NaN and infinities are null, dates are text, frames are lists of rows, other objects are dicts
of their attributes.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import inspect
import math
import pathlib
import types
import uuid

from . import arrays
from .installed import loaded

DEPTH_MAX = 128
ESCAPE = "$object"
SIMPLE = frozenset((int, float, str, bool, type(None)))
_SAFE = frozenset((int, str, bool, type(None)))
_TEXT = (datetime.date, datetime.time, datetime.timedelta, complex, decimal.Decimal, uuid.UUID, pathlib.PurePath)
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_CIRCLE = "Cannot serialize result: circular reference detected."


class Unserializable(Exception):
    """A result that has no form; its text says why, in its last line as `Type: message`."""


class Writer:
    """Makes values plain. `exact`: arrays, numpy's scalars, bytes and numbers that JSON lacks go into `buffers`."""

    def __init__(self, *, exact=False, buffers=None):
        self.exact = exact
        self.buffers = [] if buffers is None else buffers
        self._simple = _SAFE if exact else SIMPLE
        self._path = set()  # the ids of what is being made plain, outermost to innermost

    def value(self, value):
        """The plain value. Raises: Unserializable."""
        self._path.clear()
        return self._value(value)

    def _value(self, value):
        kind = type(value)
        if kind in self._simple:
            return value
        if kind is float:
            return value if math.isfinite(value) else self._odd_number(value)
        if id(value) in self._path:
            raise Unserializable(_CIRCLE)
        if len(self._path) >= DEPTH_MAX:
            raise Unserializable(f"Cannot serialize result: nested deeper than {DEPTH_MAX} levels.")
        self._path.add(id(value))
        try:
            if kind is list or kind is tuple:
                return self._list(value)
            if kind is dict:
                return self._dict(value)
            return self._other(value)
        finally:
            self._path.discard(id(value))

    def _list(self, items):
        if self._simple.issuperset(map(type, items)):
            return items
        if self.exact:
            numbers = self._numbers(items)
            if numbers is not None:
                return numbers
        value = self._value
        return [value(each) for each in items]

    def _dict(self, items):
        plain, is_odd = {}, False
        simple, value = self._simple, self._value
        for key, each in items.items():
            if type(key) is not str:
                key = _key(key)
            if self.exact and key[:1] == "$":
                is_odd = True
            plain[key] = each if type(each) in simple else value(each)
        return {ESCAPE: plain} if is_odd else plain

    def _odd_number(self, value):
        """NaN and infinities."""
        return arrays.write_floats([value], [], self.buffers) if self.exact else None

    def _numbers(self, items):
        """A (nested) list of floats as JSON holds it, or as an array where some are not finite; None for any other."""
        shape, flat = [len(items)], items
        while flat and type(flat[0]) is list and len(shape) < DEPTH_MAX:
            length = len(flat[0])
            if any(type(each) is not list or len(each) != length for each in flat):
                return None
            shape.append(length)
            flat = [inner for each in flat for inner in each]
        if not flat or not {float}.issuperset(map(type, flat)):
            return None
        return items if all(map(math.isfinite, flat)) else arrays.write_floats(flat, shape, self.buffers)

    def _other(self, value):
        if isinstance(value, enum.Enum):
            return self._value(value.value)
        if isinstance(value, (bool, str, int, float)):
            return self._value(_base(value))
        if isinstance(value, (list, tuple)):
            return self._list(list(value))
        if isinstance(value, dict):
            return self._dict(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._bytes(bytes(value))
        pandas = loaded("pandas")
        if pandas is not None:
            if isinstance(value, pandas.DataFrame):
                return self._list(value.to_dict(orient="records"))
            if isinstance(value, (pandas.Series, pandas.Index)):
                return self._list(value.tolist())
            if value is pandas.NA or value is pandas.NaT:
                return None
        numpy = loaded("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            return self._array(value, numpy)
        if isinstance(value, _TEXT):
            return str(value)
        if hasattr(value, "tolist"):  # tensors of torch and the like
            return self._value(detached(value) if self.exact and numpy is not None else value.tolist())
        return self._object(value)

    def _array(self, value, numpy):
        if value.dtype.kind in "mM":
            return self._value([str(each) for each in value.reshape(-1)] if value.ndim else _time(value, numpy))
        if self.exact and value.dtype.kind not in "cV":
            written = arrays.write(numpy.asarray(value), self.buffers)
            if written is not None:
                return written
        items = value.tolist()
        return self._value(items) if type(items) is not type(value) else str(items)

    def _bytes(self, value):
        if self.exact:
            return arrays.write_bytes(value, self.buffers)
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise Unserializable(f"TypeError: bytes that are not UTF-8 are not JSON serializable ({error})") from None

    def _object(self, value):
        if inspect.iscoroutine(value):
            value.close()  # or Python would warn that nobody awaited it
            raise Unserializable("TypeError: the result must be awaited: write the function as `async def`")
        if isinstance(value, _CODE):
            raise Unserializable(f"TypeError: Object of type {type(value).__name__} is not JSON serializable")
        if dataclasses.is_dataclass(value):
            return self._dict({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        if hasattr(value, "__dict__"):
            return self._dict(vars(value))
        raise Unserializable(f"TypeError: Object of type {type(value).__name__} is not JSON serializable")


def _base(value):
    """The plain number or text that an object of a subclass is."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value) if kind is not str else str.__str__(value)
    raise AssertionError("a number or a text")


def _key(key):
    """A dict's key as text, as Python's json has it."""
    if isinstance(key, str):
        return str.__str__(key)
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return str(key)


def _time(value, numpy):
    return None if numpy.isnat(value) else str(value)


def detached(value):
    """A tensor of another library as an array of numpy."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return value.numpy() if hasattr(value, "numpy") else value.tolist()
