"""The source files of a dataset and their formats."""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw, Struct

from batchmill.datasets import layout, readers
from batchmill.datasets.inflate import blocks
from batchmill.datasets.sources import bytes_of_short, describe, find_objects, open_file
from batchmill.errors import InvalidDataset
from batchmill.object_store.urls import is_object_url
from batchmill.types import DatasetSpec, SealedFile
from batchmill.wire.input_urls import is_input_url, is_web_url

if TYPE_CHECKING:
    import pyarrow


FORMAT_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}
CODEC_SUFFIXES = {".gz": "gzip", ".zst": "zstd"}


def kind(path: str) -> tuple[str | None, str | None]:
    """The format (jsonl, csv, parquet) and compression (gzip, zstd) by the suffixes of a file; None: unknown."""
    stem, suffix = os.path.splitext(os.path.basename(path).lower())
    codec = CODEC_SUFFIXES.get(suffix)
    if codec is not None:
        suffix = os.path.splitext(stem)[1]
    return FORMAT_SUFFIXES.get(suffix), codec


def resolve(patterns: list[str], leave_out: Collection[str] = ()) -> list[str]:
    """The absolute paths of the files that `patterns` name or match, each once, in name order.

    A pattern is a file of a web server; or a file, a folder or a glob, of this machine or in an object store, where the
    URL of a folder ends with a slash. A folder matches the files directly in it that have a known suffix and are not
    hidden. Folders and globs skip the files of `leave_out`; a file that is named itself is never skipped.
    Raises: InvalidDataset when a pattern matches no file.
    """
    if not patterns:
        raise InvalidDataset("no input file was named", code="no_input")
    skipped = {path if is_input_url(path) else os.path.realpath(path) for path in leave_out}
    return sorted({path for pattern in patterns for path in _files(pattern, skipped)})


def _files(pattern: str, skipped: set[str]) -> list[str]:
    if is_object_url(pattern):
        return find_objects(pattern, skipped, is_dataset_name)
    if is_web_url(pattern):
        return [pattern]
    return list(map(os.path.abspath, _local_files(pattern, skipped)))


def _local_files(pattern: str, skipped: set[str]) -> list[str]:
    if os.path.isdir(pattern):
        paths = [os.path.join(pattern, name) for name in os.listdir(pattern) if is_dataset_name(name)]
        paths = [path for path in paths if os.path.isfile(path)]
        suffixes = ", ".join([*FORMAT_SUFFIXES, *CODEC_SUFFIXES])
        missing = f"the folder {pattern} holds no file of a dataset (known suffixes: {suffixes})"
    elif os.path.lexists(pattern):
        return [pattern]
    elif glob.has_magic(pattern):
        paths = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
        missing = f"no file matches {pattern}"
    else:
        raise InvalidDataset(f"there is no file {pattern}", code="no_input")
    paths = [path for path in paths if os.path.realpath(path) not in skipped]
    if not paths:
        raise InvalidDataset(missing, code="no_input")
    return paths


def is_dataset_name(name: str) -> bool:
    """Whether a folder's file is a part of a dataset by its name."""
    return not name.startswith(".") and kind(name)[0] is not None


