"""Which columns a table of results has, what kind of values lie in those that have no type of their own; and CSV files.

CSV: strings bare, numbers with the digits they came with, objects and lists as their JSON text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from batchmill.jobs.results.gathering import TableSource
from batchmill.jobs.results.result_lines import LineFile
from batchmill.jobs.results.results import COLUMNS_MAX, ColumnKind, Learned, ResultFile, too_many_columns
from batchmill.part_files import Digest
from batchmill.types import OutputSchema
from batchmill.wire.json_bytes import decode, split_object, text_of
from batchmill.wire.schemas.output_schema import names_of

BATCH_BYTES = 4 * 1024 * 1024  # of lines that are Python objects at once
_EXACT = 2**53  # integers up to here are floats without loss
_INT64 = 2**63


class ColumnNames:
    """The input's columns in order, then what else the rows have, then what batchmill adds."""

    def __init__(self, source: TableSource) -> None:
        self._names = dict.fromkeys(source.columns)
        self._added = list(source.added)

    def note(self, names: Iterable[str]) -> None:
        """Add the columns of a row. Raises: InvalidInput beyond COLUMNS_MAX columns."""
        for name in names:
            if name not in self._names and name not in self._added:
                if len(self._names) >= COLUMNS_MAX:
                    raise too_many_columns(COLUMNS_MAX)
                self._names[name] = None

    def all(self) -> list[str]:
        return [*self._names, *self._added]

    def input(self) -> list[str]:
        return list(self._names)


class ColumnKinds:
    """Learns the kind of each column from its values; they need not come all at once.

    Args: declared: of columns whose kind is known. It stands unless a value does not fit it.
    """

    def __init__(self, declared: Mapping[str, ColumnKind] | None = None) -> None:
        self._seen: dict[str, set[type | ColumnKind]] = {}
        self._declared = declared or {}
        self._ints = {name for name, kind in self._declared.items() if kind in (ColumnKind.INT, ColumnKind.INTS)}

    def note(self, name: str, value: Any) -> None:
        """Add a decoded value. A value that is not one of JSON's own types, such as Raw, counts as JSON text."""
        if name in self._ints:
            value = _whole(value)
        kind: type | ColumnKind = type(value)
        if kind not in _KIND_OF:
            kind = _kind_of_value(value)
        try:
            self._seen[name].add(kind)
        except KeyError:
            self._seen[name] = {kind}

    def seen(self) -> dict[str, list[str]]:
        """The kinds of the values of each column."""
        return {name: [str(_KIND_OF.get(kind, kind)) for kind in seen] for name, seen in self._seen.items()}

    def add(self, seen: dict[str, list[str]]) -> None:
        """Add what `seen` has returned."""
        for name, kinds in seen.items():
            self._seen.setdefault(name, set()).update(map(ColumnKind, kinds))

    def kind(self, name: str) -> ColumnKind:
        """The one kind that holds every value seen: the declared one, if it does."""
        seen = {_KIND_OF.get(kind, kind) for kind in self._seen.get(name, ())} - {ColumnKind.NULL}
        declared = self._declared.get(name)
        if declared is ColumnKind.JSON or (declared is not None and seen <= _DECLARED_HOLDS[declared]):
            return declared
        for kinds, one in _HELD_BY:
            if seen <= kinds:
                return one
        return ColumnKind.JSON


# The kinds of a column's values, and the first kind that holds them all without loss.
_HELD_BY: tuple[tuple[set[ColumnKind], ColumnKind], ...] = (
    ({ColumnKind.TEXT}, ColumnKind.TEXT),
    ({ColumnKind.BOOL}, ColumnKind.BOOL),
    ({ColumnKind.INT, ColumnKind.LARGE}, ColumnKind.INT),
    ({ColumnKind.INT, ColumnKind.FLOAT}, ColumnKind.FLOAT),
    ({ColumnKind.INTS, ColumnKind.LARGE_INTS, ColumnKind.EMPTY}, ColumnKind.INTS),
    ({ColumnKind.INTS, ColumnKind.VECTOR, ColumnKind.EMPTY}, ColumnKind.VECTOR),
)
_DECLARED_HOLDS: dict[ColumnKind, set[ColumnKind]] = {
    **{one: kinds for kinds, one in _HELD_BY},
    ColumnKind.TEXTS: {ColumnKind.TEXTS, ColumnKind.EMPTY},
    ColumnKind.BOOLS: {ColumnKind.BOOLS, ColumnKind.EMPTY},
}
_KIND_OF: dict[Any, ColumnKind] = {
    str: ColumnKind.TEXT,
    bool: ColumnKind.BOOL,
    float: ColumnKind.FLOAT,
    type(None): ColumnKind.NULL,
}


