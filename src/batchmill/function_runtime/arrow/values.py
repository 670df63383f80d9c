"""Converts Arrow arrays to the values that JSON has: integers, floats, text, booleans, null, lists, objects.

Decimals are numbers with their exact digits; dates, times and timestamps are ISO 8601 text (UTC where they have a
zone); durations count their own unit; bytes are base64; NaN and infinity are null. Only for a process that has pyarrow.
"""

from __future__ import annotations

import base64

from ..installed import installed


class UnsupportedType(Exception):
    """JSON has no form for values of this type; the text says why."""


class ArrowValues:
    """
    Args:
        number: makes a value of the digits of a decimal.
    """

    def __init__(self, number):
        self._number = number
        self._pa = installed("pyarrow")
        types = self._pa.types
        self._leaves = (
            (types.is_integer, _values),
            (types.is_floating, self._floats),
            (types.is_boolean, _values),
            (types.is_null, _values),
            (types.is_string, _values),
            (types.is_large_string, _values),
            (types.is_timestamp, self._timestamps),
            (types.is_date, self._texts),
            (types.is_time, self._texts),
            (types.is_duration, self._counts),
            (types.is_decimal, self._decimals),
            (types.is_binary, _base64),
            (types.is_large_binary, _base64),
            (types.is_fixed_size_binary, _base64),
        )

    @property
    def _pc(self):
        """It takes half as long to import as all of pyarrow: not before it is needed."""
        return installed("pyarrow.compute")

    def values(self, array):
        """The values of an array. Raises: UnsupportedType."""
        return self.converter(array.type)(array)

    def converter(self, kind):
        """The function that converts arrays of a type to lists of values. Raises: UnsupportedType."""
        pa, types = self._pa, self._pa.types
        if isinstance(kind, pa.BaseExtensionType):
            inner = self.converter(kind.storage_type)
            return lambda array: inner(array.storage)
        if types.is_dictionary(kind):
            inner = self.converter(kind.value_type)
            return lambda array: inner(array.dictionary_decode())
        if types.is_struct(kind):
            return self._struct(kind)
        if types.is_map(kind):
            return self._map(kind)
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            return self._list(kind)
        for matches, convert_leaf in self._leaves:
            if matches(kind):
                return convert_leaf
        raise UnsupportedType(f"the type {kind}, which JSON cannot express")

    def _struct(self, kind):
        names = [kind.field(number).name for number in range(kind.num_fields)]
        inner = [self.converter(kind.field(number).type) for number in range(kind.num_fields)]

        def convert_struct(array):
            fields = [convert_field(array.field(number)) for number, convert_field in enumerate(inner)]
            valid = array.is_valid().to_pylist()
            values = zip(*fields) if fields else ((),) * len(array)
            return [dict(zip(names, value)) if ok else None for ok, value in zip(valid, values)]

        return convert_struct

    def _list(self, kind):
        inner = self.converter(kind.value_type)

        def convert_list(array):
            values = iter(inner(array.flatten()))
            lengths = self._pc.list_value_length(array).to_pylist()
            return [None if length is None else [next(values) for _ in range(length)] for length in lengths]

        return convert_list

    def _map(self, kind):
        pa, types = self._pa, self._pa.types
        if not (types.is_string(kind.key_type) or types.is_large_string(kind.key_type)):
            raise UnsupportedType(f"a map whose keys are {kind.key_type}, not text")
        inner = self.converter(kind.item_type)

        def convert_map(array):
            entries = array.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
            pairs = entries.flatten()
            members = zip(pairs.field(0).to_pylist(), inner(pairs.field(1)))
            lengths = self._pc.list_value_length(entries).to_pylist()
            return [None if length is None else dict(next(members) for _ in range(length)) for length in lengths]

        return convert_map

    def _floats(self, array):
        pa, pc = self._pa, self._pc
        if pa.types.is_float16(array.type):
            array = array.cast(pa.float32())
        finite = pc.is_finite(array)
        if pc.all(finite).as_py() is False:
            array = pc.if_else(finite, array, pa.scalar(None, array.type))
        return array.to_pylist()

    def _timestamps(self, array):
        """ISO 8601 with as many digits as the unit has. %S includes the fraction; times with a zone become UTC."""
        pa, kind = self._pa, array.type
        naive = array.cast(pa.timestamp(kind.unit, "UTC")).cast(pa.int64()).cast(pa.timestamp(kind.unit))
        form = "%Y-%m-%dT%H:%M:%SZ" if kind.tz is not None else "%Y-%m-%dT%H:%M:%S"
        return self._pc.strftime(naive, format=form).to_pylist()

    def _texts(self, array):
        return array.cast(self._pa.string()).to_pylist()

    def _decimals(self, array):
        number = self._number
        return [None if text is None else number(text) for text in self._texts(array)]

    def _counts(self, array):
        return array.cast(self._pa.int64()).to_pylist()


def _values(array):
    return array.to_pylist()


def _base64(array):
    return [None if value is None else base64.b64encode(value).decode() for value in array.to_pylist()]
