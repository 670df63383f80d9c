"""What a running job looks like."""

import io

from rich.console import Console

from batchmill.cli.jobs.bar_display import BarDisplay
from batchmill.cli.jobs.displays import LINE_EVERY_S, LineDisplay
from batchmill.cli.session import Session
from batchmill.types import Usage


class Listener(Session):
    """Keeps what is said."""

    def __init__(self):
        super().__init__()
        self.said = []

    def say(self, text):
        self.said.append(text)


def running(view, **fields):
    return view(
        rows=10_000, rows_failed=12, rows_per_s=512.3, input_tokens_per_s=40_200, output_tokens_per_s=5_100,
        usage=Usage(1000, 720, 5), cost=1.234, remaining_s=75.0, in_flight=128,
        **{"rows_ok": 1222, "notes": ["tuning\x1b[2J"], **fields},
    )  # fmt: skip


def test_lines_come_on_change_and_every_few_seconds(view):
    """A new state or note is a line at once; further rows are one every few seconds; nothing new is none."""
    session, now = Listener(), [100.0]
    display = LineDisplay(session, monotonic=lambda: now[0])
    display.update(view(state="validating"))
    display.update(view(state="validating", progress=0.4))
    display.update(running(view))
    display.update(running(view, rows_ok=2000))
    now[0] += LINE_EVERY_S
    display.update(running(view, rows_ok=3000))
    now[0] += LINE_EVERY_S
    display.update(running(view, rows_ok=3000))
    display.update(running(view, rows_ok=3000, notes=["waiting"]))
    assert [line.split(" rows")[0] for line in session.said] == [
        "validating",
        "running: 1,234 of 10,000",
        "running: 3,012 of 10,000",
        "running: 3,012 of 10,000",
    ]
    assert session.said[1] == (
        "running: 1,234 of 10,000 rows (12 %) | 12 failed | 512 rows/s | tokens/s 40.2k in, 5,100 out | cache 72 % | "
        "$1.23 | 128 in flight | 1:15 min left | tuning"
    )


def test_the_bar_shows_all_figures_and_no_markup(view):
    """On a terminal the bar has the figures and the notes, and nothing foreign steers it."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=140, color_system=None, markup=False, highlight=False)
    display = BarDisplay(Session(), console)
    display.update(view(state="validating", progress=0.41))
    display.update(running(view, notes=["[bold]starting\x1b]0;title\x07 vLLM[/bold]"]))
    display.say("pausing")
    display.close()
    display.close()
    text = out.getvalue()
    for part in ("41 %", "1,234 of 10,000 rows (12 %)", "12 failed", "512 rows/s", "40.2k in", "cache 72 %", "$1.23"):
        assert part in text
    assert "[bold]starting vLLM[/bold]" in text and "title" not in text
    assert "1:15 min left" in text and "pausing" in text
