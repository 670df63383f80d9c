"""Routing: picks the cheapest route of a model that can finish in time, and says why. Pure.

The cost of a route comes from its price. Its time is estimated: for a provider's batch API from its window, for a
service from its limits per minute or the speed of earlier jobs, for a local engine from earlier jobs alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from batchmill.jobs.ledger.plan import argument, handed_over_rows
from batchmill.models.providers import PROVIDERS
from batchmill.types import ModelSpec, Usage
from batchmill.wire.job_spec import JobSpec

JOBS_MAX = 4  # at a provider at once, if the model has no `jobs_max`
LATE_FACTOR = 1.5  # rows leave a provider when the time left is this times what another route needs
CHANGED = "it went on from"  # marks a changed route in the stored sentences of jobs


class Choice(Struct, frozen=True):
    """The chosen route, under the model's own name; its `routes` are the remaining ones. `reasons`: sentences."""

    model: ModelSpec
    reasons: list[str]


class _RouteEstimate(Struct, frozen=True):
    """The estimated cost and time of one route."""

    route: ModelSpec
    cost: float | None  # USD for the job, or per million tokens if its tokens are unknown; None: no price
    seconds: float | None  # for the rows; None: unknown

    def is_in_time(self, left_s: float) -> bool | None:
        """Whether the route finishes in time; None: unknown."""
        return None if self.seconds is None else self.seconds <= left_s


def choose(
    model: ModelSpec, rows: int, tokens: int | None, deadline: float | None, now: float, rates: Mapping[str, float]
) -> Choice:
    """Choose the route for `rows` rows of a model with several.

    Args:
        tokens: input and output of all rows, estimated; None: unknown.
        deadline, now: seconds since the epoch.
        rates: `route_key` -> rows per second, as measured with earlier jobs.
    """
    assert model.routes, "the model has no routes"
    left_s = math.inf if deadline is None else deadline - now
    estimates = [
        _RouteEstimate(route, cost_of(route, tokens), seconds_for(route, rows, tokens, rates)) for route in model.routes
    ]
    ordered = sorted(estimates, key=lambda estimate: _order(estimate, left_s))
    best = ordered[0]
    others = [estimate.route for estimate in ordered[1:] if is_worth(estimate.route, after=best.route)]
    reasons = [_why(best, ordered, left_s), *(_describe(estimate, left_s, tokens) for estimate in ordered)]
    return Choice(with_route(model, best.route, others), reasons)


def with_route(model: ModelSpec, route: ModelSpec, others: Sequence[ModelSpec]) -> ModelSpec:
    """A route under the name that rows use for the model."""
    return replace(route, name=model.name, allowed=model.allowed, routes=list(others))


def is_worth(route: ModelSpec, *, after: ModelSpec) -> bool:
    """Whether rows may move to this route: never to batches, because shards were cut for another engine."""
    return not route.is_handed_over or after.is_handed_over


def next_route(
    model: ModelSpec, rows: int, deadline: float | None, now: float, rates: Mapping[str, float]
) -> ModelSpec | None:
    """The route after that of `model` has failed; None: there is none left."""
    return choose(model, rows, None, deadline, now, rates).model if model.routes else None


def switch_window(
    model: ModelSpec, rows: int, deadline: float | None, rates: Mapping[str, float]
) -> tuple[float, float] | None:
    """(from, until) when rows at a provider should move to meet the deadline; None: never.

    Rows move only to a route whose time is known: the provider's results are given up for it.
    """
    if deadline is None or not model.is_handed_over:
        return None
    estimates = [seconds_for(route, rows, None, rates) for route in model.routes if not route.is_handed_over]
    needed = min((seconds for seconds in estimates if seconds is not None), default=None)
    return None if needed is None else (deadline - LATE_FACTOR * needed, deadline - needed)


def measure_rates(finished: Sequence[tuple[JobSpec, int, float]]) -> dict[str, float]:
    """`route_key` -> rows per second of the newest job that used only this route. `finished`: (job, rows, seconds)."""
    rates: dict[str, float] = {}
    for spec, rows, seconds in finished:
        if len(spec.models) == 1 and not any(CHANGED in sentence for sentence in sentences(spec)):
            rates.setdefault(route_key(spec.models[0]), rows / seconds)
    return rates


def name_of(model: ModelSpec) -> str:
    """The name of a route for users: "openai-batch:gpt-4o", "http:gpt-4o"."""
    kind = f"{model.provider or 'openai'}-batch" if model.is_handed_over else model.engine
    return f"{kind}:{model.source}" if model.source else kind


def route_key(model: ModelSpec) -> str:
    """The key of a route, equal for all jobs that used it, whatever the model's name."""
    address = model.base_url or ("" if model.connector is None else model.connector.id)
    return f"{name_of(model)}@{address}" if address else name_of(model)


