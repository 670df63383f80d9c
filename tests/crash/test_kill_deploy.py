"""A deployment whose process is killed: nothing half is left, and the version before serves."""

import os
import signal
import subprocess
import sys
import time

import httpx2
import pytest
from fakes.running_server import RunningServer

GOOD = "def example_doubler(foo: int):\n    return 2 * foo\n"
SLOW = "import pathlib, time\npathlib.Path({mark!r}).touch()\ntime.sleep(600)\n" + GOOD


def words(folder, *more):
    return [sys.executable, "-m", "batchmill", "--data-dir", str(folder / "data"), *more]


def command(folder, *more):
    return subprocess.run(words(folder, *more), cwd=folder, capture_output=True, text=True, timeout=60)


def wait_for(path):
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, "the deployment did not begin"
        time.sleep(0.02)


def left_of(folder):
    """Folders of code, staging folders and archives on their way."""
    data = folder / "data"
    found = [*data.glob("models/versions/*/*/*/*/"), *data.glob("models/staging/*"), *data.glob("deploy-*")]
    return sorted(str(path.relative_to(data)) for path in found if path.is_dir() or path.parent == data)


@pytest.mark.timeout(120)
def test_a_command_that_is_killed_leaves_nothing_half(tmp_path):
    """SIGKILL in the middle of a deployment: its version has failed, its code is gone, the one before is the latest."""
    (tmp_path / "app.py").write_text(GOOD)
    assert command(tmp_path, "deploy", "app.py:example_doubler").returncode == 0
    mark = tmp_path / "mark"
    (tmp_path / "app.py").write_text(SLOW.format(mark=str(mark)))
    process = subprocess.Popen(words(tmp_path, "deploy", "app.py:example_doubler"), cwd=tmp_path)
    wait_for(mark)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    output = command(tmp_path, "models", "versions", "example_doubler").stdout
    assert "main/1   latest" in output and "main/2   failed" in output and "interrupted" in output
    assert left_of(tmp_path) == ["models/versions/example_doubler/main/1/code"]


@pytest.mark.timeout(120)
def test_a_server_that_is_killed_serves_the_version_before(tmp_path):
    """SIGKILL of a server in the middle of a deployment: the next one serves the old version, and deploys anew."""
    server = RunningServer(tmp_path)
    server.start()
    (tmp_path / "app.py").write_text(GOOD)
    assert command(tmp_path, "deploy", "app.py:example_doubler").returncode == 0
    mark = tmp_path / "mark"
    (tmp_path / "slow.py").write_text(SLOW.format(mark=str(mark)))
    deploying = subprocess.Popen(
        words(tmp_path, "deploy", "slow.py:example_doubler"), cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    wait_for(mark)
    os.kill(server.pid, signal.SIGKILL)
    server.kill()
    assert deploying.wait(60) != 0
    server.start()
    try:
        reply = httpx2.post(f"{server.url}/v1/example_doubler/latest", json={"data": 21}, timeout=60)
        assert reply.json() == {"data": 42}
        assert "main/2   failed" in command(tmp_path, "models", "versions", "example_doubler").stdout
    finally:
        server.stop()
