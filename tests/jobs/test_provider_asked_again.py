"""Jobs whose rows a provider is asked for again: budget, deadline, other routes, and what counts in the ledger."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest
from fakes.answering_service import AnsweringService, choice
from fakes.batch_provider import BatchProvider, late_answer
from ledgered_job import LedgeredJob
from msgspec import json as msgspec_json
from test_provider_jobs import end_of, far, order, provider, seen  # noqa: F401  # a fixture, too

from batchmill.jobs.ledger.ledger import DATA_BYTES_MAX, ShardNote, of_shard
from batchmill.jobs.ledger.outcome_map import adopt
from batchmill.jobs.ledger.plan import PlanReader
from batchmill.models import functions
from batchmill.store.segments.format import BlockMeta, BlockRows, frame
from batchmill.types import Amendment, JobView, ModelSpec, OutputSchema, Policy, Price, RemoteJob, Usage

ROWS = 40
SCHEMA = OutputSchema('{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}', attempts=2)
ASKED = sum(min(n % 4, 2) + 1 for n in range(ROWS))  # answers until all rows have an outcome
EACH = Usage(3, 0, 2)  # of every answer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAR_KEY", "k")
    lines = [
        msgspec_json.encode(
            {
                "custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions",
                "body": {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": f"text {n}"}]},
            }
        )
        for n in range(ROWS)
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return tmp_path


def usage_of(answers: int) -> Usage:
    return Usage(3 * answers, 0, 2 * answers)


def far_once(provider: BatchProvider) -> ModelSpec:  # noqa: F811
    """All rows in one batch; an output token costs a dollar."""
    return ModelSpec(
        "m", "provider_batch", "gpt", base_url=provider.base_url, api_key="env:FAR_KEY", provider="openai",
        engine_args={"poll_s": 0.01, "poll_max_s": 0.02, "cancel_wait_s": 10}, price=Price(0.0, output=1e6),
    )  # fmt: skip


async def test_every_answer_counts(folder, opened, provider):  # noqa: F811
    """Rows, tokens, cost and what was asked again are in the job's record, and the ledger is sound."""
    provider.answer = late_answer
    service = await opened()
    job = (await service.submit(order(folder, far(provider), schema=SCHEMA))).id
    view = await end_of(service, job)
    assert (view.state, view.rows_ok, view.rows_failed) == ("completed", 30, 10), view.message
    assert (view.errors, view.warnings) == ({"schema_mismatch": 10}, {"asked_again": 20})
    assert (view.usage, provider.billed.total()) == (usage_of(ASKED), ASKED)
    assert view.cost == pytest.approx(5e-6 * ASKED)
    remotes = await service.remote(job)
    assert sorted(each.attempt for each in remotes) == [0] * 4 + [1] * 4 + [2] * 4
    assert {each.state for each in remotes} == {"collected"}
    assert (await service.verify(job)).broken == []


async def test_a_class_validates_them(folder, opened, provider):  # noqa: F811
    """Its words go into the next batch; what it refuses in each is an error with the answer."""
    provider.answer = lambda body: f'{{"n": {len(body["messages"])}}}'
    (folder / "answers.py").write_text(
        "import msgspec\nclass Answer(msgspec.Struct):\n    n: int\n"
        "    def __post_init__(self):\n        if self.n < 3:\n            raise ValueError('too few messages')\n"
    )
    source = f"{folder / 'answers.py'}:Answer"
    schema = OutputSchema(SCHEMA.document, validator=source, code=functions.digest(source))
    service = await opened()
    job = (await service.submit(order(folder, far_once(provider), schema=schema))).id
    view = await end_of(service, job)
    assert (view.state, view.rows_ok, view.warnings) == ("completed", ROWS, {"asked_again": ROWS}), view.message
    assert "too few messages" in list(provider.batches.values())[1].lines[0]["body"]["messages"][2]["content"]
    assert view.usage == usage_of(2 * ROWS)


async def test_what_first_answers_leave_pays_for_others(folder, opened, provider):  # noqa: F811
    """A budget for the most of all rows, asked for once, is enough: an answer costs a fifth of the most."""
    provider.answer = late_answer
    service = await opened()
    job = (await service.submit(order(folder, far_once(provider), schema=SCHEMA, policy=Policy(budget=400.0)))).id
    view = await end_of(service, job)
    assert view.state == "completed", view.message
    assert view.cost == pytest.approx(2.0 * ASKED) and view.cost <= 400.0
    assert [each.rows for each in await service.remote(job)] == [40, 30, 20]


