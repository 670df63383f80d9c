"""Seals a dataset: reads, checks, indexes and checksums every row once, and writes `seal.json` last.

It runs in a child process of the owner. Rows are processed in ranges, so that memory does not grow with the files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
from blake3 import blake3
from msgspec import Struct

from batchmill.datasets import layout, readers
from batchmill.datasets.checking.fan_out import VALIDATOR_DIED, InlineValidator, ValidatorPool, validators
from batchmill.datasets.checking.spans import DIFFERS, Checks, SpanReader
from batchmill.datasets.conversion import Additions, Material, Tables, convert, copy_sources, read_in_place
from batchmill.datasets.folders import Folder, Home, folder_of
from batchmill.datasets.formats import Detected, SourceFile, classify, detect, names_at_first
from batchmill.datasets.line_pieces import ADDED_BYTES_MAX
from batchmill.datasets.orders import KeepMedia, RangeEnd, SealOrder, SizeLimits, SourcePart, ValidatedChunk
from batchmill.datasets.sealed import SealedRows
from batchmill.datasets.sources import describe, open_source, unchanged
from batchmill.datasets.validation import ADAPTERS_MAX, check_form, column_flaw, constant_prompt, missing_column
from batchmill.errors import BatchmillError, InputChanged, InvalidDataset, InvalidRow, StorageFull
from batchmill.object_store.urls import is_object_url
from batchmill.optional import require
from batchmill.types import DatasetSpec, Seal, SealedFile
from batchmill.wire.native import SealReport
from batchmill.wire.rows.forms import Form, OpenAIForm, TableForm
from batchmill.wire.schemas.output_schema import VALIDATION

__all__ = ["SealOrder", "SealReport", "seal"]

COPY_SHARE = 0.5  # of the progress, if rows are copied or converted first


class Elsewhere(Struct):
    """What other machines have found out about the rows, how to get it, and what of it was wrong."""

    checks: Checks
    get: Callable[[str], bytes]  # an object. Raises: StorageFailed
    flaws: list[str] = []


class Survey(Struct, frozen=True):
    """What other machines need to check the rows of a dataset."""

    order: SealOrder
    parts: list[SourcePart]


def survey(order: SealOrder) -> Survey | None:
    """None: the rows are not read where they lie, as lines of objects, so other machines cannot check them.

    Raises: InvalidDataset, AuthRefused, StorageFailed.
    """
    spec = order.dataset
    order, _ = _described(order, None)
    sources = classify(spec)
    has_additions = isinstance(order.form, TableForm) and order.form.has_additions
    if (
        spec.copy
        or has_additions
        or not _is_plain(sources)
        or not all(is_object_url(source.path) for source in sources)
    ):
        return None
    return Survey(order, read_in_place([source.path for source in sources]).parts)


def seal_with_retry(
    order: SealOrder, home: Home, progress: Callable[[float], None], elsewhere: Elsewhere | None = None,
    keep: KeepMedia | None = None,
) -> SealReport:  # fmt: skip
    """Call `seal`, and once more if a validator died: something else may have killed it. Or if another machine finds
    something else in the rows than this one: then all of them are checked here.
    """
    try:
        return seal(order, home, progress, elsewhere, keep)
    except InvalidDataset as error:
        if error.code == DIFFERS and elsewhere is not None:
            elsewhere.flaws.append(error.message)
            elsewhere = None
        elif error.code != VALIDATOR_DIED:
            raise
    return seal(order, home, progress, elsewhere, keep)


def seal(
    order: SealOrder,
    home: Home,
    progress: Callable[[float], None],
    elsewhere: Elsewhere | None = None,
    keep: KeepMedia | None = None,
) -> SealReport:
    """Seal a dataset into `home`, which exists. The files of an earlier attempt are replaced.

    Args:
        progress: called with the share that is done, 0 to 1, every few MiB.
        keep: gets the files that cells of media columns name, if they are copied.

    Raises: InvalidDataset when a file as a whole cannot be read; InputChanged when one changes meanwhile; StorageFull.
    """
    folder = folder_of(home)
    try:
        return _seal(order, folder, progress, elsewhere, keep)
    except BatchmillError:
        clear(folder)  # the files of a refused dataset are useless
        raise
    except OSError as error:
        clear(folder)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"no space is left to seal the dataset in {folder.path}: {error.strerror}") from error
        raise


def _described(order: SealOrder, checks: Checks | None) -> tuple[SealOrder, Detected]:
    """The order with the files as they are now. Raises: InputChanged if others were checked elsewhere."""
    sources = [describe(path) for path in order.dataset.paths]
    seed = int.from_bytes(os.urandom(8))
    if checks is not None:
        seed = checks.id_seed
        for source, before in zip(sources, checks.files, strict=True):
            if source != before:
                raise _changed(source)
    detected = detect(order.dataset, sources)
    return msgspec.structs.replace(_with_form(order, detected), files=sources, id_seed=seed), detected


def _seal(
    order: SealOrder, folder: Folder, progress: Callable[[float], None], elsewhere: Elsewhere | None,
    keep: KeepMedia | None,
) -> SealReport:  # fmt: skip
    order, detected = _described(order, None if elsewhere is None else elsewhere.checks)
    sources = order.files
    clear(folder)
    steps = _ProgressSteps(progress)
    size_limits = SizeLimits(order, folder.path, sum(source.size_bytes for source in sources), steps.repeat)
    if isinstance(order.form, TableForm) and order.form.has_additions:
        with _additions(order, order.form, detected, folder.on_disk(), keep) as additions:
            material, progress = _converted(order, detected, folder.on_disk(), steps.progress, size_limits, additions)
        return _seal_material(_with_longer_lines(order), detected, folder, material, progress, size_limits)
    if order.may_be_columnar and detected.format == "parquet" and not order.dataset.copy:
        report = _seal_columns(order, folder.on_disk(), steps.progress, size_limits, sources)
        if report is not None:
            return report
        clear(folder)
    return _seal_lines(order, detected, folder, steps.progress, size_limits, elsewhere)


def _seal_columns(
    order: SealOrder, home: Path, progress: Callable[[float], None], size_limits: SizeLimits, sources: list[SealedFile]
) -> SealReport | None:
    """Seal Parquet files where they lie; None: their rows must be converted."""
    spec = order.dataset
    files = classify(spec)
    sealed = readers.load("column_sealing").seal_columns(files, spec, home, progress, size_limits)
    if sealed is None:
        return None
    rows, digests = sealed
    if rows == 0:
        raise _no_rows()
    _check_unchanged(sources)
    paths = {source.path for source in files}
    kept = [source for source in sources if source.path in paths]
    new_seal = Seal(
        rows=rows,
        bytes=sum(file.size_bytes for file in kept),
        digest=blake3(b"".join(digests)).hexdigest(),
        format="parquet",
        columns=detect(spec).columns,
        files=kept,
        sources=sources,
        is_columnar=True,
    )
    layout.write_seal(home, new_seal)
    return SealReport(new_seal, [], 0, 0)


def _no_rows() -> InvalidDataset:
    return InvalidDataset("the dataset has no rows: there is nothing to run", code="empty_file")


def _seal_lines(
    order: SealOrder, detected: Detected, folder: Folder, progress: Callable[[float], None], size_limits: SizeLimits,
    elsewhere: Elsewhere | None,
) -> SealReport:  # fmt: skip
    material, progress = _material(order, detected, folder, progress, size_limits)
    return _seal_material(order, detected, folder, material, progress, size_limits, elsewhere)


def _seal_material(
    order: SealOrder, detected: Detected, folder: Folder, material: Material, progress: Callable[[float], None],
    size_limits: SizeLimits, elsewhere: Elsewhere | None = None,
) -> SealReport:  # fmt: skip
    sources = order.files
    with Tables(folder, order, material, size_limits) as tables:
        digests, adapters = _check_rows(order, material, tables, progress, elsewhere)
        if tables.rows == 0:
            raise _no_rows()
        if material.converted:
            digests = [digest for source in sources for digest in _digests(source)]
        _check_unchanged([*sources, *material.files])
        new_seal = Seal(
            rows=tables.rows,
            bytes=sum(file.size_bytes for file in material.files),
            digest=blake3(b"".join(digests)).hexdigest(),
            format=detected.format,
            columns=detected.columns,
            files=material.files,
            sources=sources,
        )
        report = tables.finish(new_seal, _duplicates if detected.format == "openai" else None)
        return msgspec.structs.replace(report, adapters=sorted(adapters))


class _ProgressSteps:
    """Reports progress even if it is unchanged, so that the caller can check what was written since."""

    def __init__(self, progress: Callable[[float], None]) -> None:
        self._progress, self._share = progress, 0.0

    def progress(self, share: float) -> None:
        self._share = share
        self._progress(share)

    def repeat(self) -> None:
        self._progress(self._share)


def digest(paths: list[str]) -> str:
    """The `Seal.digest` that these files would have. Raises: InvalidDataset when one cannot be read."""
    return blake3(b"".join(block for path in paths for block in _digests(describe(path)))).hexdigest()


def clear(home: Home) -> None:
    """Remove the files of an interrupted or refused attempt, if there was one."""
    folder = folder_of(home)
    for name in folder.names():
        if name in layout.FILES or fnmatchcase(name, layout.COPIES):
            folder.remove(name)


def _with_form(order: SealOrder, detected: Detected) -> SealOrder:
    """Add the detected form of the rows to the order. Raises: InvalidDataset if they do not fit the order."""
    form = order.form
    if form is None:
        form = OpenAIForm() if detected.format == "openai" else TableForm()
    if isinstance(form, OpenAIForm) != (detected.format == "openai"):
        raise InvalidDataset(
            f"the rows are {'OpenAI requests' if detected.format == 'openai' else 'a table'}, which does not fit the "
            "order: a prompt needs the columns of a table",
            code="form_mismatch",
        )
    if isinstance(form, TableForm) and not form.makes_requests and order.default is None:
        raise InvalidDataset("the rows are a table, which names no model: name one", code="missing_model")
    if isinstance(form, TableForm) and not form.makes_requests and order.urls[order.default[0]] is not None:
        raise InvalidDataset(
            "the rows are a table, and the model needs requests: set how its columns become one with --prompt "
            '"… {column} …"',
            code="missing_prompt",
        )
    if form.schema is not None and require(f"{VALIDATION}:admits_nothing", "a schema")(form.schema):
        raise InvalidDataset("no value fits the schema: its conditions exclude each other", code="invalid_schema")
    order = msgspec.structs.replace(order, form=form)
    try:
        check_form(order)
    except InvalidRow as error:
        raise InvalidDataset(f"the rendered rows are not valid requests: {error.message}", code=error.code) from None
    if flaw := _table_flaw(order.dataset, form, detected):
        raise InvalidDataset(flaw.message, code=flaw.code)
    return order


def _table_flaw(spec: DatasetSpec, form: Form, detected: Detected) -> InvalidRow | None:
    """The flaw of the columns of a whole table, reported once, not for every row; None: there is none.

    Rows of a JSONL table may differ: a column counts as missing in the table only if none of the first rows has it.
    """
    if isinstance(form, TableForm) and (flaw := constant_prompt(tuple(detected.columns), form)):
        return flaw
    if detected.format in ("csv", "parquet"):
        return column_flaw(tuple(detected.columns), form)
    if not isinstance(form, TableForm) or set(form.columns()) <= set(detected.columns):
        return None
    names = names_at_first(spec)
    return missing_column(names, form) if names else None


def _material(
    order: SealOrder, detected: Detected, folder: Folder, progress: Callable[[float], None], size_limits: SizeLimits
) -> tuple[Material, Callable[[float], None]]:
    """The files to read, and the progress callback for reading them."""
    spec = order.dataset
    sources = classify(spec, order.files)
    paths = [source.path for source in sources]
    plain = _is_plain(sources)
    if plain and not spec.copy:
        return read_in_place(paths), progress

    def converting(share: float) -> None:
        progress(share * COPY_SHARE)

    def reading(share: float) -> None:
        progress(COPY_SHARE + share * (1 - COPY_SHARE))

    if plain:
        return copy_sources(paths, folder.on_disk(), converting), reading
    return _converted(order, detected, folder.on_disk(), progress, size_limits)


def _converted(
    order: SealOrder, detected: Detected, home: Path, progress: Callable[[float], None], size_limits: SizeLimits,
    additions: Additions | None = None,
) -> tuple[Material, Callable[[float], None]]:  # fmt: skip
    """Convert every source to `rows.jsonl`. Returns: as `_material`."""
    spec = order.dataset

    def converting(share: float) -> None:
        progress(share * COPY_SHARE)

    material = convert(classify(spec), spec, detected.columns, home, converting, size_limits, additions)
    return material, lambda share: progress(COPY_SHARE + share * (1 - COPY_SHARE))


def _additions(
    order: SealOrder, form: TableForm, detected: Detected, home: Path, keep: KeepMedia | None
) -> AbstractContextManager[Additions]:
    """What adds prompts and media to rows. Raises: InvalidDataset if a template does not fit the columns."""
    columns = list(names_at_first(order.dataset)) if detected.format == "jsonl" else detected.columns
    return readers.load("additions").RowAdditions(order, form, columns, home, keep)


def _with_longer_lines(order: SealOrder) -> SealOrder:
    """The order for rows with prompts: those of the input that are too long were marked while they were rendered."""
    most = order.dataset.line_bytes_max + ADDED_BYTES_MAX
    return msgspec.structs.replace(order, dataset=msgspec.structs.replace(order.dataset, line_bytes_max=most))


def _is_plain(sources: list[SourceFile]) -> bool:
    """Whether the lines of the files are rows."""
    return all(source.format == "jsonl" and source.codec is None for source in sources)


@contextmanager
def _checking(
    order: SealOrder, bytes_total: int, elsewhere: Elsewhere | None
) -> Iterator[InlineValidator | ValidatorPool | SpanReader]:
    if elsewhere is None:
        with validators(order, bytes_total) as validator:
            yield validator
        return
    reader = SpanReader(order, elsewhere.checks, elsewhere.get)
    try:
        yield reader
    finally:
        elsewhere.flaws += reader.flaws


def _check_rows(
    order: SealOrder, material: Material, tables: Tables, progress: Callable[[float], None],
    elsewhere: Elsewhere | None,
) -> tuple[list[bytes], set[str]]:  # fmt: skip
    """Check every line and store the results. Returns: the digests of the ranges, and the adapters to fetch."""
    total = sum(part.end - part.start for part in material.parts)
    digests = []
    names: set[str] = set()
    adapters: set[str] = set()
    done = 0
    with _checking(order, total, elsewhere) as validator:
        for range_, result in validator.check(material.parts):
            match result:
                case ValidatedChunk():
                    tables.add(result, range_.part)
                case RangeEnd(digest=digest, names=new_names, adapters=new_adapters):
                    names.update(new_names)
                    _check_columns_max(names, order.columns_max)
                    adapters.update(new_adapters)
                    _check_adapters_max(adapters)
                    if not isinstance(validator, InlineValidator) and not digests and tables.has_ids:
                        readers.load("duplicates")  # imports numpy while the validators work
                    digests.append(digest)
                    done += range_.end - range_.start
                    progress(done / total)
    return digests, adapters


def _check_columns_max(names: set[str], columns_max: int | None) -> None:
    if columns_max is not None and len(names) > columns_max:
        raise InvalidDataset(
            f"the rows have more than {columns_max} different columns, too many for a table: write the results to a "
            ".jsonl file, which has no columns",
            code="too_many_columns",
        )


def _check_adapters_max(adapters: set[str]) -> None:
    if len(adapters) > ADAPTERS_MAX:
        raise InvalidDataset(
            f"the rows name more than {ADAPTERS_MAX:,} adapters of a model hub, such as {min(adapters)!r}. One job "
            "fetches no more: split the dataset, or register the adapters first",
            code="too_many_adapters",
        )


def _duplicates(dataset: Folder, rows: SealedRows) -> Iterator[tuple[int, int]]:
    return readers.load("duplicates").find(dataset, rows)


def _digests(source: SealedFile) -> Iterator[bytes]:
    with closing(open_source(source)) as file:
        for start in range(0, file.size_bytes, layout.RANGE_BYTES):
            yield blake3(file.read_at(start, start + layout.RANGE_BYTES)).digest()


def _check_unchanged(files: list[SealedFile]) -> None:
    for file in dict.fromkeys(files):
        if not unchanged(file):
            raise _changed(file)


def _changed(file: SealedFile) -> InputChanged:
    return InputChanged(f"{file.path} changed while it was read; run the command again")
