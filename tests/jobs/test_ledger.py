"""The ledger: who holds the lease is heard, nobody else; and nothing is counted twice."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from fakes.databases import SQLITE, open_ledger
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from batchmill.errors import InvalidConfig, InvalidTransition, LedgerBroken, UnknownName
from batchmill.jobs.ledger import records, snapshot
from batchmill.jobs.ledger.counting import mask_of
from batchmill.jobs.ledger.ledger import Ledger, Verdict, undone
from batchmill.states import JobState
from batchmill.store.sql.positions import pack_positions
from batchmill.types import Commit, DatasetSpec, JobQuery, Lease, ModelSpec, Policy, SegmentRef, Shard, Usage
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm

SHARD = Shard(0, 100, 120, 0)


def spec(job_id: str = "job_1", identity: str = "same", created: float = 1.0) -> JobSpec:
    return JobSpec(
        id=job_id, dataset=DatasetSpec(["/data/in.jsonl"]), models=[ModelSpec("m", "function", "app.py:f")],
        form=OpenAIForm(), policy=Policy(), output=None, identity=identity, code={}, created=created,
    )  # fmt: skip


@pytest.fixture
def ledger(tmp_path):
    opened = open_ledger(tmp_path / "batchmill.db")
    opened.create(spec())
    yield opened
    opened.close()


def id_of(record, errors):
    return record["id"]


def commit(lease: Lease, seq: int, positions: list[int], *, failed: int = 0, offset: int = 0) -> Commit:
    return Commit(
        lease=lease, seq=seq, ref=SegmentRef("w-0001.seg", offset, 10), done=pack_positions(positions, SHARD.lo),
        rows_ok=len(positions) - failed, rows_failed=failed, usage=Usage(2, 1, 3),
        errors={"boom": failed} if failed else {}, samples={"boom": "it broke"} if failed else {},
    )  # fmt: skip


def test_counts_what_the_holder_commits(ledger):
    """A commit under the lease moves the counters, the bitmap, the tokens, the cost and the causes of errors."""
    lease = ledger.lease("job_1", 0, SHARD).lease
    assert ledger.commit([(commit(lease, 0, [100, 101, 105], failed=1), 0.5)]) == [Verdict.COUNTED]
    record = ledger.job("job_1")
    assert (record["rows_ok"], record["rows_failed"], record["cost"]) == (2, 1, 0.5)
    assert (record["input_tokens"], record["cached_tokens"], record["output_tokens"]) == (2, 1, 3)
    assert ledger.errors("job_1") == {"boom": (1, "it broke")}
    assert ledger.lease("job_1", 0, SHARD).bitmap == 0b100011
    assert ledger.progress("job_1", 0) == {0: 3}


async def test_jobs_are_found_by_state_model_and_time(ledger):
    """A list has the jobs of a state, of a model that rows go to, and since a time; the database looks them up."""
    ledger.create(msgspec.structs.replace(spec("job_2", created=2.0), models=[ModelSpec("n", "function", "app.py:f")]))
    frontend = msgspec.structs.replace(spec("job_3", created=3.0), origin={"frontend": "d"})
    ledger.create(frontend)
    ledger.move("job_2", JobState.PAUSED)
    queries = {
        JobQuery(): ["job_3", "job_2", "job_1"],
        JobQuery(state="validating"): ["job_3", "job_1"],
        JobQuery(state="validating", after="job_2"): ["job_1"],
        JobQuery(model="m"): ["job_1"],  # a frontend's job knows its models once it is planned
        JobQuery(model="n", since=2.0): ["job_2"],
        JobQuery(since=2.5): ["job_3"],
    }
    for query, found in queries.items():
        assert await ledger.database.read(records.page, query, id_of) == found
    planned = msgspec.json.encode(msgspec.structs.replace(frontend, used=["m", "m/1"]))
    ledger.move("job_3", JobState.QUEUED, via=[JobState.PLANNING], spec=planned)
    assert await ledger.database.read(records.page, JobQuery(model="m/1"), id_of) == ["job_3"]


async def test_a_list_is_read_in_pieces(ledger):
    """However many records are read at once, each job is listed once, in order, also of those made at one moment."""
    count = 2 * records.READ_ROWS + 1

    def fill(db):
        for n in range(2, count + 1):
            snapshot.insert_job(db, spec(f"job_{n:04}", created=2.0 + n // 200))

    await ledger.database.write(fill)
    wanted = [f"job_{n:04}" for n in range(count, 1, -1)] + ["job_1"]
    sizes = (1, records.READ_ROWS - 1, records.READ_ROWS, records.READ_ROWS + 1, count - 1, count, count + 1, None)
    for limit in sizes:
        assert await ledger.database.read(records.page, JobQuery(limit=limit), id_of) == wanted[:limit], limit
        rest = JobQuery(limit=limit, after=wanted[99])
        assert await ledger.database.read(records.page, rest, id_of) == wanted[100:][:limit], limit


def test_a_result_replaces_the_causes_of_errors(ledger):
    """Causes that a move names replace those that were counted, also where it names none; else they stay."""
    for state in (JobState.PLANNING, JobState.QUEUED, JobState.RUNNING):
        ledger.move("job_1", state, errors={} if state is JobState.PLANNING else None)
    lease = ledger.lease("job_1", 0, SHARD).lease
    ledger.commit([(commit(lease, 0, [100, 101], failed=1), None)])
    ledger.move("job_1", JobState.FINALIZING)
    assert ledger.errors("job_1") == {"boom": (1, "it broke")}
    ledger.move("job_1", JobState.COMPLETED, errors={}, rows_failed=0)
    assert ledger.errors("job_1") == {}
    ledger.create(spec("job_2"))
    ledger.move("job_2", JobState.PLANNING, errors={"invalid": (2, "no JSON")}, rows_failed=2)
    assert ledger.errors("job_2") == {"invalid": (2, "no JSON")}


def test_refuses_a_lost_lease(ledger):
    """Once the shard was leased again, whatever its earlier holder commits is refused and changes nothing."""
    first = ledger.lease("job_1", 0, SHARD).lease
    ledger.lease("job_1", 0, SHARD)
    assert ledger.commit([(commit(first, 0, [100]), None)]) == [Verdict.STALE]
    assert ledger.job("job_1")["rows_ok"] == 0


def test_a_stale_commit_does_not_stop_its_neighbours(ledger):
    """One refused commit of a batch leaves the others counted."""
    old = ledger.lease("job_1", 0, SHARD).lease
    new = ledger.lease("job_1", 0, SHARD).lease
    verdicts = ledger.commit([(commit(old, 0, [100]), None), (commit(new, 0, [100], offset=50), None)])
    assert verdicts == [Verdict.STALE, Verdict.COUNTED]


def test_a_repeated_commit_counts_once(ledger):
    """A commit whose acknowledgement was lost is recognised when it comes again."""
    lease = ledger.lease("job_1", 0, SHARD).lease
    again = commit(lease, 0, [100])
    assert ledger.commit([(again, None)]) == [Verdict.COUNTED]
    assert ledger.commit([(again, None)]) == [Verdict.REPEATED]
    assert ledger.job("job_1")["rows_ok"] == 1


@pytest.mark.parametrize("positions", [[100], [120], [99 + 21]])
def test_stops_rather_than_count_twice(ledger, positions):
    """A commit that overlaps what is counted, or leaves its shard, breaks the ledger and changes nothing."""
    lease = ledger.lease("job_1", 0, SHARD).lease
    ledger.commit([(commit(lease, 0, [100, 101]), None)])
    with pytest.raises(LedgerBroken):
        ledger.commit([(commit(lease, 1, positions, offset=10), None)])
    assert ledger.job("job_1")["rows_ok"] == 2


def test_states_follow_the_table(ledger):
    """A job's state changes only as the table allows."""
    with pytest.raises(InvalidTransition, match="validating"):
        ledger.move("job_1", JobState.COMPLETED)
    ledger.move("job_1", JobState.PLANNING)
    assert ledger.job("job_1")["state"] == "planning"


