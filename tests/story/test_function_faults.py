"""Whatever a deployed function does, its caller hears one clear error and the next call works; a job loses one row."""

import json
import subprocess
import sys

import httpx2
import pytest
from story.running_server import RunningServer

FUNCTIONS = '''
import ctypes
import os
import signal
import threading

kept = []


def behave(how: str = "well", n: int = 0):
    """Do what it is told, and double a number when it is told to do well."""
    if how == "exit":
        os._exit(3)
    if how == "hang":
        threading.Event().wait()
    if how == "leak":
        while True:
            kept.append(bytearray(16_000_000))  # refused before it is touched: no page takes its time
    if how == "close":
        os.closerange(3, 1024)
    if how == "print":
        print("noise", flush=True)
        os.write(1, b"\\xff\\x00 more noise")
    if how == "fork" and os.fork() == 0:
        return "the child speaks"
    if how == "junk":
        return os
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "worker":
        os.kill(os.getppid(), signal.SIGKILL)
        threading.Event().wait()
    if how == "segfault":
        ctypes.string_at(0)
    if how == "raise":
        raise ValueError(f"{n} is no good")
    if how == "leave":
        raise SystemExit(4)
    return 2 * n


def once(path: str):
    """Die in the first call, answer in the second."""
    if not os.path.exists(path):
        open(path, "w").close()
        os._exit(1)
    return "answered"
'''


def batchmill(folder, *words):
    """Run a command on the server's data directory, beside the server where there is one."""
    return subprocess.run(
        [sys.executable, "-m", "batchmill", *words, "--data-dir", str(folder / "data")],
        cwd=folder, capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def deploy(folder, *words):
    done = batchmill(folder, "deploy", *words)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    (folder / "batchmill.toml").write_text("")
    (folder / "functions.py").write_text(FUNCTIONS)
    deploy(folder, "functions.py:behave", "--name", "behave", "--timeout", "3s", "--memory", "512MB")
    deploy(folder, "functions.py:once", "--name", "twice", "--idempotent")
    with RunningServer(folder) as server:
        yield server


def ask(server, data, name="behave"):
    return httpx2.post(f"{server.url}/v1/{name}/latest", json={"data": data}, timeout=60)


BAD_WAYS = {
    "exit": "WorkerCrashed",
    "hang": "TimeoutError",
    "leak": "Memory",
    "close": "",
    "junk": "",
    "kill": "WorkerCrashed",
    "worker": "WorkerCrashed",
    "segfault": "WorkerCrashed",
    "raise": "ValueError: 0 is no good",
    "leave": "SystemExit",
}


@pytest.mark.parametrize("how", BAD_WAYS)
def test_a_function_that_does_ill_gives_one_clear_error_and_the_next_call_works(server, how):
    """The reply is an error that a client does not send again, and the function answers at once afterwards."""
    reply = ask(server, {"how": how})
    assert 400 <= reply.status_code < 500 and reply.status_code != 429, reply.text
    error = reply.json()["error"]
    assert BAD_WAYS[how] in error.rpartition("\n")[2], error
    assert ask(server, {"n": 21}).json() == {"data": 42}


@pytest.mark.parametrize("how", ["print", "fork"])
def test_a_function_that_prints_or_forks_answers_as_if_it_had_not(server, how):
    """Its own output and its children reach nobody who asked."""
    assert ask(server, {"how": how, "n": 4}).json() == {"data": 8}
    assert ask(server, {"n": 21}).json() == {"data": 42}


def test_an_idempotent_function_is_called_again_when_its_process_died(server):
    """Nobody but the log hears of the first death."""
    assert ask(server, str(server.folder / "marker"), name="twice").json() == {"data": "answered"}


def test_a_row_that_segfaults_costs_a_job_that_row_alone(server):
    """The row gets an error, the others their results, and the job completes."""
    rows = [{"how": "segfault" if n == 57 else "well", "n": n} for n in range(100)]
    (server.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = batchmill(server.folder, "run", "rows.jsonl", "--model", "behave", "-o", "results.jsonl")
    assert done.returncode == 3, done.stderr
    results = [json.loads(line) for line in (server.folder / "results.jsonl").read_text().splitlines()]
    failed = [result for result in results if result["error"] is not None]
    assert [result["n"] for result in failed] == [57] and failed[0]["error"].startswith("worker_crashed")
    assert all(result["output"] == 2 * result["n"] for result in results if result["n"] != 57)
