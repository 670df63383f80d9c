"""The engine of provider batches against a provider that has faults."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engines.provider_batch_support import PATIENT, Ground, HeldLease, batch_model, batch_row
from fakes.batch_provider import BatchProvider
from msgspec.structs import replace

from batchmill.engines.clock import SystemClock
from batchmill.engines.connections import Connections
from batchmill.engines.provider_batch import load_provider
from batchmill.engines.provider_batch.answers import Answers
from batchmill.engines.provider_batch.collecting import CollectedRows, Collector
from batchmill.engines.provider_batch.engine import ProviderBatchEngine
from batchmill.engines.provider_batch.following import Course
from batchmill.engines.provider_batch.provider import RowReply
from batchmill.engines.provider_batch.settings import read_settings
from batchmill.engines.provider_batch.spool import Spool
from batchmill.errors import AuthRefused, InvalidInput, ModelFailed, RouteFailed, SubmitUnknown
from batchmill.types import Limits, LiveRequest, ModelSpec, Row, RowError


@pytest.fixture
async def provider() -> AsyncIterator[BatchProvider]:
    async with BatchProvider() as provider:
        yield provider


@pytest.fixture
def ground(provider: BatchProvider, tmp_path: Path) -> Ground:
    return Ground(batch_model(provider.base_url), tmp_path)


def rows_of(count: int) -> list[Row]:
    return [batch_row(number) for number in range(count)]


def check_all_answered(ground: Ground, count: int) -> None:
    """Every row has the answer to its own text."""
    outcomes = ground.outcomes()
    assert sorted(outcomes) == list(range(count))
    for number, outcome in outcomes.items():
        assert outcome.error is None, outcome.error
        assert outcome.body is not None
        assert json.loads(outcome.body)["choices"][0]["message"]["content"] == f"to text {number}"
        assert json.loads(outcome.row.raw)["custom_id"] == f"id-{number}"


async def test_a_lease_is_one_batch(provider: BatchProvider, ground: Ground) -> None:
    """All rows of a lease go as one batch, each gets its own reply, and the upload is deleted."""
    lease = HeldLease(2500)
    await ground.run((lease, rows_of(2500)))
    check_all_answered(ground, 2500)
    assert len(provider.batches) == 1
    assert lease.states() == ["collected"]
    outcome = ground.outcomes()[7]
    assert outcome.usage is not None and outcome.usage.output_tokens == 2
    assert outcome.request_id == "req_r107"
    (batch,) = provider.batches.values()
    assert batch.input not in provider.files
    assert batch.lines[0]["body"]["model"] == "remote-m"


async def test_limits_split(provider: BatchProvider, tmp_path: Path) -> None:
    """A lease that is larger than one batch may be goes as several."""
    ground = Ground(batch_model(provider.base_url, rows_max=40), tmp_path)
    await ground.run((HeldLease(100), rows_of(100)))
    check_all_answered(ground, 100)
    assert sorted(len(batch.lines) for batch in provider.batches.values()) == [20, 40, 40]


async def test_urls_and_models_split(provider: BatchProvider, ground: Ground) -> None:
    """Rows of different paths or models go in different batches."""
    rows = [
        batch_row(0),
        batch_row(1, url="/v1/embeddings", input=["a", "b"]),
        batch_row(2, model="other", messages=[{"role": "user", "content": "text 2"}]),
        batch_row(3),
    ]
    await ground.run((HeldLease(4), rows))
    assert sorted(ground.outcomes()) == [0, 1, 2, 3]
    assert sorted(len(batch.lines) for batch in provider.batches.values()) == [1, 1, 2]


async def test_unfit_rows(provider: BatchProvider, ground: Ground) -> None:
    """A row that no batch can take has its error, and the others run."""
    rows = [batch_row(0), batch_row(1, url="/elsewhere"), batch_row(2, stream=True, messages=[])]
    await ground.run((HeldLease(3), rows))
    codes = {number: outcome.error and outcome.error.code for number, outcome in ground.outcomes().items()}
    assert codes == {0: None, 1: "invalid_url", 2: "unsupported_parameter"}


async def test_many_leases(provider: BatchProvider, tmp_path: Path) -> None:
    """More leases than may be at the provider at once take turns."""
    ground = Ground(batch_model(provider.base_url, jobs_max=2), tmp_path)
    leases = [HeldLease(10) for _ in range(7)]
    rows = rows_of(70)
    await ground.run(*((lease, rows[place * 10 :][:10]) for place, lease in enumerate(leases)))
    check_all_answered(ground, 70)
    assert all(lease.states() == ["collected"] for lease in leases)


CALLS = ("upload", "create", "look", "content", "delete")
FAULTS = ("429", "429_now", "500", "503", "slow", "hung", "reset", "truncated", "html", "lost")
# A page in the place of results, or results that stop: that is the batch's own fault, see the fates below.
NO_CALLS = {("content", "html"), ("content", "hung")}


@pytest.mark.parametrize(
    ("operation", "fault"), [each for each in itertools.product(CALLS, FAULTS) if each not in NO_CALLS]
)
async def test_call_faults(provider: BatchProvider, tmp_path: Path, operation: str, fault: str) -> None:
    """Whatever a call meets twice, every row is answered and paid once, and no batch is left running."""
    limits = Limits(attempt_timeout_s=0.5, connect_timeout_s=20.0) if fault == "hung" else PATIENT
    ground = Ground(batch_model(provider.base_url, limits=limits), tmp_path)
    provider.faults[operation] = [fault, fault]
    await ground.run((HeldLease(20), rows_of(20)))
    check_all_answered(ground, 20)
    assert set(provider.billed.values()) == {1}
    assert len(provider.batches) == 1
    assert provider.running == []


@pytest.mark.parametrize("operation", ["list", "files"])
@pytest.mark.parametrize("fault", ["429", "500", "reset", "truncated", "html"])
async def test_finding_meets_faults(provider: BatchProvider, ground: Ground, operation: str, fault: str) -> None:
    """A batch whose making was answered by nobody is found, though looking for it meets faults too."""
    provider.faults["create" if operation == "list" else "upload"] = ["lost"]
    provider.faults[operation] = [fault, fault]
    await ground.run((HeldLease(20), rows_of(20)))
    check_all_answered(ground, 20)
    assert len(provider.batches) == 1
    assert sum(name.endswith(".jsonl") and name != "output.jsonl" for name, _, _ in provider.files.values()) == 0


@pytest.mark.parametrize("fate", ["loses", "overloaded", "no_files", "expires", "cancelled", "queue_full"])
async def test_rows_left_over_go_again(provider: BatchProvider, ground: Ground, fate: str) -> None:
    """Rows that a batch has not answered go in another, and none is paid twice."""
    provider.fates = [fate]
    lease = HeldLease(21)
    await ground.run((lease, rows_of(21)))
    check_all_answered(ground, 21)
    assert len(provider.batches) == 2
    assert set(provider.billed.values()) == {1}
    assert [job.tag[-2:] for job in lease.jobs] == (["-1", "-1"] if fate == "queue_full" else ["-1", "-2"])


@pytest.mark.parametrize(("fate", "expected"), [("repeats", "11 rows twice"), ("strange", "1 unknown rows")])
async def test_too_many_answers(provider: BatchProvider, ground: Ground, fate: str, expected: str) -> None:
    """Of two answers the first counts, one to no row of ours is left aside, and the note says so."""
    provider.fates = [fate]
    lease = HeldLease(21)
    await ground.run((lease, rows_of(21)))
    check_all_answered(ground, 21)
    assert lease.jobs[0].message == expected


async def test_bad_rows(provider: BatchProvider, ground: Ground) -> None:
    """Rows that the provider refuses keep its status, code and body."""
    provider.fates = ["bad_rows"]
    await ground.run((HeldLease(10), rows_of(10)))
    failed = {number: outcome for number, outcome in ground.outcomes().items() if outcome.error is not None}
    assert sorted(failed) == [0, 5]
    assert (failed[5].status, failed[5].error.code, failed[5].error.message) == (
        400,
        "invalid_value",
        "this row is bad",
    )
    assert failed[5].body is not None
    assert len(provider.batches) == 1


async def test_garbled_line(provider: BatchProvider, ground: Ground) -> None:
    """A line that cannot be read is downloaded again, and is its row's error when it still cannot."""
    provider.fates = ["garbled"]
    await ground.run((HeldLease(10), rows_of(10)))
    outcomes = ground.outcomes()
    assert [number for number, outcome in outcomes.items() if outcome.error is not None] == [0]
    assert outcomes[0].error is not None and outcomes[0].error.code == "bad_response"
    assert provider.calls["content"] == 2


