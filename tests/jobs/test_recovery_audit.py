"""The audit of a ledger: whatever does not hold is said, and a sound ledger is said to be sound."""

from __future__ import annotations

import re

import pytest
from finished_job import quiet
from ledgered_job import LedgeredJob
from msgspec.structs import replace

from batchmill.jobs.ledger import audit
from batchmill.jobs.ledger.audit import AuditOrder, verify
from batchmill.jobs.ledger.snapshot import Snapshot
from batchmill.store.segments.format import BlockMeta, BlockRows, frame
from batchmill.types import Usage

ROWS = 20


@pytest.fixture
def job(tmp_path):
    made = LedgeredJob(tmp_path, rows=ROWS, shard_rows=5)
    yield made
    made.ledger.close()


def run(job: LedgeredJob) -> list:
    """Shard 0 in two commits, shard 1 in one, and a failed row of shard 2."""
    file = job.segment()
    refs = [job.run(file, [0, 1]), job.run(file, [3, 2, 4]), job.run(file, [5, 6, 7, 8, 9])]
    refs.append(job.run(file, [10], failed=True))
    file.close()
    return refs


def broken(job: LedgeredJob, snapshot: Snapshot) -> str:
    return "\n".join(verify(AuditOrder(job.spec, str(job.data_dir), job.files.segment_place, snapshot), quiet).broken)


def of_shard(snapshot: Snapshot, number: int, **changes) -> Snapshot:
    return replace(
        snapshot, shards=[replace(each, **changes) if each.shard == number else each for each in snapshot.shards]
    )


def of_commit(snapshot: Snapshot, number: int, **changes) -> Snapshot:
    commits = list(snapshot.commits)
    commits[number] = replace(commits[number], **changes)
    return replace(snapshot, commits=commits)


def of_job(snapshot: Snapshot, **changes) -> Snapshot:
    return replace(snapshot, counters=replace(snapshot.counters, **changes))


def test_a_sound_ledger(job):
    """Nothing is found in a sound ledger, and its figures are told."""
    run(job)
    report = job.verify()
    assert report.broken == []
    assert (report.rows, report.rows_done, report.commits, report.segments) == (ROWS, 11, 4, 1)


BREACHES = {
    "rows in the bitmap": lambda s: of_shard(s, 1, bitmap=b"\x0f"),
    "2 in blocks are not in the bitmap": lambda s: of_shard(s, 0, bitmap=b"\x07", done=3),
    "bits beyond its 5 rows": lambda s: of_shard(s, 1, bitmap=b"\x3f"),
    "are not a shard of the plan": lambda s: of_shard(s, 1, lo=4),
    "without a gap": lambda s: of_commit(s, 1, seq=2),
    "of an epoch later than 1": lambda s: of_commit(s, 2, epoch=2),
    "a block of epoch 1 in a commit of epoch 0": lambda s: of_commit(s, 2, epoch=0),
    "counts 4 rows ok and 1 failed": lambda s: of_commit(s, 2, rows_ok=4, rows_failed=1),
    "never leased": lambda s: of_commit(s, 2, shard=3),
    "a block of generation 0, shard 1": lambda s: of_commit(s, 2, shard=2),
    "are committed twice": lambda s: of_commit(s, 1, offset=s.commits[0].offset, length=s.commits[0].length),
    "has its outcome already": lambda s: of_commit(s, 1, offset=s.commits[0].offset, length=s.commits[0].length),
    "is missing": lambda s: of_commit(s, 1, segment="w9-0001.seg"),
    "checksums do not match": lambda s: of_commit(s, 1, length=s.commits[1].length - 1),
    "its blocks hold 10 and 1": lambda s: of_job(s, rows_ok=9),
    "a plan of 20 rows, the job has 21": lambda s: of_job(s, rows=21),
    "folded": lambda s: of_job(s, rows_folded=1),
    "tokens": lambda s: of_job(s, usage=Usage(1, 1, 1)),
    "and is completed": lambda s: replace(s, state="completed"),
}


@pytest.mark.parametrize("found", BREACHES)
def test_breaches_of_the_ledger(job, found):
    """A ledger that says what its segments do not hold is told so."""
    run(job)
    assert re.search(found, broken(job, BREACHES[found](job.ledger.snapshot("job"))))


def test_a_job_that_ended_accounts_for_every_row(job):
    """A completed job has causes for as many errors as it counts."""
    run(job)
    ended = replace(of_job(job.ledger.snapshot("job"), rows_ok=19, rows_failed=1), state="completed")
    assert broken(job, ended) == ""
    assert "causes of 1 errors" in broken(job, of_job(ended, rows_ok=18, rows_failed=2))
    assert "10 of those that ran are ok" in broken(job, of_job(ended, rows_ok=9, rows_failed=11))


def bad_frame(job: LedgeredJob, positions: list[int], rows: list[int], lines: list[bytes], shard: int) -> bytes:
    part = BlockRows(positions, rows, lines)
    return frame(part, generation=0, shard=shard, epoch=1, ok=True, meta=BlockMeta(Usage(3, 1, 2)))


@pytest.mark.parametrize(
    ("positions", "rows", "lines", "found"),
    [
        ([15, 16], [15, 16], [b"{}\n", b"{}\n{}\n"], "3 lines for 2 rows"),
        ([15, 16], [15, 16], [b"{}\n", b"{}"], "1 lines for 2 rows"),
        ([16, 15], [16, 15], [b"{\n}", b"{}\n"], "not as long as it says"),
        ([15, 16], [16, 15], [b"{}\n", b"{}\n"], "rows that the plan does not have"),
        ([15, 21], [15, 21], [b"{}\n", b"{}\n"], "positions 15 to 21 of a shard of 15 to 19"),
        ([15, 15], [15, 15], [b"{}\n", b"{}\n"], "a position twice"),
    ],
)
def test_breaches_of_a_block(job, positions, rows, lines, found):
    """A block is held against its shard, its plan, its lines and what was counted before; a rebuild leaves it out."""
    run(job)
    file = job.segment("w2")
    ref = file.append(bad_frame(job, positions, rows, lines, shard=3))
    file.close()
    job.count(ref, [15, 16])
    assert found in "\n".join(job.verify().broken)
    rebuilt = job.rebuild()
    assert rebuilt.reopened == 2 and any(found in line for line in rebuilt.damaged)
    assert job.verify().broken == []


def test_breaches_of_files(job):
    """Damage to a plan, a block and the head of a segment is named, all of it in one report."""
    refs = run(job)
    job.damage(refs[1])
    path = job.files.segments / refs[0].segment
    path.write_bytes(b"x" + path.read_bytes()[1:])
    plan = job.job.plan / "plan.json"
    plan.write_bytes(plan.read_bytes().replace(b'"most":', b'"most":9'))
    found = "\n".join(job.verify().broken)
    assert all(text in found for text in ("plan.json is damaged", "its head is damaged", "checksums do not match"))


def test_findings_have_a_maximum(job, monkeypatch):
    """At most so many findings are told one by one; of the others the number is."""
    monkeypatch.setattr(audit, "BREACHES_MAX", 2)
    lines = audit.BreachList()
    for number in range(3):
        lines.add(str(number))
    assert lines.all() == ["0", "1", "and 1 more like these"]
    run(job)
    job.ledger.note("job", rows=1, rows_ok=0, rows_folded=3, input_tokens=0)
    assert len(job.verify().broken) == 3
