"""Which rows a sample has, and what its rows tell of the whole job. Everywhere the same: commands, SDK and server."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from batchmill.errors import InvalidInput
from batchmill.types import EstimateRange, JobView, Outlook, Sample

SEED = 0  # of a sample that is drawn at random, if none is given
ROWS_MAX = 2**32 - 1
DRAWN_MAX = 1_000_000  # rows that are drawn at random: their numbers are held in memory
SEED_MAX = 2**63 - 1
SURE = 1.28  # standard errors around a mean that hold 8 of 10 samples


def sample_of(limit: int | None, sample: int | None, seed: int | None) -> Sample | None:
    """The sample that an order asks for: the first rows, or some at random. Raises: InvalidInput."""
    if limit is not None and sample is not None:
        raise InvalidInput(
            "limit and sample exclude each other: the first rows, or some drawn at random", code="invalid_sample"
        )
    if seed is not None and sample is None:
        raise InvalidInput("a seed is for a sample that is drawn at random: give sample too", code="invalid_sample")
    rows = limit if sample is None else sample
    if rows is None:
        return None
    found = Sample(rows, None if sample is None else SEED if seed is None else seed)
    check(found)
    return found


def check(sample: Sample) -> None:
    """Raises: InvalidInput, naming the value."""
    if not 1 <= sample.rows <= ROWS_MAX:
        raise InvalidInput(f"a sample has 1 to {ROWS_MAX:,} rows, not {sample.rows:,}", code="invalid_sample")
    if sample.seed is not None and sample.rows > DRAWN_MAX:
        raise InvalidInput(
            f"a sample that is drawn at random has 1 to {DRAWN_MAX:,} rows, not {sample.rows:,}: `limit` takes"
            " more, from the beginning",
            code="invalid_sample",
        )
    if sample.seed is not None and not 0 <= sample.seed <= SEED_MAX:
        raise InvalidInput(f"a seed is 0 to {SEED_MAX}, not {sample.seed}", code="invalid_sample")


def rows_of(sample: Sample, rows: int) -> Sequence[int]:
    """The numbers of the sampled rows of a dataset, ascending. The same seed draws the same rows for any prompt."""
    if sample.seed is None or sample.rows >= rows:
        return range(min(sample.rows, rows))
    return sorted(random.Random(sample.seed).sample(range(rows), sample.rows))


def in_words(sample: Sample) -> str:
    """As in "the first 20 rows"."""
    rows = "row" if sample.rows == 1 else "rows"
    if sample.seed is None:
        return f"the first {'row' if sample.rows == 1 else f'{sample.rows:,} rows'}"
    return f"{sample.rows:,} {rows} drawn at random (seed {sample.seed})"


def likely(total: float, ran: int, rows: int) -> EstimateRange:
    """What all `rows` will have, if `ran` of them had `total`.

    The range holds 8 of 10 samples of values that vary as much as their mean; lengths of answers vary less, mostly.
    """
    mid = total / ran * rows
    wider = 1 + SURE / math.sqrt(ran) * math.sqrt(max(0.0, 1 - ran / rows))
    return EstimateRange(max(total, mid / wider), mid, mid * wider)


def outlook(view: JobView, *, is_handed_over: bool) -> Outlook | None:
    """What the whole job will have used; None: no row has run yet, or no other is left.

    Args: is_handed_over: rows go to batches of a provider, whose time says nothing of that of others.
    """
    others = view.rows_rejected + view.rows_reused  # that cost nothing
    rows = view.rows - view.rows_folded - others
    ran = view.rows_ok + view.rows_failed - others
    if not 0 < ran < rows:
        return None
    usage = view.usage
    has_tokens = usage.input_tokens > 0 or usage.output_tokens > 0
    return Outlook(
        rows=rows,
        ran=ran,
        cost=None if view.cost is None else likely(view.cost, ran, rows),
        input_tokens=likely(usage.input_tokens, ran, rows) if has_tokens else None,
        output_tokens=likely(usage.output_tokens, ran, rows) if has_tokens else None,
        time_s_max=None if is_handed_over or not view.elapsed_s else view.elapsed_s / ran * rows,
    )
