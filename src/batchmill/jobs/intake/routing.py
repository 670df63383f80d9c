"""Routing: picks the cheapest route of a model that can finish in time, and says why. Pure.

A way is cheap by its price, and in time by what is known of it: a provider's batch API by its window, a service by its
limits per minute or by how fast earlier jobs went, an engine of our own by earlier jobs alone.
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

JOBS_MAX = 4  # at a provider at once, where the model does not say otherwise
LATE_FACTOR = 1.5  # rows leave a provider when another way still has this much more time than it needs
CHANGED = "it went on from"  # one way to another


class Choice(Struct, frozen=True):
    """The chosen route, under the model's own name; its `routes` are the remaining ones. `reasons`: sentences."""

    model: ModelSpec
    reasons: list[str]


class _Way(Struct, frozen=True):
    """What is known of one route."""

    route: ModelSpec
    cost: float | None  # USD for the job, or for a million tokens where its tokens are not known; None: no price
    seconds: float | None  # for the rows; None: not known

    def can(self, left_s: float) -> bool | None:
        """Whether the route finishes in time; None: unknown."""
        return None if self.seconds is None else self.seconds <= left_s


def choose(
    model: ModelSpec, rows: int, tokens: int | None, deadline: float | None, now: float, rates: Mapping[str, float]
) -> Choice:
    """Choose the route for `rows` rows of a model with several.

    Args:
        tokens: input and output of all rows, estimated; None: not known.
        deadline, now: seconds since the epoch.
        rates: `way_of` a route -> rows per second, as measured with earlier jobs.
    """
    assert model.routes, "a model of which a route is chosen has some"
    left_s = math.inf if deadline is None else deadline - now
    ways = [_Way(route, cost_of(route, tokens), seconds_for(route, rows, tokens, rates)) for route in model.routes]
    ordered = sorted(ways, key=lambda way: _order(way, left_s))
    best = ordered[0]
    others = [way.route for way in ordered[1:] if is_worth(way.route, after=best.route)]
    reasons = [_why(best, ordered, left_s, tokens), *(_estimate(way, left_s, tokens) for way in ordered)]
    return Choice(taken(model, best.route, others), reasons)


def taken(model: ModelSpec, route: ModelSpec, others: Sequence[ModelSpec]) -> ModelSpec:
    """A route under the name that rows use for the model."""
    return replace(route, name=model.name, allowed=model.allowed, routes=list(others))


def is_worth(route: ModelSpec, *, after: ModelSpec) -> bool:
    """Whether rows may move to this route: never to batches, because shards were cut for another engine."""
    return not route.is_handed_over or after.is_handed_over


def next_way(
    model: ModelSpec, rows: int, deadline: float | None, now: float, rates: Mapping[str, float]
) -> ModelSpec | None:
    """The route after that of `model` has failed; None: there is none left."""
    return choose(model, rows, None, deadline, now, rates).model if model.routes else None


def late_between(
    model: ModelSpec, rows: int, deadline: float | None, rates: Mapping[str, float]
) -> tuple[float, float] | None:
    """(from, until) when rows at a provider should move to meet the deadline; None: never.

    Only a way of which it is known how long it takes is worth giving up what may yet come.
    """
    if deadline is None or not model.is_handed_over:
        return None
    known = [seconds_for(route, rows, None, rates) for route in model.routes if not route.is_handed_over]
    needed = min((seconds for seconds in known if seconds is not None), default=None)
    return None if needed is None else (deadline - LATE_FACTOR * needed, deadline - needed)


def measured(finished: Sequence[tuple[JobSpec, int, float]]) -> dict[str, float]:
    """`way_of` a model -> rows per second of the newest job that went this way alone: (job, rows, seconds) each."""
    rates: dict[str, float] = {}
    for spec, rows, seconds in finished:
        if len(spec.models) == 1 and not any(CHANGED in sentence for sentence in sentences(spec)):
            rates.setdefault(way_of(spec.models[0]), rows / seconds)
    return rates


def name_of(model: ModelSpec) -> str:
    """The name of a route for users: "openai-batch:gpt-4o", "http:gpt-4o"."""
    kind = f"{model.provider or 'openai'}-batch" if model.is_handed_over else model.engine
    return f"{kind}:{model.source}" if model.source else kind


