"""The plan: the order in which rows run, which rows share an outcome, and the shards.

`make` is a pure function of the sealed dataset and its order. It writes `order.u32` (position -> row number, absent
where the order is the file's), `followers.u32` (follower, leader) and, last, `plan.json` with the spans of the shards.
Nothing here needs numpy: workers read plans too. Nothing grows with the rows but these files.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from batchmill.datasets.folders import Folder, Home, Part, folder_of
from batchmill.datasets.layout import PIECE_ROWS, REJECTED
from batchmill.datasets.sealed import load_seal
from batchmill.datasets.sources import Source
from batchmill.errors import LedgerBroken
from batchmill.jobs.ledger.shards import Shards, ShardSpan
from batchmill.models.providers import PROVIDERS
from batchmill.types import ModelSpec
from batchmill.wire.native import Explanation, PlanGroup

assert sys.byteorder == "little", "plans are written in the machine's own order, which must be little endian"

PLAN, ORDER, FOLLOWERS = "plan.json", "order.u32", "followers.u32"
ROWS_MAX = 2**32 - 1  # a row number fits in a u32
CHUNK_BYTES = 1024 * 1024
STEP_ROWS = 1024 * 1024
_FOLLOWER_BYTES = 8
SHARDS_PER_WORKER = 8  # at least, where the job has the rows for it
FEW_ROWS = 64
COLUMN_SHARD_ROWS = 131_072
LAST_SHARD_ROWS = 16_384  # longer shards become shorter towards the end, down to so many rows

Progress = Callable[[float], None]
Cut = Callable[["list[TargetPlan]"], "list[ShardRows]"]
Choose = Callable[[Sequence[int]], Iterable[int]]


class ShardRows(Struct, frozen=True):
    """Rows of the shards of a model. Long ones save transactions; short ones at the end let workers end together.

    `last`: the shards become shorter towards the end, down to so many rows; None: all have the same length.
    """

    most: int
    last: int | None = None


class PlanOrder(Struct, frozen=True):
    """The input of planning, besides the dataset."""

    targets: list[tuple[int, str | None]]  # value of target.u16 -> (model number, adapter)
    shard_rows: list[ShardRows]  # per model; the last shard may have fewer
    keys: bool = False  # the dataset has the columns target, prefix, cost and fold
    file_order: list[int] = []  # numbers of models that gain nothing from shared prefixes: rows stay in file order
    prompt_bytes: int = 0  # that the prompt of a table adds to each row, for the share of prefixes in common
    piece_rows: int = PIECE_ROWS  # that are sorted in memory


class TargetPlan(Struct, frozen=True):
    """The rows of one model and adapter, which run one after the other."""

    model: int
    adapter: str | None
    rows: int  # that run
    folded: int = 0  # that share the outcome of one of them
    tokens: int | None = None  # estimated, of the rows that run: input and output; None: there were no keys
    prefix_groups: int = 0  # runs of two or more rows with a prompt prefix in common
    shared_bytes: int = 0  # of prefixes that the row before has too
    input_bytes: int = 0


class Plan(Struct, frozen=True):
    """A sealed plan. `rows` = `leaders` + `followers` + `rejected`."""

    rows: int
    leaders: int  # rows that run: the positions are 0..leaders-1
    followers: int
    rejected: int
    permuted: bool  # order.u32 says which row is at a position; otherwise position and number are the same
    spans: list[ShardSpan]  # how the positions of each model are cut into shards
    targets: list[TargetPlan]
    files: dict[str, str]  # name -> sha256
    sha256: str = ""  # over everything above

    @property
    def shards(self) -> int:
        """How many there are."""
        return len(Shards(self.spans))


class Arranged(Struct, frozen=True):
    """The result of ordering. The rows of `order` come in the sequence of `targets`."""

    targets: list[TargetPlan]
    permuted: bool
    followers: int


class SummedFile:
    """A file of a plan; `plan.json` has its sha256."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._sum = sha256()
        self._part: Part = folder.part(name, self._sum)
        self.write = self._part.write

    def publish(self) -> str:
        """Publish the file. Returns its sha256."""
        self._part.publish()
        return self._sum.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._part.discard()


