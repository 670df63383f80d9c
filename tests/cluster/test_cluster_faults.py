"""Faults of a database, a store, servers and a Ray cluster, in a seeded order: no row is lost, doubled or wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.lossy_disk.disk import COMPILER
from fakes.small_disk import are_namespaces_allowed
from ray_support import ray_python

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cluster_faults.py"
SEED = 3
KINDS = (
    "owner_stopped", "owner_lost", "end_sessions", "store_slow_down", "store_lost_reply", "orphan_object",
    "credentials_expired", "worker_killed", "actor_killed", "actor_evicted", "node_removed", "driver_killed",
    "alone_killed", "power_lost", "disk_full",
)  # fmt: skip


@pytest.mark.timeout(300)
def test_a_short_campaign(tmp_path: Path):
    """Each kind once that this machine allows; what failed is named with its seed and its fault."""
    impossible = {"power_lost": COMPILER is None, "disk_full": not are_namespaces_allowed()}
    kinds = [kind for kind in KINDS if not impossible.get(kind)]
    words = [SCRIPT, "--json", "--seed", SEED, "--faults", len(kinds), "--clients", 1, "--pause", 3, "--kinds", *kinds]
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "BENCHMARK_DATA": str(tmp_path), "BATCHMILL_RAY_PYTHON": ray_python()},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, f"seed {SEED}:\n{done.stderr[-6000:]}"
    outcomes = json.loads(done.stdout.splitlines()[-1])["faults"]
    assert sorted(each["fault"] for each in outcomes) == sorted(kinds)
    assert all(each["jobs"] == 2 + each["short"] and not each["flaws"] for each in outcomes), outcomes
    assert sum(each["short"] for each in outcomes) >= len(kinds), "clients have created batches meanwhile"
