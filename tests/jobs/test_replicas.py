"""How many replicas are wanted: more at once, fewer after a while, never beyond what has work."""

from __future__ import annotations

import pytest

from batchmill.jobs.pools.replicas import Load, ReplicaTarget, follow, needed
from batchmill.types import Scaling

SCALING = Scaling(replicas_min=1, replicas_max=4, scale_up_requests=10)


@pytest.mark.parametrize(
    ("scaling", "load", "wanted"),
    [
        (SCALING, Load(), 1),
        (SCALING, Load(requests=10), 1),
        (SCALING, Load(requests=11), 2),
        (SCALING, Load(requests=1000), 4),
        (SCALING, Load(rows=1000, shards=1), 1),  # one shard is at one worker
        (SCALING, Load(rows=1000, shards=3), 3),
        (SCALING, Load(rows=25, shards=3, requests=5), 3),
        (Scaling(replicas_max=2), Load(rows=128, shards=9), 1),
        (Scaling(replicas_max=2), Load(rows=129, shards=9), 2),
        (Scaling(replicas_max=2), Load(), 1),  # somebody uses it
        (Scaling(replicas_min=3, replicas_max=4), Load(), 3),
    ],
)
def test_as_many_as_have_work(scaling, load, wanted):
    """Requests and rows over the number for each, between the least and the most, and no more than shards."""
    assert needed(scaling, load) == wanted


def walk(needs: list[tuple[float, int]], cooldown_s: float = 10.0) -> list[int]:
    standing, seen = ReplicaTarget(1), []
    for now, need in needs:
        standing = follow(standing, need, now=now, cooldown_s=cooldown_s)
        seen.append(standing.wanted)
    return seen


def test_more_come_at_once():
    """A replica that is needed starts when it is needed."""
    assert walk([(0, 1), (1, 4), (1.5, 4)]) == [1, 4, 4]


def test_fewer_come_after_the_cooldown():
    """A replica goes once it has not been needed for so long, and the count begins anew whenever it was."""
    assert walk([(0, 3), (1, 1), (10.9, 1), (11, 1)]) == [3, 3, 3, 1]
    assert walk([(0, 3), (1, 1), (9, 3), (12, 1), (21, 1), (22, 1)]) == [3, 3, 3, 3, 3, 1]


def test_as_many_stay_as_were_needed_meanwhile():
    """After the cooldown there are as many as the most that were needed within it."""
    assert walk([(0, 4), (1, 1), (5, 3), (8, 1), (11, 1), (21, 1)]) == [4, 4, 4, 4, 3, 1]


def test_without_a_cooldown_they_go_at_once():
    assert walk([(0, 4), (0, 1)], 0.0) == [4, 1]
