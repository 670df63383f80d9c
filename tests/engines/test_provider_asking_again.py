"""Answers of a provider's batch that do not fit their schema: asked for again in further batches, counted once each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from contract.engine_suite import ListSink
from engines.provider_batch_support import Ground, HeldLease, batch_model, batch_row
from engines.test_provider_batch_others import model as provider_model
from engines.test_provider_batch_others import new_fake
from fakes.batch_provider import BatchProvider, late_answer, text_of
from msgspec.structs import replace

from batchmill.engines.provider_batch import collecting
from batchmill.engines.provider_batch.following import OVER, PAUSE
from batchmill.executors.reply_checks import ReplyChecks
from batchmill.executors.validators.validators import Validators
from batchmill.models import functions
from batchmill.types import Outcome, OutputSchema, Row, Usage
from batchmill.wire.rows.forms import OpenAIForm

ROWS, STEPS_MAX = 8, 160
SCHEMA = OutputSchema('{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}', attempts=2)
ANSWER = Usage(3, 0, 2)
FORM = OpenAIForm(schema=SCHEMA)


class NoFeed:
    """No row of it comes twice: the engine keeps them."""

    def settle_checked(self, row: Row) -> None:
        """The row has its outcome."""

    def ask_again(self, row: Row) -> None:
        raise AssertionError("the engine asks again by itself")


class Living:
    """Takes outcomes of workers that live."""

    def __init__(self, sink: ListSink) -> None:
        self._sink, self.put_block = sink, None

    def put(self, outcomes: Iterable[Outcome]) -> None:
        self._sink.put([outcome for outcome in outcomes if not outcome.row.lease.dead.is_set()])


def rows(schema: OutputSchema = SCHEMA) -> list[Row]:
    return [replace(batch_row(number), form=OpenAIForm(schema=schema)) for number in range(ROWS)]


@pytest.fixture
async def provider():
    async with BatchProvider() as running:
        running.answer = late_answer
        yield running


def ground_of(provider: BatchProvider, folder: Path, **arguments: str | float | bool) -> Ground:
    ground = Ground(batch_model(provider.base_url, **arguments), folder)
    ground.checks = ReplyChecks(NoFeed(), Living(ground.sink), asks_again=False)  # type: ignore[arg-type]
    return ground


def outcome_of(outcome: Outcome) -> str:
    if outcome.error is not None:
        return outcome.error.code
    return "+".join(outcome.warnings) or "ok"


def check(ground: Ground, provider: BatchProvider, spent: list[Usage], *, was_killed: bool = False) -> None:
    """Rows 0 and 4 fit at once, 1 and 5 on the second time, 2 and 6 on the third, 3 and 7 never.

    Nobody deletes results whose reader was killed once all rows had outcomes; uploads are deleted before.
    """
    found = {number: outcome_of(outcome) for number, outcome in ground.outcomes().items()}
    expected = ["ok", "asked_again", "asked_again", "schema_mismatch"]
    assert found == {number: expected[number % 4] for number in range(ROWS)}
    asked = [min(number % 4, 2) + 1 for number in range(ROWS)]
    assert provider.billed.total() == sum(asked) and set(provider.billed.values()) == {1}
    assert total(ground, spent) == sum([ANSWER] * sum(asked), Usage())
    assert provider.running == []
    assert [name for name, *_ in provider.files.values() if name != "output.jsonl" or not was_killed] == []


def total(ground: Ground, spent: list[Usage]) -> Usage:
    return sum([*spent, *(each.usage for each in ground.sink.outcomes if each.usage is not None)], Usage())


async def test_they_are_asked_for_again(provider: BatchProvider, tmp_path: Path) -> None:
    """In one further batch each time, with the answers and what was wrong with them; the last one is kept."""
    ground, lease = ground_of(provider, tmp_path), HeldLease(ROWS)
    await ground.run((lease, rows()))
    check(ground, provider, lease.spent)
    assert [(job.rows, job.attempt, job.state) for job in lease.jobs] == [
        (ROWS, 0, "collected"), (6, 1, "collected"), (4, 2, "collected")
    ]  # fmt: skip
    messages = list(provider.batches.values())[2].lines[0]["body"]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert "not 2 yet" in messages[3]["content"] and "it is not JSON" in messages[4]["content"]
    failed = ground.outcomes()[3]
    assert failed.error is not None and failed.error.message.endswith("(asked 3 times)")
    assert failed.body is not None and json.loads(failed.body)["choices"][0]["message"]["content"] == "not 3 yet"


@pytest.mark.parametrize("attempts", [0, 1])
async def test_no_more_often_than_said(attempts: int, provider: BatchProvider, tmp_path: Path) -> None:
    """`attempts` bounds the batches."""
    ground, lease = ground_of(provider, tmp_path), HeldLease(ROWS)
    await ground.run((lease, rows(replace(SCHEMA, attempts=attempts))))
    assert len(provider.batches) == attempts + 1
    assert [outcome_of(each) for _, each in sorted(ground.outcomes().items())].count("schema_mismatch") == (
        6 - 2 * attempts
    )


@pytest.mark.parametrize("fate", ["completes", "loses"])
async def test_killed_at_every_step(fate: str, tmp_path: Path) -> None:
    """Wherever a worker is killed, each answer is paid for and counted once, and nothing is left at the provider."""
    for step in range(1, STEPS_MAX):
        async with BatchProvider() as provider:
            provider.answer, provider.fates = late_answer, [fate]
            ground, lease = ground_of(provider, tmp_path), HeldLease(ROWS)
            lease.stop_at = step
            was_killed = await ground.start((lease, rows())).finish_or_die(lease)
            await run_rest(ground, lease)
            check(ground, provider, lease.spent, was_killed=was_killed)
        if not was_killed:
            return
    raise AssertionError("the worker never came to its end")


async def test_killed_twice(tmp_path: Path) -> None:
    """Also the worker that reads the answers again may be killed anywhere."""
    for step in range(1, STEPS_MAX):
        async with BatchProvider() as provider:
            provider.answer = late_answer
            ground, lease = ground_of(provider, tmp_path), HeldLease(ROWS)
            lease.stop_at = 24  # the second batch is submitted
            assert await ground.start((lease, rows())).finish_or_die(lease)
            left = undone(ground)
            second = HeldLease(len(left), lease.notes, spent=lease.spent)
            second.stop_at = step
            was_killed = await ground.start((second, left)).finish_or_die(second)
            await run_rest(ground, second)
            check(ground, provider, lease.spent, was_killed=was_killed)
        if not was_killed:
            return
    raise AssertionError("the worker never came to its end")


@pytest.mark.parametrize("operation", ["upload", "create", "look", "content"])
@pytest.mark.parametrize("is_done", [True, False])
async def test_killed_within_a_call(
    operation: str, is_done: bool, provider: BatchProvider, tmp_path: Path
) -> None:  # fmt: skip
    """Of the second batch: whether the call was heard or not."""
    ground, lease = ground_of(provider, tmp_path), HeldLease(ROWS)

    async def on_call(called: str, done: bool) -> None:
        has_asked = any(job.attempt for job in lease.jobs)
        if has_asked and called == operation and done is is_done and not lease.dead.is_set():
            lease.dead.set()

    provider.on_call = on_call
    assert await ground.start((lease, rows())).finish_or_die(lease)
    provider.on_call = None
    await provider.settled()
    await run_rest(ground, lease)
    check(ground, provider, lease.spent)
    assert len(provider.batches) == 3


async def run_rest(ground: Ground, killed: HeldLease, **more: str) -> HeldLease:
    """The rows that have no outcome, by another worker."""
    left = undone(ground)
    lease = HeldLease(len(left), killed.notes, spent=killed.spent, **more)
    if left:
        await ground.run((lease, left))
    return lease


def undone(ground: Ground) -> list[Row]:
    done = ground.outcomes()
    return [row for row in rows() if row.number not in done]


async def paused_after(ground: Ground, lease: HeldLease, provider: BatchProvider, batches: int) -> None:
    """Pause once so many batches were made, and the last one never ends."""
    provider.fates = [*["completes"] * (batches - 1), "never_ends"]
    running = ground.start((lease, rows()))
    async with asyncio.timeout(30):
        while len(provider.batches) < batches:
            await asyncio.sleep(0.005)
    lease.end("pause")
    await running.finish()


async def test_paused_and_resumed(provider: BatchProvider, tmp_path: Path) -> None:
    """What the answers have cost is counted while the job is paused; nothing is asked for meanwhile."""
    ground, lease = ground_of(provider, tmp_path), HeldLease(ROWS)
    await paused_after(ground, lease, provider, 2)
    assert lease.has_left and lease.spent == [sum([ANSWER] * 6, Usage())]
    assert sorted(ground.outcomes()) == [0, 4]
    list(provider.batches.values())[1].fate = "completes"
    await run_rest(ground, lease)
    check(ground, provider, lease.spent)


@pytest.mark.parametrize("over", ["its deadline has passed", ""])
async def test_a_job_that_is_over(over: str, provider: BatchProvider, tmp_path: Path) -> None:
    """Rows keep the answers that they have, and say why they are not asked again; or they go on elsewhere."""
    ground, lease = ground_of(provider, tmp_path), HeldLease(ROWS)
    await paused_after(ground, lease, provider, 2)
    after = await run_rest(ground, lease, ending="over", over=over)
    assert len(provider.batches) == 2 and provider.running == [] and provider.files == {}
    assert all(job.state == "collected" for job in after.jobs)
    # Half of the batch had run when it was cancelled: rows 1, 2 and 3.
    found = {number: outcome_of(outcome) for number, outcome in ground.outcomes().items()}
    assert (found[0], found[1]) == ("ok", "asked_again")
    if not over:
        assert sorted(found) == [0, 1, 4]
        return
    assert sorted(found) == list(range(ROWS))
    for number in (2, 3, 5, 6, 7):
        error = ground.outcomes()[number].error
        assert error is not None and error.code == "schema_mismatch", number
        assert error.message.endswith("; not asked again: its deadline has passed")
        body = ground.outcomes()[number].body
        assert body is not None and f"not {number} yet".encode() in body
    assert total(ground, lease.spent) == sum([ANSWER] * provider.billed.total(), Usage())


async def test_the_budget_cannot_pay(provider: BatchProvider, tmp_path: Path) -> None:
    """Rows that it cannot pay to ask again keep their answers, and say so."""
    ground, lease = ground_of(provider, tmp_path), HeldLease(ROWS, payable=2)
    await ground.run((lease, rows()))
    assert [job.rows for job in lease.jobs] == [ROWS, 2]
    messages = [each.error.message for each in ground.outcomes().values() if each.error is not None]
    assert len(messages) == 5 and all("not asked again: the budget of the job cannot pay it" in m for m in messages)
    assert total(ground, lease.spent) == sum([ANSWER] * 10, Usage())


async def test_results_that_are_gone(provider: BatchProvider, tmp_path: Path) -> None:
    """The provider may delete the first answers before the second are read: these count all the same."""
    ground, lease = ground_of(provider, tmp_path), HeldLease(ROWS)
    await paused_after(ground, lease, provider, 2)
    first, second = provider.batches.values()
    del provider.files[str(first.output)]
    second.fate = "completes"
    await run_rest(ground, lease)
    check(ground, provider, lease.spent)


async def test_lost_when_asked_again(provider: BatchProvider, tmp_path: Path) -> None:
    """Rows that the provider loses each time that it is asked again keep the answers that they have."""
    ground, lease = ground_of(provider, tmp_path, tries_max=2), HeldLease(ROWS)
    provider.fates = ["completes", "no_files", "no_files"]
    await ground.run((lease, rows()))
    found = [outcome for number, outcome in ground.outcomes().items() if number % 4]
    assert {outcome_of(each) for each in found} == {"schema_mismatch"}
    texts = [each.error.message for each in found if each.error is not None]
    assert all("has not answered this row, in 2 jobs" in text for text in texts)
    assert all(each.body is not None for each in found)


SLOW = """
import os, pathlib, time, msgspec
class Slow(msgspec.Struct):
    n: int
    def __post_init__(self):
        here = pathlib.Path(__file__).parent
        if self.n > 1 and not (here / "go").exists():
            (here / "begun").touch()
            time.sleep(0.9)