def _kind_of_value(value: Any) -> ColumnKind:
    match value:
        case int() if abs(value) <= _EXACT:
            return ColumnKind.INT
        case int():
            return ColumnKind.LARGE if -_INT64 <= value < _INT64 else ColumnKind.JSON
        case list():
            return _kind_of_list(value)
        case _:
            return ColumnKind.JSON


def _kind_of_list(value: list[Any]) -> ColumnKind:
    types = set(map(type, value))
    if not types:
        return ColumnKind.EMPTY
    if len(types) == 1 and (kind := _LIST_KINDS.get(next(iter(types)))) is not None:
        return kind
    if not types <= {int, float}:
        return ColumnKind.JSON
    ints = [item for item in value if type(item) is int]
    if max(map(abs, ints)) <= _EXACT:
        return ColumnKind.INTS if float not in types else ColumnKind.VECTOR
    is_held = float not in types and min(ints) >= -_INT64 and max(ints) < _INT64
    return ColumnKind.LARGE_INTS if is_held else ColumnKind.JSON


_LIST_KINDS: dict[type, ColumnKind] = {float: ColumnKind.VECTOR, str: ColumnKind.TEXTS, bool: ColumnKind.BOOLS}


def _whole(value: Any) -> Any:
    """1.0 as 1, also in a list: JSON Schema takes it for an integer."""
    match value:
        case float() if value.is_integer() and abs(value) <= _EXACT:
            return int(value)
        case list():
            return list(map(_whole, value))
        case _:
            return value


def field_kinds(schema: OutputSchema | None) -> dict[str, ColumnKind]:
    """The kind of each column that holds a field of the schema."""
    if schema is None:
        return {}
    document = decode(schema.document)
    return {f"{schema.prefix}{name}": _field_kind(document["properties"][name], document) for name in names_of(schema)}


REFERENCES_MAX = 20  # one after another, on the way from a field to its type
_FIELD_KINDS = {
    "string": ColumnKind.TEXT, "integer": ColumnKind.INT, "number": ColumnKind.FLOAT, "boolean": ColumnKind.BOOL,
}  # fmt: skip
_ITEM_KINDS = {
    ColumnKind.TEXT: ColumnKind.TEXTS, ColumnKind.INT: ColumnKind.INTS, ColumnKind.FLOAT: ColumnKind.VECTOR,
    ColumnKind.BOOL: ColumnKind.BOOLS,
}  # fmt: skip
_TYPE_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def _field_kind(field: Any, document: dict[str, Any]) -> ColumnKind:
    """The kind of a field that has one type, or is null. JSON: it has several, or one that is none of a column."""
    field = _without_null(field, document)
    names = _type_names(field) - {"null"}
    if names == {"array"} and "prefixItems" not in field:
        return _ITEM_KINDS.get(_one_kind(_type_names(_resolved(field.get("items"), document))), ColumnKind.JSON)
    return _one_kind(names)


def _one_kind(names: set[str]) -> ColumnKind:
    if names == {"integer", "number"}:
        return ColumnKind.FLOAT
    return _FIELD_KINDS.get(next(iter(names)), ColumnKind.JSON) if len(names) == 1 else ColumnKind.JSON


def _without_null(field: Any, document: dict[str, Any]) -> dict[str, Any]:
    """The field's schema behind references, and behind a choice with null; of other choices, the types."""
    for _ in range(REFERENCES_MAX):
        field = _resolved(field, document)
        choices = field.get("anyOf", field.get("oneOf", field.get("allOf")))
        if choices is None or "type" in field:
            return field
        others = [each for each in choices if not (isinstance(each, dict) and each.get("type") == "null")]
        if len(others) != 1:
            types = [_type_names(_resolved(each, document)) for each in others]
            return {"type": sorted(set().union(*types))} if all(types) else {}
        field = others[0]
    return {}