def cost_of(route: ModelSpec, tokens: int | None) -> float | None:
    """USD, if input and output tokens are equal; per million tokens if they are unknown."""
    if route.price is None:
        return 0.0 if route.traits.is_local else None
    total = 1_000_000 if tokens is None else tokens
    return route.price.cost(Usage(input_tokens=total // 2, output_tokens=total - total // 2))


def seconds_for(route: ModelSpec, rows: int, tokens: int | None, rates: Mapping[str, float]) -> float | None:
    """Seconds that a route takes for these rows; None: unknown."""
    if route.is_handed_over:
        window_s = argument(route, "window_s", PROVIDERS[route.provider or "openai"].window_s)
        jobs = math.ceil(rows / handed_over_rows(route))
        return window_s * max(1, math.ceil(jobs / argument(route, "jobs_max", JOBS_MAX)))
    limits, rate = route.limits, rates.get(route_key(route))
    estimates = [
        rows / rate if rate else None,
        rows / limits.requests_per_minute * 60 if limits.requests_per_minute else None,
        tokens / limits.tokens_per_minute * 60 if tokens is not None and limits.tokens_per_minute else None,
    ]
    return max(filter(None, estimates), default=None)


def with_choices(spec: JobSpec, choices: Mapping[int, Choice]) -> JobSpec:
    """The spec with the chosen routes: number of the model -> choice."""
    if not choices:
        return spec
    models = [choices[number].model if number in choices else model for number, model in enumerate(spec.models)]
    routing = {spec.models[number].name: choice.reasons for number, choice in choices.items()}
    return replace(spec, models=models, routing={**spec.routing, **routing})


def with_next_routes(spec: JobSpec, routes: Mapping[int, ModelSpec], why: str) -> JobSpec:
    """The spec of a job some of whose models change their route."""
    models = [routes.get(number, model) for number, model in enumerate(spec.models)]
    routing = dict(spec.routing)
    for number, route in routes.items():
        before = spec.models[number]
        message = f"{CHANGED} {name_of(before)} to {name_of(route)}: {why}"
        routing[before.name] = [*routing.get(before.name, []), message]
    return replace(spec, models=models, routing=routing)


def with_warnings(spec: JobSpec, numbers: Iterable[int], warnings: Sequence[str]) -> JobSpec:
    """The spec with a warning about what the previous route may have left, for each of these models."""
    names = [spec.models[number].name for number in sorted(numbers)]
    return replace(spec, routing={**spec.routing, **{name: [*spec.routing[name], *warnings] for name in names}})


def keep_routes(spec: JobSpec, earlier: JobSpec) -> JobSpec:
    """The new spec of a job that is submitted again: its models keep their routes."""
    before = {model.name: model for model in earlier.models if not model.needs_route}
    models = [_keep_route(model, before.get(model.name)) for model in spec.models]
    return replace(spec, models=models, routing=earlier.routing)


def _keep_route(model: ModelSpec, before: ModelSpec | None) -> ModelSpec:
    if not model.needs_route or before is None:
        return model
    current = {route_key(route): route for route in model.routes}
    others = [current.get(route_key(route), route) for route in before.routes]
    return with_route(model, current.get(route_key(before), before), others)


def sentences(spec: JobSpec) -> list[str]:
    """Why the models of a job use their routes."""
    return [f"{name}: {sentence}" for name, reasons in spec.routing.items() for sentence in reasons]


def _order(estimate: _RouteEstimate, left_s: float) -> tuple:
    """The sort key: routes that finish in time, then unknown ones, then late ones; then cost, or time if late."""
    is_in_time = estimate.is_in_time(left_s)
    if math.isinf(left_s) or is_in_time:
        rank = 0
    else:
        rank = 1 if is_in_time is None else 2
    cost = math.inf if estimate.cost is None else estimate.cost
    seconds = math.inf if estimate.seconds is None else estimate.seconds
    return (rank, seconds, cost) if rank == 2 else (rank, cost, seconds)


def _why(best: _RouteEstimate, ordered: Sequence[_RouteEstimate], left_s: float) -> str:
    name, is_in_time = name_of(best.route), best.is_in_time(left_s)
    if len(ordered) == 1:
        return f"it goes by {name}: there is no other route"
    cheapest = "the cheapest route" if best.cost is not None else "no route has a price, and this one comes first"
    if math.isinf(left_s):
        return f"it goes by {name}: {cheapest}"
    if is_in_time is None:
        return f"it goes by {name}: it may take over {duration(left_s)}, and no other route is surely faster"
    if not is_in_time:
        return f"it goes by {name}: no route is done in {duration(left_s)}, and this one is the fastest"
    return f"it goes by {name}: {cheapest} of those that are done in {duration(left_s)}"


def _describe(estimate: _RouteEstimate, left_s: float, tokens: int | None) -> str:
    if estimate.cost is None:
        cost = "no price is known"
    elif tokens is None:
        cost = f"{estimate.cost:.2f} USD for a million tokens"
    else:
        cost = f"about {estimate.cost:.2f} USD"
    time = "its time is unknown" if estimate.seconds is None else f"done within {duration(estimate.seconds)}"
    late = ", too late" if estimate.is_in_time(left_s) is False else ""
    return f"{name_of(estimate.route)}: {cost}, {time}{late}"


def duration(seconds: float) -> str:
    """A duration in a suitable unit."""
    for size, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
