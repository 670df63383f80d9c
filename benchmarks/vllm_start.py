"""The start of a vLLM server, until it answers: as batchmill starts it, against the same command of vLLM's own module.

What vLLM imports takes most of it, whatever the model: this one is small.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import harness
import llm_speed

from batchmill.engines.llm.launch import STARTER, Hardware, Launch, plan_launch
from batchmill.types import ModelSpec

MODULE = "vllm.entrypoints.openai.api_server"
START_S = 300.0
TICKS = os.sysconf("SC_CLK_TCK")


def planned(path: Path) -> Launch:
    """batchmill's launch of a server on a socket."""
    model = ModelSpec("tiny", "llm", str(harness.ROOT / "examples" / "tiny-llm"), engine_args={"max-model-len": 2048})
    environment = {**os.environ, **llm_speed.engine_environment()}
    return plan_launch(model, str(harness.vllm_python()), path, env=environment, machine=Hardware.detect(os.environ))


def answers(path: Path) -> bool:
    """Whether the server on this socket is ready."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return b" 200 " in connection.recv(64)
        except OSError:
            return False


def cpu_s(pids: list[int]) -> float:
    """Seconds of processor time of processes that run, and of their children that have ended."""
    seconds = 0.0
    for pid in pids:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        seconds += sum(map(int, fields[11:15])) / TICKS
    return seconds


def start(module: str, walls: list[float]) -> float:
    """Start a server with `python -m module` and end it. Returns its processor time until it answered, in seconds."""
    with harness.work_folder() as folder, tempfile.TemporaryDirectory(prefix="bench-") as short:
        path = Path(short) / "s"  # a socket's name has little room
        launch = planned(path)
        command = [module if word == STARTER else word for word in launch.command]
        began = time.monotonic()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=launch.env,
                start_new_session=True,
            )
        try:
            harness.wait_until(lambda: process.poll() is not None or answers(path), START_S, module, look_s=0.1)
            if process.poll() is not None:
                raise harness.CommandFailed((folder / "log").read_text(errors="replace")[-3000:])
            walls.append(time.monotonic() - began)
            return cpu_s(harness.tree_of(process.pid))
        finally:
            harness.end_group(process)


def main() -> None:
    """Start both in turn and print the medians."""
    arguments = harness.parse_arguments(__doc__, pairs=3)
    ours: list[float] = []
    theirs: list[float] = []
    figures = harness.alternate(
        arguments.pairs, {"batchmill": lambda: start(STARTER, ours), "vLLM": lambda: start(MODULE, theirs)}
    )
    for name, values in figures.items():
        harness.print_side(f"{name}, processor time", values, "s")
    harness.print_side("batchmill, until it answers", ours, "s")
    harness.print_side("vLLM, until it answers", theirs, "s")
    ratio = statistics.median(figures["batchmill"]) / statistics.median(figures["vLLM"])
    harness.print_limit("processor time against vLLM's own start", ratio, 0.9, "x")


if __name__ == "__main__":
    main()
