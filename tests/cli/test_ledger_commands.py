"""`batchmill ledger`."""

import json

from msgspec.structs import replace


def test_a_sound_ledger_is_said_to_be(app, call, view):
    """A ledger without findings is exit code 0, with its figures."""
    app.jobs.add(view())
    result = call("ledger", "verify", "job_1")
    assert result.exit_code == 0
    assert result.stdout == "ledger of job job_1: sound\n  10 of 10 rows done in 2 commits, 1 segment, 2.0 kB\n"


def test_a_broken_ledger_lists_what_is_broken(app, call, view):
    """Findings are listed, and the exit code is 1."""
    app.jobs.add(view())
    app.jobs.report = replace(app.jobs.report, broken=["shard 3 \x07overlaps"])
    result = call("ledger", "verify", "job_1")
    assert result.exit_code == 1 and "broken" in result.stdout and "shard 3  overlaps" in result.stderr
    assert json.loads(call("ledger", "verify", "job_1", "--json").stdout)["report"]["broken"]


def test_rebuild_says_what_it_found(app, call, view):
    """A rebuild reports the rows that it found."""
    app.jobs.add(view())
    assert "3 rows found that the ledger did not know" in call("ledger", "rebuild", "job_1").stdout


def test_rebuild_says_what_it_lost(app, call, view):
    """A rebuild names what could not be read; that is no fault of the ledger it made."""
    app.jobs.add(view())
    app.jobs.report = replace(app.jobs.report, reopened=5, damaged=["w1-0001.seg, bytes 65 to 300: \x07bytes"])
    result = call("ledger", "rebuild", "job_1")
    assert result.exit_code == 0 and "5 rows cannot be read; resuming the job runs them again" in result.stdout
    assert "bytes 65 to 300" in result.stderr
