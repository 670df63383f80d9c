"""How many replicas a model is to have. Pure: what there is to do goes in, the wanted number comes out."""

from __future__ import annotations

from msgspec import Struct

from batchmill.types import Scaling

REQUESTS_DEFAULT = 128  # as types.Scaling says
COOLDOWN_DEFAULT_S = 600.0


class Load(Struct, frozen=True):
    """What there is to do for a model."""

    requests: int = 0  # live requests that are being answered or wait
    rows: int = 0  # of jobs, without an outcome
    shards: int = 0  # that these rows are in: a shard is at one worker at a time


class Standing(Struct, frozen=True):
    """How many are wanted, and since when fewer would have done."""

    wanted: int
    spare_since: float | None = None
    peak: int = 0  # the most that were needed since then


def needed(scaling: Scaling, load: Load) -> int:
    """As many as keep each at its number of requests and rows, and no more than could have any."""
    each = scaling.scale_up_requests or REQUESTS_DEFAULT
    by_load = -(-(load.requests + load.rows) // each)
    least = max(1, scaling.replicas_min)
    return max(least, min(by_load, load.requests + load.shards, scaling.replicas_max))


def follow(standing: Standing, need: int, *, now: float, cooldown_s: float) -> Standing:
    """More at once; fewer when fewer have done for `cooldown_s`, and then as many as were needed at most meanwhile."""
    if need >= standing.wanted:
        return Standing(need)
    since = now if standing.spare_since is None else standing.spare_since
    peak = need if standing.spare_since is None else max(standing.peak, need)
    if now - since < cooldown_s:
        return Standing(standing.wanted, since, peak)
    return Standing(peak) if peak == need else Standing(peak, now, need)
