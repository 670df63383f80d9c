"""Results gathered in parts, several at once: one index, then a child process for each range of rows.

`index_offloaded` reads every outcome once and keeps where each is; `part_offloaded` writes one part from that.
`publish_offloaded` writes the manifest. A part is complete and durable before the manifest names it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from batchmill import faults
from batchmill.datasets.sealed import load_seal
from batchmill.errors import LedgerBroken, StorageFailed, Unavailable
from batchmill.jobs.ledger.plan import Progress
from batchmill.jobs.results.gathering import (
    OTHER,
    Index,
    Tally,
    Windows,
    create_table,
    open_index,
    source_of,
)
from batchmill.jobs.results.parts.index_slices import INDEX, SlicedIndex
from batchmill.jobs.results.parts.output_folders import (
    Part,
    PartManifest,
    open_folder,
    part_name,
    publish_manifest,
    seen_manifest,
)
from batchmill.jobs.results.parts.part_orders import Indexed, PartOrder, PartsOrder, PublishOrder, Written
from batchmill.jobs.results.result_lines import LineFile
from batchmill.jobs.results.results import CAUSES_MAX, GatherOrder, Learned, Manifest, ResultFile
from batchmill.jobs.results.row_windows import RowIndex, RowWindows, SavedRowIndex
from batchmill.optional import require
from batchmill.owned_files import OwnedFiles, discard
from batchmill.owner_term import files_term_at

ERRORS_SHOWN = "errors-*.jsonl"


def index_offloaded(order: bytes, progress: Progress) -> bytes:
    """Offloaded: PartsOrder in, Indexed out.

    Raises: LedgerBroken, as `gathering.gather`; InvalidInput (`output_taken`).
    """
    request = msgspec.json.decode(order, type=PartsOrder)
    try:
        return msgspec.json.encode(_index(request, progress))
    except Unavailable as error:
        raise StorageFailed(f"the manifest cannot be read: {error.message}; then resume the job") from None


def _index(request: PartsOrder, progress: Progress) -> Indexed:
    output = request.gather.output
    seen = seen_manifest(
        open_folder(output), output,
        job=request.job, generation=request.generation, replaced_job=request.replaced_job,
    )  # fmt: skip
    scratch, gather = Path(request.scratch), request.gather
    for old in scratch.parent.glob("parts-*"):  # of an attempt that was cut off
        OwnedFiles(files_term_at(request.term)).remove_tree(old)
    scratch.mkdir()
    index, windows = open_index(gather, progress)
    try:
        if index.missing and gather.unrun is None:
            raise LedgerBroken(f"{index.missing} of {index.rows} rows have no outcome", code="row_missing")
        if isinstance(index, RowIndex):
            index.save(scratch)
        return Indexed(
            index.rows, len(index.followers), index.refused, index.missing, seen, _must_learn(request.kind, gather),
            is_saved=isinstance(index, RowIndex),
        )  # fmt: skip
    finally:
        windows.close()
        index.segments.close()


def part_offloaded(order: bytes, progress: Progress) -> bytes:
    """Offloaded: PartOrder in, Written out. The part is in its place; nothing names it yet."""
    request = msgspec.json.decode(order, type=PartOrder)
    try:
        return msgspec.json.encode(_write_part(request, progress))
    except Unavailable as error:
        raise StorageFailed(f"the results cannot be uploaded: {error.message}; then resume the job") from None


def learn_offloaded(order: bytes, progress: Progress) -> bytes:
    """Offloaded: PartOrder in, Learned out: what is to be known of the rows of all parts before one is written."""
    request = msgspec.json.decode(order, type=PartOrder)
    index, windows = _open_range(request)
    try:
        if not isinstance(windows, RowWindows):
            output_column = require("batchmill.jobs.results.column_windows:OutputColumn", "results as Parquet")
            return msgspec.json.encode(Learned(output=output_column(index, windows.reader).learned()))
        gather = request.parts.gather
        scratch = (
            Path(request.parts.scratch) / f"learned-{request.number}.{request.parts.kind}"
        )  # nothing is written to it
        table = create_table(request.parts.kind, scratch, source_of(Path(gather.dataset), gather.form, windows))
        try:
            for window in windows:
                table.learn(window.lines)
            return msgspec.json.encode(table.learned())
        finally:
            table.discard()
    finally:
        windows.close()
        index.segments.close()


def publish_offloaded(order: bytes, _: Progress) -> bytes:
    """Offloaded: PublishOrder in, Manifest out. It can run again after a crash."""
    request = msgspec.json.decode(order, type=PublishOrder)
    try:
        return msgspec.json.encode(_publish(request))
    except Unavailable as error:
        raise StorageFailed(f"the manifest cannot be written: {error.message}; then resume the job") from None


def _must_learn(kind: str, gather: GatherOrder) -> str:
    """As `Indexed.must_learn`."""
    seal = load_seal(Path(gather.dataset))
    if kind == "parquet":
        return "whole" if seal.is_columnar else "parts"
    return "parts" if kind == "csv" and seal.format not in ("csv", "parquet") else ""


def _open_range(order: PartOrder) -> tuple[Index, Windows]:
    parts, rows = order.parts, range(order.first, order.end)
    if order.slice is not None:
        index: RowIndex = SlicedIndex(order, Path(parts.scratch) / INDEX)
    elif load_seal(Path(parts.gather.dataset)).is_columnar:  # its index is made of the heads of blocks alone
        open_columns = require("batchmill.jobs.results.column_windows:open_columns", "results of Parquet")
        return open_columns(parts.gather, lambda _: None, rows=rows)
    else:
        index = SavedRowIndex(parts.gather, Path(parts.scratch))
    return index, RowWindows(parts.gather, index, rows=rows)


def _write_part(order: PartOrder, progress: Progress) -> Written:
    parts = order.parts
    folder = open_folder(parts.gather.output, parts.term)
    home = folder.writing_place(Path(parts.scratch))
    tally = Tally(parts.gather.form, order.end, progress, first=order.first)
    index, windows = _open_range(order)
    try:
        write = _write_lines if parts.kind == "jsonl" else _write_table
        found = write(order, home, index, windows, tally)
    finally:
        windows.close()
        index.segments.close()
    for file, _ in found:
        folder.put_part(Path(file.path))
    faults.point("after_part")
    part, *errors = [
        Part(Path(file.path).name, order.first, order.end, file.rows, file.bytes, digest) for file, digest in found
    ]
    return Written(part, errors[0] if errors else None, tally.failed, tally.causes)


Files = list[tuple[ResultFile, str]]  # the part, and its errors if they are apart and there are some; with digests


def _write_lines(order: PartOrder, home: Path, _: Index, windows: Windows, tally: Tally) -> Files:
    parts = order.parts
    errors_apart = parts.gather.form.errors_apart
    names = [part_name(prefix, order.number, parts.job, parts.attempt) for prefix in ("part", "errors")]
    digests = [hashlib.sha256(), hashlib.sha256()]
    files = [LineFile(home / name, digest) for name, digest in zip(names, digests, strict=True)]
    try:
        for window in windows:
            tally.count(window)
            failed = set(window.failed) if errors_apart else set()
            lines = window.lines
            if failed:
                files[1].write(b"".join([lines[number] for number in window.failed]), len(failed))
                lines = [line for number, line in enumerate(lines) if number not in failed]
            files[0].write(b"".join(lines), len(lines))
        tally.finish()
        kept = [file for number, file in enumerate(files) if number == 0 or file.rows]
        published = [file.publish() for file in kept]
    finally:
        for file in files:
            file.discard()
    return [(file, digest.hexdigest()) for file, digest in zip(published, digests, strict=False)]


def _write_table(order: PartOrder, home: Path, index: Index, windows: Windows, tally: Tally) -> Files:
    """A table with the columns and types that all parts have together."""
    parts, digest = order.parts, hashlib.sha256()
    path = home / part_name("part", order.number, parts.job, parts.attempt, parts.kind)
    if order.learned.output is not None:
        write = require("batchmill.jobs.results.parquet.column_parquet:write_part", "results as Parquet")
        file = write(
            path, index, windows, tally.count_columns,
            rows=order.end - order.first, known=order.learned.output, digest=digest,
        )  # fmt: skip
        tally.finish()
        return [(file, digest.hexdigest())]
    table = create_table(parts.kind, path, source_of(Path(parts.gather.dataset), parts.gather.form, windows), digest)
    try:
        table.know(order.learned)
        for window in windows:
            tally.count(window)
            table.write(window.lines)
        tally.finish()
        file = table.publish()
    finally:
        table.discard()
    return [(file, digest.hexdigest())]


def _publish(order: PublishOrder) -> Manifest:
    parts, indexed, output = order.parts, order.indexed, order.parts.gather.output
    _check_gapless(order.written, indexed.rows)
    failed = sum(each.failed for each in order.written)
    mine = PartManifest(
        parts.job, parts.generation, parts.attempt, indexed.rows, indexed.rows - failed, failed,
        [each.part for each in order.written], [each.errors for each in order.written if each.errors is not None],
    )  # fmt: skip
    folder = open_folder(output, parts.term)
    faults.point("before_manifest")
    counted = publish_manifest(folder, output, mine, indexed.seen, parts.replaced_job)
    discard(Path(parts.scratch))
    errors = _total(f"{output}{ERRORS_SHOWN}", counted.errors) if counted.errors else None
    return Manifest(
        _total(output, counted.parts), errors, rows=mine.rows, ok=mine.ok, failed=failed, folded=indexed.folded,
        rejected=indexed.rejected, unrun=indexed.unrun, causes=_merged(order.written),
    )  # fmt: skip


def _check_gapless(written: list[Written], rows: int) -> None:
    """Raises: LedgerBroken unless the parts are rows 0..N-1, each once."""
    at = 0
    for each in written:
        if each.part.first != at:
            raise LedgerBroken(f"the part {each.part.name} begins with row {each.part.first}, not {at}")
        at = each.part.end
    if at != rows:
        raise LedgerBroken(f"the parts have {at} rows of {rows}", code="row_missing")


def _total(path: str, parts: list[Part]) -> ResultFile:
    return ResultFile(path, sum(part.rows for part in parts), sum(part.bytes for part in parts))


def _merged(written: list[Written]) -> dict[str, tuple[int, str]]:
    causes: dict[str, tuple[int, str]] = {}
    for each in written:
        for code, (rows, sample) in each.causes.items():
            known = code if code in causes or len(causes) < CAUSES_MAX else OTHER
            before, first = causes.get(known, (0, sample))
            causes[known] = before + rows, first
    return causes
