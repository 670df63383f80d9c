"""The progress of a job in a Python program: a bar in a notebook, a line on a terminal, nothing elsewhere."""

from __future__ import annotations

import html
import sys
import uuid
from typing import Any, Protocol, TextIO

from batchmill.states import JobState
from batchmill.types import JobView

BAR_CHARS = 24
LINE_CHARS_MAX = 120
NOTE_CHARS_MAX = 200
CAUSES_SHOWN = 10


class Progress(Protocol):
    """Shows one job until it is closed."""

    def show(self, view: JobView) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class NoProgress:
    """Shows nothing."""

    def show(self, view: JobView) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class LineProgress:
    """One line of a terminal, which is written over for each view."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._chars = 0

    def show(self, view: JobView) -> None:
        share = done_share(view)
        filled = round(BAR_CHARS * (share or 0.0))
        self._write(f"{view.state} [{'#' * filled}{'.' * (BAR_CHARS - filled)}] {figures(view)}"[:LINE_CHARS_MAX])

    def say(self, text: str) -> None:
        self._write("")
        self._stream.write(f"\r{_plain(text)}\n")
        self._chars = 0
        self._stream.flush()

    def close(self) -> None:
        self._write("")
        self._stream.write("\r")
        self._stream.flush()

    def _write(self, text: str) -> None:
        text = _plain(text)
        self._stream.write("\r" + text.ljust(self._chars))
        self._chars = len(text)
        self._stream.flush()


class NotebookProgress:
    """A bar below a cell, which is replaced for each view. Args: display: IPython's function of this name."""

    def __init__(self, display: Any) -> None:
        self._display, self._id = display, f"batchmill-{uuid.uuid4().hex}"
        self._is_shown = False
        self._said: list[str] = []
        self._view: JobView | None = None

    def show(self, view: JobView) -> None:
        self._view = view
        self._draw()

    def say(self, text: str) -> None:
        self._said.append(text)
        self._draw()

    def close(self) -> None:
        """The last view stays below the cell."""

    def _draw(self) -> None:
        shown = Shown(self._view, self._said)
        self._display(shown, display_id=self._id, update=self._is_shown)
        self._is_shown = True


class Shown:
    """What a notebook or a terminal of IPython shows of a job."""

    def __init__(self, view: JobView | None, said: list[str]) -> None:
        self._view, self._said = view, list(said)

    def __repr__(self) -> str:
        return "; ".join([*([] if self._view is None else [f"{self._view.state}: {figures(self._view)}"]), *self._said])

    def _repr_html_(self) -> str:
        said = "".join(f"<div>{html.escape(text)}</div>" for text in self._said)
        return said + ("" if self._view is None else as_html(self._view))


def progress_of(is_wanted: bool | None) -> Progress:
    """Args: is_wanted: None: in a notebook and on a terminal."""
    if is_wanted is False:
        return NoProgress()
    if (display := _notebook_display()) is not None:
        return NotebookProgress(display)
    return LineProgress(sys.stderr) if is_wanted or sys.stderr.isatty() else NoProgress()


def _notebook_display() -> Any:
    """IPython's `display` in a notebook; None elsewhere. It is loaded already, if this is one."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    is_notebook = shell is not None and hasattr(shell, "kernel")
    return sys.modules["IPython.display"].display if is_notebook else None


def done_share(view: JobView) -> float | None:
    """The finished share of the job's phase, 0..1; None if unknown."""
    if view.state in (JobState.VALIDATING, JobState.PLANNING, JobState.FINALIZING):
        return view.progress
    return (view.rows_ok + view.rows_failed) / view.rows if view.rows else None


def figures(view: JobView) -> str:
    """The known figures of a job in one line."""
    done = view.rows_ok + view.rows_failed
    parts = [f"{done:,} of {view.rows:,} rows" if view.rows else ""]
    parts.append(f"{view.rows_failed:,} failed" if view.rows_failed else "")
    parts.append(f"{view.rows_per_s:,.0f} rows/s" if view.rows_per_s else "")
    parts.append(f"USD {view.cost:.4f}" if view.cost is not None else "")
    parts.append(f"{view.remaining_s:,.0f} s left" if view.remaining_s else "")
    return " | ".join(filter(None, parts))


def as_html(view: JobView) -> str:
    """A job as HTML: a bar, its figures, and why rows failed. No text is read as HTML."""
    share = done_share(view)
    value = "" if share is None else f' value="{share:.4f}"'
    head = f"<b>{html.escape(view.state)}</b> {html.escape(figures(view))}"
    if view.message:
        head += f"<div>{html.escape(view.message[:NOTE_CHARS_MAX])}</div>"
    causes = sorted(view.errors.items(), key=lambda item: (-item[1], item[0]))[:CAUSES_SHOWN]
    rows = "".join(
        f"<tr><td>{count:,}</td><td>{html.escape(code)}</td>"
        f"<td>{html.escape(view.error_samples.get(code, '')[:NOTE_CHARS_MAX])}</td></tr>"
        for code, count in causes
    )
    table = f"<table><tr><th>rows</th><th>error</th><th>example</th></tr>{rows}</table>" if rows else ""
    bar = f'<progress max="1"{value} style="width:24em"></progress>'
    return f'<div class="batchmill-job"><div>{bar} {head}</div><small>{html.escape(view.id)}</small>{table}</div>'


def _plain(text: str) -> str:
    """Text without what a terminal would read as commands."""
    return "".join(char if char.isprintable() else " " for char in text)
