"""Reads a byte range of a file in chunks of whole lines, checks every line, and computes its keys and checksums."""

from __future__ import annotations

import io
import zlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise

import msgspec
from blake3 import blake3
from msgspec import Raw, Struct

from batchmill.checksums import checksum, name_hashes
from batchmill.datasets.layout import BLOCK_BYTES, BOM, CHUNK_BYTES, RANGE_BYTES
from batchmill.datasets.orders import ByteRange, Fold, RangeEnd, RefusedRow, SealOrder, SourcePart, ValidatedChunk
from batchmill.datasets.request_digests import FOLD_BYTES, NO_DIGEST, NO_FOLD, canonical_of, digest_of, fold_of
from batchmill.datasets.sources import Source, describe, open_source
from batchmill.datasets.validation import Bulk, CheckedLine, id_of, rules_for
from batchmill.errors import InputChanged, InvalidDataset
from batchmill.types import Request, RowError, SealedFile
from batchmill.wire.json_bytes import is_too_deep, oddity, openings
from batchmill.wire.rows.forms import EMBEDDINGS, RERANK, SCORE

LEVELS = (128, 256, 512, 1024, 2048, 4096)  # bytes of a prompt; each has 10 bits of the key, the shortest the highest
LEVEL_BITS = 10
BYTES_A_TOKEN = 4
OUTPUT_TOKENS_DEFAULT = 256  # of a row without a limit
COST_MAX = 2**32 - 1

_DETERMINISTIC_URLS = frozenset((EMBEDDINGS, RERANK, SCORE))
_EMPTY = Raw(b"")


class PlanKeys(Struct, gc=False):
    prefix: int = 0
    cost: int = 0
    fold: bytes = NO_FOLD
    request: bytes = NO_DIGEST


class _Head(Struct, gc=False):
    """The fields of a body that make up the prompt, in the order of chat templates, and its limits."""

    tools: Raw = _EMPTY
    instructions: Raw = _EMPTY
    messages: Raw = _EMPTY
    prompt: Raw = _EMPTY
    input: Raw = _EMPTY
    query: Raw = _EMPTY
    documents: Raw = _EMPTY
    text_1: Raw = _EMPTY
    text_2: Raw = _EMPTY
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    stream: bool | None = None
    conversation: Raw = _EMPTY

    def text(self) -> bytes:
        parts = (self.tools, self.instructions, self.messages, self.prompt, self.input)
        return b"".join((*parts, self.query, self.documents, self.text_1, self.text_2))

    def output_tokens(self, url: str) -> int:
        if url in _DETERMINISTIC_URLS:
            return 0
        limit = self.max_completion_tokens or self.max_tokens or self.max_output_tokens or OUTPUT_TOKENS_DEFAULT
        return limit * (self.n or 1)

    def is_deterministic(self, url: str) -> bool:
        """Whether equal rows get equal results. A conversation is state at the service: it changes between rows."""
        return url in _DETERMINISTIC_URLS or (self.temperature == 0 and not self.conversation)


_head = msgspec.json.Decoder(_Head).decode


