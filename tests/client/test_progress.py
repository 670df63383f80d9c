"""The progress of a job in a program."""

import io

from batchmill.client.progress import LineProgress, NotebookProgress, as_html, figures
from batchmill.types import JobView

VIEW = JobView("job_1", "running", rows=10, rows_ok=4, rows_failed=1, rows_per_s=1234.0, errors={"<b>": 1},
               error_samples={"<b>": "<script>"})  # fmt: skip


def test_a_line_is_written_over():
    """Each view replaces the last one, whatever its length; a message stays."""
    stream = io.StringIO()
    line = LineProgress(stream)
    line.show(VIEW)
    line.say("paused\x1b[31m")
    line.show(JobView("job_1", "queued"))
    line.close()
    assert figures(VIEW) == "5 of 10 rows | 1 failed | 1,234 rows/s"
    assert f"[############............] {figures(VIEW)}" in stream.getvalue()
    assert "\rpaused [31m\n" in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_a_notebook_gets_one_display():
    """It is shown once and updated then; nothing of a row is markup."""
    calls = []
    bar = NotebookProgress(lambda shown, **how: calls.append((shown, how)))
    bar.show(VIEW)
    bar.say("pausing <now>")
    (first, how), (second, again) = calls
    assert not how["update"] and again["update"] and how["display_id"] == again["display_id"]
    assert 'value="0.5000"' in first._repr_html_() and "pausing &lt;now&gt;" in second._repr_html_()
    assert "<script>" not in as_html(VIEW) and "&lt;script&gt;" in as_html(VIEW)
    assert repr(second) == f"running: {figures(VIEW)}; pausing <now>"
