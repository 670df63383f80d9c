"""Reading a range of a file in chunks of whole lines, and finding out what every line of them is."""

from __future__ import annotations

import hashlib
import io
import os
import zlib
from array import array
from collections.abc import Iterator
from itertools import accumulate

from batchmill.datasets import plan_keys, text_rules
from batchmill.datasets.layout import BLOCK_BYTES, BOM, CHUNK_BYTES, RANGE_BYTES
from batchmill.datasets.orders import Chunk, Part, Range, RangeEnd, Refused, SealOrder
from batchmill.datasets.validation import Checked, id_of, rules_for
from batchmill.errors import InputChanged, InvalidDataset
from batchmill.types import RowError
from batchmill.wire.json_oddities import oddity

TAIL_BYTES = 64 * 1024  # read at a time behind a range, until its last line ends
BLOCK_ROWS_MAX = 65_536


def ranges(parts: list[Part]) -> Iterator[Range]:
    """Every part cut at multiples of RANGE_BYTES from its start, in order."""
    number = 0
    for part in parts:
        for start in range(part.start, part.end, RANGE_BYTES):
            yield Range(number, part, start, min(start + RANGE_BYTES, part.end))
            number += 1


class Inspector:
    """Checks lines by the rules of one order. Holds one range in memory, and one open file."""

    def __init__(self, order: SealOrder) -> None:
        self._order = order
        self._rules = rules_for(order)
        self._path = ""
        self._fd = -1

    def inspect(self, range_: Range) -> Iterator[Chunk | RangeEnd]:
        """The chunks of the lines that start in a range, then its end. Raises: InputChanged, InvalidDataset."""
        self._open(range_.part.path)
        lead = int(range_.start > range_.part.start)  # the byte before says whether a line starts here
        data = self._read(range_.start - lead, range_.end - range_.start + lead)
        for start, text in self._texts(range_, data, lead):
            yield self._chunk(range_.part.base + start, text)
        digest = hashlib.sha256(memoryview(data)[lead:]).digest()
        yield RangeEnd(digest, self._rules.new_names(), self._rules.new_adapters())

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._path = ""

    def _open(self, path: str) -> None:
        if path != self._path:
            self.close()
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise _unreadable(path, error) from None
            self._path = path

    def _read(self, start: int, size: int) -> bytes:
        try:
            data = os.pread(self._fd, size, start)
        except OSError as error:
            raise _unreadable(self._path, error) from None
        if len(data) < size:
            raise InputChanged(f"{self._path} became shorter while it was read; run the command again")
        return data

    def _texts(self, range_: Range, data: bytes, lead: int) -> Iterator[tuple[int, bytes]]:
        """(place in the file, whole lines) in runs of about CHUNK_BYTES."""
        at = 0
        if lead:
            at = data.find(b"\n") + 1
            if at == 0:
                return  # one line goes on through the whole range
        elif data.startswith(BOM):
            at = len(BOM)
        offset = range_.start - lead
        while at < len(data):
            end = data.find(b"\n", at + CHUNK_BYTES) + 1 if len(data) - at > CHUNK_BYTES else 0
            if end == 0:
                yield offset + at, data[at:] + self._tail(range_, data, at)
                return
            yield offset + at, data[at:end]
            at = end

    def _tail(self, range_: Range, data: bytes, at: int) -> bytes:
        """The rest of the last line, but no more than shows that it is too long."""
        if data.endswith(b"\n"):
            return b""
        room = self._order.dataset.line_bytes_max + len(b"\r\n") - (len(data) - max(at, data.rfind(b"\n") + 1))
        tail, place = [], range_.end
        while room > 0 and place < range_.part.end:
            more = self._read(place, min(TAIL_BYTES, range_.part.end - place))
            newline = more.find(b"\n")
            if newline >= 0:
                tail.append(more[: newline + 1])
                break
            tail.append(more)
            place += len(more)
            room -= len(more)
        return b"".join(tail)

    def _chunk(self, start: int, text: bytes) -> Chunk:
        lines = io.BytesIO(text).readlines()
        lengths = list(map(len, lines))
        starts = array("Q", accumulate(lengths[:-1], initial=start))
        limits = {"length_max": self._order.dataset.line_bytes_max, "depth_max": self._order.dataset.depth_max}
        harmless = text_rules.is_harmless(text, lines, lengths, **limits)
        bulk = self._rules.bulk(lines) if harmless else None
        if bulk is not None:
            keys = KeyColumns.of_functions(bulk.targets, bulk.sizes) if self._order.keys else None
            found = Findings(starts, array("q", map(hash, bulk.ids)), [], keys)
        else:
            found = self._look_closely(lines, starts, harmless)
        block_rows, crcs = checksums(text, start, found.offsets)
        return Chunk(
            start=start,
            end=start + len(text),
            lines=len(lines),
            rows=len(found.offsets),
            block_rows=block_rows,
            offsets=found.offsets.tobytes(),
            crcs=crcs.tobytes(),
            ids=found.ids.tobytes(),
            keys=found.keys.pack() if found.keys is not None else (b"", b"", b"", b""),
            refused=found.refused,
        )

    def _look_closely(self, lines: list[bytes], starts: array[int], harmless: bool) -> Findings:
        order = self._order
        found = Findings(array("Q"), array("q"), [], KeyColumns() if order.keys else None)
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            checked = self._checked(line, harmless)
            if checked.error is not None:
                row = len(found.offsets)
                found.refused.append(Refused(row, number, checked.error.code, checked.error.message))
            start = starts[number]
            found.offsets.append(start)
            # No custom_id holds a NUL, and no two lines start at one place.
            if self._rules.has_ids:
                found.ids.append(hash(checked.custom_id or f"\0{start}"))
            if found.keys is not None:
                found.keys.append(checked, line, order)
        return found

    def _checked(self, line: bytes, harmless: bool) -> Checked:
        if not harmless:
            dataset = self._order.dataset
            error = text_rules.flaw(line, length_max=dataset.line_bytes_max, depth_max=dataset.depth_max)
            if error is not None:
                return Checked(id_of(line), error)
        checked = self._rules.check(line)
        if checked.error is None and (odd := oddity(line)) is not None:
            return Checked(checked.custom_id, RowError("ambiguous_json", odd))
        return checked


