"""What became of a deployment's engine, told so that a client that waits for it comes to an end.

The published client asks every two seconds until an event is called Ready or Failed, whenever that was: so an update
is not answered with what was ready before it. Source: predibase 2025.10.3, `pql/api.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from msgspec import Struct, field

from batchmill.services.llms.records import LlmDeployment
from batchmill.types import EngineState, EngineView
from batchmill.types.engines import DIED

STARTS_WITHIN_S = 30.0  # an engine that was asked for has begun to start; otherwise it waits for a first call
ASKED = "asked_at"
READY, FAILED = "Ready", "Failed"
# Kind of an event -> its name here. What fails and is tried again has not failed.
NAMES = {
    "waiting": "Pending",
    "starting": "Initializing",
    "ready": READY,
    "failed": "Crashed",
    DIED: "Crashed",
    "restarted": "Restarting",
    "scaled": "Scaling",
    "stopping": "Stopping",
    "stopped": "Stopped",
    "updating": "Updating",
    "updated": READY,
    "update_failed": FAILED,
    "preloaded": "AdapterLoaded",
    "preload_failed": "AdapterFailed",
}
STATUSES = {
    EngineState.STOPPED: "standby",
    EngineState.WAITING: "pending",
    EngineState.STARTING: "initializing",
    EngineState.READY: "ready",
    EngineState.FAILED: "failed",
    EngineState.STOPPING: "standby",
}


class ComputeEvent(Struct, frozen=True, rename="camel", omit_defaults=True):
    event_type: str
    timestamp: str
    message: str = ""
    replica: int | None = None
    in_flight: int | None = None  # of a server that died: requests of the caller's project


class ComputeEvents(Struct, frozen=True, rename="camel"):
    """`resource_active_time`: whole seconds since an engine was ready; null: none is."""

    name: str
    deployment_status: str
    resource_active_time: int | None
    events: list[ComputeEvent] = field(name="ComputeEvents")


def asked(now: float) -> dict[str, Any]:
    """What a deployment remembers of when its engine was last asked for."""
    return {ASKED: now}


def status_of(deployment: LlmDeployment, view: EngineView) -> str:
    """`standby`: it starts with the first call; `stopped`: it answers none until somebody starts it."""
    if deployment.is_stopped:
        return "stopped"
    if deployment.is_updating and view.state == EngineState.READY:
        return "updating"
    return STATUSES[EngineState(view.state)]


def compute_events(deployment: LlmDeployment, view: EngineView, *, now: float, detailed: bool) -> ComputeEvents:
    """Everything since its engine was last asked for; without `detailed`, only failures say more than their names.

    The new engine of an update is ready a moment before the deployment has it: `Ready` is told when it has.
    """
    since = float(deployment.details.get(ASKED, deployment.created))
    found = [
        ComputeEvent(
            NAMES.get(event.kind, event.kind.capitalize()),
            _time(event.at),
            event.message,
            event.replica,
            event.in_flight,
        )
        for event in view.events
        if event.at >= since and not (deployment.is_updating and event.kind == "ready")
    ]
    names = {event.event_type for event in found}
    ending = _ending(deployment, view, is_late=now - since > STARTS_WITHIN_S)
    if ending is not None and ending not in names:
        found.append(ComputeEvent(ending, _time(since), view.message))
    ready_at = max((event.at for event in view.events if event.kind == "ready"), default=None)
    is_ready = view.state == EngineState.READY and ready_at is not None
    return ComputeEvents(
        deployment.name,
        status_of(deployment, view),
        int(now - ready_at) if is_ready else None,
        [each if detailed or each.event_type == FAILED else _short(each) for each in found],
    )


def _ending(deployment: LlmDeployment, view: EngineView, *, is_late: bool) -> str | None:
    """How what was asked for has ended; None: it is under way."""
    if view.state == EngineState.FAILED or deployment.problem:
        return FAILED
    if deployment.is_updating or deployment.is_stopped:
        return None
    is_standing_by = view.state == EngineState.STOPPED and is_late
    return READY if view.state == EngineState.READY or is_standing_by else None


def _short(event: ComputeEvent) -> ComputeEvent:
    return ComputeEvent(event.event_type, event.timestamp)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
