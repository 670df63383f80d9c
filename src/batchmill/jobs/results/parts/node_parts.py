"""Parts of results that nodes of a cluster write, and what the owner finds out about them."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace

from batchmill.errors import StorageFailed, Unavailable
from batchmill.jobs.ledger.plan import Progress
from batchmill.jobs.results.parts.index_slices import DATASET, write_facts
from batchmill.jobs.results.parts.output_folders import ObjectFolder
from batchmill.jobs.results.parts.part_gathering import learn_offloaded, part_offloaded
from batchmill.jobs.results.parts.part_orders import CheckOrder, PartOrder, PartsOrder, Written
from batchmill.jobs.results.row_windows import SavedRowIndex
from batchmill.types.cluster import NodePlace


def write_on_node(order: bytes, place: NodePlace) -> bytes:
    """PartOrder in, Written out, both as JSON. Raises: as `part_offloaded`."""
    request = msgspec.json.decode(order, type=PartOrder)
    return part_offloaded(msgspec.json.encode(replace(request, parts=_placed(request, place))), lambda _: None)


def learn_on_node(order: bytes, place: NodePlace) -> bytes:
    """PartOrder in, Learned out, both as JSON. Raises: as `learn_offloaded`."""
    request = msgspec.json.decode(order, type=PartOrder)
    return learn_offloaded(msgspec.json.encode(replace(request, parts=_placed(request, place))), lambda _: None)


def _placed(order: PartOrder, place: NodePlace) -> PartsOrder:
    """What its parts have in common, with the paths of this node."""
    parts, scratch = order.parts, Path(place.scratch)
    dataset = place.moved.get(parts.gather.dataset)
    if dataset is None:
        assert parts.facts is not None, "the owner sends them with each part"
        dataset = str(scratch / DATASET)
        write_facts(parts.facts, scratch / DATASET)
    gather = replace(parts.gather, dataset=dataset, moved=place.moved)
    return replace(parts, gather=gather, scratch=place.scratch, store=place.store, term=place.term)


def check_offloaded(order: bytes, _: Progress) -> bytes:
    """Offloaded: CheckOrder in, the numbers of the parts that are not what they must be out, both as JSON."""
    request = msgspec.json.decode(order, type=CheckOrder)
    parts = request.parts
    names = {part.name for each in request.written.values() for part in (each.part, each.errors) if part is not None}
    try:
        sizes = ObjectFolder(parts.gather.output, parts.term).sizes(names.__contains__)
    except Unavailable as error:
        raise StorageFailed(f"the parts cannot be listed: {error.message}; then resume the job") from None
    index = SavedRowIndex(parts.gather, Path(parts.scratch))
    try:
        wrong = [
            number for number, written in request.written.items() if not _is_right(parts, index, written, sizes)
        ]  # fmt: skip
    finally:
        index.segments.close()
    return msgspec.json.encode(wrong)


def _is_right(parts: PartsOrder, index: SavedRowIndex, written: Written, sizes: dict[str, int]) -> bool:
    """Whether the files are as long as they should be, and as many rows failed as the index says."""
    files = [part for part in (written.part, written.errors) if part is not None]
    if any(sizes.get(part.name) != part.bytes for part in files):
        return False
    totals = index.totals(range(written.part.first, written.part.end))
    if totals.failed != written.failed:
        return False
    if parts.kind != "jsonl":
        return True
    size = sum(part.bytes for part in files)
    return size == totals.copied_bytes if totals.all_copied else size > totals.copied_bytes
