"""The real command line in processes of its own, over a Python function."""

import json
import os
import signal
import subprocess
import sys

import pytest

ROWS = 3000
MAIN = ("-m", "batchmill")
FUNCTION = """
import os, pathlib, time
gate = pathlib.Path(__file__).parent / "gate"
def label(number):
    if number == 7: raise ValueError("seven")
    return number * 2
def gated(number):
    if number >= 5 and not gate.exists(): time.sleep(0.05)
    return number
def device(number):
    return os.environ["CUDA_VISIBLE_DEVICES"]
"""


@pytest.fixture
def work(tmp_path):
    """A folder with a table and functions, in which `work(...)` starts the command line."""
    (tmp_path / "app.py").write_text(FUNCTION)
    (tmp_path / "in.jsonl").write_text("".join(f'{{"number":{n}}}\n' for n in range(ROWS)))
    started = []

    def start(*args):
        environ = {**os.environ, "BATCHMILL_DATA_DIR": str(tmp_path / "data")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, *MAIN, *args], cwd=tmp_path, env=environ, **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def end(process):
    """Exit code, standard output and standard error."""
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def wait_for(process, word):
    """Read what a process says until a line begins with `word`."""
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith(word):
            return
    raise AssertionError("".join(said) + process.stdout.read())


def outputs(path):
    return [json.loads(line)["output"] for line in path.read_text().splitlines()]


def test_a_run_accounts_for_every_row(work, tmp_path):
    """A run writes each row once in input order, names what failed, and is not run twice."""
    command = ("run", "in.jsonl", "--model", "function:app.py:label", "-o", "out.jsonl", "--workers", "2")
    code, out, err = end(work(*command))
    assert code == 3, err
    assert "1  ValueError: seven" in out and f"results   {tmp_path}/out.jsonl" in out
    assert outputs(tmp_path / "out.jsonl") == [None if n == 7 else n * 2 for n in range(ROWS)]
    code, _, err = end(work(*command))
    assert code == 3 and "runs its failed rows, --overwrite runs it again" in err


def test_each_worker_has_gpus_of_its_own(work, tmp_path, monkeypatch):
    """`--gpus` shares out the visible devices; more than there are is said, and runs nothing."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    command = ("run", "in.jsonl", "--model", "function:app.py:device", "-o", "out.jsonl", "--workers", "2", "--gpus")
    code, _, err = end(work(*command, "1"))
    assert code == 0, err
    assert set(outputs(tmp_path / "out.jsonl")) <= {"4", "6"}
    code, _, err = end(work(*command, "3", "--restart", "--overwrite"))
    assert code == 1 and "need 6 GPUs and the machine has 2 GPUs" in err


def test_bad_rows_stop_a_run_before_it_begins(work, tmp_path):
    """With a bad row nothing runs, the line is named, and the exit code is 2."""
    (tmp_path / "bad.jsonl").write_text('{"number":1}\nnot json\n')
    code, _, err = end(work("run", "bad.jsonl", "--model", "function:app.py:label", "-o", "out.jsonl"))
    assert code == 2 and "bad.jsonl:2: invalid_json: " in err
    assert not (tmp_path / "out.jsonl").exists()


def test_a_function_that_does_not_load_could_not_run(work, tmp_path):
    """Code that cannot be imported is exit code 1 with its traceback."""
    (tmp_path / "app.py").write_text("import nothing_there\ndef label(number): ...")
    code, _, err = end(work("run", "in.jsonl", "--model", "function:app.py:label"))
    assert code == 1 and "ModuleNotFoundError" in err and "to go on:" in err


def test_an_interrupted_run_goes_on(work, tmp_path):
    """Ctrl-C pauses with exit code 130; the same command finishes the rest."""
    command = ("run", "in.jsonl", "--model", "function:app.py:gated", "-o", "out.jsonl")
    first = work(*command)
    wait_for(first, "running")
    first.send_signal(signal.SIGINT)
    code, out, err = end(first)
    assert code == 130 and "paused" in out and "to go on: batchmill resume" in err
    assert not (tmp_path / "out.jsonl").exists()
    (tmp_path / "gate").touch()
    code, _, err = end(work(*command))
    assert code == 0 and "resuming job" in err
    assert outputs(tmp_path / "out.jsonl") == list(range(ROWS))


def test_other_commands_work_beside_a_run(work, tmp_path):
    """While one process runs a job, others list, show, read and pause it, and one of them takes it up again."""
    running = work("run", "in.jsonl", "--model", "function:app.py:gated", "-o", "out.jsonl")
    wait_for(running, "running")
    code, out, _ = end(work("jobs", "--json"))
    job = json.loads(out)["job"]
    assert code == 0 and job["state"] == "running"
    code, out, err = end(work("results", job["id"], "--partial"))
    numbers = [json.loads(line)["output"] for line in out.splitlines()]
    assert code == 0 and numbers == sorted(set(numbers)) and f"of {ROWS:,} rows are finished" in err
    assert end(work("results", job["id"]))[0] == 2
    code, out, _ = end(work("pause", job["id"]))
    assert code == 0 and "paused" in out
    assert end(running)[0] == 4
    (tmp_path / "gate").touch()
    code, out, err = end(work("resume", job["id"]))
    assert code == 0, err
    code, out, _ = end(work("results", job["id"]))
    assert code == 0 and out == (tmp_path / "out.jsonl").read_text()
    assert outputs(tmp_path / "out.jsonl") == list(range(ROWS))
    assert end(work("ledger", "verify", job["id"]))[0] == 0
