"""A `batchmill serve` with two projects: `tenant` attacks, `other` is measured. Its memory, its engines and its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import harness
from deployed import run
from kill import started_at
from live_server import llm_config
from llm_speed import engine_environment

FUNCTION = "def double(x: int):\n    return 2 * x\n"
DRAIN_S = 30.0  # what the server gives requests (10) and rows (20) that are under way when it is told to end
END_MAX_S = 75.0  # then it is killed
MEMORY_MAX = 4 << 30  # of one process: beyond it everything is killed, for the machine's sake
ENGINE_MEMORY_MAX = 4 << 30  # of a process of an engine, which takes less than 2 GiB where it is well
LOOK_S = 0.2
LEFT_S = 5.0  # how long a process may outlive the server
ENGINE, CORE = "vllm", "EngineCore"
ECHO = {
    "name": "echo",
    "version": 1,
    "protocol": "http",
    "parameters": {"response_filter": "$.text"},
    "actions": [{"action_type": "predict", "method": "POST", "request_body": '{"text": ${parameters.text}}'}],
}


class Watch:
    """Looks at the server's processes five times a second, in a thread; kills them all when one grows too large."""

    def __init__(self, root: int) -> None:
        self._root, self._stop = root, threading.Event()
        self.owner = self.worker = 0  # the most bytes resident, of the owner and of the largest process below it
        self.worker_name = ""
        self.engine = 0  # likewise, of engines
        self.was_killed = False
        self.seen: dict[int, str] = {}  # pid -> when it started
        self.cores: set[int] = set()  # processes of engines that run now
        self.deaths: list[float] = []  # when one of those was gone
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Once. Engines are known, and not weighed."""
        parents = harness.read_parents()
        children: dict[int, list[int]] = {}
        for pid, parent in parents.items():
            children.setdefault(parent, []).append(pid)
        waiting, cores = [(self._root, False)], set()
        while waiting:
            pid, in_engine = waiting.pop()
            name = harness.name_of(pid)
            in_engine = in_engine or name.lower().startswith(ENGINE)
            waiting += [(child, in_engine) for child in children.get(pid, [])]
            if pid not in self.seen and (began := started_at(pid)):
                self.seen[pid] = began
            if not in_engine:
                self._weigh(pid, name)
                continue
            self._bound_engine(pid)
            if CORE in name:
                cores.add(pid)
        self.deaths += [time.monotonic()] * len(self.cores - cores)
        self.cores = cores

    def _weigh(self, pid: int, name: str) -> None:
        peak = harness.read_status(pid) or 0
        if pid == self._root:
            self.owner = max(self.owner, peak)
        elif peak > self.worker:
            self.worker, self.worker_name = peak, name
        if peak > MEMORY_MAX and not self.was_killed:
            self.was_killed = True
            self.kill_all()

    def _bound_engine(self, pid: int) -> None:
        """What the kernel would do on a smaller machine."""
        peak = harness.read_status(pid) or 0
        self.engine = max(self.engine, peak)
        if peak > ENGINE_MEMORY_MAX:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_all(self) -> int:
        """End what is left of the server; returns how many processes that were."""
        left = [pid for pid, began in self.seen.items() if started_at(pid) == began]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(left)


@dataclass
class Server:
    """The server, and the keys of its projects."""

    process: subprocess.Popen[bytes]
    host: str
    port: int
    grpc: str
    tenant: str
    other: str
    upstream: int
    watch: Watch
    log: Path
    ended_after_s: float | None = field(default=None)
    left: int = 0

    def end(self) -> None:
        """SIGTERM, and how long it takes until the server is gone; what it leaves behind is counted and killed."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_MAX_S)
            self.ended_after_s = time.monotonic() - began
        deadline = time.monotonic() + LEFT_S
        while self.ended_after_s is not None and time.monotonic() < deadline and self._any_left():
            time.sleep(LOOK_S)
        left = self.watch.kill_all()
        self.left = left if self.ended_after_s is not None else 0  # otherwise nobody had ended them

    def _any_left(self) -> bool:
        return any(started_at(pid) == began for pid, began in self.watch.seen.items())


def _configure(folder: Path, upstream: int, *, with_engine: bool) -> None:
    action = {**ECHO["actions"][0], "url": f"http://127.0.0.1:{upstream}/echo"}  # type: ignore[index]
    (folder / "echo.json").write_text(json.dumps({**ECHO, "actions": [action]}))
    (folder / "double.py").write_text(FUNCTION)
    config = '[server]\nprivate_hosts = ["127.0.0.1"]\n\n[models.echo]\nengine = "connector"\nsource = "echo.json"\n\n'
    (folder / "batchmill.toml").write_text(config + (llm_config() if with_engine else ""))


@contextmanager
def _upstream() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, harness.FOLDER / "attacks" / "upstream.py"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


@contextmanager
def serving(*, with_engine: bool, with_grpc: bool) -> Iterator[Server]:
    """A server in a folder of its own, with a deployed function `double`, a connector `echo` and, if asked, `tiny`."""
    with harness.work_folder() as folder, _upstream() as upstream:
        _configure(folder, upstream, with_engine=with_engine)
        run(folder, harness.BATCHMILL, "deploy", "double.py:double", "--name", "double")
        make = [harness.BATCHMILL, "keys", "create", "--name", "benchmark", "--project"]
        tenant = run(folder, *make, "tenant", "--scope", "admin").split()[-1]
        other = run(folder, *make, "other", "--scope", "submit").split()[-1]
        command = [harness.BATCHMILL, "serve", "--json", "--port", "0", "--data-dir", folder / "data"]
        command += ["--grpc-port", "0"] if with_grpc else []
        environment = {**os.environ, **(engine_environment() if with_engine else {})}
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [str(word) for word in command], cwd=folder, stdout=subprocess.PIPE, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip
        watch = Watch(process.pid)
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            if not first:
                raise harness.CommandFailed((folder / "log").read_text()[-2000:])
            received = json.loads(first)
            host, _, port = received["url"].removeprefix("http://").rpartition(":")
            grpc = received.get("grpc", "").removeprefix("http://")
            yield Server(process, host, int(port), grpc, tenant, other, upstream, watch, folder / "log")
        finally:
            watch.close()
            watch.kill_all()
            process.wait()
