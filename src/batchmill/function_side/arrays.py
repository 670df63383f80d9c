"""Arrays as they travel: `{"$array": [number of the buffer, datatype, shape]}`, bytes little-endian and row-major.

Python's own floats, where some are none that JSON has, travel so too, with `true` as a fourth member.
"""

from __future__ import annotations

import struct
import sys

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
    """An array that came is not what it says it is."""


def is_array(value):
    """Whether a value read from JSON stands for an array."""
    return type(value) is dict and len(value) == 1 and ARRAY in value


def read(value, buffers):
    """The numpy array that `value` stands for: of objects for BYTES, a part of the buffer for everything else."""
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
    """The nested list that `value` stands for; needs nothing installed."""
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
    """What stands for a numpy array, its bytes added to `buffers`; None for one of a type that has no datatype."""
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
    """What stands for one value of bytes."""
    buffers.append(join_bytes([data]))
    return {ARRAY: [len(buffers) - 1, BYTES, []]}


def joined(parts):
    """Arrays one behind the other, along the axis of the rows."""
    return loaded("numpy").concatenate(parts)


def write_floats(items, shape, buffers):
    """What stands for Python's own floats in row-major order: the last member says that they are no array's."""
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
