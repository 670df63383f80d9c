"""Sealing: every row of a dataset read once, checked, indexed and checksummed; `seal.json` is written last.

It runs in a child of the owner. Memory does not grow with the files: rows are on their way in ranges.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from batchmill.datasets import layout, readers
from batchmill.datasets.conversion import Material, Tables, convert, copied, in_place
from batchmill.datasets.fan_out import VALIDATOR_DIED, Crew, validators
from batchmill.datasets.formats import Detected, classify, describe, detect, names_at_first, unchanged
from batchmill.datasets.orders import RangeEnd, SealOrder, SizeLimits, ValidatedChunk
from batchmill.datasets.sealed import SealedRows
from batchmill.datasets.validation import ADAPTERS_MAX, check_form, column_flaw, missing_column
from batchmill.errors import BatchmillError, InputChanged, InvalidDataset, InvalidRow, StorageFull
from batchmill.types import DatasetSpec, Seal, SealedFile
from batchmill.wire.forms import Form, OpenAIForm, TableForm
from batchmill.wire.native import SealReport

__all__ = ["SealOrder", "SealReport", "seal"]

COPY_SHARE = 0.5  # of the progress, where rows are copied or converted first


def seal_patiently(order: SealOrder, home: Path, progress: Callable[[float], None]) -> SealReport:
    """As `seal`; anew, once, where a validator died: it was killed from outside, perhaps."""
    try:
        return seal(order, home, progress)
    except InvalidDataset as error:
        if error.code != VALIDATOR_DIED:
            raise
    return seal(order, home, progress)


def seal(order: SealOrder, home: Path, progress: Callable[[float], None]) -> SealReport:
    """Seal a dataset into `home`, an existing directory; what an earlier attempt left there is replaced.

    Args: progress: called with the share that is done, 0 to 1, every few MiB.
    Raises: InvalidDataset when a file as a whole cannot be read; InputChanged when one changes meanwhile; StorageFull.
    """
    try:
        return _seal(order, home, progress)
    except BatchmillError:
        clear(home)  # the unpacked files of a refused dataset are useless
        raise
    except OSError as error:
        clear(home)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"no space is left to seal the dataset in {home}: {error.strerror}") from error
        raise


def _seal(order: SealOrder, home: Path, progress: Callable[[float], None]) -> SealReport:
    sources = [describe(path) for path in order.dataset.paths]
    detected = detect(order.dataset)
    order = _with_form(order, detected)
    clear(home)
    steps = _ProgressSteps(progress)
    allowance = SizeLimits(order, home, sum(source.size_bytes for source in sources), steps.again)
    material, progress = _material(order, detected, home, steps.progress, allowance)
    with Tables(home, order, material, allowance) as tables:
        digests, adapters = _check_rows(order, material, tables, progress)
        if tables.rows == 0:
            raise InvalidDataset("the dataset has no rows: there is nothing to run", code="empty_file")
        if material.converted:
            digests = [digest for source in sources for digest in _digests(source)]
        _see_unchanged([*sources, *material.files])
        sealed = Seal(
            rows=tables.rows,
            bytes=sum(file.size_bytes for file in material.files),
            sha256=hashlib.sha256(b"".join(digests)).hexdigest(),
            format=detected.format,
            columns=detected.columns,
            files=material.files,
            sources=sources,
        )
        report = tables.finish(sealed, _duplicates if detected.format == "openai" else None)
        return msgspec.structs.replace(report, adapters=sorted(adapters))


class _ProgressSteps:
    """Reports progress also while it does not change, so that the caller can check what was written meanwhile."""

    def __init__(self, progress: Callable[[float], None]) -> None:
        self._progress, self._share = progress, 0.0

    def progress(self, share: float) -> None:
        self._share = share
        self._progress(share)

    def again(self) -> None:
        self._progress(self._share)


def digest(paths: list[str]) -> str:
    """The `Seal.sha256` that these files would have. Raises: InvalidDataset when one cannot be read."""
    return hashlib.sha256(b"".join(block for path in paths for block in _digests(describe(path)))).hexdigest()


def clear(home: Path) -> None:
    """Remove what an attempt that was cut off, or refused, left here."""
    for name in layout.FILES:
        (home / name).unlink(missing_ok=True)
    for copy in home.glob(layout.COPIES):
        copy.unlink()


def _with_form(order: SealOrder, detected: Detected) -> SealOrder:
    """The order with the form that its rows have. Raises: InvalidDataset when they cannot have it."""
    form = order.form
    if form is None:
        form = OpenAIForm() if detected.format == "openai" else TableForm()
    if isinstance(form, OpenAIForm) != (detected.format == "openai"):
        raise InvalidDataset(
            f"the rows are {'OpenAI requests' if detected.format == 'openai' else 'a table'}, which does not fit what "
            "was asked for: a prompt is for the columns of a table",
            code="form_mismatch",
        )
    if isinstance(form, TableForm) and form.prompt is None and order.default is None:
        raise InvalidDataset("the rows are a table: say which model they are for", code="missing_model")
    if isinstance(form, TableForm) and form.prompt is None and order.urls[order.default[0]] is not None:
        raise InvalidDataset(
            "the rows are a table, and no requests by themselves: say how its columns become one with --prompt "
            '"… {column} …"',
            code="missing_prompt",
        )
    order = msgspec.structs.replace(order, form=form)
    try:
        check_form(order)
    except InvalidRow as error:
        raise InvalidDataset(f"the rendered rows are not valid requests: {error.message}", code=error.code) from None
    if flaw := _flaw_of_all(order.dataset, form, detected):
        raise InvalidDataset(flaw.message, code=flaw.code)
    return order


def _flaw_of_all(spec: DatasetSpec, form: Form, detected: Detected) -> InvalidRow | None:
    """What is wrong with the columns of a table as a whole: reported once, not for every row.

    Rows of a JSONL table may differ: only a column that none of the first has is missed in all of them.
    """
    if detected.format in ("csv", "parquet"):
        return column_flaw(tuple(detected.columns), form)
    if not isinstance(form, TableForm) or set(form.columns()) <= set(detected.columns):
        return None
    names = names_at_first(spec)
    return missing_column(names, form) if names else None


def _material(
    order: SealOrder, detected: Detected, home: Path, progress: Callable[[float], None], allowance: SizeLimits
) -> tuple[Material, Callable[[float], None]]:
    """What is read, and the progress that is left for reading it."""
    spec = order.dataset
    sources = classify(spec)
    paths = [source.path for source in sources]
    plain = all(source.format == "jsonl" and source.codec is None for source in sources)
    if plain and not spec.copy:
        return in_place(paths), progress

    def converting(share: float) -> None:
        progress(share * COPY_SHARE)

    def reading(share: float) -> None:
        progress(COPY_SHARE + share * (1 - COPY_SHARE))

    if plain:
        return copied(paths, home, converting), reading
    return convert(sources, spec, detected.columns, home, converting, allowance), reading


def _check_rows(
    order: SealOrder, material: Material, tables: Tables, progress: Callable[[float], None]
) -> tuple[list[bytes], set[str]]:
    """Have every line checked and keep what is found; the digests of the ranges, and adapters yet to be fetched."""
    total = sum(part.end - part.start for part in material.parts)
    digests = []
    names: set[str] = set()
    adapters: set[str] = set()
    done = 0
    with validators(order, total) as checkers:
        for range_, found in checkers.findings(material.parts):
            match found:
                case ValidatedChunk():
                    tables.add(found, range_.part)
                case RangeEnd(digest=digest, names=new, adapters=wanted):
                    names.update(new)
                    _see_few(names, order.columns_max)
                    adapters.update(wanted)
                    _see_few_adapters(adapters)
                    if isinstance(checkers, Crew) and not digests and tables.has_ids:
                        readers.load("duplicates")  # numpy loads while the validators are at work
                    digests.append(digest)
                    done += range_.end - range_.start
                    progress(done / total)
    return digests, adapters


def _see_few(names: set[str], columns_max: int | None) -> None:
    if columns_max is not None and len(names) > columns_max:
        raise InvalidDataset(
            f"the rows have more than {columns_max} different columns, too many for a table: name the output .jsonl, "
            "which needs none",
            code="too_many_columns",
        )


def _see_few_adapters(adapters: set[str]) -> None:
    if len(adapters) > ADAPTERS_MAX:
        raise InvalidDataset(
            f"the rows name more than {ADAPTERS_MAX:,} adapters of a model hub, such as {min(adapters)!r}, the most "
            "that are fetched for one job: split the dataset, or register them before",
            code="too_many_adapters",
        )


def _duplicates(hashes: Path, rows: SealedRows) -> Iterator[tuple[int, int]]:
    return readers.load("duplicates").find(hashes, rows)


def _digests(source: SealedFile) -> Iterator[bytes]:
    with open(source.path, "rb") as file:
        while block := file.read(layout.RANGE_BYTES):
            yield hashlib.sha256(block).digest()


def _see_unchanged(files: list[SealedFile]) -> None:
    for file in files:
        if not unchanged(file):
            raise InputChanged(f"{file.path} changed while it was read; run the command again")
