"""Which rows a sample has, and what they tell of the whole job."""

from __future__ import annotations

import msgspec
import pytest

from batchmill.errors import InvalidInput
from batchmill.types import JobView, Sample, Usage
from batchmill.wire.sampling import DRAWN_MAX, ROWS_MAX, SEED, SEED_MAX, check, outlook, rows_of, sample_of


def test_the_rows_of_a_sample():
    """The first rows, or the same ones at random each time; never more than there are."""
    assert rows_of(Sample(3), 10) == range(3)
    assert rows_of(Sample(30), 10) == rows_of(Sample(10, 7), 10) == range(10)
    assert rows_of(Sample(5), 0) == range(0)
    drawn = rows_of(Sample(4, 1), 1000)
    assert drawn == sorted(set(drawn)) == rows_of(Sample(4, 1), 1000) != rows_of(Sample(4, 2), 1000)
    assert len(drawn) == 4 and drawn[0] >= 0 and drawn[-1] < 1000


def test_what_an_order_asks_for():
    """The seed has a default; what contradicts itself is refused by name."""
    assert sample_of(None, None, None) is None
    assert sample_of(5, None, None) == Sample(5)
    assert sample_of(None, 5, None) == Sample(5, SEED)
    assert sample_of(None, 5, 8) == Sample(5, 8)
    for values, word in (((5, 5, None), "exclude"), ((None, None, 1), "give sample"), ((5, None, 1), "give sample")):
        with pytest.raises(InvalidInput, match=word):
            sample_of(*values)


def test_the_bounds_of_a_sample():
    """A sample has one row at least, and as many as a plan at most."""
    for sample in (Sample(1), Sample(ROWS_MAX), Sample(1, 0), Sample(1, SEED_MAX)):
        check(sample)
    check(Sample(DRAWN_MAX, 0))
    with pytest.raises(InvalidInput, match="not 1,000,001"):
        check(Sample(DRAWN_MAX + 1, 0))
    for sample in (Sample(0), Sample(ROWS_MAX + 1), Sample(1, -1), Sample(1, SEED_MAX + 1)):
        with pytest.raises(InvalidInput, match=r"sample has|seed is"):
            check(sample)


VIEW = JobView(
    "job", "paused", rows=1100, rows_ok=90, rows_failed=110, rows_rejected=100, usage=Usage(1000, 0, 500), cost=2.0,
    elapsed_s=5.0,
)  # fmt: skip


def test_what_a_sample_tells():
    """Figures grow with the rows that run; refused rows and those that share an outcome cost nothing."""
    found = outlook(VIEW, is_handed_over=False)
    assert (found.rows, found.ran) == (1000, 100)
    assert found.cost.mid == pytest.approx(20.0) and found.input_tokens.mid == pytest.approx(10_000)
    assert 2.0 < found.cost.low < 20.0 < found.cost.high < 30.0
    assert found.time_s_max == pytest.approx(50.0)
    assert outlook(VIEW, is_handed_over=True).time_s_max is None


def test_a_sample_that_tells_nothing():
    """Before any row ran, and where no other is left, there is nothing to say."""
    for change in ({"rows_ok": 0, "rows_failed": 100}, {"rows": 200}, {"rows": 0, "rows_failed": 0, "rows_ok": 0}):
        assert outlook(msgspec.structs.replace(VIEW, **change), is_handed_over=False) is None
    bare = msgspec.structs.replace(VIEW, usage=Usage(), cost=None, elapsed_s=0.0)
    found = outlook(bare, is_handed_over=False)
    assert (found.cost, found.input_tokens, found.output_tokens, found.time_s_max) == (None, None, None, None)


def test_more_rows_make_the_range_narrower():
    """A row alone says little; of nearly all rows the range is nearly closed."""
    spans = []
    for ran in (1, 20, 500, 999):
        view = msgspec.structs.replace(VIEW, rows_ok=ran, rows_failed=100, cost=ran * 0.02)
        cost = outlook(view, is_handed_over=False).cost
        assert cost.low <= cost.mid <= cost.high and cost.mid == pytest.approx(20.0)
        spans.append(cost.high / cost.low)
    assert spans == sorted(spans, reverse=True) and spans[-1] < 1.01