class RefusedRows:
    """The rows that validation refused, read in windows. Raises: LedgerBroken where the list is not the seal's."""

    def __init__(self, dataset: Home, rows: int, count: int) -> None:
        self.count = count
        self._dataset, self._rows = folder_of(dataset), rows
        self._numbers, self._next = iter(()), rows

    def within(self, window: range) -> array:
        """The numbers (u32, ascending) of those in a window. Windows follow each other; the first begins anew."""
        if window.start == 0:
            self._numbers = self._checked()
            self._next = next(self._numbers, self._rows)
        found = array("I")
        while self._next < window.stop:
            found.append(self._next)
            self._next = next(self._numbers, self._rows)
        return found

    def _checked(self) -> Iterator[int]:
        last, count = -1, 0
        for refused in iter_rejected(self._dataset):
            if not last < refused.row < self._rows:
                raise LedgerBroken(
                    f"{self._dataset.path}: the refused rows are not in ascending order below {self._rows}"
                )
            last, count = refused.row, count + 1
            yield last
        if count != self.count:
            raise LedgerBroken(f"{self._dataset.path}: {self.count} rows were refused, but {count} are listed")


class PlanParts(Struct, frozen=True):
    """What an ordering reads and writes: rows there are, rows refused, the two files, and where it sorts."""

    rows: int
    refused: RefusedRows
    order: SummedFile
    followers: SummedFile
    sort_folder: Path  # the file system of what is sorted


Arrange = Callable[[PlanOrder, Folder, PlanParts, Progress], Arranged]
KEY_ORDER = "batchmill.jobs.ledger.key_order"


def ordering(keys: bool) -> Arrange:
    """The ordering of a dataset with or without keys; numpy is imported only if there are some."""
    return importlib.import_module(KEY_ORDER).arrange if keys else arrange_in_file_order


def can_import_at_once(*, keys: bool) -> bool:
    """Whether `ordering` imports nothing that takes long: numpy takes 70 ms the first time."""
    return not keys or KEY_ORDER in sys.modules


def make(order: PlanOrder, dataset: Home, home: Home, progress: Progress, cut: Cut | None = None) -> Plan:
    """Plan the sealed `dataset` into the folder `home`; the same input gives the same bytes.

    `cut` says how many rows a shard of each model has, where that depends on the rows there are.

    Rows run by model, adapter (the base first), prefix key (rows that share a prompt prefix are neighbours) and, where
    those are equal, the costliest first; ties and models of `file_order` keep the file's order. Rows that validation
    refused do not run. Of rows with the same fold key the first of the file is the leader.
    """
    dataset, home = folder_of(dataset), folder_of(home)
    seal = load_seal(dataset)
    if seal.rows > ROWS_MAX:
        raise LedgerBroken(f"{seal.rows} rows are more than a plan can number ({ROWS_MAX}); split the dataset")
    home.remove_durably(PLAN, ORDER, FOLLOWERS)
    with SummedFile(home, ORDER) as positions, SummedFile(home, FOLLOWERS) as followers:
        parts = PlanParts(seal.rows, RefusedRows(dataset, seal.rows, seal.rejected), positions, followers, home.path)
        arranged = ordering(order.keys)(order, dataset, parts, progress)
        leaders = sum(target.rows for target in arranged.targets)
        if leaders + arranged.followers + seal.rejected != seal.rows:
            raise LedgerBroken(f"{leaders} + {arranged.followers} + {seal.rejected} rows planned of {seal.rows}")
        files = {FOLLOWERS: followers.publish()}
        if arranged.permuted:
            files[ORDER] = positions.publish()
    shard_rows = order.shard_rows if cut is None else cut(arranged.targets)
    plan = _write(home, seal.rows, arranged, shard_rows, files, rejected=seal.rejected)
    progress(1.0)
    return plan


def arrange_in_file_order(order: PlanOrder, dataset: Folder, parts: PlanParts, progress: Progress) -> Arranged:
    """Rows in the order of the file, apart from those that were refused: no keys, no folding, no numpy.

    Without keys every row goes to the same model, whatever it is called.
    """
    models = {model for model, _ in order.targets}
    assert len(models) == 1, f"{dataset.path}: rows of several models need keys"
    refused = parts.refused.count
    if refused:
        _write_gaps(parts, min(STEP_ROWS, order.piece_rows), progress)
    else:
        parts.refused.within(range(parts.rows))  # that none is listed
    target = TargetPlan(model=models.pop(), adapter=None, rows=parts.rows - refused)
    return Arranged(targets=[target], permuted=refused > 0, followers=0)


def _write_gaps(parts: PlanParts, step: int, progress: Progress) -> None:
    """Write every row number except the refused ones. Args: step: rows in memory."""
    for start in range(0, parts.rows, step):
        end = min(start + step, parts.rows)
        numbers = array("I")
        for refused in parts.refused.within(range(start, end)):
            numbers.extend(range(start, refused))
            start = refused + 1
        numbers.extend(range(start, end))
        parts.order.write(numbers.tobytes())
        progress(end / parts.rows)


