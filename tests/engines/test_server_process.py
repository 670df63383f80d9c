"""An engine server never outlives the worker that started it."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batchmill.engines.llm import guard
from batchmill.engines.llm.server import ServerProcess

FAKE = Path(__file__).parents[1] / "fakes" / "engine_server.py"

WORKER = """
import asyncio, os, sys
from pathlib import Path
from batchmill.engines.llm.server import ServerProcess

async def main():
    server = ServerProcess.claim(Path(sys.argv[1]), grace_s=float(sys.argv[3]))
    command = [sys.executable, sys.argv[2], "--model", "m", "--served-model-name", "m", "--uds", str(server.socket)]
    await server.start(command, dict(os.environ))
    await server.wait()
    print("server gone", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Tree:
    """A worker with a server below it, and the processes that must all be gone in the end."""

    def __init__(self, home: Path, grace_s: float = 5.0, **env: str) -> None:
        self.home = home
        self.pids_file = home / "pids"
        os.mkfifo(self.pids_file)
        reader = os.open(self.pids_file, os.O_RDWR)
        self.worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(home), str(FAKE), str(grace_s)],
            env={**os.environ, "FAKE_PIDS": str(self.pids_file), **env},
            stdout=subprocess.PIPE,
        )
        lines = b""
        while lines.count(b"\n") < 3:
            lines += os.read(reader, 4096)
        os.close(reader)
        self.pids = {what: int(pid) for what, pid in (line.split() for line in lines.decode().splitlines())}
        self.fds = {what: os.pidfd_open(pid) for what, pid in self.pids.items()}
        self.guard = _parent(self.pids["server"])
        self.fds["guard"] = os.pidfd_open(self.guard)

    def wait_gone(self, *names: str) -> None:
        for name in names or tuple(self.fds):
            _wait(self.fds[name])

    def close(self) -> None:
        self.worker.kill()
        self.worker.wait()
        assert self.worker.stdout is not None
        self.worker.stdout.close()
        guard.sweep(self.home)
        self.wait_gone()
        for fd in self.fds.values():
            os.close(fd)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _wait(pidfd: int) -> None:
    """Block until a process is dead; the test's own time limit is the deadline."""
    select.select([pidfd], [], [])


@pytest.fixture
def tree(tmp_path):
    trees: list[Tree] = []

    def make(**options) -> Tree:
        trees.append(Tree(tmp_path, **options))
        return trees[-1]

    yield make
    for made in trees:
        made.close()


def test_kill_9_of_the_worker_ends_everything(tree):
    """When the worker is killed, the server, its engine core and its worker are ended by the guard."""
    made = tree()
    made.worker.kill()
    made.wait_gone()


def test_a_server_that_ignores_sigterm_is_killed(tree):
    """Processes that ignore SIGTERM, one of them in another session, are killed after the time of grace."""
    made = tree(grace_s=0.1, FAKE_STUBBORN="1")
    made.worker.kill()
    made.wait_gone()


def test_kill_9_of_the_server_ends_what_it_left(tree):
    """When the API server is killed, the guard ends its engine core and worker, and the worker hears of it."""
    made = tree()
    os.kill(made.pids["server"], signal.SIGKILL)
    made.wait_gone()
    assert made.worker.stdout.readline() == b"server gone\n"


@pytest.mark.parametrize("stubborn", ["", "1"])
def test_kill_9_of_the_guard_ends_the_server(tree, stubborn):
    """When the guard is killed, the living worker ends the server's processes itself."""
    made = tree(FAKE_STUBBORN=stubborn)
    os.kill(made.guard, signal.SIGKILL)
    made.wait_gone()
    assert made.worker.stdout.readline() == b"server gone\n"


def test_the_next_start_sweeps_what_a_dead_guard_left(tree):
    """When worker and guard are both killed, the next start ends what stubborn processes are left."""
    made = tree(FAKE_STUBBORN="1")
    os.kill(made.worker.pid, signal.SIGSTOP)
    os.kill(made.guard, signal.SIGKILL)
    os.kill(made.worker.pid, signal.SIGKILL)
    made.worker.wait()
    made.wait_gone("guard", "server")
    assert guard.sweep(made.home) == 1
    made.wait_gone()
    assert guard.sweep(made.home) == 0


