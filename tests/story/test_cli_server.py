"""The command line at a server: the same words, the same output and exit codes as on this machine."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fakes.running_server import RunningServer, running_server
from story.test_client import CODE, CONFIG, requests, table

END_S = 60.0
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "app.py").write_text(CODE)
    with running_server(folder, CONFIG) as server:
        yield server


def environment(server: RunningServer, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHMILL_")}
    return kept | {"BATCHMILL_SERVER": server.url, "HOME": "/nonexistent"} | more


@pytest.fixture
def batchmill(server: RunningServer, tmp_path) -> Command:
    """Run a command at the server, in an empty folder."""

    def run(*words: str, piped: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        line, environ = [sys.executable, "-m", "batchmill", *map(str, words)], environment(server, **more)
        return subprocess.run(
            line, cwd=tmp_path, env=environ, input=piped, capture_output=True, text=True, timeout=END_S
        )

    return run


def job_of(result: subprocess.CompletedProcess[str]) -> str:
    return next(line.split()[1] for line in result.stderr.splitlines() if line.startswith("job job_"))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_its_results_here(batchmill: Command, tmp_path):
    """Inputs go to the server, results and errors come back beside one another, exit code and summary as always."""
    requests(tmp_path / "in.jsonl", "a", "fail", "c")
    result = batchmill("run", "in.jsonl", "--model", "upper", "-o", "out.jsonl", "--label", "a=b", "--priority", "3")
    assert result.returncode == 3, result.stderr
    assert f"results   {tmp_path}/out.jsonl" in result.stdout and "ValueError: told to fail" in result.stdout
    assert [row["custom_id"] for row in lines(tmp_path / "out.jsonl")] == ["c0", "c2"]
    assert [row["custom_id"] for row in lines(tmp_path / "out.errors.jsonl")] == ["c1"]
    again = batchmill("run", "in.jsonl", "--model", "upper", "-o", "out.jsonl")
    assert again.returncode == 2 and "--overwrite" in again.stderr
    assert "with --update: 1 row to run, 2 to take over" in again.stderr
    over = batchmill("run", "in.jsonl", "--model", "upper", "-o", "out.jsonl", "--overwrite")
    assert over.returncode == 3 and len(lines(tmp_path / "out.jsonl")) == 2


def test_results_come_back_together(batchmill: Command, tmp_path):
    """With --together all rows come back in one file, in the order of the input."""
    requests(tmp_path / "in.jsonl", "a", "fail", "c")
    result = batchmill("run", "in.jsonl", "--model", "upper", "--together", "-o", "out.jsonl")
    assert result.returncode == 3, result.stderr
    assert f"results   {tmp_path}/out.jsonl" in result.stdout and "errors " not in result.stdout
    found = lines(tmp_path / "out.jsonl")
    assert [row["custom_id"] for row in found] == ["c0", "c1", "c2"]
    assert found[1]["response"] is None and found[1]["error"]["code"] == "ValueError"
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_rows_go_through_a_pipe(batchmill: Command, tmp_path):
    """Standard input goes to the server, and all rows come back on standard output in their order."""
    requests(tmp_path / "in.jsonl", "a", "fail", "c")
    words = ("run", "-", "--model", "upper", "-o", "-", "--output-format", "csv")
    result = batchmill(*words, piped=(tmp_path / "in.jsonl").read_text())
    assert result.stdout == "custom_id,output,error\nc0,A,\nc1,,ValueError: told to fail\nc2,C,\n", result.stderr
    assert result.returncode == 3 and "  failed    1" in result.stderr


def test_results_have_the_form_that_one_wants(batchmill: Command, tmp_path):
    """Rows of a job at a server are chosen and written as those of this machine, with their requests beside."""
    requests(tmp_path / "in.jsonl", "a", "fail", "c")
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress((tmp_path / "in.jsonl").read_bytes()))
    for name in ("in.jsonl", "in.jsonl.gz"):
        job = job_of(batchmill("run", name, "--model", "upper", "--format", "openai"))
        printed = batchmill("results", job, "--join", "--columns", "custom_id,output,error", "--output-format", "csv")
        assert printed.stdout.splitlines() == [
            "method,url,body,custom_id,output,error",
            'POST,/v1/x,"{""text"": ""a"", ""model"": ""upper""}",c0,A,',
            'POST,/v1/x,"{""text"": ""fail"", ""model"": ""upper""}",c1,,ValueError: told to fail',
            'POST,/v1/x,"{""text"": ""c"", ""model"": ""upper""}",c2,C,',
        ], printed.stderr
    failed = batchmill("results", job, "--partial", "--failed", "--columns", "custom_id", "-o", "f.parquet")
    assert "1 of 3 rows have failed so far" in failed.stderr
    assert pq.read_table(tmp_path / "f.parquet").to_pylist() == [{"custom_id": "c1"}]


@pytest.mark.parametrize("name", ["out.csv", "out.parquet", "out.jsonl.gz"])
def test_a_table_comes_back_as_its_name_says(batchmill: Command, tmp_path, name):
    """The name of the output decides how a server writes it."""
    (tmp_path / "in.csv").write_text("text\na\nb\n")
    result = batchmill("run", "in.csv", "--model", "upper", "-o", name)
    assert result.returncode == 0, result.stderr
    magic = {"out.csv": b"text,output", "out.parquet": b"PAR1", "out.jsonl.gz": b"\x1f\x8b"}
    assert (tmp_path / name).read_bytes().startswith(magic[name])


def test_jobs_are_looked_at_by_their_first_letters(batchmill: Command, tmp_path):
    """jobs, show, results and explain find a job of the server, and name the files as they were called here."""
    table(tmp_path / "in.jsonl", "a", "fail")
    job = job_of(batchmill("run", "in.jsonl", "--model", "upper"))
    assert job in batchmill("jobs").stdout
    shown = batchmill("show", job[:12])
    assert shown.returncode == 0 and "in.jsonl" in shown.stdout and "failed    1" in shown.stdout
    results = batchmill("results", job)
    assert [json.loads(line)["output"] for line in results.stdout.splitlines()] == ["A", None]
    done = batchmill("results", job, "--partial", "-o", "so-far.jsonl")
    assert done.returncode == 0 and len(lines(tmp_path / "so-far.jsonl")) == 2 and "2 of 2 rows" in done.stderr
    assert batchmill("results", job, "--errors").returncode == 2
    where = json.loads(batchmill("results", job, "--json").stdout)
    assert where["output"].startswith("file-")
    assert "nothing holds it up" in batchmill("explain", job).stdout
    assert batchmill("ledger", "verify", job).stdout.startswith(f"ledger of job {job}: sound")
    assert batchmill("show", "job_zz").returncode == 2


def test_steering_ends_as_on_this_machine(batchmill: Command, server: RunningServer, tmp_path):
    """retry runs what failed; amend, pause and cancel of an ended job are refused with the same exit code."""
    requests(tmp_path / "in.jsonl", "a", "fail")
    job = job_of(batchmill("run", "in.jsonl", "--model", "upper"))
    (server.folder / "mended").touch()
    try:
        retried = batchmill("retry", job)
    finally:
        (server.folder / "mended").unlink()
    assert retried.returncode == 0 and "ok        2" in retried.stdout
    for words in (("amend", job, "--priority", "1"), ("pause", job), ("cancel", job), ("resume", job)):
        assert batchmill(*words).returncode == 2


def test_looking_leaves_nothing_there(batchmill: Command, server: RunningServer, tmp_path):
    """validate, plan and estimate name the lines of the file as it lies here, and leave no upload."""
    before = sorted(path.name for path in (server.data_dir / "files").iterdir())
    path = requests(tmp_path / "in.jsonl", "a", "b")
    with path.open("a") as file:
        file.write("no json\n")
    bad = batchmill("validate", "in.jsonl", "--model", "upper")
    assert bad.returncode == 2 and bad.stderr.startswith("in.jsonl:3: invalid_json: ")
    requests(path, "a", "b")
    assert batchmill("validate", "in.jsonl", "--model", "upper").stdout.startswith("2 OpenAI batch rows")
    assert batchmill("plan", "in.jsonl", "--model", "upper").stdout.startswith("2 rows: 2 run")
    assert "input tokens" in batchmill("estimate", "in.jsonl", "--model", "upper").stdout
    assert sorted(path.name for path in (server.data_dir / "files").iterdir()) == before


def test_what_a_server_refuses_has_its_exit_code(batchmill: Command, tmp_path):
    """An unknown model and bad rows are bad input; nothing is left in the way of a second try."""
    requests(tmp_path / "in.jsonl", "a")
    unknown = batchmill("run", "in.jsonl", "--model", "uper", "-o", "out.jsonl")
    assert unknown.returncode == 2 and "did you mean 'upper'" in unknown.stderr
    (tmp_path / "bad.jsonl").write_text("[]\n")
    bad = batchmill("run", "bad.jsonl", "--model", "upper", "--format", "openai", "-o", "out.jsonl")
    assert bad.returncode == 2 and "bad.jsonl:1: " in bad.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_server_that_is_not_there_is_told(batchmill: Command, tmp_path):
    """Without an answer a command ends with 1 and names the address."""
    requests(tmp_path / "in.jsonl", "a")
    result = batchmill("validate", "in.jsonl", "--model", "upper", "--server", "http://127.0.0.1:1")
    assert result.returncode == 1 and "http://127.0.0.1:1 cannot be reached" in result.stderr


def test_ctrl_c_leaves_the_job_running(batchmill: Command, server: RunningServer, tmp_path):
    """The command ends with 130 and says how to come back; the job ends at the server all the same."""
    table(tmp_path / "in.jsonl", "now", "gate-cli")
    words = [sys.executable, "-m", "batchmill", "run", "in.jsonl", "--model", "gated", "-o", "out.jsonl"]
    running = subprocess.Popen(
        words, cwd=tmp_path, env=environment(server), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    said = ""
    assert running.stderr is not None
    for line in running.stderr:
        said += line
        if line.startswith("running: 1 of 2"):
            running.send_signal(signal.SIGINT)
            break
    rest = running.communicate(timeout=END_S)
    assert running.returncode == 130, said + rest[1]
    job = next(line.split()[1] for line in said.splitlines() if line.startswith("job job_"))
    assert "the job continues on the server" in rest[1] and f"batchmill resume {job}" in rest[1]
    assert "running" in batchmill("show", job).stdout
    assert batchmill("amend", job, "--priority", "5").stdout.count("priority  5") == 1
    words = [sys.executable, "-m", "batchmill", "resume", job]
    followed = subprocess.Popen(
        words, cwd=tmp_path, env=environment(server), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert followed.stderr is not None and job in followed.stderr.readline()
    (server.folder / "gate-cli").touch()
    followed.communicate(timeout=END_S)
    assert followed.returncode == 0
    assert batchmill("results", job, "-o", "out.jsonl").returncode == 0
    assert [row["output"] for row in lines(tmp_path / "out.jsonl")] == ["now", "gate-cli"]


def test_a_job_is_cancelled_from_here(batchmill: Command, server: RunningServer, tmp_path):
    """cancel waits until the job has ended, and finished rows can be fetched."""
    requests(tmp_path / "in.jsonl", "now", "gate-cancel", model="gated")
    words = [sys.executable, "-m", "batchmill", "run", "in.jsonl", "--model", "gated", "-o", "out.jsonl"]
    running = subprocess.Popen(
        words, cwd=tmp_path, env=environment(server), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert running.stderr is not None
    job = running.stderr.readline().split()[1]
    for line in running.stderr:
        if line.startswith("running: 1 of 2"):
            break
    (server.folder / "gate-cancel").touch()
    result = batchmill("cancel", job)
    assert result.returncode in (0, 2), result.stderr  # 2: the row that was let go was faster
    running.communicate(timeout=END_S)
    assert running.returncode in (0, 3) and (tmp_path / "out.jsonl").exists()


def test_keys_are_made_over_the_wire(tmp_path):
    """An admin's key makes others of its project; a key is read from the variable that is named."""
    (tmp_path / "app.py").write_text(CODE)
    with running_server(tmp_path, CONFIG) as server:

        def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
            line = [sys.executable, "-m", "batchmill", *words]
            return subprocess.run(
                line, cwd=tmp_path, env=environment(server, **more), capture_output=True, text=True, timeout=END_S
            )

        admin = run("keys", "create", "--name", "root", "--scope", "admin").stdout.strip()
        assert admin.startswith("bm_")
        refused = run("models")
        assert refused.returncode == 1 and "key" in refused.stderr
        assert "upper" in run("models", BATCHMILL_API_KEY=admin).stdout
        made = run("keys", "create", "--name", "look", "--scope", "read", "--api-key-env", "MINE", MINE=admin)
        assert run("models", BATCHMILL_API_KEY=made.stdout.strip()).returncode == 0
        assert "look" in run("keys", "list", BATCHMILL_API_KEY=admin).stdout
        key_id = made.stdout.split("_")[1]
        assert run("keys", "revoke", key_id, BATCHMILL_API_KEY=admin).returncode == 0
        assert run("models", BATCHMILL_API_KEY=made.stdout.strip()).returncode == 1