@pytest.mark.parametrize(("fate", "pages"), [("completes", ["html"] * 3), ("garbled", ["", "html", "html"])])
async def test_page_instead_of_results(provider: BatchProvider, ground: Ground, fate: str, pages: list[str]) -> None:
    """A proxy's page where the results should be is none of them: they are asked for again, and no row runs twice."""
    provider.fates, provider.faults["content"] = [fate], pages
    await ground.run((HeldLease(10), rows_of(10)))
    assert sorted(ground.outcomes()) == list(range(10))
    assert set(provider.billed.values()) == {1}
    assert len(provider.batches) == 1


@pytest.mark.parametrize(("faults", "left"), [(3, 0), (1000, 1)])
async def test_files_are_deleted(provider: BatchProvider, ground: Ground, faults: int, left: int) -> None:
    """What was uploaded is deleted though the provider has a bad moment; where it stays, that is told."""
    provider.faults["delete"] = ["500"] * faults
    lease = HeldLease(10)
    await ground.run((lease, rows_of(10)))
    assert sum(name.startswith("batchmill-") for name, _, _ in provider.files.values()) == left
    (job,) = (json.loads(data) for data in lease.notes.values())
    assert job["state"] == "collected" and ("is still there" in job.get("message", "")) == bool(left)


async def test_what_is_said_of_lost_rows(provider: BatchProvider, ground: Ground, tmp_path: Path) -> None:
    """The error of a row that is given up has the provider's words, where it had any."""
    lease, rows = HeldLease(2), rows_of(2)
    first, second = (row.position for row in rows)
    spool = Spool(tmp_path)
    spool.add(rows)
    api = load_provider(ground.model, Connections(ground.model.limits))
    settings = read_settings(ground.model, api.arguments)
    course, answers = Course(lease, settings, SystemClock(), lambda: 0.0), Answers(tmp_path)
    collector = Collector(api, spool, ground.sink, course, lease, answers)
    said = RowReply(0, None, RowError("batch_expired", "no time was left"), is_undone=True)
    lost = RowError("provider_lost_row", "openai has not answered this row, in 3 jobs")
    collector.give_up({first, second}, CollectedRows(undone={second: said}), lost)
    errors = [outcome.error for _, outcome in sorted(ground.outcomes().items())]
    assert errors == [lost, RowError("provider_lost_row", f"{lost.message}: no time was left")]
    spool.close()
    answers.close()


