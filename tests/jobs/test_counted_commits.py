"""What a running small job has counted, in memory."""

from __future__ import annotations

from batchmill.jobs.results import counted_commits
from batchmill.jobs.results.counted_commits import CountedCommits
from batchmill.types import Commit, Lease, SegmentRef, Usage


def commit(seq: int, offset: int, blocks: bytes) -> Commit:
    ref = SegmentRef("w-0000.carried", offset, len(blocks))
    return Commit(Lease("job_1", 0, 0, 1), seq, ref, b"", 1, 0, Usage(), blocks=blocks)


def test_it_is_kept_up_to_a_limit():
    """Beyond it nothing is, and results are written from the database."""
    counted, blocks = CountedCommits(), bytes(counted_commits.BYTES_MAX)
    first = commit(0, 0, blocks)
    counted.add(first)
    assert counted.has_all(1) and not counted.has_all(2)
    assert counted.results() == ([(0, first.ref)], {"w-0000.carried": [(0, blocks)]})
    counted.add(commit(1, len(blocks), b"x"))
    assert not counted.has_all(2) and counted.results() == ([], {})
    counted.add(commit(2, len(blocks) + 1, b""))
    assert not counted.has_all(3)
