"""How rows in flight follow a server's metrics."""

from __future__ import annotations

import pytest

from batchmill.engines.llm.row_queue import BACKLOG_ROWS, LIMIT_MAX, LIMIT_MIN, LIMIT_START, Flight, Gauges, read_gauges

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a {b}"} 3.0
vllm:num_requests_running{engine="1",model_name="a {b}"} 4.0
vllm:num_requests_waiting{engine="0",model_name="t"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="t",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="t"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="t"} 0.5
vllm:num_preemptions_total{engine="0",model_name="t"} 2.0
vllm:num_preemptions_created{engine="0",model_name="t"} 1.79e+09
vllm:prompt_tokens_total{engine="0",model_name="t"} 1.5e+06
vllm:generation_tokens_total{engine="0",model_name="t"} 70.0
python_info{version="3.11"} 1.0
"""


class Server:
    """A server of so many slots: what is in flight beyond them waits."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.preemptions = 0

    def feed(self, flight: Flight, samples: int) -> None:
        for _ in range(samples):
            running = min(flight.limit, self.slots)
            flight.observe(Gauges(running, flight.limit - running, preemptions=self.preemptions), flight.limit)


def test_metrics_are_summed_over_engines():
    """Counts of several engines add up, the KV cache is the fullest one's, and look-alike names are left alone."""
    gauges = read_gauges(METRICS)
    assert gauges == Gauges(7, 5, 0.5, 2, 1_500_000, 70)
    assert gauges.tokens == 1_500_070


def test_metrics_of_something_else_read_as_nothing():
    """A page without vLLM's names is an idle engine, never an error."""
    assert read_gauges("") == read_gauges("<html>") == Gauges()


@pytest.mark.parametrize("slots", [600, 10_000])
def test_a_hungry_engine_is_filled_within_seconds(slots):
    """While the engine runs all it gets, the limit doubles until rows wait in it, or up to the maximum."""
    flight = Flight()
    Server(slots).feed(flight, 6)
    assert flight.limit == min(LIMIT_MAX, 1024)
    assert flight.limit >= min(slots + slots // 4, LIMIT_MAX)


@pytest.mark.parametrize("slots", [1, 16, 128])
def test_a_full_engine_keeps_a_bounded_backlog(slots):
    """Where few rows can run, the limit settles at the bound and stays there."""
    flight = Flight()
    Server(slots).feed(flight, 100)
    settled = flight.limit
    Server(slots).feed(flight, 100)
    assert flight.limit == settled <= 2 * slots + BACKLOG_ROWS
    assert flight.limit >= slots


def test_preemption_shrinks_at_once_and_growth_is_isolated_after():
    """Each sample with a preemption takes rows out; after it the limit creeps for a while before it doubles again."""
    flight = Flight()
    flight.observe(Gauges(running=200, waiting=56, preemptions=3), 256)
    assert flight.limit == 170
    flight.observe(Gauges(running=170, waiting=0, preemptions=3), 170)
    assert flight.limit == 175


def test_preemption_never_goes_below_the_minimum():
    """However often rows are preempted, a few stay in flight."""
    flight = Flight()
    server = Server(1000)
    for _ in range(100):
        server.preemptions += 1
        server.feed(flight, 1)
    assert flight.limit == LIMIT_MIN


def test_too_few_rows_say_nothing_about_the_limit():
    """When the feed is short of rows, an empty engine does not raise the limit."""
    flight = Flight()
    flight.observe(Gauges(running=5), 5)
    assert flight.limit == LIMIT_START


@pytest.mark.parametrize("limit_max", [1, 7, 256, 5000])
def test_the_callers_maximum_holds(limit_max):
    """`in_flight_max` is never passed, however hungry the engine is."""
    flight = Flight(limit_max=limit_max)
    Server(100_000).feed(flight, 30)
    assert flight.limit == limit_max


def test_a_new_server_counts_from_zero():
    """After a restart the counters begin anew, and the first preemption is seen."""
    flight = Flight()
    flight.observe(Gauges(running=10, waiting=50, preemptions=7), 256)
    flight.restarted()
    before = flight.limit
    flight.observe(Gauges(running=before, waiting=50, preemptions=1), before)
    assert flight.limit < before or before == LIMIT_MIN
