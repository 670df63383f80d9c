"""What the owner and the children that write results in parts say to each other."""

from __future__ import annotations

from msgspec import Struct

from batchmill.jobs.results.output_folders import Part
from batchmill.jobs.results.results import GatherOrder, Learned
from batchmill.object_store.urls import ObjectInfo


class PartsOrder(Struct, frozen=True):
    """What all parts of one attempt have in common. `gather.output`: a folder, with a slash at its end."""

    gather: GatherOrder
    job: str
    generation: int
    attempt: str
    scratch: str  # a folder of this machine, of this attempt alone
    replaced_job: str | None
    term: str  # see `Database.term_path`
    kind: str = "jsonl"  # one of PART_KINDS
    index: str = ""  # the folder with the index; empty: the scratch folder


class Indexed(Struct, frozen=True):
    """What is known before any part is written."""

    rows: int
    folded: int
    rejected: int
    unrun: int
    seen: ObjectInfo | None  # the manifest of the folder then
    must_learn: str = ""  # parts: each is read once before any is written. whole: all rows together are
    suits_nodes: bool = False  # a part reads a few objects of a store: its rows lie together in the segments


class PartOrder(Struct, frozen=True):
    parts: PartsOrder
    number: int
    first: int
    end: int
    learned: Learned = Learned()  # of a table: of all parts


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
