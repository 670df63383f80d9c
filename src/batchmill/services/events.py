"""What an end of a job is called by the API that took it, and what an event says. Pure."""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.states import JobState

# The door that took a job -> the word its events begin with, and the beginning of its ids there.
DOORS = {
    "openai": ("batch", "batch_"), "native": ("job", "job_"), "ml_commons": ("job", "job_"),
    "predibase": ("job", "job_"),
}  # fmt: skip
ENDINGS = {
    JobState.COMPLETED: "completed",
    JobState.FAILED: "failed",
    JobState.EXPIRED: "expired",
    JobState.CANCELLED: "cancelled",
}
EVENT_TYPES = tuple(
    f"{noun}.{ending}" for noun in dict.fromkeys(noun for noun, _ in DOORS.values()) for ending in ENDINGS.values()
)
SAMPLE_DIGITS = "0" * 20
ID_DIGITS = 32


class Ended(Struct, frozen=True):
    """A job that came to rest: one generation of it."""

    job: str
    generation: int
    state: str
    created: float  # seconds since the epoch, UTC
    finished: float
    project: str
    door: str | None = None
    traceparent: str | None = None  # W3C, of the request that submitted it

    @property
    def type(self) -> str | None:
        """The type of its event; None where nobody is told."""
        noun = DOORS.get(self.door or "")
        return f"{noun[0]}.{ENDINGS[JobState(self.state)]}" if noun else None


class _Data(Struct, frozen=True):
    id: str


class Event(Struct, frozen=True):
    """As openai's `webhooks.unwrap` reads it."""

    id: str
    created_at: int
    type: str
    data: _Data
    object: str = "event"


def event_of(ended: Ended) -> Event:
    """The event of an end, always the same for the same end."""
    assert ended.type is not None
    noun = DOORS[ended.door or ""]
    shown = noun[1] + ended.job.removeprefix("job_")
    same = digits(ended.job, str(ended.generation), ended.state)
    return Event(f"evt_{same}", int(ended.finished), ended.type, _Data(shown))


def sample_event(event_type: str, event_id: str, now: float) -> Event:
    """An event of a job that never was, for an endpoint to be tried with."""
    start = next(start for noun, start in DOORS.values() if event_type.startswith(f"{noun}."))
    return Event(event_id, int(now), event_type, _Data(start + SAMPLE_DIGITS))


def payload_of(event: Event) -> bytes:
    return msgspec.json.encode(event)


def message_id(event: Event, endpoint: str) -> str:
    """One for each event and endpoint: a receiver knows by it what it has had already."""
    return f"msg_{digits(event.id, endpoint)}"


def check_types(event_types: list[str]) -> list[str]:
    """The types without repetitions. Raises: InvalidInput for one that is never sent, or none at all."""
    for each in event_types:
        if each not in EVENT_TYPES:
            raise InvalidInput(
                f"there are no events of type {each[:80]!r}; there are {', '.join(EVENT_TYPES)}",
                code="unknown_event_type",
            )
    if not event_types:
        raise InvalidInput(f"name one type of event at least, of {', '.join(EVENT_TYPES)}", code="unknown_event_type")
    return list(dict.fromkeys(event_types))


def digits(*parts: str) -> str:
    """An id's digits that follow from what it is the id of."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:ID_DIGITS]