def plan_again(
    earlier: PlanReader, choose: Choose, shard_rows: Sequence[ShardRows], home: Path, model: int | None = None
) -> Plan:
    """Plan some rows of an earlier plan again, in the same order and without followers.

    Args:
        choose: those of some row numbers, at most `STEP_ROWS`, that are planned.
        model: number of the model that all of them go to; None: each goes where it went.
    """
    kept: dict[int, int] = {}  # model -> rows
    folder = folder_of(home)
    with SummedFile(folder, ORDER) as positions, SummedFile(folder, FOLLOWERS) as followers:
        for span in earlier.plan.spans:
            for lo in range(span.lo, span.hi, STEP_ROWS):
                numbers = array("I", choose(earlier.row_numbers(lo, min(lo + STEP_ROWS, span.hi))))
                number = span.model if model is None else model
                kept[number] = kept.get(number, 0) + len(numbers)
                positions.write(numbers.tobytes())
        files = {ORDER: positions.publish(), FOLLOWERS: followers.publish()}
    targets = [TargetPlan(model=model, adapter=None, rows=rows) for model, rows in kept.items()]
    arranged = Arranged(targets=targets, followers=0, permuted=True)
    return _write(folder, earlier.plan.rows, arranged, shard_rows, files)


def _write(
    home: Folder,
    rows: int,
    arranged: Arranged,
    shard_rows: Sequence[ShardRows],
    files: dict[str, str],
    rejected: int = 0,
) -> Plan:
    """Cut the ordered rows into shards and write `plan.json` last."""
    plan = Plan(
        rows=rows, leaders=sum(target.rows for target in arranged.targets), followers=arranged.followers,
        rejected=rejected, permuted=arranged.permuted, spans=_spans(arranged.targets, shard_rows),
        targets=arranged.targets, files=files,
    )  # fmt: skip
    plan = msgspec.structs.replace(plan, sha256=_digest(plan))
    with home.part(PLAN) as file:
        file.write(msgspec.json.encode(plan))
        file.publish()
    return plan


class Rejected(Struct, frozen=True, gc=False):
    """A line of `rejected.jsonl`."""

    row: int
    code: str
    message: str


_rejected = msgspec.json.Decoder(Rejected)


def iter_rejected(dataset: Home, first: int = 0) -> Iterator[Rejected]:
    """The rows that validation refused from row `first` on, in row order."""
    decode = _rejected.decode
    folder = folder_of(dataset)
    if not folder.size(REJECTED):
        return
    with folder.open(REJECTED) as file:

        def seek(offset: int) -> None:
            """Go to the first line that begins at this byte or behind it."""
            file.seek(max(0, offset - 1))
            if offset:
                file.readline()

        def is_wanted(offset: int) -> bool:
            seek(offset)
            return not (line := file.readline()) or decode(line).row >= first

        if first:  # there may be millions, of which many readers need a few each
            seek(bisect_left(range(file.seek(0, os.SEEK_END)), True, key=is_wanted))
        for line in file:
            yield decode(line)


class PlanReader:
    """A plan that was made. Opening it checks the sizes; `check` checks every byte.

    Raises: LedgerBroken when the files are not those of `plan.json`.
    """

    def __init__(self, home: Home) -> None:
        self._folder = folder_of(home)
        self.home = self._folder.path
        try:
            self.plan = msgspec.json.decode(self._folder.read(PLAN), type=Plan)
        except (FileNotFoundError, msgspec.MsgspecError) as error:
            raise LedgerBroken(f"the plan in {self.home} cannot be read: {error}", code="plan_broken") from error
        self._check_sizes()

    @property
    def leaders(self) -> int:
        return self.plan.leaders

    def row_numbers(self, lo: int, hi: int) -> Sequence[int]:
        """Row numbers at the positions lo <= p < hi; a range where the plan keeps the file's order."""
        assert 0 <= lo <= hi <= self.plan.leaders, f"positions {lo}..{hi} of {self.plan.leaders}"
        if not self.plan.permuted:
            return range(lo, hi)
        numbers = array("I")
        with closing(self._folder.source(ORDER)) as file:  # a plan that stays open for days holds no file
            numbers.frombytes(_read_at(file, 4 * lo, 4 * hi))
        return numbers

    def shards(self) -> Shards:
        """Every shard, by number; together they cover all positions once."""
        return Shards(self.plan.spans)

    def followers(self) -> Iterator[tuple[int, int]]:
        """(row, row whose outcome it shares), ascending by the first."""
        with self._folder.open(FOLLOWERS) as file:
            while chunk := file.read(CHUNK_BYTES):
                pairs = array("I")
                pairs.frombytes(chunk)
                yield from zip(pairs[::2], pairs[1::2], strict=True)

    def check(self) -> None:
        """Read every byte and compare the checksums."""
        if _digest(self.plan) != self.plan.sha256:
            raise LedgerBroken(f"{self.home / PLAN} is damaged: its checksum does not match", code="plan_broken")
        for name, expected in self.plan.files.items():
            with self._folder.open(name) as file:
                digest = sha256()
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
            if digest.hexdigest() != expected:
                raise LedgerBroken(f"{self.home / name} is damaged: its checksum does not match", code="plan_broken")

    def _check_sizes(self) -> None:
        plan = self.plan
        sizes = {FOLLOWERS: plan.followers * _FOLLOWER_BYTES}
        if plan.permuted:
            sizes[ORDER] = plan.leaders * 4
        for name, expected in sizes.items():
            try:
                size = self._folder.size(name)
            except FileNotFoundError:
                size = -1
            if size != expected:
                raise LedgerBroken(f"{self.home / name} has {size} bytes instead of {expected}", code="plan_broken")


