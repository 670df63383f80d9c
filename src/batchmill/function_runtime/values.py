"""Converts values between JSON and user code: encoded arrays, and results as JSON values."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import inspect
import itertools
import math
import pathlib
import struct
import sys
import types
import uuid

from .installed import installed, loaded

BYTES = "BYTES"
ARRAY = "$array"
DTYPES = {
    "BOOL": "?",
    "UINT8": "<u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "<i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
_DATATYPES = {dtype[-2:]: datatype for datatype, dtype in DTYPES.items()} | {"b1": "BOOL"}
_BF16 = "BF16"
_FORMATS = {"BOOL": "?", "INT8": "b", "UINT8": "B", "INT16": "h", "UINT16": "H", "INT32": "i", "UINT32": "I"}
_FORMATS.update({"INT64": "q", "UINT64": "Q", "FP16": "e", "FP32": "f", "FP64": "d"})


class Unreadable(Exception):
    """A received array does not match its description."""


def is_array(value):
    """Whether a value read from JSON describes an array."""
    return type(value) is dict and len(value) == 1 and ARRAY in value


def read(value, buffers):
    """The numpy array that `value` encodes: of objects for BYTES, otherwise a view of the buffer."""
    numpy = installed("numpy")
    number, datatype, shape = value[ARRAY]
    data = buffers[number]
    if numpy is None:
        raise Unreadable("numpy is not installed in the function's environment")
    try:
        if datatype == BYTES:
            array = numpy.empty(len(items := split_bytes(data)), dtype=object)
            array[:] = items
        elif datatype == _BF16:
            array = numpy.frombuffer(data, "<u2").astype("<u4") << 16
            array = array.astype("<u4").view("<f4")
        else:
            array = numpy.frombuffer(data, DTYPES[datatype])
        return array.reshape(shape)
    except (KeyError, ValueError) as error:
        raise Unreadable(f"an array of {datatype} {shape} in {len(data)} bytes: {error}") from None


def read_list(value, buffers):
    """The nested list that `value` encodes; needs no packages."""
    number, datatype, shape = value[ARRAY]
    data = buffers[number]
    if datatype == BYTES:
        items = split_bytes(data)
    elif datatype == _BF16:
        high = struct.unpack(f"<{len(data) // 2}H", data)
        items = list(struct.unpack(f"<{len(high)}f", struct.pack(f"<{len(high)}I", *[each << 16 for each in high])))
    else:
        form = _FORMATS[datatype]
        items = list(struct.unpack(f"<{len(data) // struct.calcsize('<' + form)}{form}", data))
    return _nest(items, shape)


def _nest(items, shape):
    if not shape:
        return items[0]
    for length in reversed(shape[1:]):
        if not length:
            return [[] for _ in range(shape[0])]
        items = [items[at : at + length] for at in range(0, len(items), length)]
    return items


def split_bytes(data):
    """The elements of a BYTES array: a u32 length before each."""
    items, at, data = [], 0, bytes(data)
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if end > len(data):
            raise Unreadable("an element of BYTES is longer than its buffer")
        items.append(data[at + 4 : end])
        at = end
    return items


def write(array, buffers):
    """The description of a numpy array, whose bytes are added to `buffers`; None for a type without a datatype."""
    kind = array.dtype.kind
    if kind in "SUO":
        items = [_bytes_of(each) for each in array.reshape(-1).tolist()]
        if None in items:
            return None
        datatype, data = BYTES, join_bytes(items)
    elif array.dtype.name == "bfloat16":
        datatype, data = _BF16, memoryview(_plain_order(array).view("u2")).cast("B")
    else:
        datatype = _DATATYPES.get(array.dtype.str[1:])
        if datatype is None:
            return None
        data = _memory(_plain_order(array))
    buffers.append(data)
    return {ARRAY: [len(buffers) - 1, datatype, list(array.shape)]}


def write_bytes(data, buffers):
    """The description of one value of bytes."""
    buffers.append(join_bytes([data]))
    return {ARRAY: [len(buffers) - 1, BYTES, []]}


def joined(parts):
    """Concatenate arrays along the axis of the rows."""
    return loaded("numpy").concatenate(parts)


def write_floats(items, shape, buffers):
    """The description of Python's own floats in row-major order: the last member says that they are not an array's."""
    buffers.append(struct.pack(f"<{len(items)}d", *items))
    return {ARRAY: [len(buffers) - 1, "FP64", shape, True]}


def join_bytes(items):
    return b"".join([part for each in items for part in (len(each).to_bytes(4, "little"), each)])


def _memory(array):
    if array.size == 0:
        return b""
    return memoryview(array.reshape(-1)).cast("B")


def _plain_order(array):
    """The array row-major and little-endian; the very same where it is so already."""
    numpy = loaded("numpy")
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    return numpy.ascontiguousarray(array).reshape(array.shape)


def _bytes_of(value):
    if type(value) is str:
        return value.encode("utf-8", "strict")
    return value if type(value) is bytes else None


DEPTH_MAX = 128
PLAIN_DEPTH_MAX = 500  # of values that need no change
CONTAINERS_MAX = 1 << 20  # of one depth, looked at together
ESCAPE = "$object"
SIMPLE = frozenset((int, float, str, bool, type(None)))
_SAFE = frozenset((int, str, bool, type(None)))
_STR = frozenset((str,))
_JSON_KINDS = SIMPLE | {dict, list}
_TEXT = (datetime.date, datetime.time, datetime.timedelta, complex, decimal.Decimal, uuid.UUID, pathlib.PurePath)
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_CIRCLE = "Cannot serialize result: circular reference detected."


class Unserializable(Exception):
    """A result that has no form; its text says why, in its last line as `Type: message`."""


def is_plain(value, depth=DEPTH_MAX):
    """Whether a value is of JSON's own types throughout, so that `Writer` without `exact` would not change it."""
    kind = type(value)
    if kind in SIMPLE:
        return True
    if depth == 0:
        return False
    if kind is dict:
        if not _STR.issuperset(map(type, value)):
            return False
        value = value.values()
    elif kind is not list:
        return False
    return SIMPLE.issuperset(map(type, value)) or all(is_plain(each, depth - 1) for each in value)