def _unreadable(path: str, error: OSError) -> InvalidDataset:
    return InvalidDataset(f"{path} cannot be read: {error.strerror}", code="unreadable_file")


class Findings:
    """What lines turned out to be: columns with one entry a row, and the rows that were refused."""

    def __init__(self, offsets: array[int], ids: array[int], refused: list[Refused], keys: KeyColumns | None) -> None:
        self.offsets = offsets
        self.ids = ids
        self.refused = refused
        self.keys = keys


class KeyColumns:
    """The columns that the plan is made from. A refused row has zeros: it never runs."""

    def __init__(self) -> None:
        self._targets, self._prefixes, self._costs, self._folds = array("H"), array("Q"), array("I"), bytearray()

    @classmethod
    def of_functions(cls, targets: list[int], sizes: list[int]) -> KeyColumns:
        """The columns of rows for functions, none of which follows another: the same that `append` would write."""
        columns, rows = cls(), len(targets)
        columns._targets = array("H", targets)
        columns._prefixes = array("Q", bytes(8 * rows))
        columns._costs = array("I", [min(size // plan_keys.BYTES_A_TOKEN, plan_keys.COST_MAX) for size in sizes])
        columns._folds = bytearray(plan_keys.FOLD_BYTES * rows)
        return columns

    def append(self, checked: Checked, line: bytes, order: SealOrder) -> None:
        if checked.error is not None:
            keys, target = plan_keys.Keys(), 0
        else:
            keys, target = self._keys(checked, line, order), checked.target
        self._targets.append(target)
        self._prefixes.append(keys.prefix)
        self._costs.append(keys.cost)
        self._folds += keys.fold

    @staticmethod
    def _keys(checked: Checked, line: bytes, order: SealOrder) -> plan_keys.Keys:
        request = checked.request
        if request is None:
            return plan_keys.of_arguments("", line, checked.target, order.fold)
        if order.urls[checked.model] is None:
            return plan_keys.of_arguments(request.url, request.body, checked.target, order.fold)
        return plan_keys.of_request(request, checked.target, order.fold)

    def pack(self) -> tuple[bytes, bytes, bytes, bytes]:
        return self._targets.tobytes(), self._prefixes.tobytes(), self._costs.tobytes(), bytes(self._folds)


def checksums(text: bytes, start: int, offsets: array[int]) -> tuple[int, array[int]]:
    """Rows in a block, and crc32 of every block; a block's bytes end where the next one's start, or with the text."""
    rows_a_block = max(1, min(BLOCK_ROWS_MAX, len(offsets) * BLOCK_BYTES // len(text)))
    view = memoryview(text)
    starts = [offset - start for offset in offsets[::rows_a_block]]
    ends = [*starts[1:], len(text)]
    return rows_a_block, array("I", [zlib.crc32(view[a:b]) for a, b in zip(starts, ends, strict=False)])
