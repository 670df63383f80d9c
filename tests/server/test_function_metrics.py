"""What Prometheus reads of deployed functions."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from batchmill.server.metrics import BATCH_SIZES, VersionStats, functions
from batchmill.types import BatchTimes, CallStats

STATS = CallStats(
    rows=12, executions=4, succeeded=9, succeeded_ns=3_000_000_000, failed=1, failed_ns=500_000_000,
    queue_ns=250_000_000, last_at=1.0,
    batches=[BatchTimes(1, 2, 100_000_000, 200_000_000, 300_000_000), BatchTimes(5, 2, 0, 1_000_000_000, 0)],
)  # fmt: skip


class Page(Collector):
    def __init__(self, found, copies):
        self.found, self.copies = found, copies

    def collect(self):
        return functions(self.found, self.copies)


def samples(found, copies=None):
    """(name, label value …) -> value, of a page that a Prometheus parser has read."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Page(found, copies or {}))
    page = generate_latest(registry).decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_calls_of_a_version_are_counted():
    """Rows, calls, requests and seconds stand beside the model and its version."""
    found = samples([VersionStats("m", "main/3", STATS)], {("mirror", "dropped"): 2})
    assert found["batchmill_function_rows_total", "m", "main/3"] == 12
    assert found["batchmill_function_executions_total", "m", "main/3"] == 4
    assert found["batchmill_function_requests_total", "m", "ok", "main/3"] == 9
    assert found["batchmill_function_requests_total", "m", "failed", "main/3"] == 1
    assert found["batchmill_function_request_seconds_total", "m", "ok", "main/3"] == 3.0
    assert found["batchmill_function_request_seconds_total", "m", "failed", "main/3"] == 0.5
    assert found["batchmill_function_queue_seconds_total", "m", "main/3"] == 0.25
    assert found["batchmill_function_compute_seconds_total", "m", "input", "main/3"] == 0.1
    assert found["batchmill_function_compute_seconds_total", "m", "infer", "main/3"] == 1.2
    assert found["batchmill_function_compute_seconds_total", "m", "output", "main/3"] == 0.3
    assert found["batchmill_function_copies_total", "mirror", "dropped"] == 2


def test_batch_sizes_are_a_histogram():
    """Each call counts in every bucket that its rows fit, and the sum is the rows."""
    stats = CallStats(executions=7, rows=1, batches=[BatchTimes(1, 4), BatchTimes(64, 2), BatchTimes(5000, 1)])
    found = samples([VersionStats("m", "main/1", stats)])
    name = "batchmill_function_batch_size"
    assert found[f"{name}_bucket", "1.0", "m", "main/1"] == 4
    assert found[f"{name}_bucket", "32.0", "m", "main/1"] == 4
    assert found[f"{name}_bucket", "64.0", "m", "main/1"] == 6
    assert found[f"{name}_bucket", f"{BATCH_SIZES[-1]}.0", "m", "main/1"] == 6
    assert found[f"{name}_bucket", "+Inf", "m", "main/1"] == found[f"{name}_count", "m", "main/1"] == 7
    assert found[f"{name}_sum", "m", "main/1"] == 4 + 128 + 5000


def test_versions_that_were_never_called_take_no_room():
    """A page grows with what is used, not with what was ever deployed."""
    assert samples([VersionStats("m", f"main/{number}", CallStats()) for number in range(1, 100)]) == {}
