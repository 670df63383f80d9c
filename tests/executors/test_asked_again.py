"""Rows that are asked for again: ahead of others, once each, and never after their lease has ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from batchmill.datasets.orders import SealOrder
from batchmill.datasets.sealed import SealedRows
from batchmill.datasets.sealing import seal
from batchmill.executors.feed import GrantFeed
from batchmill.executors.leases import Allowance, Held, OpenJob
from batchmill.executors.recorder import NO_USAGE, Recorder, empty_rows
from batchmill.executors.reply_checks import REVOKED_S, ReplyChecks
from batchmill.executors.validators.messages import Checked
from batchmill.executors.validators.validators import Validators
from batchmill.models import functions
from batchmill.store.segments.files import SegmentFile, SegmentFolder
from batchmill.store.segments.format import SegmentHead, read_outcomes, read_ref
from batchmill.types import Commit, DatasetSpec, Lease, ModelSpec, Outcome, OutputSchema, Price, Row, Usage
from batchmill.wire.media_tokens import MediaTokens
from batchmill.wire.messages import Grant, Spending
from batchmill.wire.rows.forms import CHAT, OpenAIForm
from batchmill.wire.schemas.output_schema import WORDS_BYTES_MAX

MEDIA = MediaTokens(ModelSpec("m", "http", "m"))

SCHEMA = OutputSchema('{"type":"integer"}', attempts=1)


class Recorded:
    """A recorder that keeps what it is given."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.put_block = self.outcomes.append
        self.usage = NO_USAGE  # of other answers

    def put_usage(self, held: Held, usage: Usage) -> None:
        self.usage += usage

    def put(self, outcomes: list[Outcome]) -> None:
        self.outcomes += outcomes


