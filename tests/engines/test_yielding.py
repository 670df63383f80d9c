"""How rows yield to live requests, outside the engine: the limit on rows in flight, on a clock held by the test."""

from __future__ import annotations

import pytest

from batchmill.engines.llm.row_queue import ALERT_S, CREDIT_MAX_S, ROWS_MIN, Yielding

FULL = 256


def busy(rate: float = 100.0) -> Yielding:
    """Rows have run for ten seconds, 200 of them at a time, without live requests."""
    yielding = Yielding()
    for tick in range(40):
        yielding.observe(200, int(rate * tick / 4), tick / 4)
    return yielding


def answer(yielding: Yielding, now: float, *, piece_s: float, in_flight: int) -> None:
    """One live request that comes and is answered at once."""
    yielding.record_start(now)
    yielding.record_reply(piece_s, in_flight)
    yielding.record_end(now)


def test_without_live_requests_rows_have_it_all():
    """As long as nobody waits the limit is the engine's own."""
    assert busy().limit(FULL, 200, 10.0) == FULL


def test_no_row_is_sent_while_a_live_request_is_answered():
    """What is in flight stays; nothing comes beside it until the answer is complete."""
    yielding = busy()
    yielding.record_start(10.0)
    assert yielding.limit(FULL, 100, 10.1) == 100
    assert yielding.limit(FULL, 60, 10.2) == 60
    yielding.record_end(10.3)
    assert yielding.limit(FULL, 60, 10.3) == 150


def test_the_first_live_request_frees_places():
    """Once live requests come, a quarter fewer rows than ran are in flight, so that the next finds a place."""
    yielding = busy()
    answer(yielding, 10.0, piece_s=0.01, in_flight=0)
    assert yielding.limit(FULL, 200, 10.1) == 150


def test_full_speed_soon_after():
    """Five seconds after the last live request the limit is the engine's own again."""
    yielding = busy()
    answer(yielding, 10.0, piece_s=0.01, in_flight=0)
    assert yielding.limit(FULL, 100, 10.0 + ALERT_S - 0.1) < FULL
    assert yielding.limit(FULL, 100, 10.0 + ALERT_S) == FULL


def test_live_traffic_without_a_gap_holds_rows_back_half_of_the_time():
    """When the account of held time is spent rows are sent beside live requests, and later held back again."""
    yielding = busy()
    yielding.record_start(10.0)
    assert yielding.limit(FULL, 10, 10.0 + CREDIT_MAX_S / 2) == 10
    assert yielding.limit(FULL, 10, 10.0 + CREDIT_MAX_S) == 150
    yielding.record_end(20.0)
    yielding.record_start(22.0)
    assert yielding.limit(FULL, 10, 23.0) == 10
    assert yielding.limit(FULL, 10, 24.0) == 150


def test_slow_answers_take_rows_out_and_quick_ones_bring_them_back():
    """Answers half as quick as the best of late shrink the limit step by step; quick ones let it grow."""
    yielding = busy()
    answer(yielding, 10.0, piece_s=0.01, in_flight=0)
    limits = []
    for second in range(11, 15):
        answer(yielding, second, piece_s=0.02, in_flight=yielding.limit(FULL, 200, second))
        limits.append(yielding.limit(FULL, 200, second))
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] < 80
    for second in range(15, 30):
        answer(yielding, second, piece_s=0.01, in_flight=limits[-1])
    assert yielding.limit(FULL, 200, 30.0) > 150


def test_rows_keep_half_of_their_rate():
    """Rows that go at less than about half of their rate are not slowed further, however slow answers are."""
    yielding = busy(rate=100.0)
    done = 1000
    for tick in range(100):
        now = 10 + tick / 4
        answer(yielding, now, piece_s=0.01 if tick == 0 else 0.05, in_flight=0 if tick == 0 else 200)
        done += 10  # 40 a second
        yielding.observe(100, done, now)
    assert yielding.limit(FULL, 200, 35.0) > 100


def test_a_few_rows_stay_in_flight():
    """However slow answers are, a few rows go on where nothing is known of their rate."""
    yielding = Yielding()
    yielding.observe(200, 0, 0.0)
    for second in range(60):
        answer(yielding, second, piece_s=0.01 if second == 0 else 1.0, in_flight=100 if second else 0)
    assert yielding.limit(FULL, 200, 60.0) == ROWS_MIN


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_the_callers_own_limit_holds(limit):
    """The limit is never more than what it was."""
    yielding = busy()
    answer(yielding, 10.0, piece_s=0.01, in_flight=0)
    assert yielding.limit(limit, 0, 10.1) <= limit


def test_a_new_run_counts_from_zero():
    """Fewer rows finished than before are another run's, and no rate."""
    yielding = busy()
    yielding.observe(200, 5, 11.0)
    yielding.observe(200, 105, 12.0)
    answer(yielding, 12.0, piece_s=0.01, in_flight=0)
    assert yielding.limit(FULL, 200, 12.1) == 150
