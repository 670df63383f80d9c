"""Why a cluster is not reached, in the words that a user reads."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from batchmill.executors.ray import driver_flaws
from batchmill.executors.ray.driver_flaws import find_flaw, find_full_disk, silence_of

PYTHON = "/opt/ray/bin/python"
TRACEBACK = """Traceback (most recent call last):
  File "driver.py", line 23, in <module>
    import ray
    ^^^^^^^^^^
"""
VERSIONS = """RuntimeError: Version mismatch: The cluster was started with:
    Ray: 2.48.0
    Python: 3.12.1
This process on node 10.0.0.1 was started with:
    Ray: 2.60.0
    Python: 3.11.7

"""


@pytest.mark.parametrize(
    ("text", "error", "flaw"),
    [
        (TRACEBACK + "ModuleNotFoundError: No module named 'ray'\n", ConnectionResetError(104, "reset"),
         f"the interpreter {PYTHON} has no Ray: `{PYTHON} -m pip install 'batchmill[ray]'`"),
        (f"{PYTHON}: Error while finding module specification (ModuleNotFoundError: No module named 'batchmill')\n",
         None, f"the interpreter {PYTHON} has no batchmill"),
        (TRACEBACK + "ConnectionError: Could not find any running Ray instance.\n", None,
         "ConnectionError: Could not find any running Ray instance."),
        (TRACEBACK + VERSIONS, None,
         "the cluster has Ray 2.48.0 and Python 3.12.1, the driver here Ray 2.60.0 and Python 3.11.7: "),
        ("", FileNotFoundError(2, "No such file or directory", PYTHON),
         f"cluster.python: {PYTHON} cannot be run: No such file or directory"),
        ("", ConnectionResetError(104, "reset"), "[Errno 104] reset"),
        (None, None, ""),
    ],
)  # fmt: skip
def test_why_a_driver_has_ended(tmp_path: Path, text: str | None, error: OSError | None, flaw: str) -> None:
    """The error itself, without its traceback; what is missing, with the way out."""
    log = tmp_path / "log"
    if text is not None:
        log.write_text(text)
    assert find_flaw(log, PYTHON, error).startswith(flaw) and "^^^" not in find_flaw(log, PYTHON, error)


def test_a_disk_without_room_for_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's folder is looked at before a cluster is started: Ray would wait for half a minute, and name a file."""
    environ = {"RAY_TMPDIR": str(tmp_path / "ray" / "new"), "TMPDIR": "/"}
    assert find_full_disk(environ) == find_full_disk({}) == ""
    monkeypatch.setattr(driver_flaws, "FREE_BYTES_MIN", shutil.disk_usage(tmp_path).total + 1)
    assert find_full_disk(environ).startswith(f"the disk of Ray's folder {tmp_path / 'ray' / 'new'} is full: make room")


async def test_an_address_at_which_nobody_is() -> None:
    """It is told at once; an address that is looked up, and one that answers, are not silent."""
    assert await silence_of("127.0.0.1:1") == "nothing answers at 127.0.0.1:1: Connection refused"
    assert (await silence_of("nowhere.invalid:6379")).startswith("nothing answers at nowhere.invalid:6379: ")
    assert await silence_of("auto") == await silence_of("local") == ""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        assert await silence_of(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") == ""
