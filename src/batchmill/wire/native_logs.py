"""What calls of a deployed function printed and raised, as the native API tells it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

LIMIT_DEFAULT, LIMIT_MAX = 1000, 10_000

Text = Annotated[str, Meta(min_length=1, max_length=200)]


class LogQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Which version's lines, and which of them; without `after` the last ones."""

    branch: Text | None = None
    version: Text | None = None
    request: Annotated[str, Meta(min_length=1, max_length=200, description="Of a request's id, or a job's")] | None = (
        None
    )
    after: Annotated[str, Meta(min_length=1, max_length=40, description="`next` of the page before")] | None = None
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = LIMIT_DEFAULT


class LogEntry(Struct, frozen=True):
    """One line that a function printed, or what a call raised. `project` null: of no call, or of several projects."""

    at: float  # seconds since the epoch
    stream: str  # stdout, stderr, traceback
    text: str
    stage: str = "call"  # start: before the function was ready
    project: str | None = None
    requests: list[str] = []  # ids of requests; of rows of a job the job's, and the row's number where it is known


class LogPage(Struct, frozen=True):
    """Entries, the oldest first. `next` goes on behind them; `is_lost`: some before them are kept no longer."""

    entries: list[LogEntry]
    next: str
    is_lost: bool = False