def way_of(model: ModelSpec) -> str:
    """The key of a route, equal for all jobs that used it, whatever the model was called."""
    where = model.base_url or ("" if model.connector is None else model.connector.id)
    return f"{name_of(model)}@{where}" if where else name_of(model)


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
    limits, rate = route.limits, rates.get(way_of(route))
    known = [
        rows / rate if rate else None,
        rows / limits.requests_per_minute * 60 if limits.requests_per_minute else None,
        tokens / limits.tokens_per_minute * 60 if tokens is not None and limits.tokens_per_minute else None,
    ]
    return max(filter(None, known), default=None)


def with_choices(spec: JobSpec, choices: Mapping[int, Choice]) -> JobSpec:
    """The spec with the chosen routes: number of the model -> choice."""
    if not choices:
        return spec
    models = [choices[number].model if number in choices else model for number, model in enumerate(spec.models)]
    routing = {spec.models[number].name: choice.reasons for number, choice in choices.items()}
    return replace(spec, models=models, routing={**spec.routing, **routing})


def gone_on(spec: JobSpec, ways: Mapping[int, ModelSpec], why: str) -> JobSpec:
    """The spec of a job some of whose models change their route."""
    models = [ways.get(number, model) for number, model in enumerate(spec.models)]
    routing = dict(spec.routing)
    for number, way in ways.items():
        before = spec.models[number]
        message = f"{CHANGED} {name_of(before)} to {name_of(way)}: {why}"
        routing[before.name] = [*routing.get(before.name, []), message]
    return replace(spec, models=models, routing=routing)


def warned(spec: JobSpec, numbers: Iterable[int], warnings: Sequence[str]) -> JobSpec:
    """The spec with a warning about what the previous route may have left, for each of these models."""
    names = [spec.models[number].name for number in sorted(numbers)]
    return replace(spec, routing={**spec.routing, **{name: [*spec.routing[name], *warnings] for name in names}})


def kept(spec: JobSpec, earlier: JobSpec) -> JobSpec:
    """The new spec of a job that is ordered again: its models keep their routes."""
    before = {model.name: model for model in earlier.models if not model.needs_route}
    models = [_kept(model, before.get(model.name)) for model in spec.models]
    return replace(spec, models=models, routing=earlier.routing)


def _kept(model: ModelSpec, before: ModelSpec | None) -> ModelSpec:
    if not model.needs_route or before is None:
        return model
    now = {way_of(route): route for route in model.routes}
    left = [now.get(way_of(route), route) for route in before.routes]
    return taken(model, now.get(way_of(before), before), left)


def sentences(spec: JobSpec) -> list[str]:
    """Why the models of a job use their routes."""
    return [f"{name}: {sentence}" for name, reasons in spec.routing.items() for sentence in reasons]


def _order(way: _Way, left_s: float) -> tuple:
    """The sort key: routes that finish in time, then unknown ones, then late ones; then cost, or time if late."""
    can = way.can(left_s)
    if math.isinf(left_s) or can:
        rank = 0
    else:
        rank = 1 if can is None else 2
    cost = math.inf if way.cost is None else way.cost
    seconds = math.inf if way.seconds is None else way.seconds
    return (rank, seconds, cost) if rank == 2 else (rank, cost, seconds)


def _why(best: _Way, ordered: Sequence[_Way], left_s: float, tokens: int | None) -> str:
    name, can = name_of(best.route), best.can(left_s)
    if len(ordered) == 1:
        return f"it goes by {name}: there is no other route"
    cheapest = "the cheapest way" if best.cost is not None else "no way has a price, and this one comes first"
    if math.isinf(left_s):
        return f"it goes by {name}: {cheapest}"
    if can is None:
        return f"it goes by {name}: it may take over {duration(left_s)}, and no other route is surely faster"
    if not can:
        return f"it goes by {name}: no route is done in {duration(left_s)}, and this one is the fastest"
    return f"it goes by {name}: {cheapest} of those that are done in {duration(left_s)}"


def _estimate(way: _Way, left_s: float, tokens: int | None) -> str:
    if way.cost is None:
        cost = "no price is known"
    elif tokens is None:
        cost = f"{way.cost:.2f} USD for a million tokens"
    else:
        cost = f"about {way.cost:.2f} USD"
    time = "how long it takes is not known" if way.seconds is None else f"done within {duration(way.seconds)}"
    late = ", too late" if way.can(left_s) is False else ""
    return f"{name_of(way.route)}: {cost}, {time}{late}"


def duration(seconds: float) -> str:
    """A duration in a suitable unit."""
    for size, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