@pytest.fixture
def job(tmp_path: Path) -> Iterator[OpenJob]:
    source = tmp_path / "in.jsonl"
    body = {"messages": [{"role": "user", "content": "x"}]}
    lines = [{"custom_id": f"r{n}", "url": CHAT, "body": body} for n in range(10)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for folder in ("dataset", "segments"):
        (tmp_path / folder).mkdir()
    seal(SealOrder(DatasetSpec([str(source)])), tmp_path / "dataset", lambda _: None)
    segment = SegmentFile(tmp_path / "segments", SegmentHead("job_1", "same", "w1"))
    rows = SealedRows(tmp_path / "dataset")
    yield OpenJob("job_1", OpenAIForm(schema=SCHEMA), rows, segment)
    segment.close()
    rows.close()


class Stage:
    """A feed with ten rows of one lease, and the checks before a recorder."""

    def __init__(self, job: OpenJob, folder: Path) -> None:
        self.may_begin = True
        self.feed = GrantFeed(
            want=lambda *_: None, failed=lambda *it: None, broken=lambda error: None, suspect=folder / "suspect",
            may_begin=lambda: self.may_begin,
        )  # fmt: skip
        self.recorded = Recorded()
        self.checks = ReplyChecks(self.feed, self.recorded, asks_again=True)  # type: ignore[arg-type]
        grant = Grant(Lease("job_1", 0, 0, 1), 0, 0, 10)
        self.held = Held(
            lease=grant.lease, job=job, seq=0, base=0, key="k", undone=10, isolated=False, ok=empty_rows(),
            failed=empty_rows(), ok_usage=NO_USAGE, failed_usage=NO_USAGE, failures=[], unsent=[],
        )  # fmt: skip
        self.feed.grant(self.held, grant)

    def answer(self, row: Row, text: str) -> None:
        reply = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
        self.checks.put([Outcome(row, json.dumps(reply).encode(), usage=Usage(3, 0, 2))])


@pytest.fixture
async def stage(job: OpenJob, tmp_path: Path) -> Stage:
    return Stage(job, tmp_path)


async def test_a_row_is_asked_for_again_before_others(stage: Stage) -> None:
    """It comes first, with its answer; the second answer decides, and both cost."""
    first, second = await stage.feed.take(2)
    stage.answer(first, "one")
    stage.answer(second, "2")
    again, *others = await stage.feed.take(5)
    assert (again.number, again.earlier[0].text, others) == (0, "one", [])
    assert [row.number for row in await stage.feed.take(5)] == [2, 3, 4, 5, 6]
    stage.answer(again, "two")
    ok, failed = stage.recorded.outcomes
    assert (ok.row.number, ok.error, ok.answer) == (1, None, b"2")
    assert failed.error is not None and failed.error.code == "schema_mismatch"
    assert (stage.recorded.usage, failed.usage) == (Usage(3, 0, 2), Usage(3, 0, 2))
    assert failed.body is not None and b"two" in failed.body


async def test_a_waiting_engine_gets_it(stage: Stage) -> None:
    """Two takes that wait: one gets the row, the other waits on, and no take ends the feed before its time."""
    rows = await stage.feed.take(10)
    waiting = [asyncio.create_task(stage.feed.take(3)) for _ in range(2)]
    await asyncio.sleep(0)
    stage.answer(rows[0], "no")
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert [row.number for task in done for row in task.result()] == [0]
    stage.feed.end()
    for row in rows[1:]:
        stage.answer(row, "1")
    await asyncio.sleep(0)
    assert not any(task.done() for task in pending)  # the first row may be asked for again
    for task in done:
        stage.answer(task.result()[0], "1")
    assert [await task for task in pending] == [[]]
    assert len(stage.recorded.outcomes) == 10


async def test_it_waits_for_the_owners_term(stage: Stage) -> None:
    """A row is not begun again while its owner may have been replaced."""
    (row,) = await stage.feed.take(1)
    stage.may_begin = False
    stage.answer(row, "no")
    waiting = asyncio.create_task(stage.feed.take(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    stage.may_begin = True
    stage.feed.wake()
    assert (await waiting)[0].earlier


async def test_a_row_of_a_dropped_job_stays_undone(stage: Stage) -> None:
    """Neither a row that waits nor one that is answered later is asked for again, and the feed can end."""
    first, second = await stage.feed.take(2)
    stage.answer(first, "no")
    stage.held.job.revoked = True
    stage.held.end("pause")
    stage.feed.drop("job_1")
    stage.answer(second, "no")
    assert stage.held.undone == 0 and stage.recorded.outcomes == []
    stage.feed.end()
    assert await stage.feed.take(1) == []


async def test_a_lost_lease_forgets_its_rows(stage: Stage) -> None:
    """What waits is given to whoever has the shard now."""
    (row,) = await stage.feed.take(1)
    stage.answer(row, "no")
    stage.held.stale = True
    stage.feed.drop_lease(stage.held)
    stage.feed.end()
    assert await stage.feed.take(1) == [] and stage.held.undone == 0


async def test_errors_and_whole_leases_are_final(stage: Stage) -> None:
    """An error of the service is no answer; an engine that takes whole leases gets no row again."""
    (row,) = await stage.feed.take(1)
    stage.checks.put([Outcome(replace(row, earlier=()), error=None, body=None)])
    stage.checks = ReplyChecks(stage.feed, stage.recorded, asks_again=False)  # type: ignore[arg-type]
    (row,) = await stage.feed.take(1)
    stage.answer(row, "no")
    assert stage.recorded.outcomes[-1].error is not None


async def test_an_isolated_row_that_stays_undone_lets_others_begin(stage: Stage) -> None:
    """Its job is dropped while it is answered: rows of other jobs do not wait for it for ever."""
    stage.held.isolated = True
    (row,) = await stage.feed.take(5)
    stage.held.end("pause")
    stage.feed.drop("job_1")
    stage.answer(row, "no")
    other = Grant(Lease("job_2", 0, 0, 1), 0, 0, 3)
    stage.feed.grant(
        replace(stage.held, lease=other.lease, job=replace(stage.held.job, id="job_2"), isolated=False), other
    )
    assert len(await asyncio.wait_for(stage.feed.take(3), 10)) == 3


async def test_a_project_that_is_held_back_waits(stage: Stage) -> None:
    """Its rows are not asked for again before others may run."""
    stage.held.job.project = "p"
    (row,) = await stage.feed.take(1)
    stage.answer(row, "no")
    stage.feed.hold_back(frozenset({"p"}))
    assert not (await stage.feed.take(1))[0].earlier
    stage.feed.hold_back(frozenset())
    assert (await stage.feed.take(1))[0].earlier


async def test_a_job_whose_answers_wait_is_not_asked_again(stage: Stage) -> None:
    """Its rows wait, those that are asked for again too, until enough answers are validated."""
    (row,) = await stage.feed.take(1)
    stage.answer(row, "no")
    stage.feed.hold_answers(frozenset({"job_1"}))
    waiting = asyncio.create_task(stage.feed.take(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    stage.feed.hold_answers(frozenset())
    assert (await waiting)[0].earlier


async def test_a_lost_lease_frees_its_reservation(stage: Stage) -> None:
    """But for what its answers have cost."""
    reports: list[Spending] = []
    price = Price(1.0, 1.0)
    stage.held.job.allowance = Allowance(
        "job_1", price, has_requests=True, media=MEDIA, send=reports.append, attempts=1
    )
    stage.held.job.allowance.add(100.0, is_lean=False)
    first, second = await stage.feed.take(2)
    stage.answer(first, "no")
    stage.held.stale = True
    stage.answer(second, "no")
    stage.feed.drop_lease(stage.held)
    assert stage.held.job.allowance.free == pytest.approx(100.0 - price.cost(Usage(3, 0, 2)))


@pytest.mark.parametrize(("output", "tokens"), [(0.0, 60_000), (2.0, 100)])
async def test_all_answers_are_reserved(stage: Stage, output: float, tokens: int) -> None:
    """Also where output costs nothing: earlier answers are input of the next request."""
    price = Price(1.0, output)
    allowance = Allowance("job_1", price, has_requests=True, media=MEDIA, send=lambda _: None, attempts=2)
    allowance.add(1000.0, is_lean=False)
    body = {"messages": [{"role": "user", "content": "x" * 400}], "max_tokens": tokens}
    line = json.dumps({"custom_id": "r", "url": CHAT, "body": body})
    assert allowance.reserve([Row(0, 0, line.encode(), stage.held.job.form)]) == 1
    requests = [400 + number * (tokens + WORDS_BYTES_MAX) for number in range(3)]
    assert 1000.0 - allowance.free >= sum(price.cost(Usage(each, 0, tokens)) for each in requests)


async def test_an_answer_is_counted_before_its_row_is_asked_for_again(stage: Stage, tmp_path: Path) -> None:
    """In the kernel at once, and with the next commit, which may hold no row."""
    commits: list[Commit] = []
    recorder = Recorder(
        commit=commits.append, settled=lambda _: None, spent=lambda *_: None, broken=lambda _: None,
        refused=lambda *_: None,
    )  # fmt: skip
    stage.checks = ReplyChecks(stage.feed, recorder, asks_again=True)
    (row,) = await stage.feed.take(1)
    stage.answer(row, "no")
    await recorder.sync()
    (again,) = await stage.feed.take(1)
    stage.answer(again, "1")
    await recorder.settle(stage.held)
    assert [(each.usage, each.rows_ok, each.seq) for each in commits] == [
        (Usage(3, 0, 2), 0, 0),
        (Usage(3, 0, 2), 1, 1),
    ]
    assert commits[0].done == b""
    with closing(SegmentFolder(tmp_path / "segments")) as folder:
        assert [len(list(read(folder, commits[0].ref))) for read in (read_ref, read_outcomes)] == [1, 0]


async def test_a_pause_waits_for_no_slow_validator(stage: Stage, tmp_path: Path) -> None:
    """After a while rows are given back whose answers still wait; what they cost is counted, others are checked on."""
    path = tmp_path / "slow.py"
    path.write_text(
        "import time\nimport msgspec\nclass Slow(msgspec.Struct):\n    s: float\n"
        "    def __post_init__(self):\n        time.sleep(self.s)\n"
    )
    schema = OutputSchema("{}", validator=f"{path}:Slow", code=functions.digest(f"{path}:Slow"))
    now, validators = [5.0], Validators(lambda jobs: None)
    stage.checks = ReplyChecks(
        stage.feed, stage.recorded, asks_again=True, validators=validators, time=lambda: now[0]  # type: ignore[arg-type]
    )  # fmt: skip
    rows = [replace(row, form=OpenAIForm(schema=schema)) for row in await stage.feed.take(10)]
    for row in rows:
        stage.answer(row, '{"s": 0.9}')
    await asyncio.sleep(0)  # the process is being started
    assert stage.checks.give_back("job_1") == []
    now[0] += REVOKED_S
    assert stage.checks.give_back("job_2") == []
    assert stage.checks.give_back("job_1") == rows and stage.recorded.usage == Usage(30, 0, 20)
    assert await validators.checked(schema, b'{"s": 0}') == Checked([])
    assert stage.recorded.outcomes == [] and stage.checks.give_back("job_1") == []
    waiting = asyncio.create_task(validators.checked(schema, b'{"s": 0}'))
    stage.answer(rows[0], '{"s": 0.9}')
    for each in range(2):  # while the process has the answer
        now[0] += each * REVOKED_S
        await asyncio.sleep(0)
        found = stage.checks.give_back("job_1")
    assert found == rows[:1] and await waiting == Checked([])
    await validators.close()
