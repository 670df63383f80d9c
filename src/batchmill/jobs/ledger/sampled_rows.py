"""The rows of a sample in a plan: which positions of which shards run before all others.

A sample has no plan of its own. Its rows are run under leases of the job's shards, whose bitmaps say what is done.
"""

from __future__ import annotations

import mmap
from array import array
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.jobs.ledger.ledger import Ledger
from batchmill.jobs.ledger.plan import FOLLOWERS, PlanReader, iter_rejected
from batchmill.types import Sample, Shard
from batchmill.wire.native import PlanSample
from batchmill.wire.sampling import rows_of

SHARDS_AT_ONCE = 512  # whose bitmaps one statement reads
AT_ONCE_ROWS = 65_536  # of a job whose plan is looked through without a child process
OFFLOADED = "batchmill.jobs.ledger.sampled_rows:masks_offloaded"
PREVIEW = "batchmill.jobs.ledger.sampled_rows:preview_offloaded"


class MaskOrder(Struct, frozen=True):
    """A plan, and the sample whose rows are looked for in it."""

    plan: str
    first: str  # the plan of generation 0, which has every row
    sample: Sample


async def masks_in(order: MaskOrder, rows: int, offload: Callable[..., Awaitable[bytes]]) -> dict[int, int]:
    """As `masks`, in a child process where the job has many rows."""
    if rows <= AT_ONCE_ROWS:
        return masks(order)
    answer = await offload(OFFLOADED, msgspec.json.encode(order), lambda _: None)
    packed = msgspec.json.decode(answer, type=dict[int, bytes])
    return {number: int.from_bytes(bits, "little") for number, bits in packed.items()}


def masks_offloaded(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: MaskOrder in, shard -> bits out, both as JSON."""
    found = masks(msgspec.json.decode(order, type=MaskOrder))
    packed = {number: bits.to_bytes(bits.bit_length() // 8 + 1, "little") for number, bits in found.items()}
    return msgspec.json.encode(packed)


def masks(order: MaskOrder) -> dict[int, int]:
    """Shard -> a bit for each of its positions that the sample has; without shards that have none.

    A row that shares the outcome of another is there by that one; one that validation refused is not in a plan.
    """
    reader, first = PlanReader(Path(order.plan)), PlanReader(Path(order.first))
    numbers = rows_of(order.sample, first.plan.rows)
    if not isinstance(numbers, range):
        numbers = sorted({*numbers, *leaders_of(first, numbers)})
    chosen = numbers if isinstance(numbers, range) else frozenset(numbers)
    found: dict[int, int] = {}
    for shard in reader.shards():
        planned = reader.row_numbers(shard.lo, shard.hi)
        indexes = _within(planned, numbers) if isinstance(planned, range) else _among(planned, chosen)
        if bits := _bits(indexes, shard):
            found[shard.number] = bits
    return found


class SampledRows(Struct, frozen=True):
    """What of a planned job its sample has."""

    sample: Sample
    rows: int
    positions: array[int]  # of the rows that run, ascending
    shards: int  # with some of them
    rejected: int  # of the rows: validation refused them

    @property
    def run(self) -> int:
        return len(self.positions)

    @property
    def folded(self) -> int:
        """Of the rows: they share the outcome of another."""
        return max(0, self.rows - self.rejected - self.run)


def sampled_rows(plan: PlanReader, dataset: Path, sample: Sample) -> SampledRows:
    """The rows of a sample in the first plan of a job."""
    numbers = rows_of(sample, plan.plan.rows)
    chosen = numbers if isinstance(numbers, range) else frozenset(numbers)
    rejected = sum(1 for each in iter_rejected(dataset) if each.row in chosen) if plan.plan.rejected else 0
    found, shards = masks(MaskOrder(str(plan.home), str(plan.home), sample)), plan.shards()
    positions = array("I", (shards[number].lo + index for number, bits in found.items() for index in _indexes(bits)))
    return SampledRows(sample, len(numbers), positions, len(found), rejected)


class PreviewOrder(Struct, frozen=True):
    """As the arguments of `sampled_rows`, in a child process."""

    plan: str
    dataset: str
    sample: Sample


def preview_offloaded(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: PreviewOrder in, PlanSample out, both as JSON."""
    request = msgspec.json.decode(order, type=PreviewOrder)
    found = sampled_rows(PlanReader(Path(request.plan)), Path(request.dataset), request.sample)
    return msgspec.json.encode(
        PlanSample(found.rows, found.run, found.folded, found.rejected, found.shards, found.sample.seed)
    )


def _indexes(bits: int) -> Iterator[int]:
    """The indexes of the bits that are set."""
    return (index for index, bit in enumerate(bin(bits)[:1:-1]) if bit == "1")


def _within(planned: range, numbers: Sequence[int]) -> Iterable[int]:
    """The indexes in `planned` of those of `numbers`, which ascend, that it has."""
    lo, hi = bisect_left(numbers, planned.start), bisect_left(numbers, planned.stop)
    return (number - planned.start for number in numbers[lo:hi])


def _among(planned: Sequence[int], chosen: range | frozenset[int]) -> Iterable[int]:
    return (index for index, number in enumerate(planned) if number in chosen)


def _bits(indexes: Iterable[int], shard: Shard) -> int:
    bits = bytearray((shard.hi - shard.lo) // 8 + 1)
    for index in indexes:
        bits[index >> 3] |= 1 << (index & 7)
    return int.from_bytes(bits, "little")


def leaders_of(first: PlanReader, numbers: Sequence[int]) -> Iterator[int]:
    """The rows whose outcome those of `numbers` share that share one."""
    if not first.plan.followers:
        return
    with (
        open(first.home / FOLLOWERS, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as data,
        data.cast("I") as pairs,  # (row, row whose outcome it shares), ascending by the first
    ):
        for number in numbers:
            at = bisect_left(range(first.plan.followers), number, key=lambda index: pairs[2 * index])
            if at < first.plan.followers and pairs[2 * at] == number:
                yield pairs[2 * at + 1]


def bitmaps(ledger: Ledger, job_id: str, generation: int, numbers: Sequence[int]) -> dict[int, int]:
    """Shard -> which of its positions have their outcome."""
    found: dict[int, int] = {}
    for at in range(0, len(numbers), SHARDS_AT_ONCE):
        found |= ledger.bitmaps(job_id, generation, numbers[at : at + SHARDS_AT_ONCE])
    return found
