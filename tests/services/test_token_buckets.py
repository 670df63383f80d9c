"""Token buckets."""

from hypothesis import given
from hypothesis import strategies as st

from batchmill.services.token_buckets import TokenBuckets


def test_a_minutes_worth_at_once_and_then_evenly():
    """A bucket gives a minute's worth at once, says how long the next one takes, and fills again."""
    buckets = TokenBuckets()
    assert [buckets.take("a", 3, 3 / 60, 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert buckets.take("a", 3, 3 / 60, 0.0) == 20.0
    assert buckets.take("b", 3, 3 / 60, 0.0) == 0.0
    assert buckets.take("a", 3, 3 / 60, 20.0) == 0.0
    assert 0 < buckets.take("a", 3, 3 / 60, 20.0) <= 20.0


def test_an_older_clock_fills_nothing_twice():
    """A call whose clock was read before another call's, but that comes after it, gets no more than is there."""
    buckets = TokenBuckets()
    assert [buckets.take("a", 2, 1.0, now) for now in (0.0, 0.0)] == [0.0, 0.0]
    assert [buckets.take("a", 2, 1.0, now) for now in (1.0, 0.2)] == [0.0, 1.0]
    assert buckets.take("a", 2, 1.0, 1.9) > 0.0


@given(st.integers(1, 100_000), st.floats(0, 1e6))
def test_a_call_at_the_time_that_was_told_is_admitted(per_minute, now):
    """The wait that a refused call is told is enough, whatever the rounding of floats."""
    buckets, rate = TokenBuckets(), per_minute / 60
    while not (wait_s := buckets.take("a", 1, rate, now)):
        pass
    assert buckets.wait_s("a", 1, rate, now + wait_s * (1 + 1e-9) + 1e-9) == 0.0
    assert buckets.take("a", 1, rate, now + wait_s * (1 + 1e-9) + 1e-9) == 0.0


def test_only_so_many_names_are_kept():
    """The bucket that was used longest ago is forgotten when there are too many."""
    buckets = TokenBuckets(2)
    for name in ("a", "b", "c"):
        buckets.take(name, 1, 1 / 60, 0.0)
    assert (buckets.wait_s("a", 1, 1 / 60, 0.0), buckets.wait_s("c", 1, 1 / 60, 0.0)) == (0.0, 60.0)


@given(st.lists(st.floats(0, 30), max_size=200), st.integers(1, 1000))
def test_never_more_than_the_rate(gaps, per_minute):
    """Whatever the rhythm, no more is taken than a bucket's content and what filled it meanwhile."""
    buckets, now, taken = TokenBuckets(), 0.0, 0
    for gap in gaps:
        now += gap
        taken += buckets.take("a", per_minute, per_minute / 60, now) == 0.0
    assert taken <= per_minute + now * per_minute / 60 + 1e-6
