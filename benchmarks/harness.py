"""What the benchmarks share: whole commands timed in pairs, processes watched through /proc, environments of peers.

Linux only. Knows batchmill by its command line alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
DATA = Path(os.environ.get("BENCHMARK_DATA") or FOLDER / ".data")  # inputs, kept; and a folder for each run, removed
ENVIRONMENTS = FOLDER / ".venvs"
BATCHMILL = Path(sys.executable).with_name("batchmill")
COMMAND_TIMEOUT_S = 3600.0
SAMPLE_INTERVAL_S = 0.1
STOP_GRACE_S = 10.0


class CommandFailed(Exception):
    """A side of a benchmark did not end well; the message holds the end of its log."""


@dataclass(frozen=True)
class Finished:
    """One whole command: from its start to its exit."""

    wall_s: float
    cpu_s: float  # of the command and every process below it that was waited for
    log: str


@dataclass
class Peaks:
    """The most memory each process of a tree held, by process id."""

    bytes_of: dict[int, int] = field(default_factory=dict)
    name_of: dict[int, str] = field(default_factory=dict)

    def sample(self, root: int) -> None:
        """Look once. The kernel keeps each process's high-water mark, so a sample misses only its last moments."""
        for pid in tree_of(root):
            status = read_status(pid)
            if status is not None:
                self.bytes_of[pid] = max(self.bytes_of.get(pid, 0), status)
                self.name_of[pid] = name_of(pid) or self.name_of.get(pid, "")

    def largest(self) -> list[tuple[str, int]]:
        """Name and peak of every process seen, the largest first."""
        pairs = [(self.name_of[pid], peak) for pid, peak in self.bytes_of.items()]
        return sorted(pairs, key=lambda pair: -pair[1])


def parse_arguments(description: str, **defaults: int | float) -> argparse.Namespace:
    """Read `--pairs N` and one numeric flag for each default given."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    for name, default in {"pairs": 5, **defaults}.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, dest=name, type=type(default), default=default, help=f"default: {default}")
    return parser.parse_args()


# Processes


def read_parents() -> dict[int, int]:
    """The parent of every process on the machine."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                # The name stands in brackets and may hold spaces; what follows the last bracket does not.
                parents[int(entry)] = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue  # it ended meanwhile
    return parents


def tree_of(root: int) -> list[int]:
    """`root` and every process below it, parents before children."""
    children: dict[int, list[int]] = {}
    for pid, parent in read_parents().items():
        children.setdefault(parent, []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def read_status(pid: int) -> int | None:
    """The high-water mark of a process's resident memory in bytes, or None where it has none (any more)."""
    try:
        lines = Path("/proc", str(pid), "status").read_text().splitlines()
    except OSError:
        return None
    marks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return marks[0] * 1024 if marks else None


def name_of(pid: int) -> str:
    """What a process runs, shortly: the module after `-m`, or the program; empty where it is gone."""
    try:
        words = Path("/proc", str(pid), "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return ""
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    named = [word for word in words if not word.startswith("-")]
    is_script = len(named) > 1 and Path(named[0]).name.startswith("python")
    return Path(named[is_script]).name if named else ""


def wait_until(done: Callable[[], bool], timeout_s: float, what: str, *, look_s: float = 0.005) -> None:
    """Look every `look_s` until `done()`. Raises CommandFailed, naming `what`, after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise CommandFailed(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(look_s)


def run_whole(
    command: list[str | Path], *, log: Path, env: dict[str, str] | None = None, peaks: Peaks | None = None
) -> Finished:
    """Run a command to its end, its output in `log`. Raises CommandFailed for an exit status other than 0."""
    with log.open("wb") as file:
        cpu_before_s = children_cpu_s()
        began = time.perf_counter()
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        try:
            if peaks is not None:
                while process.poll() is None:
                    peaks.sample(process.pid)
                    time.sleep(SAMPLE_INTERVAL_S)
            process.wait(COMMAND_TIMEOUT_S)
        finally:
            wall_s = time.perf_counter() - began
            end_group(process)
    text = log.read_text(errors="replace")
    if process.returncode != 0:
        shown = " ".join(str(word) for word in command)
        raise CommandFailed(f"`{shown}` ended with status {process.returncode}:\n{text[-3000:]}")
    return Finished(wall_s, children_cpu_s() - cpu_before_s, text)


def children_cpu_s() -> float:
    """Seconds of processor time of every process below this one that has ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and its whole process group: ask first, then kill."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# Folders and environments


@contextmanager
def work_folder() -> Iterator[Path]:
    """A fresh folder beside the inputs, on the same disk, removed afterwards."""
    DATA.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="run-", dir=DATA))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def made_input(name: str, write: Callable[[Path], None]) -> Path:
    """The input file `name`, written once. Its name must say everything that its bytes depend on."""
    path = DATA / "inputs" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"writing {path}", flush=True)
        part = path.with_name(name + ".part")
        write(part)
        part.rename(path)
    with path.open("rb") as file:  # both sides find it in the page cache
        while file.read(1 << 24):
            pass
    return path


def peer_python(name: str, *requirements: str) -> Path:
    """The Python of a peer's own environment, made on first use."""
    folder = ENVIRONMENTS / name
    stamp = folder / "requirements.json"
    wanted = json.dumps(requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {', '.join(requirements)} into {folder.relative_to(ROOT)}", flush=True)
        made_by = {**os.environ, "PYTHON": sys.executable}
        subprocess.run([ROOT / "tools" / "make_venv.sh", folder], check=True, env=made_by)
        install = [folder / "bin" / "python", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*install, *requirements], check=True)
        stamp.write_text(wanted)
    return folder / "bin" / "python"


def vllm_python() -> Path:
    """The Python of the environment that holds vLLM: BATCHMILL_VLLM_PYTHON, or `make vllm`'s."""
    path = Path(os.environ.get("BATCHMILL_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    if not path.exists():
        raise SystemExit("no environment with vLLM here: run `make vllm`, or set BATCHMILL_VLLM_PYTHON")
    return path


# Pairs and verdicts


def alternate(pairs: int, sides: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Run every side `pairs` times, in turn and each time in the other order; a side returns its figure."""
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(pairs):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for name in order:
            figures[name].append(sides[name]())
            print(f"  pair {number + 1} of {pairs}: {name}: {figures[name][-1]:,.1f}", flush=True)
    return figures


def print_side(name: str, figures: list[float], unit: str) -> None:
    """Print the median of one side, and its range."""
    middle, low, high = statistics.median(figures), min(figures), max(figures)
    print(f"{name}: median {middle:,.1f} {unit} of {len(figures)} runs ({low:,.1f} to {high:,.1f})", flush=True)


def print_ratio(ours: list[float], theirs: list[float], aim: float, against: str) -> None:
    """Print the ratio of the medians, and of the pairs one by one, beside the aim."""
    ratio = statistics.median(ours) / statistics.median(theirs)
    each = ", ".join(f"{a / b:.2f}" for a, b in zip(ours, theirs, strict=False))
    print(f"=> {ratio:.2f} x {against} (pairs: {each}); aim: at least {aim:g} x: {verdict(ratio >= aim)}", flush=True)


def print_limit(what: str, value: float, limit: float, unit: str) -> None:
    """Print a figure that has to stay under a limit."""
    print(f"=> {what}: {value:,.3g} {unit}; aim: under {limit:g} {unit}: {verdict(value < limit)}", flush=True)


def verdict(is_reached: bool) -> str:
    """The word that ends a line about an aim."""
    return "reached" if is_reached else "MISSED"
