"""What sealing is asked for, what it reports, and what its processes say to each other."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from batchmill.types import DatasetSpec
from batchmill.wire.forms import Form

Fold = Literal["deterministic", "all", "none"]


class SealOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """What to seal and which rows to allow.

    A target is (number of the model, number of model and adapter together); `urls` has one entry for each model.
    """

    dataset: DatasetSpec
    form: Form | None = None  # None: OpenAI rows, or a table whose columns are a function's arguments
    targets: dict[str, tuple[int, int]] = {}  # every value that `body.model` may have
    patterns: list[tuple[str, int, int]] = []  # of adapters that are yet to be fetched, and the target of their base
    default: tuple[int, int] | None = (0, 0)  # for rows that name no model; None: each OpenAI row has to
    any_model: bool = False  # rows that name a model nobody knows yet count as rows of the default
    urls: list[frozenset[str] | None] = field(default_factory=lambda: [None])  # None: any path, and a body of any kind
    services: list[int] = []  # numbers of the models that are run by others, and may know further fields
    pathless: list[int] = []  # numbers of the models to which a path below /v1 means nothing: any is taken
    features: list[list[str] | None] = []  # of each model: what its rows may ask of a service; None: anything
    endpoint: str | None = None  # the one `url` that OpenAI rows may have
    rows_max: int | None = None  # a dataset with more is refused
    bytes_left: int | None = None  # what of its project's quota is left for what is written; None: no quota
    no_room: str = ""  # what is said where that is not enough
    keys: bool = False  # write the columns that the plan is made from
    fold: Fold = "none"  # which rows may share an answer
    columns_max: int | None = None  # different columns of a table whose rows may differ; None: as many as they like
    problems_max: int = 1000
    processes: int = 2


class Part(Struct, frozen=True):
    """Lines of one source: bytes start..end of a file that is read."""

    number: int
    path: str  # the file that is read
    source: str  # the file that the caller named
    base: int  # where byte 0 of the file lies when all files are counted as one
    start: int
    end: int


class Range(Struct, frozen=True):
    """Bytes for one validator: it checks the lines that start in them."""

    number: int
    part: Part
    start: int  # in the file
    end: int


class Refused(Struct, frozen=True, array_like=True):
    """A row that validation refused; `row` and `line` count from 0, in a chunk or in the whole as said there."""

    row: int
    line: int
    code: str
    message: str


class Chunk(Struct, frozen=True, array_like=True):
    """What a validator found in a run of whole lines: columns as packed bytes."""

    start: int
    end: int
    lines: int
    rows: int
    block_rows: int
    offsets: bytes  # u64 a row
    crcs: bytes  # u32 a block
    ids: bytes  # i64 a row: hash of the custom_id; empty for tables
    keys: tuple[bytes, bytes, bytes, bytes]  # target u16, prefix u64, cost u32, fold 2 x u64; empty without keys
    refused: list[Refused]


class RangeEnd(Struct, frozen=True, array_like=True):
    """Every chunk of a range has been sent."""

    digest: bytes  # sha256 of the range's bytes
    names: list[str] = []  # columns that this validator saw here for the first time, where they are counted
    adapters: list[str] = []  # as `names`: values of `body.model` that match one of the order's patterns


class RangeFailed(Struct, frozen=True, array_like=True):
    """The range could not be read."""

    code: str
    message: str
    changed: bool = False  # the file is not what it was when sealing began
