"""Workers of the provider_batch engine that are killed between any two steps, and providers drawn from seeds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from engines.provider_batch_support import Ground, HeldLease, batch_model, batch_row
from fakes.batch_provider import BatchProvider

from batchmill.errors import SubmitUnknown
from batchmill.types import Limits, Outcome

ROWS = 12
STEPS_MAX = 60


async def run_killed_at(step: int, provider: BatchProvider, ground: Ground) -> tuple[bool, HeldLease]:
    """Run the rows with a worker that is killed at its `step`-th step, and one more; whether the first was killed."""
    rows = [batch_row(number) for number in range(ROWS)]
    lease = HeldLease(ROWS)
    lease.stop_at = step
    was_killed = await ground.start((lease, rows)).finish_or_die(lease)
    if was_killed:
        lease = await run_rest(ground, lease.notes)
    return was_killed, lease


async def run_rest(ground: Ground, notes: dict[str, bytes], *, ending: str = "") -> HeldLease:
    """The rows that have no outcome, by another worker."""
    rows = ground.undone([batch_row(number) for number in range(ROWS)])
    lease = HeldLease(len(rows), dict(notes), ending=ending)
    if rows:
        await ground.run((lease, rows))
    return lease


@pytest.mark.parametrize("fate", ["completes", "loses", "expires", "bad_rows"])
async def test_killed_at_every_note(fate: str, tmp_path: Path) -> None:
    """Wherever a worker is killed beside a note, each row has one outcome, is paid once, and nothing runs on."""
    for step in range(1, STEPS_MAX):
        async with BatchProvider() as provider:
            provider.fates = [fate]
            ground = Ground(batch_model(provider.base_url), tmp_path)
            was_killed, _ = await run_killed_at(step, provider, ground)
            assert sorted(ground.outcomes()) == list(range(ROWS)), f"killed at step {step}"
            assert set(provider.billed.values()) == {1}, f"killed at step {step}"
            assert provider.running == []
            assert uploads_left(provider) == [], f"killed at step {step}"
        if not was_killed:
            return
    raise AssertionError("the worker never came to its end")


@pytest.mark.parametrize("operation", ["upload", "create", "look", "content", "delete"])
@pytest.mark.parametrize("is_done", [True, False])
async def test_killed_within_a_call(operation: str, is_done: bool, tmp_path: Path) -> None:
    """A worker that is killed while it waits for a reply pays nothing twice, whether the call was heard or not."""
    async with BatchProvider() as provider:
        ground = Ground(batch_model(provider.base_url), tmp_path)
        lease = HeldLease(ROWS)
        provider.on_call = dying_at(operation, lease, is_done=is_done)
        rows = [batch_row(number) for number in range(ROWS)]
        assert await ground.start((lease, rows)).finish_or_die(lease)
        provider.on_call = None
        await run_rest(ground, lease.notes)
        assert sorted(ground.outcomes()) == list(range(ROWS))
        assert set(provider.billed.values()) == {1}
        assert provider.running == []
        assert len(provider.batches) == 1


def dying_at(operation: str, lease: HeldLease, *, is_done: bool) -> Callable[[str, bool], Awaitable[None]]:
    """Kills the lease's worker in the first call of this operation, before it is done or after."""

    async def on_call(called: str, done: bool) -> None:
        if called == operation and done is is_done and not lease.dead.is_set():
            lease.dead.set()

    return on_call


async def test_killed_after_outcomes(tmp_path: Path) -> None:
    """Outcomes that were put and never became durable are downloaded again, not paid again."""
    async with BatchProvider() as provider:
        ground = Ground(batch_model(provider.base_url), tmp_path)
        lease = HeldLease(ROWS)
        provider.on_call = dying_at("delete", lease, is_done=True)  # they are put, and nothing is noted of it yet
        rows = [batch_row(number) for number in range(ROWS)]
        assert await ground.start((lease, rows)).finish_or_die(lease)
        provider.on_call = None
        kept: list[Outcome] = ground.sink.outcomes[:5]
        ground.sink.outcomes[:] = kept
        assert lease.states() == ["ended"]
        await run_rest(ground, lease.notes)
        assert sorted(ground.outcomes()) == list(range(ROWS))
        assert set(provider.billed.values()) == {1}


class LateSubmission:
    """The first call that makes a batch is done only after the second, and kills the worker that made it."""

    def __init__(self, lease: HeldLease) -> None:
        self._lease = lease
        self._is_first = True
        self._second_done, self._first_done = asyncio.Event(), asyncio.Event()

    async def on_call(self, operation: str, done: bool) -> None:
        if operation != "create":
            return
        if self._is_first:
            self._is_first = False
            self._lease.dead.set()
            await self._second_done.wait()
        elif done and not self._second_done.is_set():
            self._second_done.set()
            await self._first_done.wait()
        elif done:
            self._first_done.set()


async def test_submission_that_is_late(tmp_path: Path) -> None:
    """A batch that comes to be after its rows went again is ended, wherever the workers after it are killed."""
    for step in range(1, STEPS_MAX):
        async with BatchProvider() as provider:
            ground = Ground(batch_model(provider.base_url), tmp_path)
            lease = HeldLease(ROWS)
            provider.on_call = LateSubmission(lease).on_call
            rows = [batch_row(number) for number in range(ROWS)]
            assert await ground.start((lease, rows)).finish_or_die(lease)
            second = HeldLease(ROWS, lease.notes)
            second.stop_at = step
            was_killed = await ground.start((second, ground.undone(rows))).finish_or_die(second)
            await run_rest(ground, second.notes)
            assert sorted(ground.outcomes()) == list(range(ROWS)), f"killed at step {step}"
            assert len(provider.batches) == 2
            assert provider.untended == [], f"killed at step {step}"
            assert set(provider.billed.values()) == {1}, f"killed at step {step}"
        if not was_killed:
            return
    raise AssertionError("the worker never came to its end")


