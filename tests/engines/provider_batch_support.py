"""Leases whose notes outlive their worker, and the engine driven with them against the fake provider."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
from contract.engine_suite import PATIENCE_S, ListSink, OpenFeed

from batchmill.engines.provider_batch.engine import ProviderBatchEngine
from batchmill.errors import JobPaused
from batchmill.executors.reply_checks import ReplyChecks
from batchmill.types import Limits, MediaBounds, ModelSpec, Outcome, RemoteJob, ReplyRules, Row, Usage
from batchmill.types.position_runs import numbers_of, runs_of
from batchmill.wire.rows.forms import OpenAIForm

FAST: dict[str, str | int | float | bool | None] = {
    "poll_s": 0.002,
    "poll_max_s": 0.01,
    "note_s": 0.0,
    "cancel_wait_s": 5.0,
    "stuck_after_s": 30.0,
    "queue_rest_s": 0.01,
}


class HeldLease:
    """A `ports.engines.LeaseHandle` of a test. `die` makes it a killed worker's: no note is taken any more."""

    def __init__(
        self, rows: int, notes: dict[str, bytes] | None = None, *, ending: str = "", over: str = "",
        spent: list[Usage] | None = None, payable: int = 1_000_000,
    ) -> None:  # fmt: skip
        self.key, self.media = "job-1", MediaBounds()
        self.rows = rows
        self.notes: dict[str, bytes] = {} if notes is None else notes
        self.failure: JobPaused | None = None
        self.has_left = False
        self.steps = 0  # notes asked for, and notes taken
        self.stop_at = -1  # the step at which this worker is killed
        self.dead = asyncio.Event()
        self.job = SimpleNamespace(replies=ReplyRules())
        self.over = over
        self.spent: list[Usage] = [] if spent is None else spent  # by answers that were no outcomes
        self.payable = payable  # rows that the budget can pay to ask for again
        self._ending = ending
        self._turned = asyncio.Event()
        if ending:
            self._turned.set()

    async def note(self, key: str, data: bytes) -> None:
        await self.step()
        self.notes[key] = data
        await self.step()

    def count_misfits(self, tag: str, misfits: Mapping[int, Usage]) -> None:
        """As a ledger does, unless the worker dies before."""
        self._pass()
        if not self.dead.is_set():
            job = msgspec.json.decode(self.notes[tag], type=RemoteJob)
            job = msgspec.structs.replace(job, misfits=runs_of(numbers_of(job.misfits) | misfits.keys()))
            self.notes[tag] = msgspec.json.encode(job)
            self.spent.append(sum(misfits.values(), Usage()))
        self._pass()

    def spend(self, row: Row, usage: Usage) -> None:
        """It has no budget to speak of."""

    async def reserve(self, rows: Sequence[Row]) -> int:
        count = min(len(rows), self.payable)
        self.payable -= count
        return count

    async def until_owned(self) -> None:
        """Its owner lives as long as it does."""

    async def step(self) -> None:
        """One more durable step has passed, unless this is where the worker dies."""
        self._pass()
        if self.dead.is_set():
            await asyncio.Event().wait()

    def _pass(self) -> None:
        self.steps += 1
        if self.steps == self.stop_at:
            self.dead.set()

    @property
    def ending(self) -> str:
        return self._ending

    def end(self, how: str, over: str = "") -> None:
        self._ending, self.over = how, over
        self._turned.set()

    async def until_ending(self) -> str:
        await self._turned.wait()
        return self._ending

    def leave(self) -> None:
        assert self._ending, "a lease is left only once it ends"
        self.has_left = True

    def fail(self, error: JobPaused) -> None:
        self.failure = error

    @property
    def jobs(self) -> list[RemoteJob]:
        """What is noted, in the order of its making."""
        return sorted((msgspec.json.decode(data, type=RemoteJob) for data in self.notes.values()), key=_made)

    def states(self) -> list[str]:
        return [job.state for job in self.jobs]


def _made(job: RemoteJob) -> tuple[float, str]:
    return job.created, job.tag


