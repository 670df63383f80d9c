"""Names, orders and manifests of results, and which file format can hold which rows.

The rows themselves are written by `streaming_results` while a job runs, and by `gathering` when it has ended.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from batchmill.datasets.layout import PIECE_ROWS
from batchmill.errors import InvalidInput
from batchmill.jobs.ledger.files import is_folder
from batchmill.jobs.ledger.plan import Plan
from batchmill.jobs.results.parts.output_folders import check_folder, check_writable
from batchmill.object_store.urls import is_object_url, parse_url
from batchmill.types import RowError, Sample, SegmentPlace, SegmentRef
from batchmill.wire.rows.forms import Form

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
COLUMNS_MAX = 10_000  # of a table of results
CAUSES_MAX = 1000  # distinct error codes that are counted
COMPRESSED = (".gz", ".zst")
PART_KINDS = ("jsonl", "csv", "parquet")
STORED = ("jsonl", "csv", "parquet", "jsonl.gz", "jsonl.zst", "csv.gz", "csv.zst")  # what a job may keep with itself


class GatherOrder(Struct, frozen=True):
    """The input of gathering. Paths are absolute."""

    dataset: str  # folder of the sealed dataset
    plans: list[str]  # folders, by generation: the first names every row, later ones the rows that ran again
    segments: SegmentPlace
    committed: list[tuple[int, SegmentRef]]  # generation and range of every commit, the oldest generation first
    form: Form
    output: str
    is_numbered: bool = False  # of partial results: each line begins with the number of its row and a tab
    unrun: RowError | None = None  # what rows that never ran get; None: every row must have its outcome
    piece_rows: int = PIECE_ROWS  # of a job with more, what is known of each row is in files, not in memory
    moved: dict[str, str] = {}  # files of the dataset, or folders of them, that lie elsewhere here
    sample: Sample | None = None  # of incomplete results: only its rows


class ColumnKind(StrEnum):
    """What the values of a column are. JSON: of different types; each value is written as JSON text."""

    NULL = "null"
    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    TEXT = "text"
    INTS = "list of ints"
    VECTOR = "vector"  # list of numbers, not all of them ints
    TEXTS = "list of texts"  # this and the next: only of fields whose schema says so
    BOOLS = "list of bools"
    JSON = "json"
    # Not kinds of a column, but of a value on its way to one.
    LARGE = "large int"  # no float has it exactly
    LARGE_INTS = "list of large ints"
    EMPTY = "empty list"


class Learned(Struct, frozen=True):
    """What is known of the columns of a table of results once its rows were seen."""

    names: list[str] = []  # in order, without those that batchmill adds
    kinds: dict[str, list[str]] = {}  # column -> the kinds of its values
    output: tuple[bytes, str | None] | None = None  # of results that are columns: their Arrow schema, and their kind


def merged(learned: Sequence[Learned]) -> Learned:
    """What all parts of a table have together. Args: learned: in row order."""
    kinds: dict[str, set[str]] = {}
    for each in learned:
        for name, seen in each.kinds.items():
            kinds.setdefault(name, set()).update(seen)
    names = list(dict.fromkeys(name for each in learned for name in each.names))
    if len(names) > COLUMNS_MAX:
        raise too_many_columns(COLUMNS_MAX)
    output = next((each.output for each in learned if each.output is not None), None)
    return Learned(names, {name: sorted(seen) for name, seen in kinds.items()}, output)


def too_many_columns(most: int) -> InvalidInput:
    return InvalidInput(
        f"the rows have more than {most} columns: write the results as .jsonl, which needs none",
        code="too_many_columns",
    )


class ResultFile(Struct, frozen=True):
    """A published file."""

    path: str
    rows: int
    bytes: int


class Manifest(Struct, frozen=True):
    """What was published. `rows` = `ok` + `failed`."""

    output: ResultFile
    errors: ResultFile | None  # the rows that failed, where the form keeps them apart and there are some
    rows: int
    ok: int
    failed: int
    folded: int = 0  # rows that got another row's outcome
    rejected: int = 0  # of `failed`: refused by validation
    unrun: int = 0  # of `failed`: never ran
    causes: dict[str, tuple[int, str]] = {}  # error code -> (rows, one message)


def output_kind(path: Path | str) -> tuple[str, str]:
    """(jsonl, csv or parquet; "", ".gz" or ".zst") by the name of a result file. Raises: InvalidInput."""
    _, *endings = os.path.basename(path).lstrip(".").lower().split(".")
    suffixes = [f".{ending}" for ending in endings]
    packed = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED else ""
    kind = KINDS.get(suffixes[-1]) if suffixes else None
    if kind is None:
        raise InvalidInput(
            f"the name of the output {str(path)!r} does not say what to write: end it in {', '.join(KINDS)}, or in "
            "one of the first three with .gz or .zst behind it",
            code="invalid_output",
        )
    if kind == "parquet" and packed:
        raise InvalidInput(f"{str(path)!r}: Parquet is compressed inside; leave out {packed!r}", code="invalid_output")
    return kind, packed


def stored_name(output_format: str) -> str:
    """The name of results that stay with their job. Raises: InvalidInput."""
    if output_format not in STORED:
        raise InvalidInput(
            f"results cannot be written as {output_format!r}: one of {', '.join(STORED)}", code="invalid_output"
        )
    return f"results.{output_format}"


def written_name(output: str | None, output_format: str) -> str:
    """A name with the ending of what a job writes. Raises: InvalidInput."""
    if output is None:
        return stored_name(output_format)
    if is_folder(output) and output_format not in PART_KINDS:
        raise InvalidInput(
            f"parts cannot be written as {output_format!r}: one of {', '.join(PART_KINDS)}", code="invalid_output"
        )
    return f"{output}part.{output_format}" if is_folder(output) else output


def check_kind(name: str, format: str) -> None:
    """Whether results of a dataset of `format` can be of the kind that a file's name says. Raises: InvalidInput."""
    kind, _ = output_kind(name)
    if format == "openai" and kind != "jsonl":
        raise InvalidInput(
            f"results of OpenAI batch rows are JSONL: name the output {str(Path(name).with_suffix('.jsonl'))!r}, or "
            "give the input as a table",
            code="invalid_output",
        )
    if kind == "parquet" and find_spec("pyarrow") is None:
        raise InvalidInput(
            "writing Parquet needs pyarrow: pip install 'batchmill[parquet]', or name the output .csv or .jsonl",
            code="missing_dependency",
        )


