"""A shard for a provider's batch API, cut to what its job may still spend: what is handed over is paid."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from batchmill.executors.allowance import Allowance
from batchmill.executors.held import Held
from batchmill.types import Row
from batchmill.types.connectors import RemoteJob

WINDOW = 1024  # rows that are looked at together

_note = msgspec.json.Decoder(RemoteJob)


def cut(
    held: Held, allowance: Allowance, positions: Sequence[int], read: Callable[[int, int], list[Row]]
) -> list[int] | None:
    """Which of the rows of a lease go, by their places among `positions`; what they may cost is reserved.

    Those that a provider has already go in any case. None: all of them go; none: the owner was asked for more.
    """
    there = _handed_over(held)
    kept: list[int] = []
    is_spent = False
    for first in range(0, len(positions), WINDOW):
        last = min(first + WINDOW, len(positions))
        rows = read(first, last)
        known = [row for row in rows if row.position in there]
        allowance.reserve(known, at_any_price=True)
        fresh = [] if is_spent else [row for row in rows if row.position not in there]
        count = allowance.reserve(fresh, is_first=not kept and not known)
        is_spent = is_spent or count < len(fresh)
        going = {row.position for row in [*known, *fresh[:count]]}
        kept += [place for place, row in enumerate(rows, first) if row.position in going]
        if is_spent and not there:
            break
    return None if len(kept) == len(positions) else kept


def _handed_over(held: Held) -> set[int]:
    """Plan positions that jobs at the provider hold."""
    jobs = [_note.decode(data) for data in held.notes.values()]
    runs = [run for job in jobs if job.state != "forgotten" for run in job.runs]
    return {position for first, count in runs for position in range(first, first + count)}
