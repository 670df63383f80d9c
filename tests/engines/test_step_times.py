"""What the scheduler inside vLLM reckons with: the part of it that needs no vLLM."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location

import pytest

from batchmill.engines.llm.launch import PLUGIN_PATH

_spec = spec_from_file_location("batchmill_step_times", PLUGIN_PATH / "batchmill_step_times.py")
_module = module_from_spec(_spec)
_spec.loader.exec_module(_module)
StepTimes, CREDIT_MAX_S = _module.StepTimes, _module.CREDIT_MAX_S


def test_nothing_is_known_at_first():
    """Before it has seen both kinds of steps it gives no number of tokens."""
    times = StepTimes()
    assert times.row_tokens(1.0) is None
    times.observe(0.010, 0, True, False)
    assert times.row_tokens(1.0) is None


def test_tokens_that_fit():
    """A step of 5 ms alone, and of 25 ms with 100 tokens: 25 tokens take as long as it does alone."""
    times = StepTimes()
    times.observe(0.005, 0, True, False)
    times.observe(0.025, 100, False, False)
    assert times.row_tokens(1.0) == pytest.approx(25, abs=1)
    assert times.row_tokens(4.0) == pytest.approx(100, abs=1)


def test_steps_without_live_requests_say_nothing_of_theirs():
    """A step with neither rows nor live requests that have begun is not taken for one of live requests alone."""
    times = StepTimes()
    times.observe(0.025, 100, False, False)
    times.observe(0.5, 0, False, False)
    assert times.row_tokens(1.0) is None


def test_rows_are_held_for_half_of_the_time():
    """Held time uses an account up that other time fills, as fast, up to its end."""
    times = StepTimes()
    times.observe(CREDIT_MAX_S + 1, 0, True, True)
    assert not times.may_hold
    times.observe(0.9, 10, False, False)
    assert not times.may_hold
    times.observe(0.2, 10, False, False)
    assert times.may_hold
    times.observe(1000.0, 10, False, False)
    times.observe(CREDIT_MAX_S - 0.1, 0, True, True)
    assert times.may_hold
    times.observe(0.2, 0, True, True)
    assert not times.may_hold
