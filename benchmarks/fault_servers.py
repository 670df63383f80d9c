"""The servers of `fault_campaign.py`, and the Ray cluster of one of them. Linux only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import harness
import httpx2
from fault_clients import TIMEOUT_S

sys.path.insert(0, str(harness.ROOT / "tests" / "cluster"))
sys.path.insert(0, str(harness.ROOT / "tests"))
from fakes.faulty_objects import faulty_objects
from fakes.lossy_disk.disk import LossyDisk
from fakes.s3_server import s3_environment
from fakes.small_disk import SmallDisk
from fakes.tcp_proxy import TcpProxy
from ray_support import Nodes, free_port, ray_nodes

BUCKET = "campaign"
SMALL_DISK_BYTES = 256 * 1024 * 1024
CODE = """
import time

def steady(messages, model=None):
    text = messages[-1]["content"]
    with open({calls!r}, "a") as calls:
        calls.write(text + "\\n")
    time.sleep(0.007)
    message = {{"role": "assistant", "content": text.upper()}}
    return {{"id": "c", "object": "chat.completion", "created": 1, "model": model, "choices": [
        {{"index": 0, "finish_reason": "stop", "message": message}}]}}
"""
CONFIG = """
[models.steady]
engine = "function"
source = "app.py:steady"
workers = {workers}
"""
DATABASE_CONFIG = """
[database]
url = "postgresql+psycopg://batchmill@127.0.0.1:{port}/{database}"
[secrets]
key_file = "{keys}"
"""
STORAGE_CONFIG = """
[storage]
objects = "s3://{bucket}/{database}"
"""
RAY_CONFIG = """
[cluster]
executor = "ray"
address = "{address}"
python = "{python}"
trusted_network = true
"""


class Server:
    """A `batchmill serve`, in a folder of its own that has its configuration and its log. It has SQLite.

    Args: calls: gets a line for each row that the model is called for.
    """

    def __init__(
        self, folder: Path, calls: Path, data_dir: Path, *, workers: int = 1, config: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.data_dir, self.log = folder, data_dir, folder / "log"
        self.environment = {**os.environ, **(environment or {})}
        folder.mkdir(exist_ok=True)
        (folder / "app.py").write_text(CODE.format(calls=str(calls)))
        (folder / "batchmill.toml").write_text(CONFIG.format(workers=workers) + config)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = [str(harness.BATCHMILL), "serve", "--port", str(self.port), "--data-dir", str(self.data_dir)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(words), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self.environment, start_new_session=True,
            )  # fmt: skip

    def command(self, words: Sequence[str]) -> Sequence[str]:
        return words

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(TIMEOUT_S)

    def is_owner(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/v1/batches", timeout=2, verify=False).status_code == 200
        except httpx2.HTTPError:
            return False

    def is_standing_by(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/v1/batches", timeout=2, verify=False).status_code == 503
        except httpx2.HTTPError:
            return False

    def processes(self, name: str = "") -> list[int]:
        """The processes below this server whose command holds `name`."""
        assert self.process is not None
        return named(harness.tree_of(self.process.pid)[1:], name)


class ClusterServer(Server):
    """A server on PostgreSQL and perhaps an object store, with a proxy of its own before each."""

    def __init__(
        self, folder: Path, calls: Path, data_dir: Path, postgres_port: int, database: str, s3: str, stack: ExitStack,
        *, keys: Path, has_objects: bool = True, workers: int = 1, config: str = "",
    ) -> None:  # fmt: skip
        self.proxy = TcpProxy(postgres_port)
        stack.callback(self.proxy.close)
        self.store = stack.enter_context(faulty_objects(s3))
        config += DATABASE_CONFIG.format(port=self.proxy.port, database=database, keys=keys)
        if has_objects:
            config += STORAGE_CONFIG.format(bucket=BUCKET, database=database)
        super().__init__(
            folder, calls, data_dir, workers=workers, config=config, environment=s3_environment(self.store.url)
        )

    def writes(self) -> int:
        """Requests of this server that changed the store."""
        return sum(self.store.count(method) for method in ("PUT", "POST", "DELETE"))


class LossyServer(Server):
    """A server on a disk that can lose its power."""

    def __init__(self, folder: Path, calls: Path, stack: ExitStack) -> None:
        home = folder / "disk"
        home.mkdir(parents=True)
        self.disk = LossyDisk(home)
        stack.callback(self.disk.close)
        super().__init__(folder, calls, home / "data", environment=self.disk.environment)


class CrampedServer(Server):
    """A server on a small disk."""

    def __init__(self, folder: Path, calls: Path, stack: ExitStack) -> None:
        home = folder / "disk"
        home.mkdir(parents=True)
        self.disk = SmallDisk(home, SMALL_DISK_BYTES)
        stack.callback(self.disk.close)
        super().__init__(folder, calls, home / "data")

    def command(self, words: Sequence[str]) -> Sequence[str]:
        return self.disk.command(words, self.folder)


def named(pids: list[int], name: str) -> list[int]:
    """Those whose command holds `name`."""
    found = []
    for pid in pids:
        try:
            command = Path("/proc", str(pid), "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has ended
        if name in command:
            found.append(pid)
    return found


class RayCluster:
    """A head without a CPU and two nodes with one each, at one address, however often it is started again."""

    def __init__(self, stack: ExitStack) -> None:
        self._port = free_port()
        self._stack = stack.enter_context(ExitStack())
        self.nodes: Nodes
        self.start()

    def start(self) -> None:
        self.nodes = self._stack.enter_context(ray_nodes(0, 1, 1, port=self._port))
        self.alive, self._last = [1, 2], 2

    def end(self) -> None:
        self._stack.close()

    def replace_node(self, number: int) -> None:
        """Add a node for one that was removed."""
        self.nodes.does("add 1")
        self._last += 1
        self.alive[self.alive.index(number)] = self._last

    def processes(self, name: str) -> list[int]:
        return named(harness.tree_of(self.nodes.pid), name)
