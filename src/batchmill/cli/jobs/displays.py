"""How a running job is shown: a bar on a terminal, plain lines elsewhere, JSON for machines."""

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
        """Show where the job is now."""

    def say(self, text: str) -> None:
        """Tell the person who looks something, once."""

    def close(self) -> None:
        """Leave the terminal as it was. Safe to call twice."""


_DIGITS = re.compile(r"[\d.,]+")


def display_for(session: Session) -> Display:
    """The display that fits where the output goes."""
    name = "json" if session.as_json else "bar" if sys.stderr.isatty() else "lines"
    module, _, cls = DISPLAYS[name].partition(":")
    return getattr(import_module(module), cls)(session)


class LineDisplay:
    """One line on standard error when something changed, and every few seconds while rows are counted."""

    def __init__(self, session: Session, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._say = session.say
        self._monotonic = monotonic
        self._shown: tuple[object, ...] = ()
        self._figures: tuple[object, ...] = ()
        self._shown_at = 0.0

    def update(self, view: JobView) -> None:
        if view.state in _AT_REST:
            return  # the summary says it
        now = self._monotonic()
        state = (view.state, *(_DIGITS.sub("", note) for note in view.notes))  # not for new numbers alone
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
    """Every view as one JSON object on standard output; what is said goes to standard error."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def update(self, view: JobView) -> None:
        self._session.emit("view", job=view)

    def say(self, text: str) -> None:
        click.echo(text, err=True)

    def close(self) -> None:
        pass


def done(view: JobView) -> int:
    """Rows that have their outcome."""
    return view.rows_ok + view.rows_failed


def is_phase(view: JobView) -> bool:
    """It is at something before or after its rows run: `progress` says how far, not the rows."""
    return view.state in _PHASES or not view.id


def share(view: JobView) -> float | None:
    """0..1 of the present phase, or None if unknown."""
    if is_phase(view):
        return view.progress
    return min(1.0, done(view) / view.rows) if view.rows else None


def headline(view: JobView) -> str:
    """How far the job is."""
    if is_phase(view):
        return "" if view.progress is None else percent(view.progress, 1)
    if not view.rows:
        return ""
    return f"{count(done(view))} of {count(view.rows)} rows ({percent(done(view), view.rows)})"


def details(view: JobView) -> list[str]:
    """The figures of a running job that are known, each in a few words."""
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
