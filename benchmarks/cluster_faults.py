"""Jobs through two servers on one PostgreSQL database and one object store, while a seeded series of faults arrives.

One server owns the database and the other stands by. Each fault strikes in the middle of a batch; then the batch and a
small one ended through whichever server answers are audited: one outcome a row, the right content, a sound ledger.
Uses the PostgreSQL server and the S3 server behind a proxy of `tests/fakes`. Linux only.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any

import harness
import httpx2

sys.path.insert(0, str(harness.ROOT / "tests"))
from fakes.faulty_objects import faulty_objects
from fakes.postgres_server import PostgresServer
from fakes.s3_server import bucket_client, s3_environment, s3_server

from batchmill.services.databases import EXIT_REPLACED

BUCKET, DATABASE = "campaign", "campaign"
ROWS, SMALL_ROWS = 300, 5
TIMEOUT_S, LOOK_S = 60.0, 0.05
STORE_FAULTS = ("slow_down", "reset", "lost_reply", "truncated")
ENDED = ("completed", "failed", "expired", "cancelled")
CODE = """
import time

def steady(messages, model=None):
    text = messages[-1]["content"]
    with open({calls!r}, "a") as calls:
        calls.write(text + "\\n")
    time.sleep(0.01)
    message = {{"role": "assistant", "content": text.upper()}}
    return {{"id": "c", "object": "chat.completion", "created": 1, "model": model, "choices": [
        {{"index": 0, "finish_reason": "stop", "message": message}}]}}
