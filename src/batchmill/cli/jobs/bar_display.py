"""Shows a running job as a progress bar on a terminal. The only display that imports rich."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from batchmill.cli.jobs.displays import NOTES_MAX, details, headline, share
from batchmill.cli.session import Session
from batchmill.cli.text import clean
from batchmill.types import JobView


class BarDisplay:
    """Two lines and the engines' notes, redrawn for each view. No text is read as markup."""

    def __init__(self, session: Session, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, markup=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def update(self, view: JobView) -> None:
        self._live.update(draw(view), refresh=True)

    def say(self, text: str) -> None:
        self._console.print(Text(clean(text, lines=True)))

    def close(self) -> None:
        self._live.stop()


def draw(view: JobView) -> Group:
    """Render one view."""
    part = share(view)
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(total=1.0, completed=part or 0.0, pulse=part is None)
    line.add_row(Text(clean(view.state), style="bold"), bar, Text(headline(view)))
    rest = [Text(" | ".join(details(view)))]
    rest += [Text(clean(note), style="dim", no_wrap=True, overflow="ellipsis") for note in view.notes[:NOTES_MAX]]
    return Group(line, *(text for text in rest if text))
