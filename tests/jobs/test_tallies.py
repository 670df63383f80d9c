"""Counters of adapters that outlive the workers that counted."""

from __future__ import annotations

from batchmill.jobs.pools import tallies
from batchmill.jobs.pools.tallies import AdapterSums
from batchmill.types import AdapterStats


def stats(rows: int, name: str = "a/1") -> AdapterStats:
    return AdapterStats(name, rows, 10 * rows, 5 * rows, hits=rows // 2, loads=rows // 4, busy_s=float(rows))


def test_workers_add_up():
    """What two workers say is summed, also of one that has gone."""
    sums = AdapterSums()
    sums.add("m", [], [stats(4)])
    sums.add("m", [stats(4)], [stats(8), stats(4, "b/1")])
    sums.add("m", [], [stats(4)])  # another worker
    sums.add("other", [], [stats(4)])
    assert sums.by_adapter == {
        ("m", "a/1"): AdapterStats("a/1", 12, 120, 60, hits=6, loads=3, busy_s=12.0),
        ("m", "b/1"): stats(4, "b/1"),
        ("other", "a/1"): stats(4),
    }


def test_an_engine_that_begins_anew_adds_up():
    """An engine that was started again in the same worker counts from nothing; its sums do not fall."""
    sums = AdapterSums()
    sums.add("m", [], [stats(8)])
    sums.add("m", [stats(8)], [stats(4)])
    assert sums.by_adapter["m", "a/1"].rows == 12


def test_their_number_is_bounded(monkeypatch):
    """Adapters beyond the most that are told apart count as one."""
    monkeypatch.setattr(tallies, "ADAPTERS_MAX", 2)
    sums = AdapterSums()
    for number in range(4):
        sums.add("m", [], [stats(4, f"a/{number}")])
    sums.add("m", [stats(4, "a/0")], [stats(8, "a/0")])
    assert {key[1]: each.rows for key, each in sums.by_adapter.items()} == {"a/0": 8, "a/1": 4, "other": 8}
