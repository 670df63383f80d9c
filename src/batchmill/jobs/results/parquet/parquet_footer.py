"""Footers of Parquet files, joined: those of files whose bytes follow each other, with columns that come after them.

Column chunks are where a footer says, so a file may begin with the bytes of others.
Source: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from batchmill.jobs.results.parquet.thrift_compact import (
    BINARY,
    I16,
    I32,
    I64,
    LIST,
    STRUCT,
    Fields,
    ListOf,
    NotThrift,
    Value,
    read_struct,
    write_struct,
)

MAGIC = b"PAR1"
END_BYTES = 8  # the length of the footer, and the magic
FOOTER_BYTES_MAX = 4 * 1024 * 1024  # of all footers that are joined: they become Python objects
ORDINALS = 2**15
ARROW_SCHEMA = b"ARROW:schema"

# Numbers of fields. FileMetaData:
VERSION, SCHEMA, ROWS, GROUPS, METADATA, CREATOR, ORDERS, ENCRYPTION = 1, 2, 3, 4, 5, 6, 7, 8
CHILDREN = 5  # SchemaElement
COLUMNS, UNPACKED_BYTES, GROUP_ROWS, GROUP_OFFSET, PACKED_BYTES, ORDINAL = 1, 2, 3, 5, 6, 7  # RowGroup
FILE_PATH, CHUNK_OFFSET, CHUNK, OFFSET_INDEX, COLUMN_INDEX, CRYPTO = 1, 2, 3, (4, 5), (6, 7), (8, 9)  # ColumnChunk
DATA_PAGE, INDEX_PAGE, DICTIONARY_PAGE, BLOOM_FILTER = 9, 10, 11, 14  # ColumnMetaData
KEY, TEXT = 1, 2  # KeyValue


class Footer(Struct, frozen=True):
    """The footer of a file, and where it starts: all column chunks are before it."""

    start: int
    fields: Fields

    def groups(self) -> list[Fields]:
        return _items(self.fields, GROUPS)

    def schema(self) -> list[Fields]:
        return _items(self.fields, SCHEMA)

    def metadata(self, key: bytes) -> bytes | None:
        """A value of the file's own key-value pairs."""
        pairs = _items(self.fields, METADATA) if METADATA in self.fields else []
        return next((pair[TEXT].value for pair in pairs if pair[KEY].value == key and TEXT in pair), None)

    def is_written_like(self, other: Footer) -> bool:
        """Whether readers take both alike: by the writer's name they judge whether statistics can be trusted."""
        return self.schema() == other.schema() and all(
            self.fields.get(number) == other.fields.get(number) for number in (CREATOR, ORDERS)
        )

    def is_plain(self) -> bool:
        """Whether every column chunk is in this file and not encrypted."""
        chunks = [chunk for group in self.groups() for chunk in _items(group, COLUMNS)]
        strange = {FILE_PATH, *CRYPTO}
        return ENCRYPTION not in self.fields and all(CHUNK in chunk and strange.isdisjoint(chunk) for chunk in chunks)


def read_footer(size: int, read: Callable[[int, int], bytes]) -> Footer:
    """The footer of a file of `size` bytes; `read` gives those from a start to an end. Raises: NotThrift."""
    end = read(size - END_BYTES, size)
    start = size - END_BYTES - int.from_bytes(end[:4], "little")
    if end[4:] != MAGIC or start < len(MAGIC) or size - start > FOOTER_BYTES_MAX:
        raise NotThrift(f"a footer of {size - start} bytes that ends in {end[4:]!r}")
    try:
        footer = Footer(start, read_struct(read(start, size - END_BYTES)))
        footer.groups(), footer.schema(), footer.metadata(b"")
    except (KeyError, AttributeError, TypeError) as error:
        raise NotThrift(f"a footer without what one has: {error!r}") from None
    return footer


def _items(fields: Fields, number: int) -> list[Any]:
    return fields[number].value.items


class Placed(Struct, frozen=True):
    """A footer whose file's bytes are at `offset` of the new file."""

    footer: Footer
    offset: int


def join(
    sources: list[Placed], order: list[tuple[int, int]], added: Placed, metadata: dict[bytes, bytes]
) -> bytes:  # fmt: skip
    """The end of a file: the footer with row groups of `sources`, to each of which `added` has columns; its length.

    Args:
        order: (number in `sources`, number of its row group) of every row group.
        added: has as many row groups, with the same rows.
    """
    first = sources[0].footer
    moved = [[_moved(group, each.offset) for group in each.footer.groups()] for each in sources]
    extra = [_moved(group, added.offset) for group in added.footer.groups()]
    groups = [_widened(moved[source][at], more) for (source, at), more in zip(order, extra, strict=True)]
    for number, group in enumerate(groups):
        group.pop(ORDINAL, None)
        if number < ORDINALS:
            group[ORDINAL] = Value(I16, number)
    root, *elements = first.schema()
    root = root | {CHILDREN: Value(I32, root[CHILDREN].value + added.footer.schema()[0][CHILDREN].value)}
    pairs = [{KEY: Value(BINARY, key), TEXT: Value(BINARY, text)} for key, text in metadata.items()]
    fields = first.fields | {
        VERSION: Value(I32, max(each.fields[VERSION].value for each in (first, added.footer))),
        SCHEMA: _structs([root, *elements, *added.footer.schema()[1:]]),
        ROWS: Value(I64, sum(group[GROUP_ROWS].value for group in groups)),
        GROUPS: _structs(groups),
        METADATA: _structs(pairs),
    }
    if ORDERS in fields and ORDERS in added.footer.fields:
        fields[ORDERS] = _structs([*_items(first.fields, ORDERS), *_items(added.footer.fields, ORDERS)])
    else:
        fields.pop(ORDERS, None)
    data = write_struct(fields)
    return data + len(data).to_bytes(4, "little") + MAGIC


def _structs(items: list[Fields]) -> Value:
    return Value(LIST, ListOf(STRUCT, items))


def _moved(group: Fields, by: int) -> Fields:
    """A row group whose bytes are `by` further on, without indexes of pages.

    They hold offsets themselves, and the results have none: readers refuse files of which only some columns have them.
    """
    chunks = []
    for chunk in _items(group, COLUMNS):
        moved = _shifted(chunk, (CHUNK_OFFSET,), by)
        fields = _shifted(chunk[CHUNK].value, (DATA_PAGE, INDEX_PAGE, DICTIONARY_PAGE, BLOOM_FILTER), by)
        moved[CHUNK] = Value(STRUCT, fields)
        for number in (*OFFSET_INDEX, *COLUMN_INDEX):
            moved.pop(number, None)
        chunks.append(moved)
    return _shifted(group, (GROUP_OFFSET,), by) | {COLUMNS: _structs(chunks)}


def _shifted(fields: Fields, numbers: tuple[int, ...], by: int) -> Fields:
    """The fields, with those of these numbers more by as much. Writers without an offset have 0 there."""
    found = {number: fields[number] for number in numbers if number in fields and fields[number].value > 0}
    return fields | {number: Value(kind, value + by) for number, (kind, value) in found.items()}


def _widened(group: Fields, more: Fields) -> Fields:
    """A row group with the columns of another one."""
    assert group[GROUP_ROWS] == more[GROUP_ROWS], (group[GROUP_ROWS], more[GROUP_ROWS])
    sums = {
        number: Value(I64, group[number].value + more[number].value)
        for number in (UNPACKED_BYTES, PACKED_BYTES)
        if number in group and number in more
    }
    return group | sums | {COLUMNS: _structs([*_items(group, COLUMNS), *_items(more, COLUMNS)])}
