"""The starts of commands that the tests share."""

from __future__ import annotations

import gc
import importlib.util
import os
import resource
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from fakes import forked_modules, preloaded_server
from fakes.forked_modules import SHOWN_CHARS, SYS_CLONE, read_at_start
from fakes.forked_runtimes import PROGRAM
from fakes.preloaded import IS_ENABLED, PreloadedPopen

from batchmill.function_runtime import printing

BATCHMILL = (sys.executable, "-m", "batchmill")


def test_what_is_imported_before_a_command_exists():
    """A row of a module that was renamed would make every start of it slow, and nothing would say so."""
    names = {*preloaded_server.MODULES, *forked_modules.MODULES, *forked_modules.SERVERS}
    assert [name for name in sorted(names) if importlib.util.find_spec(name) is None] == []


def test_a_server_that_nobody_waits_for_harms_no_later_command(tmp_path: Path):
    """A test that is interrupted leaves its server to the collector of garbage: later tests start theirs."""
    serve = [*BATCHMILL, "serve", "--port", "0", "--data-dir", str(tmp_path)]
    left = PreloadedPopen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pid = left.pid
    left.itself = left  # as the traceback of an interrupted test does
    with warnings.catch_warnings(action="ignore"):  # that it still runs
        del left
        gc.collect()
    assert subprocess.run([*BATCHMILL, "--version"], capture_output=True, check=False).returncode == 0
    (kept,) = [each for each in subprocess._active if each.pid == pid]
    kept.send_signal(signal.SIGKILL)
    assert kept.wait(30) == -signal.SIGKILL


@pytest.mark.skipif(not IS_ENABLED or SYS_CLONE is None, reason="every program gets a new interpreter")
def test_a_module_is_a_child_like_any_other(tmp_path: Path):
    """What batchmill starts as a module is a fork, yet the starter's child, with its limits, mask, folder and session,
    and holds no descriptor but its own."""
    environ = {**read_at_start(dict(os.environ)), "A": "ü"}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    mask = os.umask(0o027)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12345, before[1]))
        child = PreloadedPopen(
            [sys.executable, "-P", "-m", "batchmill.children.child", str(os.getpid()), "json:loads"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path, start_new_session=True,
            env=environ,
        )  # fmt: skip
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        os.umask(mask)
    assert child.stdin is not None and child.stdout is not None
    size = (3).to_bytes(8, "little")
    child.stdin.write(size + b"a:b" + (0).to_bytes(8, "little") + (2).to_bytes(8, "little") + b"{}" + size + b"\0\0\0")
    child.stdin.flush()
    assert child.stdout.read(1) == b"E", "it has begun, and there is no such module"
    entry = Path(f"/proc/{child.pid}")
    assert (entry / "cmdline").read_text().rstrip("\0").split("\0") == child.args
    shown = (entry / "environ").read_text().rstrip("\0").split("\0")
    assert dict(line.split("=", 1) for line in shown) == environ
    assert (entry / "maps").read_text().count("_sqlite3"), "it is a fork"
    status = (entry / "status").read_text()
    assert f"PPid:\t{os.getpid()}\n" in status and "Umask:\t0027\n" in status
    assert "Max file size 12345 " in " ".join((entry / "limits").read_text().split())
    assert (entry / "cwd").readlink() == tmp_path and os.getsid(child.pid) == child.pid
    assert sorted(each.name for each in (entry / "fd").iterdir()) == ["0", "1", "2"]
    child.stdin.close()
    child.stdout.close()
    assert child.wait(30) == 0


@pytest.mark.skipif(not IS_ENABLED or SYS_CLONE is None, reason="every program gets a new interpreter")
@pytest.mark.parametrize(("variables", "is_fork"), [({}, True), ({"PYTHONPATH": "/nowhere"}, False)])
def test_a_functions_process_is_a_child_like_any_other(tmp_path: Path, variables: dict[str, str], is_fork: bool):
    """What this process starts for a function is its child, a fork where a new interpreter would be like the forker."""
    ours, theirs = socket.socketpair()
    memory = os.memfd_create("progress")
    os.ftruncate(memory, printing.BYTES)
    environ = {**read_at_start(dict(os.environ)), "A": "ü", **variables}
    child = PreloadedPopen(
        [sys.executable, PROGRAM, str(theirs.fileno()), str(memory)], stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno(), memory], cwd=tmp_path, process_group=0, env=environ,
    )  # fmt: skip
    entry = Path(f"/proc/{child.pid}")
    with ours, theirs:
        assert f"PPid:\t{os.getpid()}\n" in (entry / "status").read_text()
        assert os.getpgid(child.pid) == child.pid
        begin, end = map(int, (entry / "stat").read_text().rpartition(")")[2].split()[45:47])
        assert (end - begin > SHOWN_CHARS) == is_fork  # room for longer words than its own
    os.close(memory)
    assert child.wait(30) in (0, 1)
