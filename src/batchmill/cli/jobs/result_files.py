"""Results written in the form that a file's name says, whatever form the job wrote them in; and those that failed."""

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
def written_whole(path: str, kept: Sequence[str]) -> Iterator[BinaryIO]:
    """What is written gets its name at the end; until then what was there stays. A device or pipe is written as it is.

    Args: kept: files that must not be written over.
    Raises: InvalidInput when `path` is one of them or cannot be written; BatchmillError when the disk is full.
    """
    target = Path(os.path.realpath(path))
    for own in kept:
        if target == Path(os.path.realpath(own)) or _is_same(target, own):
            raise InvalidInput(f"{path} belongs to the job itself: choose another name", code="output_is_input")
    is_special = target.exists() and not target.is_file()
    part = target if is_special else target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        out = open(part, "wb" if is_special else "xb")  # noqa: SIM115 - it is closed below
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}", code="invalid_output") from None
    try:
        with _full_disk_named(path), out:
            yield out
        if not is_special:
            part.replace(target)
    finally:
        if not is_special:
            part.unlink(missing_ok=True)


def _is_same(target: Path, own: str) -> bool:
    try:
        return os.path.samefile(target, own)
    except OSError:  # one of them is not there
        return False


@contextlib.contextmanager
def _full_disk_named(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise BatchmillError(f"there is no room to write {path}: {error.strerror}", code="storage_full") from error


CODECS = {".gz": "gzip", ".zst": "zstd"}
FOREIGN = frozenset((".arrow", ".avro", ".feather", ".json", ".orc", ".pkl", ".tsv", ".xls", ".xlsx", ".zip"))
LINES_TOGETHER = 1000
CELL_BYTES_MAX = 1024 * 1024 * 1024  # as lines of input files at most
JSONL, CSV, PARQUET = "jsonl", "csv", "parquet"

_encode = msgspec.json.Encoder(enc_hook=str).encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def kind_of(name: str) -> tuple[str, str]:
    """(jsonl, csv, parquet, or "" where the name says nothing; "", ".gz" or ".zst"). Raises: InvalidInput."""
    suffixes = [each.lower() for each in Path(name).suffixes]
    packed = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED else ""
    last = suffixes[-1] if suffixes else ""
    if last in FOREIGN:
        raise InvalidInput(
            f"results cannot be written as {last[1:]}, which {name} says: end it in {', '.join(KINDS)}",
            code="invalid_output",
        )
    return KINDS.get(last, ""), packed


def must_convert(name: str, output: str) -> bool:
    """Whether results in a file of this name are to become something else for `output`. Raises: InvalidInput."""
    (had, had_packed), (wanted, packed) = kind_of(name), kind_of(output)
    if not wanted or (had, had_packed) == (wanted, packed):
        return False
    if packed:
        plain = output[: -len(packed)]
        raise InvalidInput(f"{output} would be packed anew: name it {plain}, and pack it then", code="invalid_output")
    return True


async def write_as(
    name: str, pieces: AsyncIterator[bytes], output: str | None, kept: Sequence[str], *, only_failed: bool
) -> int:
    """Write results of a file of this name in the form that `output` says, on standard output as JSON lines.

    Returns: how many rows were written. Raises: InvalidInput for rows that such a file cannot hold.
    """
    kind = kind_of(output)[0] if output is not None else ""
    folder = Path(os.path.realpath(output)).parent if output is not None else None
    if folder is not None and not os.access(folder, os.W_OK):
        folder = None  # a device, as /dev/stdout is: what is made first lies with the temporary files
    with tempfile.TemporaryDirectory(dir=folder, prefix=".batchmill-results-") as made:
        source = Path(made, "source")
        with source.open("wb") as file:
            async for piece in pieces:
                file.write(piece)
        lines = lambda: _chosen(_lines(source, name), only_failed)  # noqa: E731
        if kind not in (CSV, PARQUET):
            return _copy_lines(lines(), output, kept)
        rows = _make_table(lines, Path(made, f"table.{kind}"), output or "")
        with written_whole(output or "", kept) as out, Path(made, f"table.{kind}").open("rb") as file:
            while piece := file.read(LINES_TOGETHER * LINES_TOGETHER):
                out.write(piece)
        return rows


def _copy_lines(lines: Iterator[bytes], output: str | None, kept: Sequence[str]) -> int:
    if output is not None:
        with written_whole(output, kept) as out:
            return _write_lines(lines, out)
    return _write_lines(lines, sys.stdout.buffer)


def _write_lines(lines: Iterator[bytes], out: BinaryIO) -> int:
    rows = 0
    for line in lines:
        out.write(line + b"\n")
        rows += 1
    return rows


def _make_table(lines: Callable[[], Iterator[bytes]], path: Path, output: str) -> int:
    check_kind(output, JSONL)  # says what is not installed
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
        for act in (table.learn, table.write) if table.must_learn else (table.write,):
            each = lines()
            while some := list(islice(each, LINES_TOGETHER)):
                act(some)
        table.publish()
    except BaseException:
        table.discard()
        raise
    return rows


def _chosen(lines: Iterator[bytes], only_failed: bool) -> Iterator[bytes]:
    return (line for line in lines if _has_failed(line)) if only_failed else lines


def _has_failed(line: bytes) -> bool:
    """Of a table's row, or of an OpenAI result line."""
    members = _decode(line)
    if members.get("error") is not None:
        return True
    reply = None if "output" in members else members.get("response")
    return isinstance(reply, dict) and reply.get("status_code", 200) >= 400


def _lines(path: Path, name: str) -> Iterator[bytes]:
    """Every row of a result file as a JSON object."""
    kind, packed = kind_of(name)
    if kind == PARQUET:
        yield from _parquet_lines(path)
        return
    found = _split(blocks(str(path), CODECS.get(packed), lambda _: None))
    yield from found if kind != CSV else _csv_lines(found)


def _split(pieces: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    if rest:
        yield rest


def _csv_lines(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Cells are text; where a table has nothing in `output` or `error` they are empty, and mean null."""
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
    for row in readers.load(PARQUET).values(path, LINES_TOGETHER):
        yield _encode(row)
