"""Writes results in the form that a command asks for: a format, the rows that failed, some columns, requests beside
replies. Whatever the format of the job's own files, memory does not grow with the rows.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import click
from msgspec import Struct

from batchmill.cli.text import clean
from batchmill.errors import BatchmillError, InvalidInput
from batchmill.jobs.results.gathering import TableSource, create_table
from batchmill.jobs.results.result_rows import (
    CSV,
    JSONL,
    LINES_AT_ONCE,
    PARQUET,
    ResultSource,
    ShapedRows,
    kind_of,
)
from batchmill.jobs.results.results import check_kind
from batchmill.optional import require
from batchmill.part_files import sync_folder
from batchmill.types import OutputSchema
from batchmill.wire.job_spec import EXISTS
from batchmill.wire.rows.result_rows import RowShape

STDOUT = "-"
COPY_BYTES = 1024 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Wanted(Struct, frozen=True):
    """The form of results that a command asks for."""

    output: str | None = None  # a path; None: standard output
    kind: str = ""  # jsonl, csv or parquet; "": that of the results
    shape: RowShape = RowShape()
    only_failed: bool = False
    is_safe: bool = False  # no cell of CSV begins a formula
    replaces: bool = False  # an existing file
    schema: OutputSchema | None = None  # its fields are columns, with its types in Parquet
    skipped_bytes: int = 0  # of the results as they are: standard output has them already

    @property
    def is_table(self) -> bool:
        """Whether each row must be a row of a table."""
        return self.kind in (CSV, PARQUET) or not self.shape.is_whole

    def must_convert(self, name: str) -> bool:
        """Whether results in a file of this name are written otherwise than as they are."""
        is_other = bool(self.kind) and kind_of(name) != (self.kind, kind_of(self.output or "")[1])
        return is_other or self.only_failed or self.is_safe or not self.shape.is_whole


def wanted_form(
    output: str | None, kind: str | None, shape: RowShape, *, only_failed: bool, is_safe: bool, replaces: bool
) -> Wanted:
    """Check the options of a command. Args: kind: what --output-format says. Raises: InvalidInput."""
    output = None if output == STDOUT else output
    named, _ = kind_of(output) if output is not None else ("", "")
    if kind and named and kind != named:
        raise InvalidInput(f"{output} is named as {named}, and --output-format says {kind}: leave one of them out")
    kind = kind or named
    if is_safe and kind != CSV:
        raise InvalidInput("--csv-safe changes cells of CSV: name the output .csv, or give --output-format csv")
    if kind == PARQUET and output is None and sys.stdout.isatty():
        raise InvalidInput("Parquet is not for a terminal: name a file with -o, or send it into a pipe")
    if kind == PARQUET:
        check_kind(f"results.{PARQUET}", JSONL)  # refuses a format whose package is not installed
    return Wanted(output, kind, shape, only_failed, is_safe, replaces)


def refuse_compression(output: str) -> None:
    """Refuse a compressed name for rows that are converted. Raises: InvalidInput."""
    if codec := kind_of(output)[1]:
        raise InvalidInput(
            f"converted results are not compressed: write {output[: -len(codec)]}, then compress it",
            code="invalid_output",
        )


@contextlib.contextmanager
def open_output(wanted: Wanted, protected: Sequence[str]) -> Iterator[BinaryIO]:
    """Open what results are written to: a file that gets its name at the end, or standard output."""
    if wanted.output is not None:
        with write_atomically(wanted.output, protected, replaces=wanted.replaces) as out:
            yield out
        return
    if sys.stdout.isatty():
        with _Terminal() as terminal:
            yield cast(BinaryIO, terminal)
        return
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


class _Terminal(io.RawIOBase):
    """Prints lines without control sequences."""

    _rest = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        *whole, self._rest = (self._rest + bytes(data)).split(b"\n")
        for line in whole:
            _print(line)
        return len(data)

    def close(self) -> None:
        if self._rest:
            _print(self._rest)
        self._rest = b""
        super().close()


def _print(line: bytes) -> None:
    click.echo(clean(line.decode(errors="replace"), chars_max=len(line)))


def check_output(path: str, protected: Sequence[str], *, replaces: bool) -> None:
    """Refuse a file that must not be written. Args: as for `write_atomically`. Raises: InvalidInput."""
    if not path:
        raise InvalidInput("the name of the results' file is empty", code="invalid_output")
    target = Path(os.path.realpath(path))
    for protected_path in protected:
        if target == Path(os.path.realpath(protected_path)) or _is_same(target, protected_path):
            raise InvalidInput(f"{path} belongs to the job itself: choose another name", code="output_is_input")
    if target.is_file() and not replaces:
        raise InvalidInput(f"{path} exists: name another file, or replace it with --overwrite", code=EXISTS)
    if not target.parent.is_dir():
        raise InvalidInput(f"{path} cannot be written: {os.strerror(errno.ENOENT)}", code="invalid_output")


@contextlib.contextmanager
def write_atomically(path: str, protected: Sequence[str], *, replaces: bool = True) -> Iterator[BinaryIO]:
    """Open a file that becomes `path` at the end, if nothing fails. A device or pipe is written directly.

    Args:
        protected: files that must not be overwritten.
        replaces: an existing file.

    Raises: InvalidInput when `path` is one of them, exists or cannot be written; BatchmillError when the disk is full.
    """
    target = Path(os.path.realpath(path))
    check_output(path, protected, replaces=replaces)
    is_special = target.exists() and not target.is_file()
    part = target if is_special else target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        out = open(part, "wb" if is_special else "xb")  # noqa: SIM115 - it is closed below
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}", code="invalid_output") from None
    try:
        with _report_full_disk(path), out:
            yield out
            if not is_special:  # a loss of power must not leave an empty file in place of an earlier one
                out.flush()
                os.fsync(out.fileno())
        if not is_special:
            part.replace(target)
            with contextlib.suppress(PermissionError):  # it may be writable but not readable
                sync_folder(target.parent)
    finally:
        if not is_special:
            part.unlink(missing_ok=True)


def _is_same(target: Path, path: str) -> bool:
    try:
        return os.path.samefile(target, path)
    except OSError:  # one of them does not exist
        return False


@contextlib.contextmanager
def _report_full_disk(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise BatchmillError(f"there is no space to write {path}: {error.strerror}", code="storage_full") from error


def write_rows(source: ResultSource, wanted: Wanted, protected: Sequence[str], scratch: Path) -> int:
    """Write the wanted rows of results.

    Args: scratch: an empty folder for a table that is not complete yet.
    Returns: the number of rows written. Raises: InvalidInput for a column that no row has.
    """
    kind = wanted.kind or JSONL
    if wanted.output is not None:
        refuse_compression(wanted.output)
    if kind == PARQUET and kind_of(source.name)[0] == PARQUET:
        copy = require("batchmill.jobs.results.parquet.parquet_selection:copy_selected", "results as Parquet")
        table = scratch / f"table.{kind}"
        rows = copy(source.path, table, wanted.shape, only_failed=wanted.only_failed)
        _copy(table, wanted, protected)
        return rows
    if not wanted.is_table:
        return _write_lines(source.lines(only_failed=wanted.only_failed), wanted, protected)
    shaped = ShapedRows(source, wanted.shape, only_failed=wanted.only_failed)
    if kind == JSONL:
        return _write_lines(shaped, wanted, protected)
    table = _make_table(shaped, scratch / f"table.{kind}", is_safe=wanted.is_safe, schema=wanted.schema)
    _copy(table, wanted, protected)
    return shaped.rows


def _write_lines(lines: Iterable[bytes], wanted: Wanted, protected: Sequence[str]) -> int:
    rows = 0
    with open_output(wanted, protected) as out:
        for line in lines:
            out.write(line + b"\n")
            rows += 1
    return rows


def _make_table(rows: ShapedRows, path: Path, *, is_safe: bool, schema: OutputSchema | None) -> Path:
    kind = path.suffix[1:]
    source = TableSource(path.parent, rows.names, kind == CSV, is_safe=is_safe, schema=schema)
    table = create_table(kind, path, source)
    try:
        for add in (table.learn, table.write) if table.must_learn else (table.write,):
            remaining = iter(rows)
            while batch := list(islice(remaining, LINES_AT_ONCE)):
                add(batch)
        table.publish()
    except BaseException:
        table.discard()
        raise
    return path


def _copy(path: Path, wanted: Wanted, protected: Sequence[str]) -> None:
    with open_output(wanted, protected) as out, path.open("rb") as file:
        while piece := file.read(COPY_BYTES):
            out.write(piece)
