"""`batchmill ledger`."""

import json

from msgspec.structs import replace

from batchmill.types import SalvagedTable, SalvageReport


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
    assert "3 rows found that the ledger lacked" in call("ledger", "rebuild", "job_1").stdout


def test_rebuild_says_what_it_lost(app, call, view):
    """A rebuild names what could not be read; that is not a fault of the ledger it made."""
    app.jobs.add(view())
    app.jobs.report = replace(app.jobs.report, reopened=5, damaged=["w1-0001.seg, bytes 65 to 300: \x07bytes"])
    result = call("ledger", "rebuild", "job_1")
    assert result.exit_code == 0 and "5 rows cannot be read; resuming the job runs them again" in result.stdout
    assert "bytes 65 to 300" in result.stderr


def test_salvage_says_what_it_made(app, call, tmp_path):
    """A salvage names what could not be read, what it took from a backup, and which jobs it could not have."""
    tables = [SalvagedTable("keys", 3, 2, True), SalvagedTable("files", 0, 0, True), SalvagedTable("jobs", 1)]
    report = SalvageReport(False, tables, "b.db", ["job_1"], [], ["lost+found/x"], "damaged")
    app.salvage = lambda config, progress: report
    result = call("ledger", "salvage")
    assert result.exit_code == 0
    for received in ("nothing could be read of files", "keys: some of it", "2 come from the backup", "resume job_1"):
        assert received in result.stdout
    app.salvage = lambda config, progress: replace(report, failed=["job_2: no plan"])
    assert call("ledger", "salvage").exit_code == 1
    app.salvage = lambda config, progress: SalvageReport(True)
    assert "nothing was changed" in call("ledger", "salvage").stdout