"""


@pytest.mark.parametrize("ending", [PAUSE, OVER])
async def test_a_pause_between_rows(ending: str, provider: BatchProvider, tmp_path: Path, monkeypatch) -> None:
    """While a class validates a window of answers, a pause is not held up, nor for long the end of a job: what was
    validated is recorded, each answer counts once, and a successor reads the others again."""
    monkeypatch.setattr(collecting, "OVER_S", 0.0)
    code = tmp_path / "slow.py"
    code.write_text(SLOW)
    schema = OutputSchema("{}", validator=f"{code}:Slow", code=functions.digest(f"{code}:Slow"), attempts=0)
    provider.answer = lambda body: json.dumps({"n": int(text_of(body).rpartition(" ")[2])})
    validators = Validators(lambda jobs: None)
    ground, lease = ground_of(provider, tmp_path), HeldLease(ROWS)
    ground.checks = ReplyChecks(NoFeed(), Living(ground.sink), asks_again=False, validators=validators)  # type: ignore[arg-type]
    running = ground.start((lease, rows(schema)))
    while not (tmp_path / "begun").exists():
        await asyncio.sleep(0)
    lease.end(ending, "it was cancelled" if ending == OVER else "")
    await running.finish()
    first = ground.outcomes()
    assert len(first) < ROWS and {outcome_of(each) for each in first.values()} <= {"ok"} and lease.has_left
    if ending == OVER:
        assert total(ground, lease.spent) == sum([ANSWER] * ROWS, Usage())
    else:
        (tmp_path / "go").touch()
        left = [row for row in rows(schema) if row.number not in first]
        await ground.run((HeldLease(len(left), lease.notes, spent=lease.spent), left))
        assert sorted(ground.outcomes()) == list(range(ROWS)) and len(provider.batches) == 1
        assert total(ground, lease.spent) == sum([ANSWER] * ROWS, Usage())
    await validators.close()


@pytest.mark.parametrize("name", ["anthropic", "gemini", "sagemaker", "bedrock"])
async def test_every_provider(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is asked again in its own form, also after its worker was killed once the second batch was made."""
    async with new_fake(name, monkeypatch) as fake:
        ground, lease = Ground(provider_model(name, fake), tmp_path), HeldLease(ROWS)
        ground.checks = ReplyChecks(NoFeed(), Living(ground.sink), asks_again=False)  # type: ignore[arg-type]
        lease.stop_at = 24
        late = [
            replace(batch_row(n, messages=[{"role": "user", "content": f"late {n}"}], max_tokens=99), form=FORM)
            for n in range(ROWS)
        ]
        assert await ground.start((lease, [replace(row) for row in late])).finish_or_die(lease)
        left = [replace(row) for row in late if row.number not in ground.outcomes()]
        await ground.run((HeldLease(len(left), lease.notes, spent=lease.spent), left))
        expected = ["ok", "asked_again", "asked_again", "schema_mismatch"]
        found = {number: outcome_of(outcome) for number, outcome in ground.outcomes().items()}
        assert found == {number: expected[number % 4] for number in range(ROWS)}
        assert [len(job.rows) for job in fake.jobs.values()] == [ROWS, 6, 4]
        asked = sum(min(number % 4, 2) + 1 for number in range(ROWS))
        assert total(ground, lease.spent).output_tokens in (3 * asked, 4 * asked)