def test_finds_a_job_by_the_beginning_of_its_id(ledger):
    """A unique prefix names a job; an ambiguous or unknown one is an error that says so."""
    ledger.create(spec("job_22"))
    assert ledger.job("job_2")["id"] == "job_22"
    with pytest.raises(UnknownName, match="several"):
        ledger.job("job")
    with pytest.raises(UnknownName, match="unknown"):
        ledger.job("job_3")
    with pytest.raises(UnknownName):
        ledger.job("%")


def test_identity_finds_the_newest_job(ledger):
    """The jobs of an identity are found, the newest first, refused ones apart."""
    ledger.create(spec("job_2", created=2.0))
    assert ledger.by_identity("same")[0]["id"] == "job_2"
    ledger.move("job_2", JobState.FAILED)
    assert ledger.by_identity("same")[0]["id"] == "job_1"
    assert ledger.by_identity("other") == []


def test_refuses_a_database_of_another_version(tmp_path):
    """A database that a later batchmill wrote is refused by name and left as it is."""
    ledger = open_ledger(tmp_path / "batchmill.db")
    with ledger._engine.begin() as db:
        db.exec_driver_sql("UPDATE schema SET version = 99")
    ledger.close()
    with pytest.raises(InvalidConfig, match="99"):
        open_ledger(tmp_path / "batchmill.db")


