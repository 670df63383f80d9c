"""A job's description as it changes while the job lives: which models its rows use, and what the ledger keeps of it."""

from __future__ import annotations

import msgspec

from batchmill.jobs.plan import Plan
from batchmill.wire.job_spec import JobSpec


def with_used(spec: JobSpec, plan: Plan) -> JobSpec:
    """A door's job is given every model its caller may use: remember those that its rows go to."""
    if spec.origin is None:
        return spec
    used = [target.adapter or spec.models[target.model].name for target in plan.targets if target.rows or target.folded]
    return msgspec.structs.replace(spec, used=used)


def columns_of(spec: JobSpec) -> dict[str, object]:
    """What of a description stands in the job's record too."""
    return {
        "spec": msgspec.json.encode(spec),
        "priority": spec.policy.priority,
        "deadline": spec.policy.deadline,
    }