def are_plain(values):
    """Whether each of many values is plain. All values of one depth are looked at together."""
    depth, level = 0, values
    while not SIMPLE.issuperset(kinds := set(map(type, level))):
        depth += 1
        if depth > PLAIN_DEPTH_MAX or not _JSON_KINDS.issuperset(kinds):
            return False
        is_uniform = len(kinds) == 1 and type(level) is list
        dicts = level if is_uniform and dict in kinds else [each for each in level if type(each) is dict]
        lists = [each for each in level if type(each) is list] if list in kinds else []
        if len(dicts) + len(lists) > CONTAINERS_MAX:  # a list that holds itself twice doubles with each level
            return all(map(is_plain, values))
        if not _STR.issuperset(map(type, itertools.chain.from_iterable(dicts))):
            return False
        level = _Inner(dicts, lists)
    return True


class _Inner:
    """The values in dicts and lists, to be iterated several times."""

    def __init__(self, dicts, lists):
        self._dicts, self._lists = dicts, lists

    def __iter__(self):
        in_dicts = itertools.chain.from_iterable(map(dict.values, self._dicts))
        return itertools.chain(in_dicts, itertools.chain.from_iterable(self._lists))


class Writer:
    """Makes values plain. `exact`: arrays, numpy's scalars, bytes and numbers that JSON lacks go into `buffers`."""

    def __init__(self, *, exact=False, buffers=None):
        self.exact = exact
        self.buffers = [] if buffers is None else buffers
        self._simple = _SAFE if exact else SIMPLE
        self._path = set()  # the ids of what is being made plain, outermost to innermost

    def value(self, value):
        """The JSON value. Raises: Unserializable."""
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
            text = f"nested deeper than {PLAIN_DEPTH_MAX} levels, or {DEPTH_MAX} with values that JSON lacks"
            raise Unserializable(f"Cannot serialize result: {text}.")
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
        return write_floats([value], [], self.buffers) if self.exact else None

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
        return items if all(map(math.isfinite, flat)) else write_floats(flat, shape, self.buffers)

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
        if isinstance(value, (set, frozenset)):
            return self._list(list(value))
        if isinstance(value, _TEXT):
            return str(value)
        if hasattr(value, "model_dump"):  # pydantic's
            return self._value(value.model_dump(mode="json"))
        if hasattr(value, "tolist"):  # tensors of torch and the like
            return self._value(detached(value) if self.exact and numpy is not None else value.tolist())
        return self._object(value)

    def _array(self, value, numpy):
        if value.dtype.kind in "mM":
            return self._value([str(each) for each in value.reshape(-1)] if value.ndim else _time(value, numpy))
        if self.exact and value.dtype.kind not in "cV":
            written = write(numpy.asarray(value), self.buffers)
            if written is not None:
                return written
        items = value.tolist()
        return self._value(items) if type(items) is not type(value) else str(items)

    def _bytes(self, value):
        if self.exact:
            return write_bytes(value, self.buffers)
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise Unserializable(f"TypeError: bytes that are not UTF-8 are not JSON serializable ({error})") from None

    def _object(self, value):
        if inspect.iscoroutine(value):
            value.close()  # or Python would warn that it was never awaited
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
    """A tensor of another library as a numpy array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return value.numpy() if hasattr(value, "numpy") else value.tolist()
