"""Adapters as commands and callers see them."""

from __future__ import annotations

import os

import msgspec
from msgspec.structs import replace

from batchmill.services.adapters.records import AdapterRecord
from batchmill.wire.native_adapters import AdapterInfo


def adapter_info(record: AdapterRecord) -> AdapterInfo:
    """For whoever works on this machine."""
    return msgspec.convert(record, AdapterInfo, from_attributes=True)


def shown_info(record: AdapterRecord) -> AdapterInfo:
    """For callers of a server: where folders lie on it is nobody's business."""
    info = adapter_info(record)
    if not os.path.isabs(record.source):
        return info
    name = os.path.basename(record.source)
    return replace(info, source=name, message=record.message.replace(record.source, name))
