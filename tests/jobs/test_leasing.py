"""Leases of shards that are granted: in a transaction, or the one that a new job was stored with."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from fakes.terms import SetTerm

from batchmill.jobs.pools.leasing import Match, lease
from batchmill.types import Shard


@pytest.mark.parametrize(("left_s", "leased"), [(math.inf, "first"), (3.0, "first"), (0.0, "new")])
async def test_an_owner_whose_term_is_over_grants_nothing_from_memory(left_s, leased):
    """Another process may own the database by then, and run the same rows: its transaction tells."""

    async def write(*_: object) -> list[str]:
        return ["new"]

    database = SimpleNamespace(term=SetTerm(lambda: left_s))
    commit_log = SimpleNamespace(ledger=SimpleNamespace(database=database, lease_each=None), write_short=write)
    run = SimpleNamespace(spec=SimpleNamespace(id="job_1"), generation=0, take_first_lease=lambda _: "first")
    match = Match(None, SimpleNamespace(run=run), Shard(0, 0, 5, 0))
    assert await lease(commit_log, [match]) == [leased]