async def test_lost_for_good(provider: BatchProvider, ground: Ground) -> None:
    """A row that no batch answers has an error of its own in the end."""
    provider.fates = ["no_files"] * 3
    await ground.run((HeldLease(3), rows_of(3)))
    codes = {outcome.error.code for outcome in ground.outcomes().values() if outcome.error is not None}
    assert codes == {"provider_lost_row"}
    assert len(provider.batches) == 3


async def test_overloaded_for_good(provider: BatchProvider, ground: Ground) -> None:
    """A row that meets the provider's own failure in every batch keeps what the provider says of it."""
    provider.fates = ["overloaded"] * 3
    await ground.run((HeldLease(4), rows_of(4)))
    failed = ground.outcomes()[0]
    assert failed.error is not None
    assert (failed.status, failed.error.code) == (500, "server_error")
    assert len(ground.outcomes()) == 4 and len(provider.batches) == 3


async def test_cancelled_from_outside_again_and_again(provider: BatchProvider, ground: Ground) -> None:
    """A provider that leaves rows undone batch after batch fails the route, its answers kept."""
    provider.fates = ["cancelled"] * 5
    lease = HeldLease(40)
    await ground.run((lease, rows_of(40)))
    assert isinstance(lease.failure, RouteFailed)
    assert len(provider.batches) == 3
    assert len(ground.outcomes()) == 20 + 10 + 5


