"""amend, explain and models: what they ask for and what they print."""

import json
import time

import click
import pytest

from batchmill.cli.values import Moment
from batchmill.types import JobView
from batchmill.wire.native import Change

RUNNING = JobView("job_1", "running", rows=10, rows_ok=4)
CONFIG = """
[models.f]
engine = "function"
source = "app.py:f"
price = { input = 0.5, cached = 0.25, output = 2 }

[models.far]
engine = "openai"
source = "s"
base_url = "http://127.0.0.1:9/v1"
adapters = { legal = "legal" }
"""


def test_amend_changes_what_is_given_and_nothing_else(app, call):
    """Only the flags that were given reach the job, and the new values are shown."""
    app.jobs.add(RUNNING)
    result = call("amend", "job_1", "--priority", "7", "--deadline", "2126-01-02T03:04:05+00:00")
    assert result.exit_code == 0, result.stderr
    assert app.jobs.asked == [(Change(priority=7, deadline=4922996645.0), "job_1")]
    assert "priority  7" in result.stdout and "deadline  2126-01-02" in result.stdout


@pytest.mark.parametrize("flags", [(), ("--priority", "101"), ("--budget", "0"), ("--deadline", "2001-01-01")])
def test_amend_refuses_what_changes_nothing_or_cannot_be(app, call, flags):
    """No flag at all, or a value out of range, is an error before anything is asked."""
    app.jobs.add(RUNNING)
    assert call("amend", "job_1", *flags).exit_code == 2
    assert app.jobs.asked == []


def test_explain_says_why(app, call):
    """Every reason is a line, cleaned of what could steer a terminal; with none it says that nothing is in the way."""
    app.jobs.add(RUNNING)
    assert "nothing holds it up" in call("explain", "job_1").stdout
    app.jobs.reasons, app.jobs.ahead = ["the model m is\x1b[2J loading"], 3
    received = call("explain", "job_1").stdout
    assert "the model m is" in received and "\x1b" not in received and "3 jobs get workers before it" in received
    as_json = json.loads(call("explain", "job_1", "--json").stdout)
    assert as_json["wait"]["ahead"] == 3


def test_models_are_those_of_the_configuration(place, call):
    """Names, engines, adapters and prices; without any, how to name one."""
    assert "there are no models" in call("models").stdout
    (place / "batchmill.toml").write_text(CONFIG)
    received = call("models").stdout
    assert "legal" in received and "0.5 in, 0.25 cached, 2 out" in received
    assert [json.loads(line)["model"]["name"] for line in call("models", "--json").stdout.splitlines()] == ["f", "far"]


@pytest.mark.parametrize(("text", "seconds"), [("90m", 5400), ("12h", 43_200), ("2d", 172_800), ("1w", 604_800)])
def test_a_span_counts_from_now(text, seconds):
    """A deadline may be said as so long from now."""
    before = time.time()
    assert before + seconds <= Moment().convert(text, None, None) <= time.time() + seconds


@pytest.mark.parametrize("text", ["", "0h", "soon", "12", "1y", "99999999999h", "2020-01-01", "10000-01-01T00:00"])
def test_a_time_that_is_none_is_refused(text):
    """What is not a span and no date to come is refused with how one is written, or that it has passed."""
    with pytest.raises(click.BadParameter):
        Moment().convert(text, None, None)
