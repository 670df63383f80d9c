"""Scheduler: which job is served first at a model's workers, and the fair share of each project.

Pure: snapshot in, decision out. Priority comes first, strictly; then jobs that are about to miss their deadline; then
the project that is furthest behind its share; then the earlier deadline; then age.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from batchmill.ports.clock import Clock
from batchmill.types import Usage

WINDOW_S = 15.0
MEMORY_ROWS = 4096.0  # a row's cost is estimated from about so many of the most recent rows


class Rates:
    """Rows and tokens per second over the last `WINDOW_S` seconds, or since `start` if that is less."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int, Usage]] = deque()
        self._rows, self._usage = 0, Usage()
        self._since = clock.monotonic()

    def start(self) -> None:
        """Start measuring now."""
        self._samples.clear()
        self._rows, self._usage = 0, Usage()
        self._since = self._clock.monotonic()

    def add(self, rows: int, usage: Usage) -> None:
        now = self._clock.monotonic()
        self._forget(now)
        self._samples.append((now, rows, usage))
        self._rows += rows
        self._usage = self._usage + usage

    def _forget(self, now: float) -> None:
        """Drop samples that are older than the window."""
        while self._samples and self._samples[0][0] < now - WINDOW_S:
            _, rows, usage = self._samples.popleft()
            self._rows -= rows
            self._usage = self._usage + Usage(-usage.input_tokens, -usage.cached_tokens, -usage.output_tokens)

    def now(self) -> tuple[float, float, float] | None:
        """(rows, input tokens, output tokens) per second; None before the first commit."""
        now = self._clock.monotonic()
        self._forget(now)
        span = min(WINDOW_S, now - self._since)
        if not self._samples or span <= 0:
            return None
        return self._rows / span, self._usage.input_tokens / span, self._usage.output_tokens / span


def cost_of(rows: int, usage: Usage) -> float:
    """The cost of rows for fair sharing: their tokens, or their number if they have none."""
    return float(usage.input_tokens + usage.output_tokens or rows)


class RowCost:
    """The cost of a row, estimated from recent ones."""

    def __init__(self) -> None:
        self._rows = self._cost = 0.0

    def add(self, rows: int, usage: Usage) -> None:
        if self._rows > MEMORY_ROWS:
            self._rows, self._cost = self._rows / 2, self._cost / 2
        self._rows += rows
        self._cost += cost_of(rows, usage)

    def now(self) -> float | None:
        """None before the first row."""
        return self._cost / self._rows if self._rows else None


class Throughput:
    """Throughput of workers while they have work; idle time does not count."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque()  # (when, cost)
        self._cost = 0.0
        self._since: float | None = None  # when work began; None: there is no work
        self._last: float | None = None  # the throughput when work last ended

    def work(self, *, has_work: bool) -> None:
        """Set whether there is work."""
        if has_work and self._since is None:
            self._since = self._clock.monotonic()
        elif not has_work and self._since is not None:
            self._last = self.now()
            self._since, self._cost = None, 0.0
            self._samples.clear()

    def add(self, cost: float) -> None:
        now = self._clock.monotonic()
        self._forget(now)
        self._samples.append((now, cost))
        self._cost += cost

    def _forget(self, now: float) -> None:
        while self._samples and self._samples[0][0] < now - WINDOW_S:
            self._cost -= self._samples.popleft()[1]

    def now(self) -> float | None:
        """Cost per second; None before the first sample."""
        now = self._clock.monotonic()
        self._forget(now)
        if self._since is None or not self._samples or now <= self._since:
            return self._last
        return self._cost / min(WINDOW_S, now - self._since)


WEIGHT_MIN = 1e-9  # a project with weight 0 would never be served
LATE_FACTOR = 1.5  # a deadline is in danger if the time left is less than the work left takes, times this
# The part of a project's share that only its first job gets. All of its jobs divide the rest equally: many small jobs
# neither wait for a large one nor stop it.
FIRST_SHARE = 0.25


class Candidate(Struct, frozen=True):
    """A job that has rows for a model."""

    job: str
    created: float
    project: str = "default"
    priority: int = 0
    deadline: float | None = None
    is_late: bool = False  # it is about to miss its deadline
    ahead: float = 0.0  # virtual time that its project has been served: see `FairShare`

    @property
    def rank(self) -> int:
        """Rows of a job with a higher rank always go first."""
        return 2 * self.priority + self.is_late


def order_of(candidate: Candidate) -> tuple:
    """The sort key of the serving order."""
    deadline = math.inf if candidate.deadline is None else candidate.deadline
    urgency = deadline if candidate.is_late else 0.0
    return -candidate.rank, urgency, candidate.ahead, deadline, candidate.created, candidate.job


def ahead_of(job: str, is_waiting: bool, candidates: Sequence[Candidate]) -> int:
    """How many candidates are served before this job; once it has rows at a worker, only those of higher rank."""
    candidate = next((each for each in candidates if each.job == job), None)
    if candidate is None:
        return 0
    before = [each for each in candidates if order_of(each) < order_of(candidate)]
    return len(before if is_waiting else [each for each in before if each.rank > candidate.rank])


def is_late(deadline: float | None, now: float, *, work: float, per_s: float | None) -> bool:
    """Whether a job with this much work left misses its deadline unless it gets all workers.

    `work`, and `per_s`, the throughput of the workers, are in the same unit; `per_s` None: not known yet.
    """
    if deadline is None or not per_s:
        return False
    return deadline - now < LATE_FACTOR * work / per_s


def shares(candidates: Sequence[Candidate], weights: Mapping[str, float]) -> dict[str, float]:
    """Job -> its share of the workers beside others of its rank: its project's weight, divided among its jobs."""
    groups = Counter((each.rank, each.project) for each in candidates)
    seen: set[tuple[int, str]] = set()
    claims: dict[str, float] = {}
    for each in sorted(candidates, key=order_of):
        group = each.rank, each.project
        equal = (1.0 - FIRST_SHARE) / groups[group]
        claims[each.job] = weights.get(each.project, 1.0) * (equal if group in seen else FIRST_SHARE + equal)
        seen.add(group)
    return claims


class FairShare:
    """Fair share between projects by what their rows cost, as virtual time: service divided by weight.

    Every project that has work has a virtual time; the one furthest behind is served next. A project that comes
    back after it had nothing to do begins where the others are: idle time earns no credit.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._served: dict[str, float] = {}  # project -> virtual time
        self._active: set[str] = set()
        self._now = 0.0  # the virtual time that no project with work is behind

    def _weight(self, project: str) -> float:
        return max(self._weights.get(project, 1.0), WEIGHT_MIN)

    def set_active(self, projects: Iterable[str]) -> None:
        """Set the projects that have work."""
        projects = set(projects)
        continuing = [self._served[project] for project in projects & self._active]
        if continuing:
            self._now = max(self._now, min(continuing))
        for project in projects - self._active:
            self._served[project] = max(self._served.get(project, 0.0), self._now)
        for project in [each for each in self._served if each not in projects and self._served[each] <= self._now]:
            del self._served[project]  # it would begin at `now` anyway
        self._active = projects

    def charge(self, project: str, cost: float) -> None:
        """Charge counted rows to a project."""
        self._served[project] = self._served.get(project, self._now) + cost / self._weight(project)

    def ahead(self, project: str, held: float = 0.0) -> float:
        """The virtual time of a project, with what it holds now counted as served."""
        return self._served.get(project, self._now) + held / self._weight(project)
