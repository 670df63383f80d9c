"""What a policy may say: its ranges, checked once where a job is ordered and once where it is amended."""

from __future__ import annotations

import math

from msgspec.structs import replace

from batchmill.errors import InvalidInput, InvalidTransition
from batchmill.models import registry
from batchmill.states import JobState
from batchmill.types import Amendment, ModelSpec, Policy
from batchmill.wire.job_spec import JobSpec

PRIORITY_MAX = 100
WAITING_ENGINES = frozenset({"connector", "http"})  # a row that failed waits there until its service is back
CHOICES = {"on_invalid": ("fail", "skip"), "on_engine_failure": ("pause", "fail")}


def check(policy: Policy, models: list[ModelSpec], now: float) -> None:
    """Raises: InvalidInput, naming the value."""
    for name, allowed in CHOICES.items():
        if getattr(policy, name) not in allowed:
            raise InvalidInput(
                f"{name} is {getattr(policy, name)!r}; it can be {' or '.join(allowed)}", code="invalid_policy"
            )
    if not -PRIORITY_MAX <= policy.priority <= PRIORITY_MAX:
        raise InvalidInput(
            f"the priority must be {-PRIORITY_MAX} to {PRIORITY_MAX}, not {policy.priority}", code="invalid_priority"
        )
    if policy.deadline is not None and not (math.isfinite(policy.deadline) and policy.deadline > now):
        raise InvalidInput(
            f"the deadline {policy.deadline} is not ahead: give a time after {now:.0f}, in seconds since the epoch",
            code="invalid_deadline",
        )
    if policy.budget is not None and not (math.isfinite(policy.budget) and policy.budget > 0):
        raise InvalidInput(f"the budget must be more than 0 USD, not {policy.budget}", code="invalid_budget")
    registry.checked_budget(policy.budget, models)


def amended(spec: JobSpec, change: Amendment, now: float) -> Policy:
    """The policy after a change. Raises: InvalidInput."""
    told = {name: value for name in Amendment.__struct_fields__ if (value := getattr(change, name)) is not None}
    if not told:
        raise InvalidInput("nothing was named that is to change: priority, deadline or budget", code="nothing_to_amend")
    policy = replace(spec.policy, **told)
    # A deadline that has passed meanwhile is left alone: it ends the job by itself.
    check(policy if "deadline" in told else replace(policy, deadline=None), spec.models, now)
    return policy


def check_rows_may_wait(spec: JobSpec, state: str) -> None:
    """Raises: InvalidTransition for a job none of whose rows waits for a service."""
    engines = {model.engine for model in spec.models}
    if engines.isdisjoint(WAITING_ENGINES):
        raise InvalidTransition(
            f"the job {spec.id} runs on {', '.join(sorted(engines))}: only rows of services that are called row by row "
            f"({', '.join(sorted(WAITING_ENGINES))}) wait after they failed; `cancel` ends a job without its other rows"
        )
    if state not in (JobState.QUEUED, JobState.RUNNING, JobState.PAUSED):
        raise InvalidTransition(f"the job {spec.id} is {state}: rows wait only while a job runs or is paused")


def without_past_deadline(spec: JobSpec, now: float) -> JobSpec:
    """What runs again is not to expire at once."""
    deadline = spec.policy.deadline
    if deadline is None or deadline > now:
        return spec
    return replace(spec, policy=replace(spec.policy, deadline=None))
