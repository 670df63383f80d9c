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
    """A salvage says what it read, took from a backup and rebuilt, what is left of jobs, and what is lost."""
    tables = [
        SalvagedTable("keys", 3, 2, True, from_leaves=1), SalvagedTable("files", 0, 0, True), SalvagedTable("jobs", 1),
        SalvagedTable("shards", 0, 0, True, rebuilt=7),
    ]  # fmt: skip
    report = SalvageReport(
        False, tables, "b.db", rebuilt=["job_1", "job_3"], reopened={"job_3": 5}, reduced=["job_2"], lost=["job_4"],
        moved=["lost+found/x"], damaged="damaged",
    )  # fmt: skip
    app.salvage = lambda config, progress: report
    result = call("ledger", "salvage")
    assert result.exit_code == 0
    for received in (
        "nothing could be read of files\n", "keys: some of it could not be read, 3 rows could",
        "(1 of them below damaged pages), 2 come from the backup",
        "resume job_1", "shards: nothing of it could be read, 7 were rebuilt", "job_2: it keeps only its results",
        "resume job_3` continues the job and runs 5 rows again",
        "job_4: its record could not be read, so the job is lost",
        "rows that the backup does not have and that could be neither read nor rebuilt are lost",
    ):  # fmt: skip
        assert received in result.stdout, received
    app.salvage = lambda config, progress: replace(report, backup=None)
    assert "there was no backup: rows that could be neither read nor" in call("ledger", "salvage").stdout
    app.salvage = lambda config, progress: replace(report, failed=["job_2: no plan"])
    assert call("ledger", "salvage").exit_code == 1
    app.salvage = lambda config, progress: SalvageReport(True)
    assert "nothing was changed" in call("ledger", "salvage").stdout