async def test_killed_before_an_upload_was_deleted(tmp_path: Path) -> None:
    """What was uploaded for rows that all have outcomes is deleted by whoever runs the other rows of their lease."""
    async with BatchProvider() as provider:
        provider.fates = ["completes", "never_ends"]
        ground = Ground(batch_model(provider.base_url, rows_max=ROWS // 2), tmp_path)
        lease = HeldLease(ROWS)
        provider.on_call = dying_at("delete", lease, is_done=False)
        assert await ground.start((lease, [batch_row(number) for number in range(ROWS)])).finish_or_die(lease)
        provider.on_call = None
        assert sorted(lease.states()) == ["ended", "submitted"]
        for batch in provider.batches.values():
            batch.fate = "completes"
        rest = await run_rest(ground, lease.notes)
        assert sorted(ground.outcomes()) == list(range(ROWS))
        assert rest.states() == ["collected", "collected"]
        assert provider.files == {}


async def test_killed_and_then_over(tmp_path: Path) -> None:
    """Wherever a worker is killed, a job that ends then leaves no batch running, and none is begun for it."""
    for step in range(1, STEPS_MAX):
        async with BatchProvider() as provider:
            ground = Ground(batch_model(provider.base_url), tmp_path)
            lease = HeldLease(ROWS)
            lease.stop_at = step
            rows = [batch_row(number) for number in range(ROWS)]
            if not await ground.start((lease, rows)).finish_or_die(lease):
                return
            made = len(provider.batches)
            over = await run_rest(ground, lease.notes, ending="over")
            assert len(provider.batches) == made
            assert provider.running == []
            assert set(over.states()) <= {"ended", "collected", "forgotten"}
    raise AssertionError("the worker never came to its end")


async def test_adopted_and_forgotten(tmp_path: Path) -> None:
    """What a person says of a submission in doubt is taken: its id is followed, or its rows go anew."""
    for remote_id in ("batch", ""):
        async with BatchProvider() as provider:
            provider.fates = ["never_ends"]
            ground = Ground(batch_model(provider.base_url), tmp_path)
            lease = HeldLease(ROWS)
            provider.on_call = dying_at("create", lease, is_done=True)
            assert await ground.start((lease, [batch_row(n) for n in range(ROWS)])).finish_or_die(lease)
            provider.on_call = None
            (batch,) = provider.batches.values()
            batch.fate = "completes"
            settle(lease, state="submitted" if remote_id else "forgotten", id=batch.id if remote_id else "")
            batches = dict(provider.batches)
            await run_rest(ground, lease.notes)
            assert sorted(ground.outcomes()) == list(range(ROWS))
            assert len(provider.batches) == len(batches) + (0 if remote_id else 1)


def settle(lease: HeldLease, *, state: str, id: str) -> None:
    (job,) = lease.jobs
    job = msgspec.structs.replace(job, state=state, id=id)
    lease.notes[job.tag] = msgspec.json.encode(job)


@pytest.mark.parametrize("seed", range(12))
async def test_seeded_faults_and_kills(seed: int, tmp_path: Path) -> None:
    """With every fault at random, and workers killed every few steps, each row has one outcome and is paid once."""
    async with BatchProvider(seed=seed, rate=0.15, faults_max=40) as provider:
        # Nothing but a call that hangs may take so long: a reply that is too late is another test's.
        limits = Limits(attempt_timeout_s=3.0, connect_timeout_s=3.0)
        ground = Ground(batch_model(provider.base_url, limits=limits, rows_max=5, tries_max=8), tmp_path)
        notes: dict[str, bytes] = {}
        for life in range(100):
            rows = ground.undone([batch_row(number) for number in range(ROWS)])
            if not rows:
                break
            lease = HeldLease(len(rows), notes)
            lease.stop_at = 3 + (seed * 7 + life * 5) % 17
            if await ground.start((lease, rows)).finish_or_die(lease):
                await provider.settled()  # a submission that arrives later than that: test_submission_that_is_late
            else:
                assert lease.failure is None or not isinstance(lease.failure, SubmitUnknown)
        assert sorted(ground.outcomes()) == list(range(ROWS))
        codes = {outcome.error.code for outcome in ground.outcomes().values() if outcome.error is not None}
        assert codes <= {"invalid_value", "server_error", "bad_response", "provider_lost_row"}
        assert max(provider.billed.values()) == 1
        assert provider.running == []


def uploads_left(provider: BatchProvider) -> list[str]:
    """Files that batchmill has uploaded and not deleted."""
    return [name for name, _, _ in provider.files.values() if name != "output.jsonl"]


async def test_results_that_are_gone_run_again(tmp_path: Path) -> None:
    """Rows whose outcomes were damaged after their results had been deleted are run again, without anybody asked."""
    async with BatchProvider() as provider:
        ground = Ground(batch_model(provider.base_url), tmp_path)
        lease = HeldLease(ROWS)
        await ground.run((lease, [batch_row(number) for number in range(ROWS)]))
        assert provider.files == {}
        ground.sink.outcomes[:] = ground.sink.outcomes[:5]
        again = await run_rest(ground, lease.notes)
        assert sorted(ground.outcomes()) == list(range(ROWS))
        assert again.states() == ["collected", "collected"]
