"""A worker on a node leads a session of its own, wherever its process was started from."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# It is told to begin when its standard input ends. It says who leads its session, and what it started there.
WORKER = """
import os, subprocess, sys
from batchmill.children.process_end import VARIABLE
from batchmill.executors.ray.node_process import lead_session
from batchmill.models.runtime_process import new_mark
sys.stdin.read()
lead_session()
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
held = subprocess.Popen(sleep, stdin=subprocess.DEVNULL)
code = subprocess.Popen(
    sleep, stdin=subprocess.DEVNULL, start_new_session=True, env=os.environ | {VARIABLE: new_mark()}
)
print(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), flush=True)
"""
# It ends at once, as a raylet that is killed does: its worker belongs to a session that is not its new parent's.
RAYLET = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {WORKER!r}], stdin=subprocess.PIPE, process_group=0)
"""


@pytest.mark.parametrize(
    ("program", "options"),
    [
        (WORKER, {}),
        (WORKER, {"process_group": 0}),
        (WORKER, {"start_new_session": True}),
        (RAYLET, {"start_new_session": True}),
    ],
    ids=["in a group", "leads a group", "leads a session", "leads a group whose session's leader has ended"],
)
def test_a_worker_leads_a_session_that_ends_with_it(program, options):
    """Its output ends only when everything that it started has ended, user code in a session of its own too."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, **options,
    )  # fmt: skip
    output, _ = process.communicate(timeout=60)
    assert output == "True True\n"


# As Ray does, it runs its loop in a thread of its own, and waits for it.
EXITS = """
import asyncio, sys, threading
from batchmill.executors.ray.node_process import end_with_this_thread

async def work():
    sys.exit(9)

async def main():
    end_with_this_thread()
    other = threading.Thread(target=sys.exit, args=[4])
    other.start()
    other.join()
    await asyncio.create_task(work())

threading.Thread(target=asyncio.run, args=[main()], daemon=True).start()
sys.stdin.read()
"""


def test_a_worker_that_calls_sys_exit_ends_its_process():
    """The process ends with the code, and its log says where that was called; in other threads it ends the thread."""
    with subprocess.Popen(
        [sys.executable, "-c", EXITS], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        log = process.stderr.read()
        assert process.wait() == 9
    assert "in work" in log and log.endswith("SystemExit: 9\n")
