"""Whose rows a worker begins next: priority strictly, shares in the long run, and nobody saves up or starves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from batchmill.executors.fair_queue import FairQueue, JobQueue

SHARES = st.floats(0.05, 20.0)
COSTS = st.floats(0.1, 5_000.0)
LANES = st.lists(st.tuples(SHARES, COSTS, st.integers(1, 40)), min_size=2, max_size=6)


def serve(turns: FairQueue, takes: dict[str, int], times: int) -> Counter[str]:
    """Cost that each lane was served, when each takes its own number of rows at a time."""
    served: Counter[str] = Counter()
    for _ in range(times):
        lane = turns.next()
        assert lane is not None
        turns.charge(lane, takes[lane.job])
        served[lane.job] += takes[lane.job] * lane.row_cost
    return served


def enter_all(lanes: list[tuple[float, float, int]]) -> tuple[FairQueue, dict[str, int], dict[str, JobQueue]]:
    turns = FairQueue()
    made = {f"j{n}": JobQueue(f"j{n}", share=share, row_cost=cost) for n, (share, cost, _) in enumerate(lanes)}
    for lane in made.values():
        turns.enter(lane)
    return turns, {f"j{n}": take for n, (_, _, take) in enumerate(lanes)}, made


@given(LANES)
def test_service_follows_the_shares(lanes):
    """However many rows a take has and whatever they cost, no lane is ever further off its share than two takes."""
    turns, takes, made = enter_all(lanes)
    served = serve(turns, takes, 400)
    largest = max(takes[job] * lane.row_cost / lane.share for job, lane in made.items())
    virtual = [served[job] / lane.share for job, lane in made.items()]
    assert max(virtual) - min(virtual) <= 2 * largest * (1 + 1e-9)


@given(LANES, st.integers(0, 300))
def test_who_comes_late_begins_where_the_others_are(lanes, before):
    """A lane that was away has saved up nothing and waits for nobody: it is served within one take of the others."""
    turns, takes, made = enter_all(lanes)
    late = JobQueue("late")
    takes["late"] = 1
    serve(turns, takes, before)
    turns.enter(late)
    served = 0.0
    while (lane := turns.next()) is not late:
        assert lane is not None
        turns.charge(lane, takes[lane.job])
        served += 1
        assert served <= len(made)
    turns.leave(late)
    serve(turns, takes, 50)
    turns.enter(late)
    largest = max(takes[job] * lane.row_cost / lane.share for job, lane in made.items())
    assert late.due * (1 + 1e-9) >= min(lane.due for lane in made.values()) - largest


def test_priority_is_strict():
    """Rows of a higher priority go first as long as there are any, and a changed priority counts at once."""
    turns = FairQueue()
    low, high = JobQueue("low", share=100.0), JobQueue("high", priority=1, share=0.01, row_cost=1e9)
    turns.enter(low)
    turns.enter(high)
    assert serve(turns, {"high": 8, "low": 8}, 20).keys() == {"high"}
    turns.weigh(low, priority=2, share=1.0, row_cost=1.0)
    assert turns.next() is low
    turns.leave(low)
    turns.leave(high)
    assert turns.next() is None and not len(turns)


def test_an_enormous_row_blocks_nobody():
    """A row of any cost is begun when its turn comes; after it the others go on until they have had as much."""
    turns = FairQueue()
    huge, small = JobQueue("huge", row_cost=1e12), JobQueue("small", row_cost=1.0)
    turns.enter(huge)
    turns.enter(small)
    assert serve(turns, {"huge": 1, "small": 1}, 100) == {"huge": 1e12, "small": 99.0}