FORMATS = {"openai": "jsonl", "jsonl": "jsonl", "csv": "csv", "parquet": "parquet"}  # of the rows -> of the file
CONVERTED = ("csv", "parquet")  # formats that a module of `readers` converts to rows
MAGIC = ((b"PAR1", "parquet"), (b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
HEAD_BYTES = 4096  # that show what a file is
UTF16 = (b"\xff\xfe", b"\xfe\xff")
NAMES_ROWS_MAX = 1000  # first rows that are searched for columns that the first one lacks
FIRST_ROWS_MAX = 100  # lines that may be unreadable before the first readable one
BLANK_LINES_MAX = 1_000_000  # before the first row
FIRST_BYTES_MAX = 64 * 1024 * 1024  # of the first rows; no more is unpacked to detect the format

REMEMBERED_MAX = 64  # files of which it is remembered what they hold

_members = msgspec.json.Decoder(dict[str, Raw]).decode


class SourceFile(Struct, frozen=True):
    """A file of a dataset and how to read it."""

    path: str
    format: str  # jsonl, csv, parquet
    codec: str | None  # gzip, zstd
    seen: SealedFile | None = None  # what it was then

    @property
    def size_bytes(self) -> int:
        """Its size then."""
        return 0 if self.seen is None else self.seen.size_bytes


class Detected(Struct, frozen=True):
    """The detected format of a dataset; only its first row has been read."""

    format: str  # openai, jsonl, csv, parquet
    columns: list[str]  # of a table; empty for OpenAI rows


def detect(spec: DatasetSpec, files: Sequence[SealedFile] | None = None) -> Detected:
    """Detect the format and the columns of a dataset. Args: files: as of `classify`.

    Raises: InvalidDataset (`format_mismatch`, `unknown_format`, `empty_file`, `not_jsonl`, `invalid_encoding` …).
    """
    return _detected(classify(spec, files), spec)


def _detected(sources: list[SourceFile], spec: DatasetSpec) -> Detected:
    if not sources:
        raise InvalidDataset(f"{_describe_paths(spec.paths)} is empty: there is nothing to run", code="empty_file")
    first = sources[0]
    if first.format in CONVERTED:
        return Detected(first.format, readers.load(first.format).columns(first, spec))
    names = _first_names(tuple(sources), spec.line_bytes_max)
    if spec.format == "openai" or (spec.format is None and _is_openai(names)):
        return Detected("openai", [])
    return Detected("jsonl", list(names or ()))


def detect_format(spec: DatasetSpec) -> str:
    """`detect(spec).format`, without the columns of Parquet: what reads them takes longer to import than to use.

    Raises: as `detect`; Parquet that cannot be read is refused where it is sealed.
    """
    sources = classify(spec)
    return "parquet" if sources and sources[0].format == "parquet" else _detected(sources, spec).format


def names_at_first(spec: DatasetSpec) -> tuple[str, ...]:
    """The field names of the first rows of a JSONL dataset, in order; unreadable rows are skipped."""
    names: dict[str, None] = {}
    for row in islice(_first_rows(classify(spec), spec), NAMES_ROWS_MAX):
        names.update(dict.fromkeys(row))
    return tuple(names)


def _first_rows(sources: list[SourceFile], spec: DatasetSpec) -> Iterator[dict[str, Raw]]:
    seen = 0
    for source in sources:
        for line in lines_of(source, spec.line_bytes_max):
            seen += len(line) + 1
            if seen > FIRST_BYTES_MAX + spec.line_bytes_max:
                return
            with suppress(msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
                yield _members(line)


def classify(spec: DatasetSpec, files: Sequence[SealedFile] | None = None) -> list[SourceFile]:
    """Every file that is not empty, and how to read it. Raises: InvalidDataset.

    Args: files: those of the dataset, as they were just seen; None: they are looked at.
    """
    if spec.format is not None and spec.format not in FORMATS:
        raise InvalidDataset(
            f"unknown format {spec.format!r}; the formats are {', '.join(FORMATS)}", code="unknown_format"
        )
    if not spec.paths:
        raise InvalidDataset("no input file was named", code="no_input")
    files = list(map(describe, spec.paths)) if files is None else files
    sources = [_classify_file(file, spec.format) for file in files if file.size_bytes]
    for source in sources:
        if source.format != sources[0].format:
            raise InvalidDataset(
                f"{sources[0].path} is {sources[0].format} and {source.path} is {source.format}: "
                "the files of a dataset must have one format",
                code="format_mismatch",
            )
    return sources


def columns_schema(home: Path) -> pyarrow.Schema | None:
    """The Arrow schema of the file that was sealed into `home`; None: its format has no types."""
    if not (home / layout.SCHEMA).exists():
        return None
    return readers.load("parquet").read_schema(home / layout.SCHEMA)


def lines_of(source: SourceFile, line_bytes_max: int) -> Iterator[bytes]:
    """Yield the lines of a source, without the BOM; a line that is too long comes in pieces."""
    rest = b""
    first = True
    short = None if source.codec is not None or source.seen is None else bytes_of_short(source.seen)
    for block in blocks(source.path, source.codec, lambda _: None) if short is None else (short,):
        rest += block
        if first and len(rest) >= len(layout.BOM):
            rest, first = rest.removeprefix(layout.BOM), False
        *lines, rest = rest.split(b"\n")
        yield from lines
        if len(rest) > line_bytes_max:
            yield rest
            rest = b""
    if rest:
        yield rest


@lru_cache(maxsize=REMEMBERED_MAX)
def _classify_file(seen: SealedFile, row_format: str | None) -> SourceFile:
    """How to read a file. What was seen of one is remembered: a short job asks several times."""
    path = seen.path
    head = bytes_of_short(seen)
    if head is None:
        with open_file(path) as file:
            head = file.read(HEAD_BYTES)
    head = head[:HEAD_BYTES]
    named_format, named_codec = kind(path)
    content = next((name for magic, name in MAGIC if head.startswith(magic)), None)
    codec = content if content in ("gzip", "zstd") else None
    if named_codec != codec and (named_codec is not None or named_format is not None):
        data = f"{codec} data" if codec else f"no {named_codec} data"
        raise InvalidDataset(f"{path} holds {data}, but its name says otherwise: rename it", code="format_mismatch")
    file_format = FORMATS[row_format] if row_format is not None else named_format
    if file_format is None and codec is None:
        is_json = head.removeprefix(layout.BOM).lstrip()[:1] == b"{"
        file_format = "parquet" if content == "parquet" else "jsonl" if is_json else None
    if file_format is None:
        raise InvalidDataset(
            f"the format of {path} is unknown: name it with --format {'|'.join(FORMATS)}", code="unknown_format"
        )
    if (content == "parquet") != (file_format == "parquet"):
        fact = "is a Parquet file" if content == "parquet" else "is not a Parquet file"
        raise InvalidDataset(f"{path} {fact}, but its format is {file_format} by name", code="format_mismatch")
    if head.startswith(UTF16) and file_format != "parquet":
        raise InvalidDataset(f"{path} is UTF-16; convert it with `iconv -f UTF-16 -t UTF-8`", code="invalid_encoding")
    return SourceFile(path, file_format, codec, seen)


@lru_cache(maxsize=REMEMBERED_MAX)
def _first_names(sources: tuple[SourceFile, ...], line_bytes_max: int) -> tuple[str, ...] | None:
    """The field names of the first readable row; None if none of the first rows is readable. As `_classify_file`."""
    unreadable = blank = seen = 0
    for source in sources:
        for line in lines_of(source, line_bytes_max):
            seen += len(line)
            if not line.strip():
                blank += 1
                if blank > BLANK_LINES_MAX or seen > FIRST_BYTES_MAX + line_bytes_max:
                    raise _no_rows(source.path)
                continue
            if unreadable == 0:
                _refuse_other_json(source.path, line)
            try:
                return tuple(_members(line))
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
                unreadable += 1
            if unreadable == FIRST_ROWS_MAX or seen > FIRST_BYTES_MAX + line_bytes_max:
                return None
    return None


def _no_rows(path: str) -> InvalidDataset:
    return InvalidDataset(
        f"{path} begins with more than {BLANK_LINES_MAX:,} blank lines, or {FIRST_BYTES_MAX:,} bytes of them: is it "
        "JSONL?",
        code="not_jsonl",
    )


def _refuse_other_json(path: str, line: bytes) -> None:
    """Refuse a JSON array, and an object over many lines."""
    start = b"".join(line[:4096].split())[:2]
    if start in (b"[", b"[{"):
        raise InvalidDataset(
            f"{path} is a JSON array; make it JSONL, one object a line, with `jq -c '.[]'`", code="not_jsonl"
        )
    if start == b"{":
        raise InvalidDataset(
            f"{path} holds an object over many lines; make it JSONL, one object a line, with `jq -c .`",
            code="not_jsonl",
        )


def _is_openai(names: tuple[str, ...] | None) -> bool:
    """Whether rows are requests. If the first row is unreadable they are, so that every flaw is reported."""
    if names is None:
        return True
    return {"url", "body"} <= set(names) or ("custom_id" in names and ("url" in names or "body" in names))


def _describe_paths(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"every one of {len(paths)} files"