async def test_the_budget_cannot_pay(folder, opened, provider):  # noqa: F811
    """Rows that it cannot pay to ask again fail with what they have."""
    provider.answer = lambda body: "not at all"
    service = await opened()
    usd = 40 * 10.0  # a first answer to each; they leave 320 dollars, which 32 further ones may cost
    job = (await service.submit(order(folder, far_once(provider), schema=SCHEMA, policy=Policy(budget=usd)))).id
    view = await end_of(service, job)
    assert (view.state, view.rows_ok) == ("completed", 0), view.message
    assert view.cost is not None and view.cost == pytest.approx(2.0 * provider.billed.total()) and view.cost <= usd
    assert [each.rows for each in await service.remote(job)] == [40, 32, 25]
    errors = [msgspec_json.decode(line) for line in (folder / "out.errors.jsonl").read_bytes().splitlines()]
    assert sum("the budget of the job cannot pay it" in each["error"]["message"] for each in errors) == 8 + 7
    assert all(each["response"]["body"]["choices"][0]["message"]["content"] == "not at all" for each in errors)


async def asked_again(folder, opened, provider, **more) -> tuple:  # noqa: F811
    """A job whose second batch never ends: (service, id)."""
    provider.answer, provider.fates = late_answer, ["completes", "never_ends"]
    service = await opened()
    job = (await service.submit(order(folder, far_once(provider), schema=SCHEMA, **more))).id
    await seen(service, job, lambda: len(provider.batches) == 2)
    return service, job


def check_kept(view: JobView, folder: Path, provider: BatchProvider, why: str) -> None:  # noqa: F811
    assert provider.running == [] and view.usage == usage_of(provider.billed.total())
    assert view.rows_ok + view.rows_failed == ROWS and view.errors.keys() == {"schema_mismatch"}
    errors = [msgspec_json.decode(line) for line in (folder / "out.errors.jsonl").read_bytes().splitlines()]
    assert any(each["error"]["message"].endswith(f"; not asked again: {why}") for each in errors)
    assert all("yet" in each["response"]["body"]["choices"][0]["message"]["content"] for each in errors)


async def test_cancelled(folder, opened, provider):  # noqa: F811
    """Rows keep the answers that they have; `retry` reaches them."""
    service, job = await asked_again(folder, opened, provider)
    assert (await service.show(job)).usage == usage_of(ROWS)  # counted while the second batch runs
    check_kept(await service.cancel(job), folder, provider, "the job was cancelled")
    assert all(each.state == "collected" for each in await service.remote(job))
    failed = (await service.show(job)).rows_failed
    await service.retry(job)
    view = await end_of(service, job)
    assert view.state == "completed" and view.rows_failed < failed


async def test_paused_and_cancelled(folder, opened, provider):  # noqa: F811
    """Also where it was paused before, and another owner cancels it."""
    service, job = await asked_again(folder, opened, provider)
    view = await service.pause(job)
    assert (view.usage, view.cost) == (usage_of(ROWS), pytest.approx(2.0 * ROWS))
    await service.close(at_once=True)
    service = await opened()
    check_kept(await service.cancel(job), folder, provider, "the job was cancelled")


async def test_past_its_deadline(folder, opened, provider):  # noqa: F811
    """No answer is waited for then."""
    service, job = await asked_again(folder, opened, provider)
    await service.amend(job, Amendment(deadline=time.time() + 0.2))
    view = await end_of(service, job)
    assert view.state == "expired"
    check_kept(view, folder, provider, "the deadline of the job has passed")


async def test_another_route(folder, opened, provider):  # noqa: F811
    """Rows whose provider refuses to be asked again go on at the next route, which asks them anew."""
    provider.answer, provider.fates = late_answer, ["completes", *["refused"] * 10]
    async with AnsweringService(lambda body: choice('{"n": 1}')) as near:
        online = ModelSpec(
            "near", "http", "gpt", base_url=near.url, api_key="env:FAR_KEY", price=Price(0.0, output=9e6)
        )
        service = await opened()
        routes = ModelSpec("m", "routes", "", routes=[online, far_once(provider)])
        job = (await service.submit(order(folder, routes, schema=SCHEMA))).id
        view = await end_of(service, job)
    assert (view.state, view.rows_ok) == ("completed", ROWS), view.message
    assert len(near.bodies) == 30 and provider.running == []
    assert view.usage == usage_of(provider.billed.total()) + Usage(10 * 30, 0, 5 * 30)


# -- the ledger --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ledgered(tmp_path: Path):
    job = LedgeredJob(tmp_path, rows=8, shard_rows=8)
    yield job
    job.ledger.close()


def written(job: LedgeredJob, epoch: int, positions: list[int], worker: str = "w1") -> None:
    """A block that counts answers in the results of the remote job `tag`."""
    each = usage_of(1)
    misfits = [(position, each.input_tokens, each.cached_tokens, each.output_tokens) for position in positions]
    meta = BlockMeta(usage_of(len(positions)), misfits={"tag": misfits})
    with closing(job.segment(worker)) as segment:
        segment.append(frame(BlockRows([], [], []), generation=0, shard=0, epoch=epoch, ok=True, meta=meta))
        segment.sync()