async def test_lines_named_by_the_provider(provider: BatchProvider, ground: Ground) -> None:
    """A batch that is refused for one of its lines is that row's error, and the others go again."""
    provider.fates = ["fails"]
    await ground.run((HeldLease(10), rows_of(10)))
    outcomes = ground.outcomes()
    assert {number for number, outcome in outcomes.items() if outcome.error is not None} == {0}
    assert outcomes[0].error is not None and outcomes[0].error.code == "invalid_json_line"
    assert len(outcomes) == 10


async def test_refused_as_a_whole(provider: BatchProvider, ground: Ground) -> None:
    """A batch that is refused twice fails the route with the provider's words."""
    provider.fates = ["refused"] * 5
    lease = HeldLease(10)
    await ground.run((lease, rows_of(10)))
    assert isinstance(lease.failure, RouteFailed)
    assert "not supported by the Batch API" in lease.failure.message
    assert len(provider.batches) == 2


async def test_stuck(provider: BatchProvider, tmp_path: Path) -> None:
    """A batch that never ends is cancelled there, what it did is kept, and the route has failed."""
    ground = Ground(batch_model(provider.base_url, stuck_after_s=0.1), tmp_path)
    provider.fates = ["never_ends"]
    lease = HeldLease(10)
    await ground.run((lease, rows_of(10)))
    assert isinstance(lease.failure, RouteFailed)
    assert sorted(ground.outcomes()) == [0, 1, 2, 3, 4]
    assert provider.running == []
    assert lease.states() == ["collected"]


async def test_pause_leaves_the_batch(provider: BatchProvider, ground: Ground) -> None:
    """A pause leaves the batch at the provider, and the next lease of the rows goes on with it."""
    provider.fates = ["never_ends"]
    lease, rows = HeldLease(10), rows_of(10)
    running = ground.start((lease, rows))
    await _until_submitted(lease)
    lease.end("pause")
    await running.finish()
    assert lease.has_left and lease.states() == ["submitted"]
    for batch in provider.batches.values():
        batch.fate = "completes"
    again = HeldLease(10, lease.notes)
    await ground.run((again, ground.undone(rows)))
    check_all_answered(ground, 10)
    assert len(provider.batches) == 1


async def test_over_collects(provider: BatchProvider, ground: Ground) -> None:
    """When the job ends its batch is cancelled there, what is done is collected, and the rest is left."""
    provider.fates = ["never_ends"]
    lease = HeldLease(10)
    running = ground.start((lease, rows_of(10)))
    await _until_submitted(lease)
    lease.end("over")
    await running.finish()
    assert lease.has_left
    assert sorted(ground.outcomes()) == [0, 1, 2, 3, 4]
    assert provider.running == []


