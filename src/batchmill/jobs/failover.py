"""Route failover of a running job: the speed of its routes, when to leave one, and which one follows."""

from __future__ import annotations

import math

from msgspec.structs import replace

from batchmill.errors import BatchmillError, JobPaused
from batchmill.jobs.intake import orders, routing
from batchmill.jobs.ledger import records
from batchmill.jobs.ledger.files import read_spec
from batchmill.jobs.pools.job_run import JobRun
from batchmill.ports.clock import Clock
from batchmill.states import PauseReason
from batchmill.store.sql.database import Database
from batchmill.types import ModelSpec
from batchmill.wire.job_spec import JobSpec

JOBS_MEASURED = 200  # the newest jobs, for the speed of a route
POLL_S = 60.0  # rows come back from providers, and deadlines change


class RouteFailover:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock
        self.rates: dict[str, float] = {}  # see routing.choose

    async def measure(self, models: list[ModelSpec]) -> None:
        """Measure the speed of earlier jobs, if any of these models has several routes."""
        if any(model.routes for model in models):
            finished = await self._database.read(records.finished_lately, JOBS_MEASURED)
            self.rates = routing.measure_rates([(read_spec(spec), rows, seconds) for spec, rows, seconds in finished])

    async def watch(self, run: JobRun) -> None:
        """Fail the route of a model that would miss the deadline, as long as another can still meet it."""
        while not run.ended.done():
            now = self._clock.now()
            windows = {number: self._window(run, number) for number in run.models_left}
            due = {number for number, (start, end) in windows.items() if start <= now <= end}
            if due:
                names = ", ".join(run.spec.models[number].name for number in sorted(due))
                run.failing |= due
                run.pause(JobPaused(f"{names} would miss the deadline", reason=PauseReason.ROUTE_FAILED))
                return
            ahead = [start - now for start, _ in windows.values() if start > now]
            await self._clock.sleep(min([POLL_S, *ahead]))

    def _window(self, run: JobRun, number: int) -> tuple[float, float]:
        model, deadline = run.spec.models[number], run.spec.policy.deadline
        return routing.switch_window(model, run.rows_left_of(number), deadline, self.rates) or (math.inf, math.inf)

    @staticmethod
    def may_change(spec: JobSpec) -> bool:
        """Whether a route of this job may be replaced."""
        return any(model.is_handed_over and model.routes for model in spec.models)

    def next(self, run: JobRun, failure: BatchmillError | None) -> JobSpec | None:
        """The job spec with the next routes; None if nothing has failed or no route is left."""
        if not isinstance(failure, JobPaused) or failure.reason is not PauseReason.ROUTE_FAILED or not run.failing:
            return None
        spec, now = run.spec, self._clock.now()
        routes = {
            number: routing.next_route(
                spec.models[number], run.rows_left_of(number), spec.policy.deadline, now, self.rates
            )
            for number in run.failing
        }
        if None in routes.values():
            return None
        return with_code(routing.with_next_routes(spec, routes, failure.message))


def with_code(spec: JobSpec) -> JobSpec:
    """The job spec with the current code of the functions that its rows go to."""
    code = orders.code_of(spec.models, by_frontend=spec.origin is not None)
    return replace(spec, code={**code, **{name: spec.code[name] for name in code if name in spec.code}})
