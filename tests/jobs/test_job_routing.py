"""Which way rows go: the cheapest that finishes in time, told in sentences."""

from __future__ import annotations

import pytest

from batchmill.jobs.intake import routing
from batchmill.jobs.intake.routing import choose
from batchmill.types import DatasetSpec, Limits, ModelSpec, Policy, Price
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm

NOW, HOUR, DAY = 1_000_000.0, 3600.0, 86_400.0
BATCH = ModelSpec("cheap", "provider_batch", "gpt", provider="openai", price=Price(1.0, output=2.0))
ONLINE = ModelSpec("fast", "http", "gpt", base_url="http://x/v1", price=Price(2.0, output=4.0))
LOCAL = ModelSpec("ours", "llm", "/models/small")
PACED = ModelSpec(
    "paced", "http", "gpt", base_url="http://y/v1", price=Price(2.0, output=4.0), limits=Limits(requests_per_minute=600)
)


def model(*routes: ModelSpec) -> ModelSpec:
    return ModelSpec("m", "routes", "", routes=list(routes), allowed=["m"])


@pytest.mark.parametrize(
    ("routes", "deadline", "rates", "taken"),
    [
        ([ONLINE, BATCH], None, {}, "provider_batch"),  # no deadline: the cheapest
        ([BATCH, ONLINE, LOCAL], None, {}, "llm"),  # our own machine costs nothing by the token
        ([ONLINE, BATCH], NOW + 2 * DAY, {}, "provider_batch"),  # its window lies before the deadline
        ([BATCH, PACED], NOW + 12 * HOUR, {}, "http"),  # the window does not; 1,000 rows at 600 a minute do
        ([BATCH, ONLINE], NOW + 12 * HOUR, {"http:gpt@http://x/v1": 5.0}, "http"),  # as measured
        ([BATCH, ONLINE], NOW + 12 * HOUR, {}, "http"),  # nobody knows: better than surely too late
        ([BATCH, PACED], NOW + 60, {}, "http"),  # nothing is in time: the fastest
        ([LOCAL, PACED], NOW + HOUR, {}, "http"),  # surely in time goes before cheaper, and unknown
    ],
)
def test_the_way_that_is_taken(routes, deadline, rates, taken):
    """The cheapest of those that are surely in time, then of those that may be, then the fastest."""
    choice = choose(model(*routes), 1000, 500_000, deadline, NOW, rates)
    assert choice.model.engine == taken
    assert (choice.model.name, choice.model.allowed) == ("m", ["m"])
    assert len(choice.reasons) == len(routes) + 1 and choice.reasons[0].startswith("it goes by ")


def test_what_is_left_are_ways_for_rows():
    """Rows are not moved into batches: their shards were cut for something else."""
    local = choose(model(BATCH, ONLINE, LOCAL), 10, None, None, NOW, {}).model
    assert (local.engine, [way.engine for way in local.routes]) == ("llm", ["http"])
    chosen = choose(model(BATCH, ONLINE), 10, None, None, NOW, {}).model
    assert [way.engine for way in chosen.routes] == ["http"]
    assert routing.next_route(chosen, 10, None, NOW, {}).engine == "http"
    assert routing.next_route(routing.next_route(chosen, 10, None, NOW, {}), 10, None, NOW, {}) is None


def test_windows_of_many_jobs_come_one_after_another():
    """A provider that has room for two jobs of ten rows takes two windows for forty."""
    narrow = ModelSpec(
        "n", "provider_batch", "gpt", provider="openai", engine_args={"rows_max": 10, "jobs_max": 2, "window_s": 60}
    )
    assert routing.seconds_for(narrow, 20, None, {}) == 60
    assert routing.seconds_for(narrow, 40, None, {}) == 120


def test_when_rows_leave_a_provider():
    """From half as long again before the deadline as the other way needs, until it would be too late for that too."""
    chosen = choose(model(BATCH, PACED), 6000, None, None, NOW, {}).model  # ten minutes of the other way
    assert routing.switch_window(chosen, 6000, NOW + HOUR, {}) == (NOW + HOUR - 900, NOW + HOUR - 600)
    assert routing.switch_window(chosen, 6000, None, {}) is None
    assert routing.switch_window(choose(model(BATCH, ONLINE), 10, None, None, NOW, {}).model, 10, NOW, {}) is None


def spec(*models: ModelSpec) -> JobSpec:
    return JobSpec(
        id="j", dataset=DatasetSpec(["/x"]), models=list(models), form=OpenAIForm(), policy=Policy(), output=None,
        identity="j", code={}, created=1.0,
    )  # fmt: skip


def test_a_job_that_is_taken_up_keeps_its_way():
    """The same command again goes on with the way that was chosen, under the limits and prices of now."""
    order = spec(model(BATCH, ONLINE))
    chosen = routing.with_choices(order, {0: choose(order.models[0], 10, None, None, NOW, {})})
    dearer = ModelSpec("cheap", "provider_batch", "gpt", provider="openai", price=Price(9.0))
    again = routing.keep_routes(spec(model(dearer, ONLINE)), chosen)
    assert (again.models[0].engine, again.models[0].price) == ("provider_batch", Price(9.0))
    assert [way.engine for way in again.models[0].routes] == ["http"] and again.routing == chosen.routing


def test_a_change_is_told():
    """Whoever asks why a job goes the way it goes is told of every change."""
    chosen = routing.with_choices(
        spec(model(BATCH, ONLINE)), {0: choose(model(BATCH, ONLINE), 10, None, None, NOW, {})}
    )
    following = routing.next_route(chosen.models[0], 10, None, NOW, {})
    moved = routing.with_next_routes(chosen, {0: following}, "it is stuck")
    assert moved.models[0].engine == "http" and moved.models[0].name == "m"
    assert routing.sentences(moved)[-1] == "m: it went on from openai-batch:gpt to http:gpt: it is stuck"
    assert routing.sentences(routing.with_warnings(moved, {0}, ["look there"]))[-1] == "m: look there"
    assert routing.with_warnings(moved, {0}, []) == moved


def test_rates_are_those_of_one_way():
    """A job that changed its way, or had several models, says nothing of how fast one of them is."""
    alone = spec(ONLINE)
    moved = JobSpec(**{name: getattr(alone, name) for name in alone.__struct_fields__} | {
        "routing": {"fast": [f"{routing.CHANGED} a to b"]}
    })  # fmt: skip
    assert routing.measure_rates([(alone, 100, 10.0), (alone, 100, 50.0)]) == {"http:gpt@http://x/v1": 10.0}
    assert routing.measure_rates([(moved, 100, 10.0), (spec(ONLINE, LOCAL), 100, 10.0)]) == {}
