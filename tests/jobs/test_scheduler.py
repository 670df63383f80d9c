"""Which job goes first, and what each has a claim to."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.jobs.pools import scheduler
from batchmill.jobs.pools.scheduler import Candidate, FairShare

WEIGHTS = st.lists(st.floats(0.1, 50.0), min_size=2, max_size=6)


def first(*candidates: Candidate) -> str:
    return min(candidates, key=scheduler.order_of).job


def test_the_order():
    """Priority, then a deadline in danger, then the project that is behind, then the deadline, then age."""
    old = Candidate("old", 1.0)
    assert first(Candidate("new", 2.0), old) == "old"
    assert first(Candidate("due", 2.0, deadline=9.0), old, Candidate("later", 1.0, deadline=10.0)) == "due"
    behind = Candidate("behind", 3.0, "other", ahead=-1.0)
    assert first(behind, Candidate("due", 1.0, deadline=9.0)) == "behind"
    late = Candidate("late", 4.0, "third", deadline=8.0, is_late=True, ahead=5.0)
    assert first(behind, late) == "late"
    assert first(late, Candidate("sooner", 5.0, deadline=7.0, is_late=True)) == "sooner"
    assert first(late, Candidate("high", 9.0, priority=1, ahead=99.0)) == "high"
    assert Candidate("a", 1.0, priority=1).rank > Candidate("b", 1.0, is_late=True).rank


@pytest.mark.parametrize(
    ("left_s", "work", "per_s", "late"),
    [(100.0, 50.0, 1.0, False), (100.0, 67.0, 1.0, True), (-1.0, 1.0, 1.0, True), (100.0, 1e9, None, False)],
)
def test_a_deadline_in_danger(left_s, work, per_s, late):
    """A job is late when the workers would need nearly all the time that is left for it; not while that is unknown."""
    assert scheduler.is_late(1000.0 + left_s, 1000.0, work=work, per_s=per_s) is late
    assert scheduler.is_late(None, 1000.0, work=work, per_s=per_s) is False


@given(WEIGHTS, st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_shares_add_up_to_the_weights(weights, owners):
    """A project's share is its weight however many jobs it has; each of them has one, the first the largest."""
    named = {f"p{n}": weight for n, weight in enumerate(weights)}
    candidates = [Candidate(f"j{n:02}", float(n), f"p{owner % len(weights)}") for n, owner in enumerate(owners)]
    shares = scheduler.shares(candidates, named)
    for project in {each.project for each in candidates}:
        mine = [shares[each.job] for each in candidates if each.project == project]
        assert sum(mine) == pytest.approx(named[project]) and min(mine) > 0
        assert mine[0] == max(mine) >= scheduler.FIRST_SHARE * named[project]


@given(WEIGHTS, st.lists(st.floats(0.5, 2_000.0), min_size=6, max_size=6))
def test_projects_converge_to_their_weights(weights, costs):
    """Projects that always have work are served by their weights, whatever their rows cost; nobody starves."""
    share = FairShare({f"p{n}": weight for n, weight in enumerate(weights)})
    projects = [f"p{n}" for n in range(len(weights))]
    served: Counter[str] = Counter()
    for _ in range(600):
        share.set_active(projects)
        chosen = first(*[Candidate(p, 1.0, p, ahead=share.ahead(p)) for p in projects])
        share.charge(chosen, costs[projects.index(chosen)])
        served[chosen] += costs[projects.index(chosen)]
    virtual = [served[p] / weight for p, weight in zip(projects, weights, strict=True)]
    largest = max(cost / weight for cost, weight in zip(costs, weights, strict=False))
    assert max(virtual) - min(virtual) <= largest * (1 + 1e-9)


def test_an_idle_project_saves_up_nothing():
    """A project that comes back shares from then on, and one that has only begun owes nothing of the past."""
    share = FairShare({})
    share.set_active(["busy", "away"])
    for _ in range(10):
        share.set_active(["busy"])
        share.charge("busy", 100.0)
    share.set_active(["busy"])
    share.set_active(["busy", "away", "new"])
    assert share.ahead("away") == share.ahead("new") == share.ahead("busy")
    assert share.ahead("new", held=50.0) == share.ahead("new") + 50.0


def test_what_a_project_took_too_much_is_not_forgotten():
    """A project cannot shake off what it was served by having no work for a moment."""
    share = FairShare({})
    share.set_active(["one", "two"])
    share.charge("one", 500.0)
    share.set_active(["two"])
    share.set_active(["one", "two"])
    assert share.ahead("one") == share.ahead("two") + 500.0
