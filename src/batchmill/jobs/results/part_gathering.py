"""Results gathered in parts, several at once: one index, then a child process for each range of rows.

`index_offloaded` reads every outcome once and keeps where each is; `part_offloaded` writes one part from that.
`publish_offloaded` writes the manifest. A part is complete and durable before the manifest names it.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import msgspec

from batchmill import faults
from batchmill.datasets.sealed import load_seal
from batchmill.errors import LedgerBroken, StorageFailed, Unavailable
from batchmill.jobs.ledger.plan import Progress
from batchmill.jobs.results.gathering import CAUSES_MAX, OTHER, Index, Tally, Windows, open_index
from batchmill.jobs.results.output_folders import (
    Part,
    PartManifest,
    open_folder,
    part_name,
    publish_manifest,
    seen_manifest,
)
from batchmill.jobs.results.part_orders import Indexed, PartOrder, PartsOrder, PublishOrder, Written
from batchmill.jobs.results.result_lines import LineFile
from batchmill.jobs.results.results import Manifest, ResultFile
from batchmill.jobs.results.row_windows import RowIndex, RowWindows, SavedRowIndex
from batchmill.optional import require

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
        shutil.rmtree(old)
    scratch.mkdir()
    index, windows = open_index(gather, progress)
    try:
        if index.missing and gather.unrun is None:
            raise LedgerBroken(f"{index.missing} of {index.rows} rows have no outcome", code="row_missing")
        if isinstance(index, RowIndex):
            index.save(scratch)
        return Indexed(index.rows, len(index.followers), index.refused, index.missing, seen)
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


def publish_offloaded(order: bytes, _: Progress) -> bytes:
    """Offloaded: PublishOrder in, Manifest out. It can run again after a crash."""
    request = msgspec.json.decode(order, type=PublishOrder)
    try:
        return msgspec.json.encode(_publish(request))
    except Unavailable as error:
        raise StorageFailed(f"the manifest cannot be written: {error.message}; then resume the job") from None


def _open_range(order: PartsOrder, rows: range) -> tuple[Index, Windows]:
    if load_seal(Path(order.gather.dataset)).is_columnar:  # its index is made of the heads of blocks alone
        open_columns = require("batchmill.jobs.results.column_windows:open_columns", "results of Parquet")
        return open_columns(order.gather, lambda _: None, rows=rows)
    index = SavedRowIndex(order.gather, Path(order.scratch))
    return index, RowWindows(order.gather, index, rows=rows)


def _write_part(order: PartOrder, progress: Progress) -> Written:
    parts = order.parts
    output, form = parts.gather.output, parts.gather.form
    folder = open_folder(output, parts.term)
    home = folder.writing_place(Path(parts.scratch))
    names = [part_name(prefix, order.number, parts.job, parts.attempt) for prefix in ("part", "errors")]
    digests = [hashlib.sha256(), hashlib.sha256()]
    files = [LineFile(home / name, digest) for name, digest in zip(names, digests, strict=True)]
    tally = Tally(form, order.end, progress, first=order.first)
    index, windows = _open_range(parts, range(order.first, order.end))
    try:
        for window in windows:
            tally.count(window)
            failed = set(window.failed) if form.errors_apart else set()
            lines = window.lines
            if failed:
                files[1].write(b"".join([lines[number] for number in window.failed]), len(failed))
                lines = [line for number, line in enumerate(lines) if number not in failed]
            files[0].write(b"".join(lines), len(lines))
        tally.finish()
        found = [file.publish() if number == 0 or file.rows else None for number, file in enumerate(files)]
    finally:
        for file in files:
            file.discard()
        windows.close()
        index.segments.close()
    for file in filter(None, found):
        folder.put_part(Path(file.path))
    faults.point("after_part")
    part, errors = (
        None if file is None else Part(name, order.first, order.end, file.rows, file.bytes, digest.hexdigest())
        for file, name, digest in zip(found, names, digests, strict=True)
    )
    assert part is not None, "a part is written even if it has no rows"
    return Written(part, errors, tally.failed, tally.causes)


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
    shutil.rmtree(parts.scratch)
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