# A call that is slow on a busy machine must not count as one without a reply: batchmill looks at a batch after such a
# call, and the fake runs a batch when it is looked at.
PATIENT = Limits(attempt_timeout_s=20.0, connect_timeout_s=20.0)


def batch_model(base_url: str, *, limits: Limits = PATIENT, **arguments: str | float | bool) -> ModelSpec:
    return ModelSpec(
        "m",
        "provider_batch",
        "remote-m",
        base_url=base_url,
        provider="openai",
        engine_args=FAST | arguments,
        limits=limits,
    )


def batch_row(number: int, *, url: str = "/v1/chat/completions", model: str = "", **body: object) -> Row:
    """A row whose position is not its number, as in a plan that was put in order."""
    content = body or {"messages": [{"role": "user", "content": f"text {number}"}]}
    line = {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": {"model": model, **content}}
    return Row(number + 100, number, json.dumps(line).encode(), OpenAIForm())


class Ground:
    """A folder, a model and what became of its rows."""

    def __init__(self, model: ModelSpec, home: Path) -> None:
        self.model, self.home = model, home
        self.sink = ListSink()
        self.checks: ReplyChecks | None = None  # of rows with a schema, before the sink

    async def run(self, *leased: tuple[HeldLease, Sequence[Row]]) -> None:
        """Run the rows of these leases to their end."""
        await self.start(*leased).finish()

    def start(self, *leased: tuple[HeldLease, Sequence[Row]], ended: bool = True) -> Running:
        return Running(self, leased, ended)

    def outcomes(self) -> dict[int, Outcome]:
        """By row number; none has two."""
        found = {outcome.row.number: outcome for outcome in self.sink.outcomes}
        assert len(found) == len(self.sink.outcomes), "a row has two outcomes"
        return found

    def undone(self, rows: Iterable[Row]) -> list[Row]:
        """The same rows anew, without those that have an outcome."""
        done = {outcome.row.number for outcome in self.sink.outcomes}
        return [fresh(row) for row in rows if row.number not in done]


def fresh(row: Row) -> Row:
    """A row as another worker would be given it."""
    return batch_row(row.number) if not row.raw else Row(row.position, row.number, row.raw, row.form)


class LeasedFeed(OpenFeed):
    """Gives the rows of one lease after the other, never of two at once."""

    def __init__(self, sink: ListSink, leased: Sequence[tuple[HeldLease, Sequence[Row]]], *, ended: bool) -> None:
        super().__init__(sink, ended=ended)
        for lease, rows in leased:
            self.give_lease(lease, rows)

    def give_lease(self, lease: HeldLease, rows: Sequence[Row]) -> None:
        for row in rows:
            row.lease = lease
        self.give(rows)

    async def take(self, n: int) -> list[Row]:
        rows = await super().take(n)
        mine = [row for row in rows if row.lease is rows[0].lease]
        self._rows[:0] = rows[len(mine) :]
        return mine


class JobsFeed(LeasedFeed):
    """One that knows which rows an engine has begun already."""

    async def take_noted(self, n: int) -> list[Row]:
        while True:
            lease = next((row.lease for row in self._rows if row.lease.notes or row.lease.ending), None)
            mine = [row for row in self._rows if row.lease is lease][:n]
            if mine or self._ended:
                self._rows = [row for row in self._rows if row not in mine]
                return mine
            self._changed.clear()
            await self._changed.wait()


class Running:
    """An engine at work."""

    def __init__(self, ground: Ground, leased: Sequence[tuple[HeldLease, Sequence[Row]]], ended: bool) -> None:
        self.engine = ProviderBatchEngine(ground.model, ground.home)
        self.feed = JobsFeed(ground.sink, leased, ended=ended)
        self._sink = ground.sink if ground.checks is None else ground.checks
        self.task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        await self.engine.start()
        try:
            await self.engine.run(self.feed, self._sink)
        finally:
            await self.engine.stop()

    async def finish(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.task

    async def finish_or_die(self, lease: HeldLease) -> bool:
        """Until all is done, or this lease's worker is killed; whether it was."""
        dying = asyncio.create_task(lease.dead.wait())
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait({self.task, dying}, return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if not lease.dead.is_set():
            await self.task
            return False
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        return True
