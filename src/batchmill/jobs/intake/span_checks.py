"""Rows that nodes of a cluster check: what there is to check, found out in a child of the owner, and the checks."""

from __future__ import annotations

import contextlib

import msgspec

from batchmill import faults
from batchmill.datasets.checking.spans import SpanOrder, check_span
from batchmill.datasets.sealing import Survey, survey
from batchmill.errors import BatchmillError
from batchmill.jobs.intake.preparation import PrepareOrder, seal_order
from batchmill.jobs.ledger.plan import Progress
from batchmill.owner_term import term_at
from batchmill.store.objects import StoreObjects
from batchmill.types.cluster import NodePlace


def survey_offloaded(order: bytes, _: Progress) -> bytes:
    """Offloaded: PrepareOrder in as JSON, `Survey | None` out as msgpack."""
    request = msgspec.json.decode(order, type=PrepareOrder)
    found: Survey | None = None
    with contextlib.suppress(BatchmillError):  # `prepare` meets it again, and says it
        found = survey(seal_order(request.spec))
    return msgspec.msgpack.encode(found)


def check_on_node(order: bytes, place: NodePlace) -> bytes:
    """SpanOrder in, CheckedSpan out, both as msgpack. Raises: as `check_span`; StorageFailed."""
    objects = StoreObjects(place.store, term_at(place.term))
    checked = check_span(msgspec.msgpack.decode(order, type=SpanOrder), objects.put)
    faults.point("after_span")
    return msgspec.msgpack.encode(checked)
