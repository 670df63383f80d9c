"""Displays of a running job: a bar on a terminal, plain lines elsewhere, JSON for programs."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Protocol

import click

from batchmill.cli.session import Session
from batchmill.cli.text import clean, count, duration, money, percent, short
from batchmill.states import JobState
from batchmill.types import JobView

LINE_EVERY_S = 5.0
NOTES_MAX = 4

DISPLAYS = {
    "bar": "batchmill.cli.jobs.bar_display:BarDisplay",  # the only one that imports rich
    "lines": "batchmill.cli.jobs.displays:LineDisplay",
    "json": "batchmill.cli.jobs.displays:JsonDisplay",
}


class Display(Protocol):
    """Shows one job while it runs."""

    def update(self, view: JobView) -> None:
        """Show the current state of the job."""

    def say(self, text: str) -> None:
        """Print a message to the user."""

    def close(self) -> None:
        """Leave the terminal as it was. Safe to call twice."""


_DIGITS = re.compile(r"[\d.,]+")


def display_for(session: Session) -> Display:
    """The display for the kind of output."""
    name = "json" if session.as_json else "bar" if sys.stderr.isatty() else "lines"
    module, _, cls = DISPLAYS[name].partition(":")
    return getattr(import_module(module), cls)(session)


class LineDisplay:
    """Prints one line on standard error when the state changes, and every few seconds while figures change."""

    def __init__(self, session: Session, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._say = session.say
        self._monotonic = monotonic
        self._shown: tuple[object, ...] = ()
        self._figures: tuple[object, ...] = ()
        self._shown_at = 0.0

    def update(self, view: JobView) -> None:
        if view.state in _AT_REST:
            return  # the summary shows it
        now = self._monotonic()
        # Changed numbers in a note are not a new state.
        state = (view.state, *(_DIGITS.sub("", note) for note in view.notes))
        figures = (view.rows_ok, view.rows_failed, view.progress, view.notes)
        is_due = now - self._shown_at >= LINE_EVERY_S and figures != self._figures
        if state == self._shown and not is_due:
            return
        self._shown, self._figures, self._shown_at = state, figures, now
        parts = [headline(view), *details(view), *(clean(note) for note in view.notes[:NOTES_MAX])]
        self._say(f"{clean(view.state)}: {' | '.join(part for part in parts if part)}".rstrip(": "))

    def say(self, text: str) -> None:
        self._say(text)

    def close(self) -> None:
        pass


class JsonDisplay:
    """Prints every view as one JSON object on standard output; messages go to standard error."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def update(self, view: JobView) -> None:
        self._session.emit("view", job=view)

    def say(self, text: str) -> None:
        click.echo(text, err=True)

    def close(self) -> None:
        pass


def done(view: JobView) -> int:
    """The number of finished rows, ok or failed."""
    return view.rows_ok + view.rows_failed


def is_phase(view: JobView) -> bool:
    """Whether the job is in a phase before or after its rows run, where `progress` counts, not rows."""
    return view.state in _PHASES or not view.id


def share(view: JobView) -> float | None:
    """The finished share of the current phase, 0..1; None if unknown."""
    if is_phase(view):
        return view.progress
    rows = rows_to_run(view)
    return min(1.0, done(view) / rows) if rows else None


def rows_to_run(view: JobView) -> int:
    """The rows before the job ends, or pauses after its sample, as far as known."""
    if view.sample is None:
        return view.rows
    return min(view.rows, view.sample.rows + view.rows_rejected)


def headline(view: JobView) -> str:
    """The progress of the job in words."""
    if is_phase(view):
        return "" if view.progress is None else percent(view.progress, 1)
    if not view.rows:
        return ""
    rows = rows_to_run(view)
    what = "rows" if rows == view.rows else f"rows of a sample of {count(view.rows)}"
    return f"{count(min(done(view), rows))} of {count(rows)} {what} ({percent(min(done(view), rows), rows)})"


def details(view: JobView) -> list[str]:
    """The known figures of a running job, each in a few words."""
    if is_phase(view):
        return []
    parts = [f"{count(view.rows_failed)} failed" if view.rows_failed else ""]
    if view.rows_per_s is not None:
        parts.append(f"{short(view.rows_per_s)} rows/s")
    if view.input_tokens_per_s or view.output_tokens_per_s:
        into, out = view.input_tokens_per_s or 0.0, view.output_tokens_per_s or 0.0
        parts.append(f"tokens/s {short(into)} in, {short(out)} out")
    if view.usage.cached_tokens:
        parts.append(f"cache {percent(view.usage.cached_tokens, view.usage.input_tokens)}")
    if view.cost is not None:
        parts.append(money(view.cost))
    if view.in_flight:
        parts.append(f"{count(view.in_flight)} in flight")
    if view.remaining_s is not None:
        parts.append(f"{duration(view.remaining_s)} left")
    return [part for part in parts if part]


_PHASES = (JobState.VALIDATING, JobState.PLANNING, JobState.FINALIZING)
_AT_REST = (JobState.PAUSED, JobState.COMPLETED, JobState.CANCELLED, JobState.EXPIRED, JobState.FAILED)
