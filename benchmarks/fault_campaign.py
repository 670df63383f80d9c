"""The servers of `cluster_faults.py`, the batches that run through them, and the audit of both. Linux only.

Two servers share one PostgreSQL database and one object store, each behind proxies of its own. A third one has a
database of its own and its workers on a Ray cluster, if BATCHMILL_RAY_PYTHON names an interpreter with batchmill[ray].
A fourth one has nothing but its data directory, with SQLite in it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import httpx2
from fault_clients import (
    ENDED,
    LOOK_S,
    TIMEOUT_S,
    Clients,
    NoAnswer,
    ShortBatch,
    answer_of,
    answered,
    check,
    created_since,
    order_of,
    upload_of,
)

sys.path.insert(0, str(harness.ROOT / "tests" / "cluster"))
sys.path.insert(0, str(harness.ROOT / "tests"))
from fakes.faulty_objects import faulty_objects
from fakes.postgres_server import PostgresServer
from fakes.s3_server import bucket_client, s3_environment, s3_server
from fakes.tcp_proxy import TcpProxy
from ray_support import Nodes, free_port, ray_nodes

BUCKET, DATABASE, RAY_DATABASE = "campaign", "campaign", "campaign_ray"
ROWS, SMALL_ROWS = 100, 5
LONG = "text"  # begins the texts of the rows of a campaign's own batches
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
    """A `batchmill serve` with a way to its database and a way to the store."""

    def __init__(
        self, folder: Path, campaign: Campaign, s3: str, stack: ExitStack, *, data_dir: Path,
        database: str | None = DATABASE, workers: int = 1, more: str = "",
    ) -> None:  # fmt: skip
        """Args: database: a name at the PostgreSQL server; None: SQLite, and no object store."""
        self.folder, self.log, self.data_dir = folder, folder / "log", data_dir
        folder.mkdir()
        self.proxy = TcpProxy(campaign.postgres.port)
        stack.callback(self.proxy.close)
        self.store = stack.enter_context(faulty_objects(s3))
        self.environment = {**os.environ, **s3_environment(self.store.url)}
        (folder / "app.py").write_text(CODE.format(calls=str(campaign.calls)))
        config = CONFIG.format(workers=workers)
        if database is not None:
            config += DATABASE_CONFIG.format(port=self.proxy.port, database=database, keys=campaign.folder / "keys")
            if campaign.has_objects:
                config += STORAGE_CONFIG.format(bucket=BUCKET, database=database)
        (folder / "batchmill.toml").write_text(config + more)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = [str(harness.BATCHMILL), "serve", "--port", str(self.port), "--data-dir", str(self.data_dir)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                words, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment,
                start_new_session=True,
            )  # fmt: skip

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

    def writes(self) -> int:
        """Requests of this server that changed the store."""
        return sum(self.store.count(method) for method in ("PUT", "POST", "DELETE"))


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


@dataclass
class Outcome:
    """One fault and what became of the rows under it."""

    fault: str
    jobs: int = 0
    short: int = 0  # those of them that clients created meanwhile
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    again: int = 0
    unmet: int = 0  # failures of the store that no request came for
    called: int = 0  # rows of the batch that a model had been called for as the fault struck
    recovery_s: float = 0.0
    whole_s: float = 0.0
    flaws: list[str] = field(default_factory=list)


class Campaign:
    """The servers, their databases, store and cluster, and the rows that run through them.

    Args:
        has_ray: with the third server.
        has_alone: with the fourth server.
        has_objects: without, the servers keep everything in their data directories.
        clients: that create short batches all the time. None: nobody does.
    """

    def __init__(
        self, folder: Path, seed: int, stack: ExitStack, *, has_ray: bool, has_alone: bool = False,
        has_objects: bool = True, clients: Clients | None = None,
    ) -> None:  # fmt: skip
        self.has_objects, self.clients = has_objects, clients
        self.folder, self.chance, self.calls = folder, random.Random(seed), folder / "calls"
        self.calls.touch()
        self.postgres = PostgresServer("fsync=on", "shared_buffers=32MB", "autovacuum=off")
        stack.callback(self.postgres.close)
        self.postgres.create_database(DATABASE)
        s3 = stack.enter_context(s3_server())
        stack.enter_context(bucket_client(s3, BUCKET))
        self.servers = [
            Server(folder / name, self, s3, stack, data_dir=folder / "data") for name in ("first", "second")
        ]
        self.ray: Server | None = None
        self.cluster: RayCluster | None = None
        self.alone: Server | None = None
        self.target: Server | None = None  # that the rows go to; None: to whichever of the two is the owner
        if has_ray:
            self._add_ray(s3, stack)
        if has_alone:
            self.alone = Server(folder / "alone", self, s3, stack, data_dir=folder / "alone" / "data", database=None)
            self.servers.append(self.alone)
        stack.callback(self.end_servers)
        self.owner, self.standby = self.servers[:2]
        for each in (self.owner, *self.servers[2:]):
            each.start()
        harness.wait_until(self.owner.is_owner, TIMEOUT_S, "the first owner", look_s=LOOK_S)
        self.standby.start()
        harness.wait_until(self.standby.is_standing_by, TIMEOUT_S, "the standby", look_s=LOOK_S)
        for each in self.servers[2:]:
            self.wait_for(each)
        self.texts = 0

    def _add_ray(self, s3: str, stack: ExitStack) -> None:
        self.postgres.create_database(RAY_DATABASE)
        self.cluster = RayCluster(stack)
        python = os.environ["BATCHMILL_RAY_PYTHON"]
        self.ray = Server(
            self.folder / "ray", self, s3, stack, data_dir=self.folder / "ray" / "data", database=RAY_DATABASE,
            workers=2, more=RAY_CONFIG.format(address=self.cluster.nodes.address, python=python),
        )  # fmt: skip
        self.servers.append(self.ray)

    def wait_for(self, server: Server) -> None:
        harness.wait_until(server.is_owner, TIMEOUT_S, f"the server {server.folder.name}", look_s=LOOK_S)

    def end_servers(self) -> None:
        for each in self.servers:
            if each.process is not None and each.process.poll() is None:
                each.signal(signal.SIGCONT)
                harness.end_group(each.process)

    def refused_server(self, port: int) -> tuple[int, str]:
        """Start a server whose database has another port. Returns: its exit code, and what it said."""
        config = self.owner.folder / "refused.toml"
        ours = (self.owner.folder / "batchmill.toml").read_text()
        config.write_text(ours.replace(f":{self.owner.proxy.port}/", f":{port}/"))
        words = [
            str(harness.BATCHMILL), "serve", "--port", str(free_port()), "--config", str(config),
            "--data-dir", str(self.folder / "refused"),
        ]  # fmt: skip
        done = subprocess.run(
            words,
            cwd=self.owner.folder,
            env=self.owner.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def take_over(self) -> None:
        """Wait until the standby owns the database; from then on it is the owner."""
        self.owner, self.standby = self.standby, self.owner
        harness.wait_until(self.owner.is_owner, TIMEOUT_S, "the take-over", look_s=LOOK_S)

    def restart_standby(self) -> None:
        """Start the other server again; `ensure_standby` waits for it."""
        self.standby.start()

    def revive_standby(self) -> None:
        """Start the other server again if it has ended."""
        if self.standby.process is not None and self.standby.process.poll() is not None:
            self.standby.start()

    def ensure_standby(self) -> None:
        self.revive_standby()
        harness.wait_until(self.standby.is_standing_by, TIMEOUT_S, "the standby", look_s=LOOK_S)

    @property
    def server(self) -> Server:
        """The one that the rows go to."""
        return self.target or self.owner

    def ask(self, method: str, path: str, **arguments: Any) -> httpx2.Response:
        """Ask the server, again until it answers: a fault may have struck in between."""

        def send(_: int) -> httpx2.Response:
            return httpx2.request(method, f"{self.server.url}{path}", timeout=20, verify=False, **arguments)

        try:
            return answered(send)
        except NoAnswer as error:
            raise harness.CommandFailed(f"{method} {path}: {error}") from None

    def call(self, method: str, path: str, **arguments: Any) -> httpx2.Response:
        return self.ask(method, path, **arguments).raise_for_status()

    def submit(self, count: int) -> tuple[str, list[str]]:
        """A batch of rows with texts that no other batch has; its id and its texts."""
        texts = [f"{LONG} {n}" for n in range(self.texts, self.texts + count)]
        self.texts += count
        file = self.call("POST", "/v1/files", **upload_of(texts)).json()["id"]
        return self.call("POST", "/v1/batches", json=order_of(file)).json()["id"], texts

    def count_calls(self) -> int:
        """Rows of the campaign's own batches that a model was called for, on all servers."""
        return self.calls.read_bytes().count(LONG.encode())

    def done(self, batch: str) -> dict[str, Any]:
        return self.call("GET", f"/v1/batches/{batch}").json()

    def audit(self, batch: str, texts: list[str], outcome: Outcome) -> None:
        """Wait for the end of a batch, and compare its results with its rows."""
        deadline = time.monotonic() + TIMEOUT_S
        while (found := self.done(batch))["status"] not in ENDED:
            if time.monotonic() > deadline:
                outcome.flaws.append(f"{batch} did not end: {found['batchmill']}")
                outcome.lost += len(texts) - found["request_counts"]["completed"]
                return
            time.sleep(LOOK_S)
        if found["status"] != "completed" or not found.get("output_file_id"):
            outcome.flaws.append(f"{batch} ended as {found['status']}: {found.get('errors')}")
        content = ""
        if file := found.get("output_file_id"):
            content = self.call("GET", f"/v1/files/{file}/content").text
        self._audit_rows(batch, texts, content, outcome)

    def _audit_rows(
        self, batch: str, texts: list[str], content: str, outcome: Outcome, *, is_cancelled: bool = False
    ) -> None:
        """Compare the results of a batch with its rows, and verify its ledger. Of one that was cancelled, rows that
        have not run have errors, or there are no results.
        """
        outcome.jobs += 1
        outcome.rows += len(texts)
        answers = [json.loads(line) for line in content.splitlines()]
        counts = Counter(each["custom_id"] for each in answers)
        outcome.doubled += sum(count - 1 for count in counts.values())
        if not is_cancelled or answers:
            outcome.lost += sum(not counts[text] for text in texts)
        for each in answers:
            outcome.wrong += answer_of(each) != each["custom_id"].upper() and not (is_cancelled and each["error"])
        # What `batchmill ledger verify` calls.
        report = self.call("POST", f"/batchmill/v1/jobs/{batch.replace('batch_', 'job_')}/verify").json()
        if report["broken"] or (report["rows_done"] != len(texts) and not is_cancelled):
            outcome.flaws.append(f"ledger verify {batch}: {report}")

    def _audit_short(self, batches: list[ShortBatch], since: int, outcome: Outcome) -> None:
        """Compare what clients have seen with what is there. Args: since: when they began."""
        for each in batches:
            outcome.flaws += check(each, self.ask)
            content, is_cancelled = "".join(each.contents.values()), each.end["status"] == "cancelled"
            self._audit_rows(each.id, each.texts, content, outcome, is_cancelled=is_cancelled)
        outcome.short = len(batches)
        counts = created_since(since, self.ask)
        for each in batches:
            if counts[each.input] != 1:
                outcome.flaws.append(f"{counts[each.input]} batches of the file of {each}")

    def count_again(self, texts: Iterable[str], outcome: Outcome) -> None:
        """Count the rows that a model was called for more than once."""
        called = Counter(self.calls.read_text().splitlines())
        outcome.again += sum(max(0, called[text] - 1) for text in texts)

    def strike(self, fault: str, inject: Injection, target: Server | None) -> Outcome:
        """Inject a fault when part of a batch has run, and audit that batch, a small one sent afterwards, and those
        that clients have created meanwhile.

        Args: target: the server that they go to; None: whichever of the first two is the owner.
        """
        outcome, started, since = Outcome(fault), time.monotonic(), int(time.time())
        self.target = target
        with ExitStack() as stack:
            if self.clients is not None:
                urls = [each.url for each in ([target] if target else [self.owner, self.standby])]
                stack.enter_context(self.clients.running(urls, self.chance.randrange(1 << 32)))
            texts = self._struck(outcome, inject)
        if self.clients is not None:
            outcome.flaws += self.clients.flaws
            ended = [each for each in self.clients.batches if each.end]  # of the others there is a flaw
            self._audit_short(ended, since, outcome)
            texts += [text for each in ended for text in each.texts]
        self.count_again(texts, outcome)
        outcome.whole_s = time.monotonic() - started
        return outcome

    def _struck(self, outcome: Outcome, inject: Injection) -> list[str]:
        """Inject a fault when part of a batch has run, and audit that batch and a small one sent afterwards. Returns:
        the texts of both.
        """
        called = self.count_calls()
        batch, texts = self.submit(ROWS)
        goal = called + self.chance.randrange(ROWS // 10, 9 * ROWS // 10)
        try:
            harness.wait_until(lambda: self.count_calls() >= goal, TIMEOUT_S, "rows")
        except harness.CommandFailed as error:
            raise harness.CommandFailed(f"{error}: {self.done(batch)}") from None
        before, began = self.count_calls(), time.monotonic()
        outcome.called = before - called
        undo = inject(self, outcome)
        harness.wait_until(
            lambda: self.count_calls() > before or self.done(batch)["status"] in ENDED,
            TIMEOUT_S, "a row after the fault", look_s=LOOK_S,
        )  # fmt: skip
        outcome.recovery_s = time.monotonic() - began
        small, small_texts = self.submit(SMALL_ROWS)
        self.audit(batch, texts, outcome)
        self.audit(small, small_texts, outcome)
        undo()
        return texts + small_texts


Undo = Callable[[], None]
Injection = Callable[[Campaign, Outcome], Undo]
