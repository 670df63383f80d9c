"""The budget of a running job, shared between its workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from batchmill.wire.messages import Allow, Spending

MARGIN = 1.1  # the suggested budget is the estimated cost of the rows times this
ROUNDING_USD = 1e-9  # sums of fractions are not exact
SLICE = 0.5  # the share of the free budget that a worker gets at once, unless its next row needs more

Send = Callable[[Allow], None]


class JobBudget:
    """What workers may spend of it: each is allowed some, and returns what its rows do not need."""

    def __init__(self, job: str, budget: float, spent: float) -> None:
        self._job, self.budget, self._spent = job, budget, spent
        self._allowed: Counter[str] = Counter()  # worker -> USD that it holds and has not spent
        self._sent: Counter[str] = Counter()  # worker -> number of messages to it
        self._counted: Counter[str] = Counter()  # worker -> the number of its counted rows
        self._workers: dict[str, Send] = {}
        self._spending: dict[str, Spending] = {}  # worker -> its budget
        self._is_lean = False

    @property
    def free(self) -> float:
        """USD that no worker holds."""
        return self.budget - self._spent - sum(self._allowed.values())

    @property
    def needs(self) -> float:
        """USD that the next row may cost, if that exceeds what is free and no row is in flight; otherwise 0."""
        needs = [each.needs for each in self._spending.values() if each.needs]
        is_quiet = self._is_lean and all(name in self._spending for name in self._workers)
        if not needs or not is_quiet or any(each.reserved for each in self._spending.values()):
            return 0.0
        return min(needs) if min(needs) > self.free + ROUNDING_USD else 0.0

    @property
    def beyond(self) -> float:
        """USD by which the rows in flight may exceed the budget."""
        return sum(each.beyond for each in self._spending.values())

    @property
    def notes(self) -> list[str]:
        """Notes for the user."""
        if not (beyond := self.beyond):
            return []
        return [
            f"rows in flight without max_tokens may exceed the budget by {beyond:.4f} USD if each writes as much as "
            "the longest row before it: set max_tokens"
        ]

    def refusal(self, *, rows: int, rows_left: int) -> str:
        """Why no further row runs, and how to continue; `rows`: how many are left."""
        used, needs = max(self._spent, self.budget - self.free), self.needs
        rows_left -= sum(spending.done - self._counted[worker] for worker, spending in self._spending.items())
        row_usd = used / (rows - rows_left) if rows > rows_left else 0.0
        text = f"{used:.4f} USD of the budget of {self.budget:g} USD are spent"
        if needs:
            text += f", and the next row may cost {needs:.4f} USD"
        if not row_usd:
            return f"{text}: `batchmill amend {self._job} --budget USD`, then `batchmill resume {self._job}`"
        rest = f"the {rows_left:,} rows left would cost about {rows_left * row_usd:.4f} USD more"
        suggested = max(MARGIN * (used + rows_left * row_usd), used + needs, self.budget)
        amend = f"`batchmill amend {self._job} --budget {suggested:.4g}`"
        return f"{text}; {rest}: {amend}, then `batchmill resume {self._job}`"

    def amend(self, budget: float) -> None:
        """Change the budget. If it is smaller, workers return what none of their rows has reserved."""
        if budget != self.budget:
            self.budget = budget
            if self.free < 0:
                self._make_lean(repeat=True)
            self.share()

    def open(self, worker: str, send: Send) -> None:
        """Add a worker that gets rows of the job and requests money for them."""
        self._workers[worker] = send
        self._sent[worker] = 0
        self._send(worker)

    def charge(self, worker: str, usd: float, rows: int) -> None:
        """Record the cost of rows of this worker, or of a former one, that the ledger counted."""
        self._spent += usd
        if worker in self._workers:
            self._allowed[worker] -= usd
            self._counted[worker] += rows

    def report(self, worker: str, spending: Spending) -> None:
        """Apply a worker's report of its budget."""
        if worker in self._workers:
            # A report from before the last grant arrived does not show what it needs now.
            is_late = spending.allowances_seen < self._sent[worker]
            self._spending[worker] = (
                replace(spending, needs=0.0, reserved=spending.reserved + 1) if is_late else spending
            )
            self._allowed[worker] -= spending.returned
            if spending.wants:
                usd = max(0.0, min(spending.wants, self.free))
                self._allowed[worker] += usd
                self._send(worker, usd, is_reply=True)
            self.share()

    def remove(self, worker: str) -> None:
        """Remove a dead worker whose finished rows have been counted."""
        for by_worker in (self._workers, self._spending, self._allowed, self._counted, self._sent):
            by_worker.pop(worker, None)
        self.share()

    def share(self) -> None:
        """Give waiting workers what their next row may cost; if it is not free, ask the others to return theirs."""
        for worker, spending in list(self._spending.items()):
            if not spending.needs:
                continue
            if spending.needs > self.free + ROUNDING_USD:
                self._make_lean()
                continue
            usd = max(spending.needs, self.free * (1.0 if spending.takes_all else SLICE))
            self._allowed[worker] += usd
            self._spending[worker] = replace(spending, needs=0.0, reserved=spending.reserved + 1)
            self._send(worker, usd)

    def _send(self, worker: str, usd: float = 0.0, *, is_reply: bool = False) -> None:
        self._sent[worker] += 1
        self._workers[worker](Allow(self._job, usd, self._is_lean, is_reply))

    def _make_lean(self, *, repeat: bool = False) -> None:
        """Have workers reserve only what a row needs, and return the rest. `repeat`: even if they do already."""
        if repeat or not self._is_lean:
            self._is_lean = True
            for worker in self._workers:
                self._send(worker)
