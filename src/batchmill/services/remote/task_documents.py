"""What a provider says of a job, as its task keeps it: an object, and no longer than has to be. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchmill.services.remote.calls import RemoteReply
from batchmill.wire.json_bytes import encode
from batchmill.wire.json_templates import is_json

BYTES_MAX = 64 * 1024  # of one, as JSON: all tasks of a project are searched at once


def read(reply: RemoteReply) -> dict[str, Any] | None:
    """The job that a reply tells of; None for a list, a text and anything else that is no object."""
    if reply.data is None or not reply.body.lstrip().startswith(b"{") or not is_json(reply.body):
        return None  # post-processing makes an object of whatever comes
    return reply.data


def bounded(told: Mapping[str, Any]) -> dict[str, Any]:
    """As much as may be kept: the longest members go first. Ids and states are short."""
    sizes = {name: len(encode(name)) + len(encode(value)) + 2 for name, value in told.items()}
    total, gone = sum(sizes.values()), set()
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if total <= BYTES_MAX:
            break
        total -= sizes[name]
        gone.add(name)
    return {name: value for name, value in told.items() if name not in gone}