def explain(plan: Plan, models: Sequence[str]) -> Explanation:
    """A plan in words and figures; `models` are the names by model number."""
    per_model = {span.model: span.end - span.first for span in plan.spans}
    groups = [
        PlanGroup(
            models[target.model], target.adapter, target.rows, target.folded, per_model.get(target.model, 0),
            target.tokens, target.prefix_groups, _share(target.shared_bytes, target.input_bytes),
        )
        for target in plan.targets
    ]  # fmt: skip
    tokens = [target.tokens for target in plan.targets]
    return Explanation(
        rows=plan.rows, run=plan.leaders, folded=plan.followers, rejected=plan.rejected, shards=plan.shards,
        in_file_order=not plan.permuted, groups=groups,
        tokens=None if None in tokens else sum(filter(None, tokens)),
        shared_prefix=_share(
            sum(target.shared_bytes for target in plan.targets), sum(target.input_bytes for target in plan.targets)
        ),
    )  # fmt: skip


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _spans(targets: Iterable[TargetPlan], shard_rows: Sequence[ShardRows]) -> list[ShardSpan]:
    """Shards of a model run on over its adapters, and end where the model's rows end."""
    rows_of: dict[int, int] = {}
    for target in targets:
        rows_of[target.model] = rows_of.get(target.model, 0) + target.rows
    spans: list[ShardSpan] = []
    first = lo = 0
    for model, rows in rows_of.items():
        if rows:
            cut = shard_rows[model]
            spans.append(ShardSpan(model, first, lo, lo + rows, cut.most, cut.last))
            first, lo = spans[-1].end, lo + rows
    return spans


def shard_rows(model: ModelSpec, rows: int, *, is_columnar: bool = False, is_small: bool = False) -> ShardRows:
    """The shards of this model in a job of `rows` rows; for a provider's batch API, those of one job there.

    Shards of a columnar dataset are longer: its rows move faster, and are read best where they follow each other.
    A few rows of a small job are one shard for each worker: a lease costs as much as they do.
    """
    if model.is_handed_over:
        return ShardRows(handed_over_rows(model))
    least, most = model.traits.shard_rows
    most = max(most, COLUMN_SHARD_ROWS) if is_columnar else most
    workers = max(1, model.workers if model.scaling is None else model.scaling.replicas_max)
    if is_small and rows <= FEW_ROWS:
        return ShardRows(max(least, -(-rows // workers)))
    return ShardRows(max(least, min(most, rows // (workers * SHARDS_PER_WORKER))), LAST_SHARD_ROWS)


def handed_over_rows(model: ModelSpec) -> int:
    """The most rows of one job at a model's provider."""
    return int(argument(model, "rows_max", PROVIDERS[model.provider or "openai"].rows_max))


def argument(model: ModelSpec, name: str, default: float) -> float:
    """A number of at least 1 among the engine's arguments; the engine itself refuses what is none."""
    value = model.engine_args.get(name)
    try:
        number = default if value is None or isinstance(value, bool) else float(value)
    except ValueError:
        number = default
    return max(1.0, number) if math.isfinite(number) else default


def _digest(plan: Plan) -> str:
    return sha256(msgspec.json.encode(msgspec.structs.replace(plan, sha256=""))).hexdigest()


def _read_at(file: Source, start: int, end: int) -> bytes:
    """All bytes start <= n < end; one read returns 2 GiB at most."""
    pieces = []
    while start < end:
        piece = file.read_at(start, end)
        if not piece:
            raise LedgerBroken("the plan ends before its last position", code="plan_broken")
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)