def _resolved(schema: Any, document: dict[str, Any]) -> dict[str, Any]:
    """The schema that a reference inside the document leads to; empty: it leads to none."""
    for _ in range(REFERENCES_MAX):
        if not isinstance(schema, dict):
            return {}
        if "$ref" not in schema:
            return schema
        head, *steps = schema["$ref"].split("/")
        schema = document if head == "#" else None
        for step in steps:
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return {}


def _type_names(field: dict[str, Any]) -> set[str]:
    """The types of JSON that the values of a field may have, as far as its schema says so."""
    given = field.get("type")
    if given is None:
        values = field["enum"] if "enum" in field else [field["const"]] if "const" in field else []
        return {_TYPE_NAMES.get(type(value), "object") for value in values}
    return {given} if isinstance(given, str) else set(given)


def decoded_members(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """The members of every line. A number that no machine number holds comes as Raw."""
    for batch in in_batches(lines):
        try:
            yield from _decode_many(b"[" + b",".join(batch) + b"]")
        except msgspec.ValidationError:
            for line in batch:
                yield _decode_one(line)


def _decode_one(line: bytes) -> dict[str, Any]:
    members: dict[str, Any] = dict(split_object(line))
    for name, value in members.items():
        with suppress(msgspec.ValidationError):
            members[name] = decode(value)
    return members


_decode_many = msgspec.json.Decoder(list[dict[str, Any]]).decode


def in_batches(lines: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Split lines into batches of about BATCH_BYTES: as Python objects they take many times that."""
    batch: list[bytes] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += len(line)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class CsvFile:
    """A header and a record for every row. An empty cell is null, an empty string, or a column the row lacks."""

    def __init__(self, output: Path, source: TableSource, digest: Digest | None) -> None:
        self._names = ColumnNames(source)
        self.must_learn = not source.fixed
        self._cell = safe_cell if source.is_safe else str
        self._file = LineFile(output, digest)
        self._columns: list[str] | None = None

    def learn(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            self._names.note(split_object(line))

    def learned(self) -> Learned:
        return Learned(self._names.input())

    def know(self, learned: Learned) -> None:
        self._names.note(learned.names)

    def write(self, lines: Sequence[bytes]) -> None:
        columns = self._begin()
        for batch in in_batches(lines):
            records = []
            for line in batch:
                members = split_object(line)
                cells = (text_of(members[name]) if name in members else "" for name in columns)
                records.append(list(map(self._cell, cells)))
            self._file.write(_text_of(records), len(batch))

    def publish(self) -> ResultFile:
        self._begin()
        return self._file.publish()

    def discard(self) -> None:
        self._file.discard()

    def _begin(self) -> list[str]:
        """Settle the columns and write the header: every row has been seen."""
        if self._columns is None:
            self._columns = self._names.all()
            self._file.write(_text_of([list(map(self._cell, self._columns))]), 0)
        return self._columns


# What spreadsheets take for the beginning of a formula, also in full width. Source: OWASP, "CSV Injection".
_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")
_SKIPPED = "".join(map(chr, range(33))) + "\u00a0\u200b\u3000\ufeff"  # what may stand before it
_FIRST = frozenset((*_FORMULA, *_SKIPPED))


def safe_cell(cell: str) -> str:
    """The cell, with an apostrophe before what a spreadsheet would run as a formula. Numbers are unchanged."""
    if not cell or cell[0] not in _FIRST:
        return cell
    is_formula = cell.lstrip(_SKIPPED).startswith(_FORMULA) and not _is_number(cell)
    return f"'{cell}" if is_formula or cell[0] in "\t\r\n" else cell


def _is_number(cell: str) -> bool:
    try:
        decode(cell.encode(), type=float)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return False
    return True


def _text_of(records: list[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    # A bare CR ends a record for every reader, and csv quotes only what its own line terminator holds.
    careful = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for record in records:
        (careful if any("\r" in cell for cell in record) else writer).writerow(record)
    return text.getvalue().encode()


def create(output: Path, source: TableSource, digest: Digest | None = None) -> CsvFile:
    return CsvFile(output, source, digest)
