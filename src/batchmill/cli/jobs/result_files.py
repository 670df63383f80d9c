"""Writes results in the format of a file name, whatever the format of the job's own files; or only the failed rows."""

from __future__ import annotations

import contextlib
import csv
import errno
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from batchmill.datasets import readers
from batchmill.datasets.inflate import blocks
from batchmill.errors import BatchmillError, InvalidInput
from batchmill.jobs.results.gathering import TableSource, create_table
from batchmill.jobs.results.results import COMPRESSED, KINDS, check_kind

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def write_atomically(path: str, protected: Sequence[str]) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` at the end, if nothing fails. A device or pipe is written directly.

    Args: protected: files that must not be overwritten.
    Raises: InvalidInput when `path` is one of them or cannot be written; BatchmillError when the disk is full.
    """
    target = Path(os.path.realpath(path))
    for protected_path in protected:
        if target == Path(os.path.realpath(protected_path)) or _is_same(target, protected_path):
            raise InvalidInput(f"{path} belongs to the job itself: choose another name", code="output_is_input")
    is_special = target.exists() and not target.is_file()
    part = target if is_special else target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        out = open(part, "wb" if is_special else "xb")  # noqa: SIM115 - it is closed below
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}", code="invalid_output") from None
    try:
        with _report_full_disk(path), out:
            yield out
        if not is_special:
            part.replace(target)
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


CODECS = {".gz": "gzip", ".zst": "zstd"}
UNSUPPORTED = frozenset((".arrow", ".avro", ".feather", ".json", ".orc", ".pkl", ".tsv", ".xls", ".xlsx", ".zip"))
LINES_AT_ONCE = 1000
CELL_BYTES_MAX = 1024 * 1024 * 1024  # the most for a line of an input file
JSONL, CSV, PARQUET = "jsonl", "csv", "parquet"

_encode = msgspec.json.Encoder(enc_hook=str).encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def kind_of(name: str) -> tuple[str, str]:
    """(jsonl, csv, parquet, or "" if unknown; "", ".gz" or ".zst") by the name of a file. Raises: InvalidInput."""
    suffixes = [each.lower() for each in Path(name).suffixes]
    codec = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED else ""
    last = suffixes[-1] if suffixes else ""
    if last in UNSUPPORTED:
        raise InvalidInput(
            f"results cannot be written as {last[1:]}: end {name} in {', '.join(KINDS)}",
            code="invalid_output",
        )
    return KINDS.get(last, ""), codec


def must_convert(name: str, output: str) -> bool:
    """Whether results in a file of this name must be converted for `output`. Raises: InvalidInput."""
    source, target = kind_of(name), kind_of(output)
    if not target[0] or source == target:
        return False
    if codec := target[1]:
        plain = output[: -len(codec)]
        raise InvalidInput(
            f"converted results are not compressed: write {plain}, then compress it", code="invalid_output"
        )
    return True


async def write_as(
    name: str, pieces: AsyncIterator[bytes], output: str | None, protected: Sequence[str], *, only_failed: bool
) -> int:
    """Write results from a file of this name in the format of `output`, or as JSON lines on standard output.

    Returns: the number of rows written. Raises: InvalidInput for rows that such a file cannot hold.
    """
    kind = kind_of(output)[0] if output is not None else ""
    folder = Path(os.path.realpath(output)).parent if output is not None else None
    if folder is not None and not os.access(folder, os.W_OK):
        folder = None  # a device such as /dev/stdout: use the folder for temporary files
    with tempfile.TemporaryDirectory(dir=folder, prefix=".batchmill-results-") as scratch:
        source = Path(scratch, "source")
        with source.open("wb") as file:
            async for piece in pieces:
                file.write(piece)
        lines = lambda: _select(_lines(source, name), only_failed)  # noqa: E731
        if kind not in (CSV, PARQUET):
            return _copy_lines(lines(), output, protected)
        rows = _make_table(lines, Path(scratch, f"table.{kind}"), output or "")
        with write_atomically(output or "", protected) as out, Path(scratch, f"table.{kind}").open("rb") as file:
            while piece := file.read(LINES_AT_ONCE * LINES_AT_ONCE):
                out.write(piece)
        return rows


def _copy_lines(lines: Iterator[bytes], output: str | None, protected: Sequence[str]) -> int:
    if output is not None:
        with write_atomically(output, protected) as out:
            return _write_lines(lines, out)
    return _write_lines(lines, sys.stdout.buffer)


def _write_lines(lines: Iterator[bytes], out: BinaryIO) -> int:
    rows = 0
    for line in lines:
        out.write(line + b"\n")
        rows += 1
    return rows


def _make_table(lines: Callable[[], Iterator[bytes]], path: Path, output: str) -> int:
    check_kind(output, JSONL)  # refuses a format whose package is not installed
    names: dict[str, None] = {}
    rows = 0
    for line in lines():
        members = _decode(line)
        if "output" not in members or "error" not in members:
            raise InvalidInput(
                f"these rows are not a table: results of OpenAI batch rows are JSON lines, so name {output} "
                f"{Path(output).with_suffix('.jsonl').name}",
                code="invalid_output",
            )
        names.update(dict.fromkeys(members))
        rows += 1
    columns = [each for each in names if each not in ("output", "error", "folded_from")]
    table = create_table(path.suffix[1:], path, TableSource(path.parent, columns, False, "folded_from" in names))
    try:
        for add in (table.learn, table.write) if table.must_learn else (table.write,):
            remaining = lines()
            while batch := list(islice(remaining, LINES_AT_ONCE)):
                add(batch)
        table.publish()
    except BaseException:
        table.discard()
        raise
    return rows


def _select(lines: Iterator[bytes], only_failed: bool) -> Iterator[bytes]:
    return (line for line in lines if _has_failed(line)) if only_failed else lines


def _has_failed(line: bytes) -> bool:
    """Whether a row of a table, or an OpenAI result line, is an error."""
    members = _decode(line)
    if members.get("error") is not None:
        return True
    reply = None if "output" in members else members.get("response")
    return isinstance(reply, dict) and reply.get("status_code", 200) >= 400


def _lines(path: Path, name: str) -> Iterator[bytes]:
    """Yield every row of a result file as a JSON object."""
    kind, codec = kind_of(name)
    if kind == PARQUET:
        yield from _parquet_lines(path)
        return
    lines = _split(blocks(str(path), CODECS.get(codec), lambda _: None))
    yield from lines if kind != CSV else _csv_lines(lines)


def _split(pieces: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    if rest:
        yield rest


def _csv_lines(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Yield CSV rows as JSON. Cells are text; an empty cell in `output`, `error` or `folded_from` is null."""
    limit = csv.field_size_limit(CELL_BYTES_MAX)
    try:
        records = csv.reader((f"{line.decode()}\n" for line in lines), strict=True)
        names = next(records, [])
        for cells in records:
            row: dict[str, Any] = dict(zip(names, cells, strict=True))
            for name in ("output", "error", "folded_from"):
                if row.get(name) == "":
                    row[name] = None
            yield _encode(row)
    finally:
        csv.field_size_limit(limit)


def _parquet_lines(path: Path) -> Iterator[bytes]:
    for row in readers.load(PARQUET).values(path, LINES_AT_ONCE):
        yield _encode(row)
