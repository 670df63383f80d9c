"""A job's budget while it runs: what its workers were allowed, what they spent of it, and when nothing is left.

`budget = spent + allowed to workers + free` holds at any time; a worker spends no more than it was allowed but for what
rows without a bound of their own write beyond the usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from batchmill.wire.messages import Allow, Spending

MARGIN = 1.1  # by which a budget should be larger than what rows are reckoned to cost
TINY = 1e-9  # USD: sums of fractions are not exact
SLICE = 0.5  # of what is free that a worker gets at once, where it needs no more for a row

Send = Callable[[Allow], None]


class Purse:
    def __init__(self, job: str, budget: float, spent: float) -> None:
        self._job, self.budget, self._spent = job, budget, spent
        self._allowed: Counter[str] = Counter()  # worker -> USD that it has and that are not counted as spent
        self._sent: Counter[str] = Counter()  # worker -> messages to it
        self._counted: Counter[str] = Counter()  # worker -> its rows that are counted
        self._workers: dict[str, Send] = {}
        self._told: dict[str, Spending] = {}  # worker -> how things stand there
        self._is_lean = False

    @property
    def free(self) -> float:
        """USD that nobody has."""
        return self.budget - self._spent - sum(self._allowed.values())

    @property
    def needs(self) -> float:
        """USD that the next row may cost, where that is more than is free and no row is in flight; 0: it goes on."""
        wanted = [each.needs for each in self._told.values() if each.needs]
        is_quiet = self._is_lean and all(name in self._told for name in self._workers)
        if not wanted or not is_quiet or any(each.reserved for each in self._told.values()):
            return 0.0
        return min(wanted) if min(wanted) > self.free + TINY else 0.0

    @property
    def beyond(self) -> float:
        """USD by which the rows in flight may pass the budget."""
        return sum(each.beyond for each in self._told.values())

    @property
    def notes(self) -> list[str]:
        """What people should know of it."""
        if not (beyond := self.beyond):
            return []
        return [
            f"rows in flight that do not bound their tokens may pass the budget by {beyond:.4f} USD, should each write "
            "as much as the longest before them: give them max_tokens"
        ]

    def refusal(self, *, rows: int, rows_left: int) -> str:
        """Why no further row goes, and how to go on; of `rows` so many are left that were not counted."""
        used, needs = max(self._spent, self.budget - self.free), self.needs
        rows_left -= sum(told.done - self._counted[worker] for worker, told in self._told.items())
        row_usd = used / (rows - rows_left) if rows > rows_left else 0.0
        text = f"{used:.4f} USD of the budget of {self.budget:g} USD are spent"
        if needs:
            text += f", and the next row may cost {needs:.4f} USD"
        if not row_usd:
            return f"{text}: `batchmill amend {self._job} --budget USD`, then `batchmill resume {self._job}`"
        rest = f"the {rows_left:,} rows left would cost about {rows_left * row_usd:.4f} USD more"
        wanted = max(MARGIN * (used + rows_left * row_usd), used + needs, self.budget)
        return (
            f"{text}; {rest}: `batchmill amend {self._job} --budget {wanted:.4g}`, then `batchmill resume {self._job}`"
        )

    def amend(self, budget: float) -> None:
        """There is more to spend now, or less: then workers give back what no row of theirs has reserved."""
        if budget != self.budget:
            self.budget = budget
            if self.free < 0:
                self._be_lean(again=True)
            self.share()

    def open(self, worker: str, send: Send) -> None:
        """This worker gets rows of the job, and asks for what they may cost."""
        self._workers[worker] = send
        self._sent[worker] = 0
        self._send(worker)

    def spent(self, worker: str, usd: float, rows: int) -> None:
        """The ledger has counted rows of this worker, or of one that nobody knows any more."""
        self._spent += usd
        if worker in self._workers:
            self._allowed[worker] -= usd
            self._counted[worker] += rows

    def hear(self, worker: str, told: Spending) -> None:
        """A worker says how things stand there."""
        if worker in self._workers:
            # What it said before it heard what it was allowed last says nothing of what it needs.
            is_late = told.heard < self._sent[worker]
            self._told[worker] = replace(told, needs=0.0, reserved=told.reserved + 1) if is_late else told
            self._allowed[worker] -= told.returned
            self.share()

    def gone(self, worker: str) -> None:
        """This worker has died, and what it had finished is counted."""
        for known in (self._workers, self._told, self._allowed, self._counted, self._sent):
            known.pop(worker, None)
        self.share()

    def share(self) -> None:
        """Give those that wait what their next row may cost; where it is not there, the others give back theirs."""
        for worker, told in list(self._told.items()):
            if not told.needs:
                continue
            if told.needs > self.free + TINY:
                self._be_lean()
                continue
            usd = max(told.needs, self.free * (1.0 if told.takes_all else SLICE))
            self._allowed[worker] += usd
            self._told[worker] = replace(told, needs=0.0, reserved=told.reserved + 1)
            self._send(worker, usd)

    def _send(self, worker: str, usd: float = 0.0) -> None:
        self._sent[worker] += 1
        self._workers[worker](Allow(self._job, usd, self._is_lean))

    def _be_lean(self, *, again: bool = False) -> None:
        if again or not self._is_lean:
            self._is_lean = True
            for worker in self._workers:
                self._send(worker)
