"""Engines of a model as people see them: how many there are, what they do, and what has become of them."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

DIED = "died"  # the kind of an event: a server ended under its worker, and is started again


class EngineState(StrEnum):
    """Of all replicas of a model together."""

    STOPPED = "stopped"  # there is none: it starts when somebody asks
    WAITING = "waiting"  # one is wanted, and the machine has no room for it
    STARTING = "starting"
    READY = "ready"  # one at least answers
    FAILED = "failed"  # it could not be started, or died too often
    STOPPING = "stopping"


class EngineEvent(Struct, frozen=True):
    """Something that became of the replicas of a model."""

    at: float  # seconds since the epoch
    kind: str  # waiting, starting, ready, died, failed, restarted, scaled, stopping, stopped
    message: str = ""  # for people; of a failure the engine's last lines
    replica: int | None = None
    in_flight: int | None = None  # of a death: how many requests of the project that asks were in flight
    by_project: dict[str, int] = {}  # the same of every project; told to nobody


class EngineView(Struct, frozen=True):
    """The replicas of a model now, and what became of them lately, the oldest event first."""

    state: str = EngineState.STOPPED
    replicas: int = 0  # that run or start
    ready: int = 0
    wanted: int = 0
    message: str = ""  # why it waits or has failed
    events: list[EngineEvent] = []


def seen(event: EngineEvent, project: str, message: str) -> EngineEvent:
    """An event as a project may know of it: how many requests of its own were in flight, of others nothing."""
    own = event.by_project.get(project, 0) if event.kind == DIED else None
    return replace(event, message=message, in_flight=own, by_project={})