def of_request(request: Request, target: int, fold: Fold, *, requests: bool = False) -> PlanKeys:
    """The keys of a request to a language model; its body has been checked. Args: requests: with its digest."""
    try:
        head = _head(request.body)
    except msgspec.ValidationError:  # an unchecked field has the name, but not the type, of one of _Head
        return PlanKeys(prefix_of(request.body), min(len(request.body) // BYTES_A_TOKEN, COST_MAX))
    text = head.text() or request.body
    cost = len(text) // BYTES_A_TOKEN + head.output_tokens(request.url)
    keys = PlanKeys(prefix_of(text), min(cost, COST_MAX))
    is_deterministic = head.is_deterministic(request.url)
    folds = fold != "none" and not head.stream and (fold == "all" or is_deterministic)
    may_be_reused = requests and not head.stream and not head.conversation
    if folds or may_be_reused:
        canonical = canonical_of(request.body, without="model")
        keys.fold = fold_of(request.url, canonical, target) if folds else NO_FOLD
        if may_be_reused:
            keys.request = digest_of(request.url, canonical, is_deterministic=is_deterministic)
    return keys


def of_arguments(url: str, data: bytes, target: int, fold: Fold, *, requests: bool = False) -> PlanKeys:
    """The keys of a row whose fields are a function's arguments. The function may be impure: only `all` folds it."""
    keys = PlanKeys(0, min(len(data) // BYTES_A_TOKEN, COST_MAX))
    if fold == "all" or requests:
        canonical = canonical_of(data)
        keys.fold = fold_of(url, canonical, target) if fold == "all" else NO_FOLD
        if requests:
            keys.request = digest_of(url, canonical, is_deterministic=False)
    return keys


def prefix_of(text: bytes) -> int:
    """Hashes of the first 128, 256 … 4096 bytes, 10 bits each: rows that share more of a prompt sort closer."""
    key, crc, start = 0, 0, 0
    for level in LEVELS:
        crc = zlib.crc32(text[start:level], crc)
        key = key << LEVEL_BITS | (crc * 0x9E3779B1 & 0xFFFFFFFF) >> (32 - LEVEL_BITS)
        start = level
    return key


GROUP_LINES = 16  # lines whose brackets are counted at once


def is_harmless(text: bytes, lengths: list[int], *, length_max: int, depth_max: int) -> bool:
    """Whether no line has a flaw, for sure. False: check each line with `flaw`.

    Args: lengths: of the lines of `text`, with their line ends.
    """
    longest = max(lengths, default=0)
    if longest > length_max or not (text.isascii() or is_utf8(text)):
        return False
    if longest <= 2 * depth_max:  # each level has two brackets
        return True
    edges = [0, *islice(accumulate(lengths), GROUP_LINES - 1, len(lengths) - 1, GROUP_LINES), len(text)]
    return all(_is_shallow(text[first:end], depth_max) for first, end in pairwise(edges))


def flaw(line: bytes, *, length_max: int, depth_max: int) -> RowError | None:
    """The flaw of a line as text: `line_too_long`, `invalid_encoding`, `nesting_too_deep`; None: it has none."""
    if len(line) > length_max and len(line.rstrip(b"\r\n")) > length_max:
        return RowError("line_too_long", f"the line is longer than {length_max} bytes")
    if not (line.isascii() or is_utf8(line)):
        return RowError("invalid_encoding", f"the line is not UTF-8{_encoding_hint(line)}")
    if is_too_deep(line, depth_max):
        return RowError("nesting_too_deep", f"the JSON is nested deeper than {depth_max} levels")
    return None


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_shallow(lines: bytes, depth_max: int) -> bool:
    if openings(lines) <= depth_max:
        return True
    return not any(is_too_deep(line, depth_max) for line in lines.split(b"\n"))


def _encoding_hint(line: bytes) -> str:
    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line:
        return "; it looks like UTF-16: convert the file with `iconv -f UTF-16 -t UTF-8`"
    return ""


TAIL_BYTES = 64 * 1024  # read at a time after a range, until its last line ends
BLOCK_ROWS_MAX = 65_536


def ranges(parts: Sequence[SourcePart]) -> Iterator[ByteRange]:
    """Split every part into ranges of RANGE_BYTES, in order."""
    number = 0
    for part in parts:
        for start in range(part.start, part.end, RANGE_BYTES):
            yield ByteRange(number, part, start, min(start + RANGE_BYTES, part.end))
            number += 1


class Inspector:
    """Checks lines by the rules of one order. It has one range in memory and one file open."""

    def __init__(self, order: SealOrder) -> None:
        self._order = order
        self._rules = rules_for(order)
        self._path = ""
        self._file: Source | None = None

    def inspect(self, range_: ByteRange) -> Iterator[ValidatedChunk | RangeEnd]:
        """Yield the chunks of the lines that start in a range, then its end. Raises: InputChanged, InvalidDataset."""
        self._open(range_.part.path)
        lead = int(range_.start > range_.part.start)  # the byte before the range shows whether a line starts with it
        data = self._read(range_.start - lead, range_.end - range_.start + lead)
        for start, text in self._texts(range_, data, lead):
            yield self._chunk(range_.part.base + start, text)
        digest = blake3(memoryview(data)[lead:]).digest()
        yield RangeEnd(digest, self._rules.new_names(), self._rules.new_adapters())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._path = ""

    def _open(self, path: str) -> None:
        if path != self._path:
            self.close()
            try:
                self._file = open_source(self._sealed(path), beyond=TAIL_BYTES)
            except OSError as error:
                raise _unreadable(path, error) from None
            self._path = path

    def _sealed(self, path: str) -> SealedFile:
        """A file as it was when sealing began."""
        return next((file for file in self._order.files if file.path == path), None) or describe(path)

    def _read(self, start: int, size: int) -> bytes:
        assert self._file is not None
        try:
            data = self._file.read_at(start, start + size)
        except OSError as error:
            raise _unreadable(self._path, error) from None
        if len(data) < size:
            raise InputChanged(f"{self._path} became shorter while it was read; run the command again")
        return data

    def _texts(self, range_: ByteRange, data: bytes, lead: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset in the file, whole lines) in chunks of about CHUNK_BYTES."""
        at = 0
        if lead:
            at = data.find(b"\n") + 1
            if at == 0:
                return  # one line spans the whole range
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

    def _tail(self, range_: ByteRange, data: bytes, at: int) -> bytes:
        """The rest of the last line, or enough of it to see that the line is too long."""
        if data.endswith(b"\n"):
            return b""
        room = self._order.dataset.line_bytes_max + len(b"\r\n") - (len(data) - max(at, data.rfind(b"\n") + 1))
        tail, position = [], range_.end
        while room > 0 and position < range_.part.end:
            more = self._read(position, min(TAIL_BYTES, range_.part.end - position))
            newline = more.find(b"\n")
            if newline >= 0:
                tail.append(more[: newline + 1])
                break
            tail.append(more)
            position += len(more)
            room -= len(more)
        return b"".join(tail)

    def _chunk(self, start: int, text: bytes) -> ValidatedChunk:
        lines = io.BytesIO(text).readlines()
        lengths = list(map(len, lines))
        starts = array("Q", accumulate(lengths[:-1], initial=start))
        limits = {"length_max": self._order.dataset.line_bytes_max, "depth_max": self._order.dataset.depth_max}
        harmless = is_harmless(text, lengths, **limits)
        bulk = self._rules.bulk(lines) if harmless else None
        if bulk is not None:
            keys = KeyColumns.of_functions(bulk) if self._order.keys else None
            findings = Findings(starts, name_hashes(bulk.ids, self._order.id_seed), [], keys)
        else:
            findings = self._check_lines(lines, starts, harmless)
        block_rows, checksums = block_checksums(text, start, findings.offsets)
        return ValidatedChunk(
            start=start,
            end=start + len(text),
            lines=len(lines),
            rows=len(findings.offsets),
            block_rows=block_rows,
            offsets=findings.offsets.tobytes(),
            checksums=checksums.tobytes(),
            ids=findings.ids.tobytes(),
            keys=findings.keys.pack() if findings.keys is not None else (b"", b"", b"", b""),
            refused=findings.refused,
            requests=bytes(findings.keys.requests) if findings.keys is not None else b"",
        )

    def _check_lines(self, lines: list[bytes], starts: array[int], harmless: bool) -> Findings:
        order = self._order
        findings = Findings(array("Q"), array("Q"), [], KeyColumns() if order.keys else None)
        ids = []
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            checked = self._check_line(line, harmless)
            if checked.error is not None:
                row = len(findings.offsets)
                findings.refused.append(RefusedRow(row, number, checked.error.code, checked.error.message))
            start = starts[number]
            findings.offsets.append(start)
            # A line without a custom_id gets a unique one: no custom_id has a NUL, and no two lines have one offset.
            if self._rules.has_ids:
                ids.append(checked.custom_id or f"\0{start}")
            if findings.keys is not None:
                findings.keys.append(checked, line, order)
        findings.ids = name_hashes(ids, order.id_seed)
        return findings

    def _check_line(self, line: bytes, harmless: bool) -> CheckedLine:
        if not harmless:
            dataset = self._order.dataset
            error = flaw(line, length_max=dataset.line_bytes_max, depth_max=dataset.depth_max)
            if error is not None:
                return CheckedLine(id_of(line), error)
        checked = self._rules.check(line)
        if checked.error is None and (odd := oddity(line)) is not None:
            return CheckedLine(checked.custom_id, RowError("ambiguous_json", odd))
        return checked


def _unreadable(path: str, error: OSError) -> InvalidDataset:
    return InvalidDataset(f"{path} cannot be read: {error.strerror}", code="unreadable_file")


class Findings:
    """The results of checking lines: columns with one entry a row, and the refused rows."""

    def __init__(
        self, offsets: array[int], ids: array[int], refused: list[RefusedRow], keys: KeyColumns | None
    ) -> None:
        self.offsets = offsets
        self.ids = ids
        self.refused = refused
        self.keys = keys


class KeyColumns:
    """The columns that planning reads. A refused row has zeros: it never runs."""

    def __init__(self) -> None:
        self._targets, self._prefixes, self._costs, self._folds = array("H"), array("Q"), array("I"), bytearray()
        self.requests = bytearray()  # digests, if the order asks for them

    @classmethod
    def of_functions(cls, bulk: Bulk) -> KeyColumns:
        """The columns of rows for functions, none of which is folded: the same that `append` would write."""
        columns, rows = cls(), len(bulk.targets)
        columns._targets = array("H", bulk.targets)
        columns.requests += bulk.requests
        columns._prefixes = array("Q", bytes(8 * rows))
        columns._costs = array("I", [min(size // BYTES_A_TOKEN, COST_MAX) for size in bulk.sizes])
        columns._folds = bytearray(FOLD_BYTES * rows)
        return columns

    def append(self, checked: CheckedLine, line: bytes, order: SealOrder) -> None:
        if checked.error is not None:
            keys, target = PlanKeys(), 0
        else:
            keys, target = self._keys(checked, line, order), checked.target
        self._targets.append(target)
        self._prefixes.append(keys.prefix)
        self._costs.append(keys.cost)
        self._folds += keys.fold
        if order.requests:
            self.requests += keys.request

    @staticmethod
    def _keys(checked: CheckedLine, line: bytes, order: SealOrder) -> PlanKeys:
        request, fold = checked.request, order.fold
        if request is None:
            return of_arguments("", line, checked.target, fold, requests=order.requests)
        if order.urls[checked.model] is None:
            return of_arguments(request.url, request.body, checked.target, fold, requests=order.requests)
        return of_request(request, checked.target, fold, requests=order.requests)

    def pack(self) -> tuple[bytes, bytes, bytes, bytes]:
        return self._targets.tobytes(), self._prefixes.tobytes(), self._costs.tobytes(), bytes(self._folds)


def block_checksums(text: bytes, start: int, offsets: array[int]) -> tuple[int, array[int]]:
    """The rows of a block, and the checksum of each. A block ends where the next one starts, or with the text."""
    rows_a_block = max(1, min(BLOCK_ROWS_MAX, len(offsets) * BLOCK_BYTES // len(text)))
    view = memoryview(text)
    starts = [offset - start for offset in offsets[::rows_a_block]]
    ends = [*starts[1:], len(text)]
    return rows_a_block, array("I", [checksum(view[a:b]) for a, b in zip(starts, ends, strict=False)])
