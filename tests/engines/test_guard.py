"""The guard's own parts: who a process is, what belongs to an engine, what a record may do."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from batchmill.engines.llm import guard


@pytest.fixture
def sleeper():
    """Start a process that lives until it is killed."""
    started = []

    def start(**env: str) -> subprocess.Popen:
        code = "import sys, time; print('up', flush=True); time.sleep(1000)"
        process = subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, **env}, stdout=subprocess.PIPE, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def record(process, **changes):
    return {
        "marker": "m1",
        "server_pid": process.pid,
        "server_start": guard.start_time(process.pid),
        "boot_id": guard.boot_id(),
        **changes,
    }


def is_killed(process) -> bool:
    """Whether the process was killed: it is signalled at once or not at all."""
    with open(f"/proc/{process.pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] == "Z"


def test_a_process_is_named_by_its_start(sleeper):
    """A live process has one start time; one that is dead, reaped or not, has none."""
    process = sleeper()
    started = guard.start_time(process.pid)
    assert started is not None
    assert guard.start_time(process.pid) == started
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert guard.start_time(process.pid) is None
    process.wait()
    assert guard.start_time(process.pid) is None


def test_the_marked_are_found_and_nobody_else(sleeper):
    """Only processes with exactly this marker in their environment belong to an engine."""
    mine, other = sleeper(BATCHMILL_ENGINE="m1"), sleeper(BATCHMILL_ENGINE="m12")
    assert guard.find_marked("m1") == [mine.pid]
    assert guard.find_marked("m12") == [other.pid]


def test_descendants_in_other_sessions_are_found(sleeper):
    """A child that leaves the session is still below us."""
    process = sleeper()
    assert process.pid in guard.descendants(os.getpid())
    assert guard.descendants(process.pid) == []


def test_end_left_kills_the_server_and_the_marked(sleeper, tmp_path):
    """What a record names is killed, what carries its marker too, and its files go."""
    server, orphan = sleeper(), sleeper(BATCHMILL_ENGINE="m1")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert guard.end_leftovers(record(server, scratch=str(scratch))) == []
    assert server.wait() == orphan.wait() == -9
    assert not scratch.exists()


@pytest.mark.parametrize(
    "changes", [{"server_start": 1}, {"boot_id": "another boot"}, {"marker": ""}, {"server_pid": None}]
)
def test_a_reused_process_id_is_left_alone(sleeper, changes):
    """A record of another start, another boot or no engine at all kills nobody."""
    stranger = sleeper()
    guard.end_leftovers(record(stranger, **changes))
    assert not is_killed(stranger)


def test_sweep_survives_records_that_are_no_records(tmp_path):
    """A slot whose writer was killed half-way, and a foreign file, do not stop the next start."""
    for number, text in enumerate(["", "{", "[]", '"x"', "{}"]):
        (tmp_path / f"engine-{number}.pid").write_text(text)
    assert guard.sweep(tmp_path) == 0
    assert guard.sweep(tmp_path / "nowhere") == 0


def test_sweep_passes_over_a_slot_that_is_locked_by_the_living(tmp_path):
    """As long as its worker lives, a slot is nobody else's to sweep."""
    path = tmp_path / "engine-0.pid"
    own = {"marker": "m1", "worker_pid": os.getpid(), "worker_start": guard.start_time(os.getpid())}
    path.write_text(json.dumps(own))
    holder = os.open(path, os.O_RDWR)
    assert guard.try_lock(holder)
    assert guard.sweep(tmp_path) == 0
    assert json.loads(path.read_text()) == own
    os.close(holder)
    assert guard.sweep(tmp_path) == 1
    assert path.read_text() == "{}"


@pytest.mark.parametrize(("extra", "rotated"), [(0, False), (1, True)])
def test_a_log_is_turned_at_its_limit(tmp_path, extra, rotated):
    """At exactly the limit a log is kept; the byte beyond begins a new one."""
    log = guard.Log(tmp_path / "engine-0.log")
    log.write(b"x" * (guard.LOG_BYTES_MAX - 10))
    log.write(b"y" * (10 + extra))
    log.file.close()
    assert (tmp_path / "engine-0.log.1").exists() is rotated