def check_output(path: str, format: str, output_format: str = "jsonl") -> None:
    """Whether results of a dataset of `format` can be written to `path`. Raises: InvalidInput.

    Args: output_format: of the parts, if `path` is a folder.
    """
    check_kind(written_name(path, output_format), format)
    if is_folder(path):
        check_folder(path)
        return
    if is_object_url(path):
        errors_of(path)  # refuses a bucket
        return
    output = Path(path)
    if output.is_dir():
        raise InvalidInput(
            f"the output {path!r} is a folder: end it with a slash to write parts into it", code="invalid_output"
        )
    if not output.parent.is_dir():
        raise InvalidInput(
            f"the folder {str(output.parent)!r} of the output is not there: make it", code="invalid_output"
        )
    names = [output.name, *([errors_path(output).name] if format == "openai" else [])]
    check_writable(output.parent, max(len(os.fsencode(name)) for name in names))


def errors_path(output: Path) -> Path:
    """Where the rows that failed go: STEM.errors.jsonl beside the output."""
    _, packed = output_kind(output)
    stem = output.name[: len(output.name) - len(packed)].rpartition(".")[0]
    return output.with_name(f"{stem}.errors.jsonl")


def errors_of(output: str) -> str:
    """As `errors_path`, for an output that may be a URL. Raises: InvalidInput."""
    if not is_object_url(output):
        return str(errors_path(Path(output)))
    if not parse_url(output).key:
        raise InvalidInput(
            f"the output {output!r} is a bucket: name an object in it, or end it with a slash to write parts into it",
            code="invalid_output",
        )
    folder, _, name = output.rpartition("/")
    return f"{folder}/{errors_path(Path(name)).name}"


def can_stream(output: Path, plan: Plan) -> bool:
    """Whether results can be written while the first generation runs: blocks copied as they are, in file order."""
    same_order = not (plan.permuted or plan.followers or plan.rejected)
    return same_order and output_kind(output) == ("jsonl", "")
