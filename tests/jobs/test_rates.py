"""How fast a job runs."""

from __future__ import annotations

from fakes.held_clock import HeldClock

from batchmill.jobs.pools.scheduler import WINDOW_S, Rates
from batchmill.types import Usage


def test_the_last_seconds_count():
    """Rows and tokens of the window, by second; what is older counts no more."""
    clock = HeldClock()
    rates = Rates(clock)
    rates.add(100, Usage(1000, 0, 10))
    clock.at += WINDOW_S + 1
    assert rates.now() is None
    rates.add(30, Usage(60, 0, 15))
    assert rates.now() == (2.0, 4.0, 1.0)


def test_nothing_old_is_kept_where_nobody_looks():
    """A job that no one watches keeps only its last seconds."""
    clock = HeldClock()
    rates = Rates(clock)
    for _ in range(1000):
        rates.add(1, Usage())
        clock.at += 1.0
    assert len(rates._samples) <= WINDOW_S + 1
