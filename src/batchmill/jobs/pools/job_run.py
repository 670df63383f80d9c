"""The shards of a running job: ready, held, done. In memory only; the ledger is the truth."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from batchmill.errors import JobPaused
from batchmill.jobs.ledger.counting import mask_of
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.ledger.ledger import JobEnd, LeasedShard, undone
from batchmill.jobs.ledger.plan import PlanReader
from batchmill.jobs.pools.job_budget import JobBudget
from batchmill.jobs.pools.scheduler import Rates, RowCost
from batchmill.object_store.credentials import variables_of
from batchmill.ports.clock import Clock
from batchmill.states import PauseReason
from batchmill.types import Commit, Lease, Shard
from batchmill.wire import messages
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.messages import Grant, Open
from batchmill.wire.rows.forms import Form

OPEN_SHARDS = 1024  # of a model, opened at once: a large job has a million
CRASHES_MAX = 3  # workers that may die on one row before it is given up
# Workers that may die on a shard of user code, which shares their process. Something else may have killed one of them.
USER_CODE_DEATHS = 2


class Ending(Struct, frozen=True):
    """How a run ended when it was not paused."""

    cancelled: bool = False


class _Held(Struct):
    shard: Shard
    worker: str
    epoch: int


class JobRun:
    def __init__(
        self,
        spec: JobSpec,
        generation: int,
        plan: PlanReader,
        *,
        files: JobFiles,
        clock: Clock,
        index: Mapping[str, bytes] = MappingProxyType({}),
        is_over: bool = False,
        open_shards: int = OPEN_SHARDS,
    ) -> None:
        """
        Args:
            index: as of `Open`.
            is_over: start no more rows; only collect the results that providers have for the loaded shards.
            open_shards: of a model, opened at once.
        """
        self.spec, self.generation, self.plan, self.files = spec, generation, plan, files
        self.is_over, self._index = is_over, index
        self.over = ""  # why the job is over, if its rows do not go on elsewhere: in words, for users
        self.first_lease: Lease | None = None  # of its only shard: the job was stored with it
        self.fails_rows = False  # its failing rows do not wait until their service recovers
        self.failing: set[int] = set()  # numbers of models whose route has failed
        self.rates = Rates(clock)
        self._clock = clock
        self._started_at: float | None = None  # when the first rows were granted
        self._finished_at: float | None = None  # when the last row was counted
        self.progressed_at: float | None = None  # when its rows were last counted, or first granted
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.counted_hooks: list[Callable[[Commit], None]] = []
        self.finishing: Callable[[Commit], JobEnd | None] = lambda _: None  # the end of the job with its last commit
        self.is_finished = False  # the job has ended with it
        self._open_shards = open_shards
        self._planned = plan.shards()
        self._unopened: dict[int, range] = {}  # model -> shards of the plan that it did not reach yet
        self._finished = bytearray(len(self._planned) // 8 + 1)  # a bit for each shard of the plan
        self._partial: dict[int, int] = {}  # shard that is not opened -> rows done, if there are some
        self._shards: dict[int, Shard] = {}  # opened shards with open rows
        # In the order of grants. A shard that ended or got a holder before its turn stays in the queue and is skipped:
        # removing it would take time in proportion to the length of the queue.
        self._ready: dict[int, deque[Shard]] = {model: deque() for model in range(len(spec.models))}
        self._held: dict[int, _Held] = {}
        self._shards_held: defaultdict[str, set[int]] = defaultdict(set)  # worker -> shards it holds
        self._rows_held: Counter[int] = Counter()  # model -> open rows that workers hold
        self._shards_left: Counter[int] = Counter()  # model -> shards with open rows
        self._rows_left: Counter[int] = Counter()  # model -> open rows
        self._row_costs: defaultdict[int, RowCost] = defaultdict(RowCost)  # model -> the recent cost of its rows
        self._done: dict[int, int] = {}
        self._deaths: dict[int, int] = {}  # shard -> workers that died on it
        self._row_deaths: dict[int, int] = {}  # position -> workers that died while it ran alone
        self._given_up: set[int] = set()  # positions that were: after each the rows of its shard ran together again
        self.suspects = 0  # times that a worker died while a row ran alone
        self._wanted: dict[int, int] | None = None  # of a sample: shard -> a bit for each open position that it runs
        self.rows_total = self.rows_left = plan.leaders
        self.cost = 0.0
        self.job_budget: JobBudget | None = None  # set by `check_budget` if the job has a budget

    def load_sample(self, wanted: dict[int, int], rows_done: int) -> None:
        """Make some rows ready, and no others: shard -> a bit for each of its open positions.

        Args: rows_done: of all shards.
        """
        self._wanted = {number: bits for number, bits in wanted.items() if bits}
        self.rows_left = 0
        for number, bits in sorted(self._wanted.items()):
            shard = self._planned[number]
            self._load_one(shard, shard.hi - shard.lo - bits.bit_count())  # the others count as done
        self.rows_total = rows_done + self.rows_left
        self._end_if_complete()

    @property
    def is_sample(self) -> bool:
        """Whether other rows than those of this run are left."""
        return self._wanted is not None

    @property
    def sampled_shards(self) -> list[int]:
        """The shards that `load_sample` was given."""
        return sorted(self._wanted or ())

    def load(self, done: dict[int, int], only: frozenset[int] | None = None) -> None:
        """Make the shards ready, given how many rows of each are done. `only`: of these shards, those of providers."""
        if only is not None:
            self.rows_left = 0
            for number in sorted(only):
                if number < len(self._planned) and self.spec.models[self._planned[number].model].is_handed_over:
                    self._load_one(self._planned[number], done.get(number, 0))
            self._end_if_complete()
            return
        for span in self.plan.plan.spans:
            self._unopened[span.model] = range(span.first, span.end)
            self._rows_left[span.model] += span.hi - span.lo
            self._shards_left[span.model] += span.end - span.first
        for number, rows in done.items():
            shard = self._planned[number]
            self.rows_left -= rows
            self._rows_left[shard.model] -= rows
            if rows == shard.hi - shard.lo:
                self._shards_left[shard.model] -= 1
                self._set_finished(number)
            elif rows:
                self._partial[number] = rows
        self._end_if_complete()

    def _load_one(self, shard: Shard, done: int) -> None:
        """Make one shard ready if it has open rows."""
        rows = shard.hi - shard.lo - done
        if rows:
            self.rows_left += rows
            self._rows_left[shard.model] += rows
            self._shards_left[shard.model] += 1
            self._shards[shard.number], self._done[shard.number] = shard, done
            self._ready[shard.model].append(shard)

    def _open_more(self, model: int) -> bool:
        """Make the next shards of a model ready. Returns whether the plan had any."""
        unopened = self._unopened.get(model, range(0))
        self._unopened[model] = unopened[self._open_shards :]
        for number in unopened[: self._open_shards]:
            if not self._is_finished(number):
                self._ready[model].append(self._open(number))
        return bool(unopened)

    def _open(self, number: int) -> Shard:
        if number not in self._shards:
            self._shards[number], self._done[number] = self._planned[number], self._partial.pop(number, 0)
        return self._shards[number]

    def _has_open_rows(self, number: int) -> bool:
        """Whether a shard has open rows; it is opened then, though it may not be ready before its turn."""
        if number in self._shards or not 0 <= number < len(self._planned) or self._is_finished(number):
            return number in self._shards
        if number in self._unopened.get(self._planned[number].model, ()):
            self._open(number)
        return number in self._shards

    def _is_finished(self, number: int) -> bool:
        return bool(self._finished[number >> 3] >> (number & 7) & 1)

    def _set_finished(self, number: int) -> None:
        self._finished[number >> 3] |= 1 << (number & 7)

    def catch_up_sample(self, done: dict[int, int]) -> None:
        """As `catch_up`: shard -> which of its positions are done."""
        for number, bits in done.items():
            self._advance_wanted(number, bits)
        self._end_if_complete()

    def _advance_wanted(self, number: int, done: int) -> None:
        """Count the rows of a sample among these positions of a shard."""
        assert self._wanted is not None
        fresh = self._wanted.get(number, 0) & done
        if fresh:
            self._wanted[number] ^= fresh
            self._advance(number, fresh.bit_count())

    def catch_up(self, done: dict[int, int]) -> None:
        """Count rows that the ledger counted without a report to this run: shard -> rows done there now."""
        for number, rows in done.items():
            if self._has_open_rows(number) and rows > self._done[number]:
                self._advance(number, rows - self._done[number])
        self._end_if_complete()

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first grant to the last commit, without the start of the model."""
        if self._started_at is None:
            return 0.0
        return (self._clock.monotonic() if self._finished_at is None else self._finished_at) - self._started_at

    # -- grants -------------------------------------------------------------------------------------------------------

    def has_ready(self, model: int) -> bool:
        if self.ended.done():
            return False
        ready = self._ready[model]
        while True:
            while ready and (ready[0].number not in self._shards or ready[0].number in self._held):
                ready.popleft()
            if ready or not self._open_more(model):
                return bool(ready)

    @property
    def rows_out(self) -> int:
        """Rows without an outcome that workers hold."""
        return self._rows_held.total()

    def rows_held(self, model: int) -> int:
        return self._rows_held[model]

    def rows_left_of(self, model: int) -> int:
        """Rows of this model without an outcome."""
        return self._rows_left[model]

    def shards_left_of(self, model: int) -> int:
        """Shards of this model with open rows."""
        return self._shards_left[model]

    def row_cost(self, model: int) -> float | None:
        """The recent cost of a row of this model, in tokens if it has any; None before the first."""
        return self._row_costs[model].now()

    def pop(self, model: int, worker: str) -> Shard:
        """Take the next ready shard of a model for this worker."""
        shard = self._ready[model].popleft()
        self._hold(shard, worker)
        return shard

    def take_over(self, left: dict[int, str]) -> None:
        """Assign shards that workers held before this run began: shard -> worker."""
        for number, worker in left.items():
            if self._has_open_rows(number):
                self._hold(self._shards[number], worker)

    def _hold(self, shard: Shard, worker: str) -> None:
        self._held[shard.number] = _Held(shard, worker, 0)
        self._shards_held[worker].add(shard.number)
        self._rows_held[shard.model] += shard.hi - shard.lo - self._done[shard.number]

    def _clear_holder(self, shard: Shard) -> bool:
        """Clear the holder of a shard; return whether it had one."""
        held = self._held.pop(shard.number, None)
        if held is None:
            return False
        self._shards_held[held.worker].discard(shard.number)
        if not self._shards_held[held.worker]:
            del self._shards_held[held.worker]
        self._rows_held[shard.model] -= shard.hi - shard.lo - self._done[shard.number]
        return True

    def opening(self, model: int) -> Open:
        """What a worker of a model gets of the job before its rows."""
        spec, files = self.spec, self.files
        return Open(
            spec.id, spec.identity, self._form, dataset=str(files.dataset), segments=files.segment_place,
            is_small=spec.is_small, adapters=spec.models[model].adapter_set(), project=spec.project,
            stores=variables_of(os.environ) if spec.uses_stores else {}, inputs=spec.local_inputs, replies=spec.replies,
            media=files.media_bounds(spec), index=dict(self._index),
        )  # fmt: skip

    @property
    def _form(self) -> Form:
        """How rows are read; those of a retry with what was changed for it."""
        changed = self.spec.retried_fields(self.generation)
        return replace(self.spec.form, overrides=changed) if changed else self.spec.form

    def grant(self, shard: Shard, leased: LeasedShard) -> Grant:
        """The grant message for the open rows of a shard."""
        if self._started_at is None:
            self._started_at = self.progressed_at = self._clock.monotonic()
            self.rates.start()
        self._held[shard.number].epoch = leased.lease.epoch
        n = shard.hi - shard.lo
        out = 0 if self._wanted is None else ((1 << n) - 1) ^ self._wanted[shard.number]
        left = undone(leased.bitmap | out, n)
        numbers = self.plan.row_numbers(shard.lo, shard.hi)
        isolated = self._is_isolated(shard)
        base = {
            "lease": leased.lease, "seq": leased.seq, "base": shard.lo, "isolated": isolated,
            "notes": leased.notes, "is_over": self.is_over, "over": self.over,
        }  # fmt: skip
        if isinstance(left, range) and isinstance(numbers, range) and not isolated:
            return Grant(n=len(left), position=shard.lo, row=numbers.start, **base)
        pairs = [(shard.lo + i, numbers[i]) for i in left]
        given_up = [p for p, _ in pairs if self._row_deaths.get(p, 0) >= CRASHES_MAX - 1]
        if isolated and not self._given_up.issuperset(given_up):
            self._given_up.update(given_up)
            self._deaths[shard.number] = self._deaths_max(shard) - 1  # the others run together, until one more dies
            base["isolated"] = False
        return messages.replace_rows(Grant(n=0, quarantined=given_up, **base), pairs)

    def _is_isolated(self, shard: Shard) -> bool:
        """Whether a shard runs one row at a time, alone on its worker. Slow, so one death is not enough.

        Rows that are handed to a provider kill no worker, and go there together or not at all.
        """
        if self.spec.models[shard.model].is_handed_over:
            return False
        return self._deaths.get(shard.number, 0) >= self._deaths_max(shard)

    def _deaths_max(self, shard: Shard) -> int:
        return USER_CODE_DEATHS if self.spec.models[shard.model].traits.runs_user_code else CRASHES_MAX

    # -- results ------------------------------------------------------------------------------------------------------

    def end_with(self, commit: Commit) -> JobEnd | None:
        """The end of the job, to be stored with this commit if it has the last rows; None: its runner ends it."""
        is_last = not self.ended.done() and self.rows_left == commit.rows_ok + commit.rows_failed
        return self.finishing(commit) if is_last and commit.lease.generation == self.generation else None

    def apply_commit(self, commit: Commit) -> None:
        """Apply a commit of the ledger."""
        number = commit.lease.shard
        rows = commit.rows_ok + commit.rows_failed
        self.rates.add(rows, commit.usage)
        self.fails_rows = self.fails_rows and not commit.rows_ok
        self.progressed_at = self._clock.monotonic()
        for hook in self.counted_hooks:
            hook(commit)
        if self._has_open_rows(number):
            self._row_costs[self._shards[number].model].add(rows, commit.usage)
            if self._wanted is None:
                self._advance(number, rows)
            else:  # a worker may still have rows that an earlier run had granted
                self._advance_wanted(number, mask_of(commit.done))
        self._end_if_complete()

    def _advance(self, number: int, rows: int) -> None:
        """Add finished rows of a shard."""
        shard = self._shards[number]
        self.rows_left -= rows
        self._rows_left[shard.model] -= rows
        self._done[number] += rows
        if number in self._held:
            self._rows_held[shard.model] -= rows
        if self._done[number] == shard.hi - shard.lo:
            self._clear_holder(shard)
            self._shards_left[shard.model] -= 1
            del self._shards[number], self._done[number]
            self._set_finished(number)
            self._deaths.pop(number, None)

    def take_first_lease(self, number: int) -> LeasedShard | None:
        """The lease with which the job was stored, once; None: the shard must be leased."""
        lease, self.first_lease = self.first_lease, None
        return LeasedShard(lease, 0, 0) if lease is not None and lease.shard == number else None

    def held_by(self, worker: str) -> list[Shard]:
        return [self._shards[number] for number in sorted(self._shards_held.get(worker, ()))]

    def holder(self, shard: Shard) -> str | None:
        """The worker that holds a shard."""
        held = self._held.get(shard.number)
        return None if held is None else held.worker

    def is_held_by(self, worker: str) -> bool:
        return bool(self._shards_held.get(worker))

    @property
    def is_waiting(self) -> bool:
        """Whether no worker has a row of the job."""
        return not self._held

    @property
    def held(self) -> dict[int, str]:
        """Shard -> the worker that holds it."""
        return {number: held.worker for number, held in self._held.items()}

    def shard(self, number: int) -> Shard:
        """A shard with open rows."""
        assert self._has_open_rows(number), f"shard {number} has no open rows"
        return self._shards[number]

    def put_back(self, shard: Shard, *, died: bool) -> None:
        """Make the shard of a dead worker ready again, before all others."""
        if not self._clear_holder(shard):
            return
        if died:
            self._deaths[shard.number] = self._deaths.get(shard.number, 0) + 1
        self._ready[shard.model].appendleft(shard)

    def release_lease(self, lease: Lease) -> None:
        """A worker is done with a shard: end the shard if the job is over, otherwise make it ready again."""
        held = self._held.get(lease.shard)
        if held is None or held.epoch != lease.epoch:
            return
        shard = held.shard
        if not self.is_over:
            self.put_back(shard, died=False)
            return
        rest = shard.hi - shard.lo - self._done[shard.number]
        self._clear_holder(shard)
        self.rows_left -= rest
        self._rows_left[shard.model] -= rest
        self._shards_left[shard.model] -= 1
        del self._shards[shard.number], self._done[shard.number]
        self._set_finished(shard.number)
        self._end_if_complete()

    def note_suspect(self, path: Path) -> None:
        """Remember the row that ran alone when an isolated worker died, as the worker noted it."""
        try:
            job, generation, _, position = path.read_text().split()
        except (FileNotFoundError, ValueError):
            return
        if job == self.spec.id and int(generation) == self.generation:
            self.suspect(int(position))
            path.unlink()

    def suspect(self, position: int) -> None:
        """Count a death of a worker while this row ran alone."""
        self._row_deaths[position] = self._row_deaths.get(position, 0) + 1
        self.suspects += 1

    # -- ending -------------------------------------------------------------------------------------------------------

    def pause(self, error: Exception) -> None:
        """End the run with a reason; rows in flight may still be counted."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # a run that never began has no caller that reads it

    @property
    def is_cancelled(self) -> bool:
        done = self.ended.done() and not self.ended.cancelled() and self.ended.exception() is None
        return done and self.ended.result().cancelled

    def cancel(self) -> None:
        if not self.ended.done():
            self.ended.set_result(Ending(cancelled=True))

    def charge(self, worker: str, cost: float, rows: int) -> None:
        """Add the cost in USD of so many counted rows of a worker."""
        self.cost += cost
        if self.job_budget is not None:
            self.job_budget.charge(worker, cost, rows)

    def forget_worker(self, worker: str) -> None:
        """Forget a dead worker whose finished rows have been counted."""
        if self.job_budget is not None:
            self.job_budget.remove(worker)
            self.check_budget()

    def check_budget(self) -> None:
        """Pause if the budget is spent, or if the next row may cost more than is left."""
        budget = self.spec.policy.budget
        if budget is None or not self.rows_left:
            return
        if self.job_budget is None:
            self.job_budget = JobBudget(self.spec.id, budget, self.cost)
        self.job_budget.amend(budget)
        if self.cost >= budget or self.job_budget.needs:
            text = self.job_budget.refusal(rows=self.rows_total, rows_left=self.rows_left)
            self.pause(JobPaused(text, reason=PauseReason.BUDGET))

    def _end_if_complete(self) -> None:
        if self.rows_left == 0 and not self.ended.done():
            self._finished_at = self._clock.monotonic()
            self.ended.set_result(Ending())

    @property
    def models_left(self) -> Sequence[int]:
        """Numbers of the models that still have rows to run."""
        return sorted(model for model, shards in self._shards_left.items() if shards)