def noted(job: LedgeredJob) -> RemoteJob:
    with job.ledger.database.reader.connect() as db:
        return msgspec_json.decode(of_shard(db, job.id, 0, 0)["tag"], type=RemoteJob)


def test_a_killed_worker_has_counted(ledgered):
    """What it wrote is counted with the note, once: not again by what another wrote of the same answers."""
    plan = PlanReader(ledgered.job.plan)
    lease = ledgered.ledger.lease(ledgered.id, 0, plan.shards()[0]).lease
    remote = RemoteJob("tag", "openai", "ended", [(0, 8)], 8)
    ledgered.ledger.keep_notes([ShardNote(lease, "tag", msgspec_json.encode(remote), 1.0)])
    written(ledgered, lease.epoch, [1, 2, 5])
    arguments = (ledgered.ledger, ledgered.spec, 0, plan, ledgered.files)
    assert len(adopt(*arguments)) == 1 and adopt(*arguments) == []
    assert noted(ledgered).misfits == [(1, 2), (5, 1)]
    written(ledgered, lease.epoch, [1, 5], "w2")
    assert adopt(*arguments) == []
    written(ledgered, lease.epoch, [6], "w3")
    assert len(adopt(*arguments)) == 1 and noted(ledgered).misfits == [(1, 2), (5, 2)]
    assert ledgered.ledger.snapshot(ledgered.id).counters.usage == usage_of(4)


def test_answers_that_two_workers_have_counted(ledgered):
    """A successor was paused in the middle of answers that the worker before it had written whole. Each counts once: in
    the ledger, an audit and a rebuilt ledger, in whatever order the blocks are found."""
    plan = PlanReader(ledgered.job.plan)
    lease = ledgered.ledger.lease(ledgered.id, 0, plan.shards()[0]).lease
    remote = RemoteJob("tag", "openai", "ended", [(0, 8)], 8)
    ledgered.ledger.keep_notes([ShardNote(lease, "tag", msgspec_json.encode(remote), 1.0)])
    arguments = (ledgered.ledger, ledgered.spec, 0, plan, ledgered.files)
    written(ledgered, lease.epoch, [1, 2, 3], "w2")  # the successor
    assert [commit.usage for commit, _ in adopt(*arguments)] == [usage_of(3)]
    written(ledgered, lease.epoch - 1, [0, 1, 2, 3, 4, 5], "w1")
    assert [commit.usage for commit, _ in adopt(*arguments)] == [usage_of(3)]
    assert noted(ledgered).misfits == [(0, 6)]
    written(ledgered, lease.epoch, [5, 6], "w3")
    written(ledgered, lease.epoch, [6, 7], "w4")
    assert [commit.usage for commit, _ in adopt(*arguments)] == [usage_of(1), usage_of(1)]
    assert ledgered.ledger.snapshot(ledgered.id).counters.usage == usage_of(8)
    assert not [each for each in ledgered.verify().broken if "tokens" in each]
    ledgered.rebuild()
    assert ledgered.ledger.snapshot(ledgered.id).counters.usage == usage_of(8)


def test_a_rebuilt_ledger_counts_once(ledgered):
    """What no commit names is counted with the note, and what was counted already is not."""
    plan = PlanReader(ledgered.job.plan)
    lease = ledgered.ledger.lease(ledgered.id, 0, plan.shards()[0]).lease
    remote = RemoteJob("tag", "openai", "ended", [(0, 8)], 8)
    ledgered.ledger.keep_notes([ShardNote(lease, "tag", msgspec_json.encode(remote), 1.0)])
    written(ledgered, lease.epoch, [1, 2])
    adopt(ledgered.ledger, ledgered.spec, 0, plan, ledgered.files)
    written(ledgered, lease.epoch, [2], "w2")
    written(ledgered, lease.epoch, [7], "w3")
    ledgered.rebuild()
    assert ledgered.ledger.snapshot(ledgered.id).counters.usage == usage_of(3)
    assert noted(ledgered).misfits == [(1, 2), (7, 1)]


def test_notes_of_the_largest_batches_are_kept(ledgered):
    """Of 100,000 rows, no two of which are neighbours, all of them asked for again; and no larger ones."""
    lease = ledgered.ledger.lease(ledgered.id, 0, PlanReader(ledgered.job.plan).shards()[0]).lease
    runs = [(4_000_000_000 + 2 * n, 1) for n in range(50_000)]
    data = msgspec_json.encode(RemoteJob("tag", "gemini", "ended", runs, 50_000, misfits=runs))
    assert ledgered.ledger.keep_notes([ShardNote(lease, "tag", data, 1.0)]) == [True]
    assert ledgered.ledger.keep_notes([ShardNote(lease, "more", b"x" * DATA_BYTES_MAX, 1.0)]) == [True]
    assert ledgered.ledger.keep_notes([ShardNote(lease, "most", b"x" * (DATA_BYTES_MAX + 1), 1.0)]) == [False]