def test_sweep_leaves_a_living_engine_alone(tree):
    """An engine whose worker lives is not swept."""
    made = tree()
    assert guard.sweep(made.home) == 0
    assert all(guard.start_time(pid) is not None for pid in made.pids.values())


def test_sigterm_of_the_guard_ends_the_server(tree):
    """A guard that is asked to end takes the server with it."""
    made = tree()
    os.kill(made.guard, signal.SIGTERM)
    made.wait_gone()


def _command(server: ServerProcess, code: str) -> list[str]:
    return [sys.executable, "-c", code, str(server.socket)]


async def test_stop_ends_the_server_and_removes_its_files(tmp_path):
    """`stop` returns when nothing is left: no process, no socket directory, no record; a second call does nothing."""
    server = ServerProcess.claim(tmp_path)
    await server.start(_command(server, "import time; time.sleep(1000)"), os.environ)
    assert server.is_alive
    await server.stop()
    await server.stop()
    assert not server.is_alive
    assert not server.scratch.exists()
    assert server.pid_file.read_bytes() == b"{}"


async def test_stop_before_start_gives_the_slot_back(tmp_path):
    """A server that was claimed and never started leaves nothing behind."""
    server = ServerProcess.claim(tmp_path)
    await server.stop()
    again = ServerProcess.claim(tmp_path)
    assert again.pid_file == server.pid_file
    assert not server.scratch.exists()
    await again.stop()


async def test_two_servers_have_slots_of_their_own(tmp_path):
    """Engines under one home at the same time share neither record, log nor socket."""
    first, second = ServerProcess.claim(tmp_path), ServerProcess.claim(tmp_path)
    assert len({first.pid_file, second.pid_file, first.socket, second.socket, first.log_path, second.log_path}) == 6
    await asyncio.gather(first.stop(), second.stop())


async def test_the_exit_of_a_server_is_told_with_its_last_exception(tmp_path):
    """A server that dies at once is noticed, with its exit code and what its log says."""
    server = ServerProcess.claim(tmp_path)
    await server.start(_command(server, "print('x'); raise ValueError('no such model')"), os.environ)
    assert await server.wait() == 1
    assert server.complaint() == "exit code 1: ValueError: no such model"
    await server.stop()


async def test_a_program_that_does_not_exist_is_an_end_with_a_reason(tmp_path):
    """A command that cannot be started ends with 127 and says so."""
    server = ServerProcess.claim(tmp_path)
    await server.start(["/no/such/python"], os.environ)
    assert await server.wait() == 127
    assert "/no/such/python" in server.complaint()
    assert not server.scratch.exists()
    assert server.pid_file.read_bytes() == b"{}"


async def test_a_signal_that_ended_the_server_is_in_its_exit_code(tmp_path):
    """A server ended by signal N has the exit code 128 + N."""
    server = ServerProcess.claim(tmp_path)
    await server.start(_command(server, "import os; os.kill(os.getpid(), 9)"), os.environ)
    assert await server.wait() == 137
    assert server.complaint() == "killed by signal 9: it wrote nothing"


async def test_the_log_is_bounded(tmp_path):
    """However much a server writes, at most two logs of 8 MiB are kept, and the newest line is in the current one."""
    server = ServerProcess.claim(tmp_path)
    code = "import sys\nfor i in range(300): sys.stdout.write('x' * 65535 + '\\n')\nprint('the end')"
    await server.start(_command(server, code), os.environ)
    await server.wait()
    old = server.log_path.with_suffix(".log.1")
    assert old.stat().st_size <= guard.LOG_BYTES_MAX
    assert server.log_path.stat().st_size <= guard.LOG_BYTES_MAX
    assert server.log_path.read_text().endswith("the end\n")
