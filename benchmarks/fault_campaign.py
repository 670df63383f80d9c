"""The batches of `cluster_faults.py`, the servers that they run through, and the audit of both. Linux only.

Two servers share one PostgreSQL database and one object store. A third one has a database of its own and its workers on
a Ray cluster, if BATCHMILL_RAY_PYTHON names an interpreter with batchmill[ray]. Two have nothing but their data
directories, with SQLite in them: one on a disk that loses its power, one on a small disk.
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
from collections.abc import Callable, Collection, Iterable
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
from fault_servers import (
    BUCKET,
    RAY_CONFIG,
    ClusterServer,
    CrampedServer,
    LossyServer,
    RayCluster,
    Server,
    free_port,
)

sys.path.insert(0, str(harness.ROOT / "tests"))
from fakes.lossy_disk.disk import COMPILER
from fakes.postgres_server import PostgresServer
from fakes.s3_server import bucket_client, s3_server

DATABASE, RAY_DATABASE = "campaign", "campaign_ray"
ROWS, SMALL_ROWS = 100, 5
RAY, ALONE, CRAMPED = "ray", "alone", "cramped"
LONG = "text"  # begins the texts of the rows of a campaign's own batches


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
        others: the servers beside the first two: RAY, ALONE, CRAMPED.
        has_objects: without, the servers keep everything in their data directories.
        clients: that create short batches all the time. None: nobody does.
    """

    cluster: RayCluster  # if there is the server RAY

    def __init__(
        self, folder: Path, seed: int, stack: ExitStack, *, others: Collection[str] = (), has_objects: bool = True,
        clients: Clients | None = None,
    ) -> None:  # fmt: skip
        self.clients, self._has_objects = clients, has_objects
        self.folder, self.chance, self.calls = folder, random.Random(seed), folder / "calls"
        self.calls.touch()
        self.postgres = PostgresServer("fsync=on", "shared_buffers=32MB", "autovacuum=off")
        stack.callback(self.postgres.close)
        self.postgres.create_database(DATABASE)
        self._s3, self._stack = stack.enter_context(s3_server()), stack
        stack.enter_context(bucket_client(self._s3, BUCKET))
        self.owner, self.standby = (
            self._cluster_server(name, folder / "data", DATABASE) for name in ("first", "second")
        )
        self.others: dict[str, Server] = {name: self._other(name) for name in others}
        self.servers: list[Server] = [self.owner, self.standby, *self.others.values()]
        self.target: Server | None = None  # that the rows go to; None: to whichever of the first two is the owner
        stack.callback(self.end_servers)
        for each in (self.owner, *self.others.values()):
            each.start()
        harness.wait_until(self.owner.is_owner, TIMEOUT_S, "the first owner", look_s=LOOK_S)
        self.standby.start()
        harness.wait_until(self.standby.is_standing_by, TIMEOUT_S, "the standby", look_s=LOOK_S)
        for each in self.others.values():
            self.wait_for(each)
        self.texts = 0

    def _cluster_server(
        self, name: str, data_dir: Path, database: str, *, workers: int = 1, config: str = ""
    ) -> ClusterServer:
        return ClusterServer(
            self.folder / name, self.calls, data_dir, self.postgres.port, database, self._s3, self._stack,
            keys=self.folder / "keys", has_objects=self._has_objects, workers=workers, config=config,
        )  # fmt: skip

    def _other(self, name: str) -> Server:
        folder = self.folder / name
        if name == ALONE and COMPILER is not None:
            return LossyServer(folder, self.calls, self._stack)
        if name == ALONE:
            return Server(folder, self.calls, folder / "data")
        if name == CRAMPED:
            return CrampedServer(folder, self.calls, self._stack)
        self.postgres.create_database(RAY_DATABASE)
        self.cluster = RayCluster(self._stack)
        python = os.environ["BATCHMILL_RAY_PYTHON"]
        config = RAY_CONFIG.format(address=self.cluster.nodes.address, python=python)
        return self._cluster_server(name, folder / "data", RAY_DATABASE, workers=2, config=config)

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