@pytest.mark.once
def test_refuses_a_file_that_is_no_database(tmp_path):
    """A file that is not a database is an error, not a traceback."""
    (tmp_path / "batchmill.db").write_bytes(b"hello" * 1000)
    with pytest.raises(InvalidConfig, match="file is not a database"):
        open_ledger(tmp_path / "batchmill.db")


class LedgerMachine(RuleBasedStateMachine):
    """Two workers lease, commit, repeat and resume as zombies; a plain set says what must be counted."""

    def __init__(self, ledger: Ledger, job: str) -> None:
        super().__init__()
        self.ledger, self.job = ledger, job

    @initialize()
    def begin(self) -> None:
        self.ledger.create(spec(self.job))
        self.counted: set[int] = set()
        self.held: dict[str, list] = {}
        self.sent: list[Commit] = []

    @rule(worker=st.sampled_from("ab"))
    def lease(self, worker: str) -> None:
        leased = self.ledger.lease(self.job, 0, SHARD)
        assert leased.bitmap == mask_of(pack_positions(sorted(self.counted), SHARD.lo))
        self.held[worker] = [leased.lease, leased.seq, list(undone(leased.bitmap, SHARD.hi - SHARD.lo))]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.held)))
        lease, seq, left = self.held[worker]
        if not left:
            return
        n = data.draw(st.integers(1, len(left)))
        positions = [SHARD.lo + i for i in left[:n]]
        is_holder = lease.epoch == max(held[0].epoch for held in self.held.values())
        made = commit(lease, seq, positions, offset=10 * len(self.sent))
        (verdict,) = self.ledger.commit([(made, None)])
        assert verdict is (Verdict.COUNTED if is_holder else Verdict.STALE)
        if is_holder:
            self.counted.update(positions)
            self.held[worker][1:] = [seq + 1, left[n:]]
            self.sent.append(made)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        (verdict,) = self.ledger.commit([(data.draw(st.sampled_from(self.sent)), None)])
        assert verdict is Verdict.REPEATED

    @invariant()
    def accounts(self) -> None:
        if not hasattr(self, "counted"):
            return
        assert self.ledger.job(self.job)["rows_ok"] == len(self.counted)
        assert sum(c.rows_ok + c.rows_failed for c in self.ledger.snapshot(self.job).commits) == len(self.counted)


def test_two_workers(ledger: Ledger, database_kind: str):
    """Whatever two workers do, and in which order: each row counts once, under the lease that holds."""
    jobs = (f"job_{number}" for number in itertools.count(2))
    examples = 40 if database_kind == SQLITE else 10  # where each transaction takes longer
    bounds = settings(max_examples=examples, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(lambda: LedgerMachine(ledger, next(jobs)), settings=bounds)


def test_no_time_of_a_job_lies_before_another(ledger):
    """A job whose clock was set back while it ran began and ended no earlier than it was created, nor before it
    began."""
    ledger.create(spec("job_2", created=1000.0))
    for state in (JobState.PLANNING, JobState.QUEUED):
        ledger.move("job_2", state)
    ledger.move("job_2", JobState.RUNNING, started=1010.0)
    ledger.move("job_2", JobState.FINALIZING, finalizing=400.0)
    ledger.move("job_2", JobState.COMPLETED, finished=410.0)
    record = ledger.job("job_2")
    assert [record[name] for name in ("started", "finalizing", "finished")] == [1010.0] * 3
    for state in (JobState.PLANNING, JobState.QUEUED):
        ledger.move("job_1", state)
    ledger.move("job_1", JobState.RUNNING, started=5.0)
    ledger.move("job_1", JobState.FINALIZING, finalizing=6.0)
    ledger.move("job_1", JobState.COMPLETED, finished=7.0)
    record = ledger.job("job_1")
    assert [record[name] for name in ("started", "finalizing", "finished")] == [5.0, 6.0, 7.0]
