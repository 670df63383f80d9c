"""What the owner and the children that write results in parts say to each other."""

from __future__ import annotations

from msgspec import Struct

from batchmill.jobs.results.parts.output_folders import Part
from batchmill.jobs.results.results import GatherOrder, Learned
from batchmill.object_store.urls import ObjectInfo
from batchmill.types import Seal


class IndexFacts(Struct, frozen=True):
    """What all parts must know of the index and the dataset of a job. The first four: see `RowIndex`."""

    has_failed: bool
    is_flawed: bool
    reuses: bool
    folds: bool
    seal: Seal  # without files
    schema: bytes | None  # the file `layout.SCHEMA`; None: there is none


class SlicePiece(Struct, frozen=True):
    """An object with a slice of the index, of `index_slices.PIECE_ROWS` rows at most."""

    name: str
    bytes: int
    digest: str  # BLAKE3


class PartSlice(Struct, frozen=True):
    """The slice of the index that one part needs."""

    pieces: list[SlicePiece]
    needs_input: bool  # more lines are made of the input than a slice has rows of it


class PartsOrder(Struct, frozen=True):
    """What all parts of one attempt have in common. `gather.output`: a folder, with a slash at its end."""

    gather: GatherOrder
    job: str
    generation: int
    attempt: str
    scratch: str  # a folder of this machine, of this attempt alone
    replaced_job: str | None
    term: str  # see `Term.path`: of objects
    kind: str = "jsonl"  # one of PART_KINDS
    facts: IndexFacts | None = None  # for parts that are written from a slice of the index
    store: str = ""  # for these: the URL of the store with the slices and the segments


class Indexed(Struct, frozen=True):
    """What is known before any part is written."""

    rows: int
    folded: int
    rejected: int
    unrun: int
    seen: ObjectInfo | None  # the manifest of the folder then
    must_learn: str = ""  # parts: each is read once before any is written. whole: all rows together are
    is_saved: bool = False  # the index: a part needs no list of commits


class SliceOrder(Struct, frozen=True):
    """What is to be put into a store for nodes. `prefix`: what the names of its objects begin with."""

    parts: PartsOrder
    part_rows: int
    store: str
    prefix: str


class Slices(Struct, frozen=True):
    """What nodes may write, one slice for each part. None: its rows lie too far apart in the segments."""

    facts: IndexFacts
    parts: list[PartSlice | None]


class PartOrder(Struct, frozen=True):
    parts: PartsOrder
    number: int
    first: int
    end: int
    learned: Learned = Learned()  # of a table: of all parts
    slice: PartSlice | None = None  # None: the index is in the scratch folder


class Written(Struct, frozen=True):
    """One complete part."""

    part: Part
    errors: Part | None
    failed: int
    causes: dict[str, tuple[int, str]]


class CheckOrder(Struct, frozen=True):
    """Parts that nodes have written."""

    parts: PartsOrder
    written: dict[int, Written]  # number of a part -> what the node says


class PublishOrder(Struct, frozen=True):
    parts: PartsOrder
    indexed: Indexed
    written: list[Written]  # in row order