async def test_over_from_the_start_begins_nothing(provider: BatchProvider, ground: Ground) -> None:
    """A lease that is granted to collect hands no row over; an intent nobody heard of is forgotten."""
    first, rows = HeldLease(10), rows_of(10)
    first.stop_at = 2
    running = ground.start((first, rows))
    assert await running.finish_or_die(first)
    assert first.states() == ["intent"]
    over = HeldLease(10, first.notes, ending="over")
    await ground.run((over, ground.undone(rows)))
    assert over.has_left and over.states() == ["forgotten"]
    assert provider.batches == {}


async def test_over_needs_no_room(provider: BatchProvider, tmp_path: Path) -> None:
    """While other leases wait for room at the provider, one that is to end is still collected."""
    ground = Ground(batch_model(provider.base_url, jobs_max=1), tmp_path)
    rows = rows_of(40)
    earlier = HeldLease(10)
    provider.fates = ["never_ends"] * 9
    running = ground.start((earlier, rows[30:]))
    await _until_submitted(earlier)
    earlier.end("pause")
    await running.finish()
    leases = [HeldLease(10) for _ in range(3)]
    running = ground.start(*((lease, rows[place * 10 :][:10]) for place, lease in enumerate(leases)), ended=False)
    await _until_submitted(leases[0])
    over = HeldLease(10, earlier.notes, ending="over")
    running.feed.give_lease(over, ground.undone(rows[30:]))
    async with asyncio.timeout(30):
        while not over.has_left:
            await asyncio.sleep(0)
    assert over.states() == ["collected"]
    assert [lease.states() for lease in leases] == [["submitted"], [], []]
    for lease in leases:
        lease.end("pause")
    running.feed.end()
    await running.finish()


async def test_wrong_key(provider: BatchProvider, ground: Ground) -> None:
    """A key that is refused stops the engine: no row has failed."""
    provider.key = "another"
    with pytest.raises(AuthRefused):
        await ground.run((HeldLease(10), rows_of(10)))
    assert ground.outcomes() == {}


async def test_no_key(provider: BatchProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is not there is a matter of the key, not of the way: no other way is taken for it."""
    monkeypatch.setenv("FAR_KEY", "")
    ground = Ground(replace(batch_model(provider.base_url), api_key="env:FAR_KEY"), tmp_path)
    with pytest.raises(AuthRefused, match="FAR_KEY has no key"):
        await ground.run((HeldLease(10), rows_of(10)))
    assert ground.outcomes() == {} and provider.calls.total() == 0


async def test_unknown_job(provider: BatchProvider, ground: Ground) -> None:
    """A batch that the provider denies is in doubt: somebody must look before its rows go again."""
    provider.fates = ["never_ends"]
    lease, rows = HeldLease(10), rows_of(10)
    running = ground.start((lease, rows))
    await _until_submitted(lease)
    provider.batches.clear()
    await running.finish()
    assert isinstance(lease.failure, SubmitUnknown)
    assert "batchmill remote forget" in lease.failure.message
    assert lease.states() == ["unknown"]


async def test_live(ground: Ground) -> None:
    """A live request is told where it can go: its caller has to change it, and repeats of it would not help."""
    running = ground.start(ended=False)
    with pytest.raises(InvalidInput) as raised:
        running.engine.predict(LiveRequest("/v1/chat/completions", b"{}"))
    assert raised.value.code == "no_live_requests"
    running.feed.end()
    await running.finish()


async def _until_submitted(lease: HeldLease) -> None:
    async with asyncio.timeout(30):
        while lease.states() != ["submitted"]:
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("name", "value"), [("jobs_max", 2.7), ("rows_max", "10.9"), ("tries_max", 0), ("output_expires_after_s", 5)]
)
def test_a_number_that_would_be_cut_is_refused(tmp_path: Path, name: str, value: float | str) -> None:
    """What must be whole, or of a least size, is refused by name and not made to fit."""
    model = ModelSpec("m", "provider_batch", "gpt", provider="openai", engine_args={name: value})
    with pytest.raises(ModelFailed, match=name):
        ProviderBatchEngine(model, tmp_path)
