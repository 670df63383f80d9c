"""What a part of results needs to know of its rows, for a machine that has neither the index of a job nor its dataset.

The owner's child puts slices of the index as objects: where the line of each row is, and the objects that hold these
lines. So a node reads what its part needs, and lists nothing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3
from msgspec import Struct
from msgspec.structs import replace

from batchmill.datasets.layout import REJECTED, SCHEMA, SEAL
from batchmill.datasets.readers import open_rows
from batchmill.datasets.sealed import DatasetRows, load_seal, moved
from batchmill.errors import StorageFailed
from batchmill.jobs.ledger.plan import FOLLOWERS, Progress, Rejected, iter_rejected
from batchmill.jobs.results.parts.part_orders import (
    IndexFacts,
    PartOrder,
    PartSlice,
    SliceOrder,
    SlicePiece,
    Slices,
)
from batchmill.jobs.results.row_arrays import RowArrays
from batchmill.jobs.results.row_windows import (
    FOLLOWS,
    PLACE,
    PLACES,
    REFUSED,
    SIZES,
    RowIndex,
    SavedRowIndex,
)
from batchmill.object_store.urls import ObjectInfo
from batchmill.owner_term import term_at
from batchmill.store.objects import StoreObjects
from batchmill.store.segments.blocks import open_segments
from batchmill.store.segments.objects import READ_BYTES, list_objects
from batchmill.types import SegmentObject

INDEX, DATASET = "index", "dataset"  # folders of a task
PIECE_ROWS = 512 * 1024  # of a slice in one object: 12 bytes each, so that one request reads it
PUT_AT_ONCE = 4  # pieces in memory
INPUT_ROWS, INPUT_BYTES = 16 * 1024, 16 * 1024 * 1024  # of the input, that a part gets; for more, all of it is brought
INPUT_AT_ONCE = 256  # of these rows
SCATTERED_RATIO = 4  # bytes to read for each byte of lines: of a part that needs more, the rows lie too far apart,
SCATTERED_BYTES = 8 * 1024 * 1024  # unless it needs so few more
SCATTERED_MAX = 8  # such parts, one after the other: then no other is looked at


class _Segment(Struct, frozen=True, array_like=True):
    """A segment with lines of the rows."""

    name: str
    base: int  # see `RowIndex.bases`
    objects: list[SegmentObject]  # those with the lines
    blocks: list[tuple[int, bytes]]  # see `SegmentPlace.blocks`


class _Piece(Struct, frozen=True):
    """The rows of one object."""

    place: bytes  # u64
    size: bytes  # u32
    followers: bytes  # pairs of u32: follower, leader
    segments: list[_Segment]
    inputs: list[tuple[int, bytes]]  # the rows of the input that lines are made of
    refused: list[Rejected]


_pieces = msgspec.msgpack.Decoder(_Piece)


def slice_offloaded(order: bytes, progress: Progress) -> bytes:
    """Offloaded: SliceOrder in, Slices out, both as JSON. Raises: StorageFailed."""
    request = msgspec.json.decode(order, type=SliceOrder)
    index = SavedRowIndex(request.parts.gather, Path(request.parts.scratch))
    slicer = _Slicer(request, index)
    try:
        return msgspec.json.encode(slicer.run(progress))
    finally:
        slicer.close()
        index.segments.close()


class _Slicer:
    """Cuts the index of a job."""

    def __init__(self, order: SliceOrder, index: SavedRowIndex) -> None:
        self._order, self._index = order, index
        self._gather = order.parts.gather
        self._objects = StoreObjects(order.store, term_at(order.parts.term))
        self._known = list_objects(self._objects, order.parts.job)
        self._waiting: deque[Future[None]] = deque()
        self._dataset: DatasetRows | None = None  # opened when a row of it is needed: most jobs need none

    def close(self) -> None:
        if self._dataset is not None:
            self._dataset.close()

    def run(self, progress: Progress) -> Slices:
        rows, parts, scattered = self._index.rows, [], 0
        with ThreadPoolExecutor(PUT_AT_ONCE, thread_name_prefix="slices") as threads:
            for number, first in enumerate(range(0, rows, self._order.part_rows)):
                last = min(first + self._order.part_rows, rows)
                found = None
                if scattered < SCATTERED_MAX:
                    found = self._cut(first, last, f"{self._order.prefix}{number:06d}-", threads)
                    scattered = scattered + 1 if found is None else 0
                parts.append(found)
                progress(last / rows)
            for each in self._waiting:
                each.result()
        return Slices(self._facts(), parts)

    def _facts(self) -> IndexFacts:
        index, dataset = self._index, Path(self._gather.dataset)
        seal = replace(load_seal(dataset), files=[])  # they are needed with the dataset alone
        schema = (dataset / SCHEMA).read_bytes() if (dataset / SCHEMA).exists() else None
        return IndexFacts(index.has_failed, index.is_flawed, index.reuses, index.folds, seal, schema)

    def _cut(self, first: int, last: int, prefix: str, threads: ThreadPoolExecutor) -> PartSlice | None:
        """None: the rows lie too far apart."""
        pieces: list[SlicePiece] = []
        left, read_bytes, line_bytes = _Left(INPUT_ROWS, INPUT_BYTES), 0, 0
        bounds = [*range(first, last, PIECE_ROWS), last]
        for number, (start, end) in enumerate(itertools.pairwise(bounds)):
            places, sizes = self._index.places_of(start, end), self._index.sizes_of(start, end)
            located = places < REFUSED
            inputs, refused = self._inputs(start, places, located, left)
            segments, size = self._segments(places[located] & PLACE, sizes[located])
            self._index.arrays.touch(end - start)
            line_bytes += int(sizes[located].sum(dtype=np.uint64))
            read_bytes += size
            if read_bytes > SCATTERED_BYTES + SCATTERED_RATIO * line_bytes:
                return None
            piece = _Piece(places.tobytes(), sizes.tobytes(), self._followers(start, end), segments, inputs, refused)
            pieces.append(self._put(f"{prefix}{number:04d}", piece, threads))
        return PartSlice(pieces, left.is_exceeded)

    def _inputs(
        self, first: int, places: np.ndarray, located: np.ndarray, left: _Left
    ) -> tuple[list[tuple[int, bytes]], list[Rejected]]:
        """The rows of the input that lines of a piece are made of, and why validation refused some of them."""
        made_of_input = np.flatnonzero(~located | ((places & FOLLOWS) != 0)) + first
        followers, leaders = self._index.pairs_of(first, first + len(places))
        leaders = leaders[np.isin(followers, made_of_input)]
        numbers = np.union1d(made_of_input, leaders).tolist()
        left.take(len(numbers), 0)
        found: list[tuple[int, bytes]] = []
        for at in range(0, len(numbers), INPUT_AT_ONCE):
            if left.is_exceeded:
                return [], []
            some = numbers[at : at + INPUT_AT_ONCE]
            raws = self._read(some)
            left.take(0, sum(map(len, raws)))
            found += zip(some, raws, strict=True)
        count = int(np.count_nonzero(places == REFUSED))
        refused = iter_rejected(Path(self._gather.dataset), first) if count and not left.is_exceeded else ()
        return found, list(itertools.islice(refused, count))

    def _read(self, numbers: list[int]) -> list[bytes]:
        if self._dataset is None:
            dataset = Path(self._gather.dataset)
            self._dataset = open_rows(dataset, moved(load_seal(dataset), self._gather.moved))
        return self._dataset.read_many(numbers)

    def _put(self, name: str, piece: _Piece, threads: ThreadPoolExecutor) -> SlicePiece:
        data = msgspec.msgpack.encode(piece)
        while len(self._waiting) >= PUT_AT_ONCE:
            self._waiting.popleft().result()
        self._waiting.append(threads.submit(self._objects.put, name, data))
        return SlicePiece(name, len(data), blake3(data).hexdigest())

    def _followers(self, first: int, last: int) -> bytes:
        followers, leaders = self._index.pairs_of(first, last)
        return np.stack([followers, leaders], axis=1).tobytes()

    def _segments(self, starts: np.ndarray, sizes: np.ndarray) -> tuple[list[_Segment], int]:
        """The segments with the lines at these places, and the bytes of their objects from the first to the last."""
        by_place = np.argsort(starts, kind="stable")
        starts = starts[by_place]
        ends = starts + sizes[by_place]
        numbers = self._index.segment_at(starts)
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(starts)]
        found, read_bytes = [], 0
        for begin, end in itertools.pairwise(cuts):
            if begin == end:
                continue
            number = int(numbers[begin])
            name, base = self._index.names[number], self._index.bases[number]
            objects, size = _with_lines(self._known.get(name, []), starts[begin:end] - base, ends[begin:end] - base)
            read_bytes += size
            found.append(_Segment(name, int(base), objects, self._gather.segments.blocks.get(name, [])))
        return found, read_bytes


def _with_lines(
    objects: Sequence[SegmentObject], starts: np.ndarray, ends: np.ndarray
) -> tuple[list[SegmentObject], int]:
    """The objects that hold some of these lines, up to where, and their bytes from the first line to the last.

    Args: starts, ends: of the lines in their segment, ascending.
    """
    found, read_bytes = [], 0
    low, high = int(starts[0]), int(ends[-1])
    for each in objects:
        if each.end <= low or each.start >= high:
            continue
        first, after = int(np.searchsorted(ends, each.start, "right")), int(np.searchsorted(starts, each.end))
        if first < after:
            needed_end = min(each.end, int(ends[after - 1]))
            found.append(replace(each, needed_end=needed_end))
            read_bytes += needed_end - max(each.start, int(starts[first]))
    return found, read_bytes


class _Left(Struct):
    """How much of the input a part may still get."""

    rows: int
    size_bytes: int

    @property
    def is_exceeded(self) -> bool:
        return self.rows < 0 or self.size_bytes < 0

    def take(self, rows: int, size_bytes: int) -> None:
        self.rows -= rows
        self.size_bytes -= size_bytes


class SlicedIndex(RowIndex):
    """The index of the rows of one part, from the slice that the owner has put into a store."""

    def __init__(self, order: PartOrder, folder: Path) -> None:
        """Args: folder: a new one, for what is read. Raises: StorageFailed."""
        facts, part = order.parts.facts, order.slice
        assert facts is not None and part is not None, "the owner gives both to those who have no index"
        folder.mkdir()
        self.first, self.rows = order.first, order.end
        self.has_failed, self.is_flawed, self.reuses = facts.has_failed, facts.is_flawed, facts.reuses
        self._folds = facts.folds
        self.arrays = RowArrays(folder, order.end - order.first)
        self.raws: dict[int, bytes] | None = None if part.needs_input else {}
        segments = self._read(StoreObjects(order.parts.store), part.pieces, folder)
        if self._refused and not part.needs_input:
            lines = b"".join(msgspec.json.encode(each) + b"\n" for each in self._refused)
            (Path(order.parts.gather.dataset) / REJECTED).write_bytes(lines)
        self.place = self.arrays.opened(folder / PLACES, np.uint64)
        self.size = self.arrays.opened(folder / SIZES)
        pairs = self.arrays.opened(folder / FOLLOWERS).reshape(-1, 2)
        self.followers, self.leaders = pairs[:, 0], pairs[:, 1]
        if not len(self.place) == len(self.size) == order.end - order.first:
            raise StorageFailed(f"the slice of part {order.number} has {len(self.place)} rows")
        self.names = sorted(segments)
        self.bases = np.array([segments[name].base for name in self.names], np.uint64)
        gather = order.parts.gather
        place = replace(
            gather.segments, store=order.parts.store,
            blocks={name: each.blocks for name, each in segments.items() if each.blocks},
            objects={name: each.objects for name, each in segments.items() if each.objects},
        )  # fmt: skip
        self.segments = open_segments(place)

    @property
    def folds(self) -> bool:
        return self._folds

    def _read(self, objects: StoreObjects, pieces: Sequence[SlicePiece], folder: Path) -> dict[str, _Segment]:
        """Write the arrays to files. Returns: the segments, by name."""
        segments: dict[str, _Segment] = {}
        self._refused: list[Rejected] = []
        with (
            open(folder / PLACES, "xb") as places,
            open(folder / SIZES, "xb") as sizes,
            open(folder / FOLLOWERS, "xb") as followers,
        ):
            for each in pieces:
                piece = _get(objects, each)
                places.write(piece.place)
                sizes.write(piece.size)
                followers.write(piece.followers)
                self._refused += piece.refused
                if self.raws is not None:
                    self.raws.update(piece.inputs)
                for segment in piece.segments:
                    segments[segment.name] = _joined(segments.get(segment.name), segment)
        return segments


def _get(objects: StoreObjects, piece: SlicePiece) -> _Piece:
    """Raises: StorageFailed for an object that is not what the owner has put."""
    info = ObjectInfo(piece.name, piece.bytes)
    steps = range(0, piece.bytes, READ_BYTES)
    data = b"".join([objects.get_range(info, at, min(at + READ_BYTES, piece.bytes)) for at in steps])
    if blake3(data).hexdigest() != piece.digest:
        raise StorageFailed(f"{piece.name} is not what was put")
    return _pieces.decode(data)


def _joined(before: _Segment | None, segment: _Segment) -> _Segment:
    """What two pieces need of the same segment."""
    if before is None:
        return segment
    objects = {(each.start, each.end): each for each in before.objects}
    for each in segment.objects:
        known = objects.get((each.start, each.end), each)
        objects[each.start, each.end] = replace(each, needed_end=max(known.needed_end, each.needed_end))
    return replace(segment, objects=[objects[place] for place in sorted(objects)])


def write_facts(facts: IndexFacts, folder: Path) -> None:
    """Make a folder that tells of a dataset what its results need, as long as no row of it is read."""
    folder.mkdir()
    (folder / SEAL).write_bytes(msgspec.json.encode(facts.seal))
    (folder / REJECTED).touch()
    if facts.schema is not None:
        (folder / SCHEMA).write_bytes(facts.schema)