"""
CONFIG = """
[models.steady]
engine = "function"
source = "app.py:steady"
[database]
url = "postgresql+psycopg://batchmill@127.0.0.1:{port}/{database}"
[storage]
objects = "s3://{bucket}/server"
[secrets]
key_file = "{keys}"
"""


class TcpProxy:
    """Forwards connections to a port of this machine; what arrives while it is cut is held, not refused."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        self._open.set()

    def close(self) -> None:
        self.mend()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        self._open.wait()
        try:
            far = socket.create_connection(("127.0.0.1", self._port))
        except OSError:
            near.close()
            return
        threading.Thread(target=self._pump, args=(near, far), daemon=True).start()
        self._pump(far, near)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._open.wait()
                target.sendall(data)
        except OSError:
            pass  # one side broke the connection; the other is told below
        for each in (source, target):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class Server:
    """One of the two `batchmill serve`, with a data directory, a way to the database and a way to the store."""

    def __init__(self, folder: Path, campaign: Campaign, s3: str, stack: ExitStack) -> None:
        self.folder, self.log = folder, folder / "log"
        self.data_dir = (folder if campaign.is_apart else campaign.folder) / "data"
        folder.mkdir()
        self.proxy = TcpProxy(campaign.postgres.port)
        stack.callback(self.proxy.close)
        self.store = stack.enter_context(faulty_objects(s3))
        self.environment = {**os.environ, **s3_environment(self.store.url)}
        (folder / "app.py").write_text(CODE.format(calls=str(campaign.calls)))
        keys = campaign.folder / "keys"
        config = CONFIG.format(port=self.proxy.port, database=DATABASE, bucket=BUCKET, keys=keys)
        (folder / "batchmill.toml").write_text(config)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.seen: set[int] = set()

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
            return httpx2.get(f"{self.url}/v1/batches", timeout=2).status_code == 200
        except httpx2.HTTPError:
            return False

    def is_standing_by(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/v1/batches", timeout=2).status_code == 503
        except httpx2.HTTPError:
            return False

    def writes(self) -> int:
        """Requests of this server that changed the store."""
        return sum(self.store.count(method) for method in ("PUT", "POST", "DELETE"))


@dataclass
class Outcome:
    """One fault and what became of the rows under it."""

    fault: str
    jobs: int = 0
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    again: int = 0
    unmet: int = 0  # failures of the store that no request came for
    recovery_s: float = 0.0
    flaws: list[str] = field(default_factory=list)


class Campaign:
    """Two servers, their database and store, and the rows that run through them."""

    def __init__(self, folder: Path, seed: int, is_apart: bool, stack: ExitStack) -> None:
        self.is_apart = is_apart
        self.folder, self.chance, self.calls = folder, random.Random(seed), folder / "calls"
        self.calls.touch()
        self.postgres = PostgresServer("fsync=on", "shared_buffers=32MB", "autovacuum=off")
        stack.callback(self.postgres.close)
        self.postgres.create_database(DATABASE)
        s3 = stack.enter_context(s3_server())
        stack.enter_context(bucket_client(s3, BUCKET))
        self.servers = [Server(folder / name, self, s3, stack) for name in ("first", "second")]
        stack.callback(self.end_servers)
        self.owner, self.standby = self.servers
        self.owner.start()
        harness.wait_until(self.owner.is_owner, TIMEOUT_S, "the first owner")
        self.standby.start()
        harness.wait_until(self.standby.is_standing_by, TIMEOUT_S, "the standby")
        self.texts = 0

    def end_servers(self) -> None:
        for each in self.servers:
            if each.process is not None and each.process.poll() is None:
                each.signal(signal.SIGCONT)
                harness.end_group(each.process)

    def take_over(self) -> None:
        """Wait until the standby owns the database; from then on it is the owner."""
        self.owner, self.standby = self.standby, self.owner
        harness.wait_until(self.owner.is_owner, TIMEOUT_S, "the take-over")

    def restart_standby(self) -> None:
        self.standby.start()
        harness.wait_until(self.standby.is_standing_by, TIMEOUT_S, "the standby")

    def call(self, method: str, path: str, **arguments: Any) -> httpx2.Response:
        """Ask the owner, again until it answers: a fault may have struck in between."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                reply = httpx2.request(method, f"{self.owner.url}{path}", timeout=20, **arguments)
                if reply.status_code < 500:
                    return reply.raise_for_status()
                problem = f"{reply.status_code} {reply.text[:300]}"
            except httpx2.TransportError as error:
                problem = repr(error)
            if time.monotonic() > deadline:
                raise harness.CommandFailed(f"{method} {path}: {problem}")
            time.sleep(LOOK_S)

    def submit(self, count: int) -> tuple[str, list[str]]:
        """A batch of rows with texts that no other batch has; its id and its texts."""
        texts = [f"text {n}" for n in range(self.texts, self.texts + count)]
        self.texts += count
        lines = [json.dumps(row(text)) for text in texts]
        files = {"file": ("rows.jsonl", "\n".join(lines) + "\n")}
        file = self.call("POST", "/v1/files", files=files, data={"purpose": "batch"}).json()["id"]
        order = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return self.call("POST", "/v1/batches", json=order).json()["id"], texts

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
        outcome.jobs += 1
        outcome.rows += len(texts)
        if found["status"] != "completed" or not found.get("output_file_id"):
            outcome.flaws.append(f"{batch} ended as {found['status']}: {found.get('errors')}")
            outcome.lost += len(texts)
            return
        content = self.call("GET", f"/v1/files/{found['output_file_id']}/content").text
        answers = [json.loads(line) for line in content.splitlines()]
        counts = Counter(each["custom_id"] for each in answers)
        outcome.lost += sum(not counts[text] for text in texts)
        outcome.doubled += sum(count - 1 for count in counts.values())
        outcome.wrong += sum(answer_of(each) != each["custom_id"].upper() for each in answers)
        called = Counter(self.calls.read_text().splitlines())
        outcome.again += sum(called[text] - 1 for text in texts)
        words = [str(harness.BATCHMILL), "--json", "ledger", "verify", batch.replace("batch_", "job_")]
        verified = subprocess.run(
            [*words, "--data-dir", str(self.owner.data_dir)],
            cwd=self.owner.folder,
            env=self.owner.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if verified.returncode:
            outcome.flaws.append(f"ledger verify {batch}: {(verified.stdout + verified.stderr)[-500:]}")

    def strike(self, fault: str) -> Outcome:
        """Inject a fault when part of a batch has run, and audit that batch and a small one sent afterwards."""
        outcome = Outcome(fault)
        batch, texts = self.submit(ROWS)
        goal = self.chance.randrange(ROWS // 10, ROWS // 2)
        harness.wait_until(lambda: self.done(batch)["request_counts"]["completed"] >= goal, TIMEOUT_S, "rows")
        before, began = len(self.calls.read_text().splitlines()), time.monotonic()
        undo = FAULTS[fault](self, outcome)
        harness.wait_until(
            lambda: len(self.calls.read_text().splitlines()) > before or self.done(batch)["status"] in ENDED,
            TIMEOUT_S, "a row after the fault",
        )  # fmt: skip
        outcome.recovery_s = time.monotonic() - began
        small, small_texts = self.submit(SMALL_ROWS)
        self.audit(batch, texts, outcome)
        self.audit(small, small_texts, outcome)
        undo()
        return outcome


Undo = Callable[[], None]


def row(text: str) -> dict[str, Any]:
    body = {"model": "steady", "messages": [{"role": "user", "content": text}]}
    return {"custom_id": text, "method": "POST", "url": "/v1/chat/completions", "body": body}


def answer_of(line: dict[str, Any]) -> str:
    return line["response"]["body"]["choices"][0]["message"]["content"] if line.get("response") else ""


def nothing() -> None:
    """For faults that are over at once."""


def end_sessions(campaign: Campaign, _: Outcome) -> Undo:
    """Some sessions of the database are ended by an administrator."""
    query = f"SELECT pid FROM pg_stat_activity WHERE datname = '{DATABASE}'"
    pids = [pid for (pid,) in campaign.postgres.execute(query)]
    for pid in campaign.chance.sample(pids, min(2, len(pids))):
        campaign.postgres.execute(f"SELECT pg_terminate_backend({pid})")
    harness.wait_until(lambda: any(each.is_owner() for each in campaign.servers), TIMEOUT_S, "an owner")
    if not campaign.owner.is_owner():
        campaign.take_over()
    return lambda: revive(campaign)


def revive(campaign: Campaign) -> None:
    """Start the other server again if it ended itself."""
    if campaign.standby.process is not None and campaign.standby.process.poll() is not None:
        campaign.restart_standby()


def database_stopped(campaign: Campaign, outcome: Outcome) -> Undo:
    """PostgreSQL crashes, and is away for some seconds."""
    campaign.postgres.stop(signal.SIGQUIT)
    time.sleep(campaign.chance.uniform(1, 5))
    campaign.postgres.start()
    harness.wait_until(lambda: any(each.is_owner() for each in campaign.servers), TIMEOUT_S, "an owner")
    if not campaign.owner.is_owner():
        campaign.take_over()
    return lambda: revive(campaign)


def owner_killed(campaign: Campaign, _: Outcome) -> Undo:
    """SIGKILL for the owner; its data directory stays."""
    campaign.owner.signal(signal.SIGKILL)
    campaign.owner.wait()
    campaign.take_over()
    return campaign.restart_standby


def owner_lost(campaign: Campaign, _: Outcome) -> Undo:
    """SIGKILL for the owner and every process of it, and each folder of its data directory is deleted."""
    process = campaign.owner.process
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)
    campaign.owner.wait()
    for each in campaign.owner.data_dir.iterdir():
        if each.is_dir():
            rmtree(each)
    campaign.take_over()
    return campaign.restart_standby


def come_back(campaign: Campaign, outcome: Outcome, go_on: Undo) -> Undo:
    """The rest of the story of an owner that was replaced: it goes on, writes nothing, and ends itself."""

    def undo() -> None:
        before = campaign.standby.writes()
        go_on()
        code = campaign.standby.wait()
        if code != EXIT_REPLACED:
            outcome.flaws.append(f"a replaced owner ended with {code}")
        if written := campaign.standby.writes() - before:
            outcome.flaws.append(f"a replaced owner changed {written} objects")
        campaign.restart_standby()

    return undo


def owner_stopped(campaign: Campaign, outcome: Outcome) -> Undo:
    """SIGSTOP for the owner, SIGCONT after the take-over."""
    stopped = campaign.owner
    stopped.signal(signal.SIGSTOP)
    campaign.take_over()
    return come_back(campaign, outcome, lambda: stopped.signal(signal.SIGCONT))


def owner_cut_off(campaign: Campaign, outcome: Outcome) -> Undo:
    """What the owner sends to the database is held, and arrives after the take-over."""
    lost = campaign.owner
    lost.proxy.cut()
    campaign.take_over()
    return come_back(campaign, outcome, lost.proxy.mend)


def worker_killed(campaign: Campaign, _: Outcome) -> Undo:
    """SIGKILL for one process below the owner."""
    assert campaign.owner.process is not None
    pids = harness.tree_of(campaign.owner.process.pid)[1:]
    if pids:
        os.kill(campaign.chance.choice(pids), signal.SIGKILL)
    return nothing


def store_fault(fault: str) -> Callable[[Campaign, Outcome], Undo]:
    def inject(campaign: Campaign, outcome: Outcome) -> Undo:
        store = campaign.owner.store
        methods = ("GET",) if fault == "truncated" else ("PUT", "GET")
        for method in methods:
            store.fail(method, fault)

        def undo() -> None:
            outcome.unmet = len(store.faults)
            store.faults.clear()

        return undo

    return inject


FAULTS: dict[str, Callable[[Campaign, Outcome], Undo]] = {
    "end_sessions": end_sessions, "database_stopped": database_stopped, "owner_killed": owner_killed,
    "owner_lost": owner_lost, "owner_stopped": owner_stopped, "owner_cut_off": owner_cut_off,
    "worker_killed": worker_killed, **{f"store_{each}": store_fault(each) for each in STORE_FAULTS},
}  # fmt: skip


def series(seed: int, count: int, kinds: list[str]) -> Iterator[str]:
    """Each kind once in a random order, then again in another."""
    chance = random.Random(seed)
    while count > 0:
        order = chance.sample(kinds, len(kinds))[:count]
        count -= len(order)
        yield from order


@contextmanager
def running_campaign(seed: int, is_apart: bool) -> Iterator[Campaign]:
    with harness.work_folder() as folder, ExitStack() as stack:
        yield Campaign(folder, seed, is_apart, stack)


def print_table(outcomes: list[Outcome]) -> None:
    print("| fault | times | jobs | rows | again | lost | doubled | wrong | recovery median, max | flaws | unmet |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for fault in FAULTS:
        if found := [each for each in outcomes if each.fault == fault]:
            sums = [sum(getattr(each, name) for each in found) for name in ("jobs", "rows", "again", "lost", "doubled")]
            cells = [len(found), *sums, sum(each.wrong for each in found)]
            times = [each.recovery_s for each in found]
            cells.append(f"{statistics.median(times):.1f} s, {max(times):.1f} s")
            cells += [sum(len(each.flaws) for each in found), sum(each.unmet for each in found)]
            print(f"| {fault} | {' | '.join(map(str, cells))} |")


def main() -> None:
    """Run the series, and print what became of the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--seconds", type=float, default=7200.0, help="no fault begins later")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--apart", action="store_true", help="a data directory for each server")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # servers are ended on the way out
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with running_campaign(arguments.seed, arguments.apart) as campaign:
        for number, fault in enumerate(series(arguments.seed, arguments.faults, arguments.kinds), 1):
            if time.monotonic() - began > arguments.seconds:
                break
            try:
                outcomes.append(campaign.strike(fault))
            except (AssertionError, harness.CommandFailed, subprocess.TimeoutExpired, httpx2.HTTPError) as error:
                outcomes.append(Outcome(fault, flaws=[f"did not recover: {error!r}"]))
            last = outcomes[-1]
            print(f"seed {arguments.seed}, fault {number}: {last}", file=sys.stderr, flush=True)
            if last.flaws:
                for each in campaign.servers:
                    print(f"{each.folder.name}: {each.log.read_text()[-2000:]}", file=sys.stderr)
                break
    if arguments.json:
        print(json.dumps({"seed": arguments.seed, "faults": [asdict(each) for each in outcomes]}))
    else:
        print_table(outcomes)
    sys.exit(any(each.lost or each.doubled or each.wrong or each.flaws for each in outcomes))


if __name__ == "__main__":
    main()
