"""Killed while a provider has its rows, a job ends with every row once, none billed twice, and nothing left running."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchmill.faults import MISFIT_POINTS, PROVIDER_POINTS

ROWS, ROWS_MAX = 240, 60  # of the job, and of one batch
TESTS = Path(__file__).parents[1]
CONFIG = """
[models.far]
engine = "openai-batch"
source = "gpt"
base_url = "{url}"
api_key = "env:FAR_KEY"
engine_args = {{ poll_s = 0.02, poll_max_s = 0.05, rows_max = {rows_max}, jobs_max = 2, cancel_wait_s = 10 }}
"""


class Provider:
    """The fake provider, a process of its own that nothing kills."""

    def __init__(self, looks: int, *more: str) -> None:
        command = [sys.executable, "-P", "-m", "fakes.batch_provider", "--looks", str(looks), *more]
        environ = {**os.environ, "PYTHONPATH": str(TESTS)}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def state(self) -> dict:
        with urllib.request.urlopen(self.url.removesuffix("/v1") + "/_fake/state") as reply:
            return json.load(reply)

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(params=[3])
def provider(request) -> Iterator[Provider]:
    made = Provider(request.param)
    yield made
    made.end()


class Command:
    """`batchmill run` of one job, as often as it takes."""

    def __init__(self, folder: Path, provider: Provider) -> None:
        self.folder = folder
        (folder / "batchmill.toml").write_text(CONFIG.format(url=provider.url, rows_max=ROWS_MAX))
        rows = [
            {
                "custom_id": f"c{n}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": "far", "messages": [{"role": "user", "content": f"text {n}"}]},
            }
            for n in range(ROWS)
        ]
        (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(self, *words: str, fault: str = "") -> subprocess.Popen[str]:
        words = words or ("run", "in.jsonl", "--model", "far", "-o", "out.jsonl")
        environment = {**os.environ, "BATCHMILL_FAULT": fault, "FAR_KEY": "k", "no_proxy": "127.0.0.1"}
        return subprocess.Popen(
            [sys.executable, "-m", "batchmill", "--data-dir", str(self.folder / "data"), *words],
            cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *words: str, fault: str = "") -> tuple[int, str]:
        process = self.start(*words, fault=fault)
        output = process.communicate(timeout=120)
        return process.returncode, "".join(output)

    def workers(self) -> list[int]:
        """The process ids of the workers there are."""
        found = []
        for path in (self.folder / "data" / "workers").glob("*.pid"):
            text = path.read_text()
            if text:
                found.append(int(text.split()[0]))
        return found

    def results(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "out.jsonl").read_text().splitlines()]


@pytest.fixture
def command(tmp_path, provider) -> Command:
    return Command(tmp_path, provider)


def check(command: Command, provider: Provider) -> None:
    lines = command.results()
    assert [line["custom_id"] for line in lines] == [f"c{n}" for n in range(ROWS)]
    assert all(line["error"] is None for line in lines)
    state = provider.state()
    assert state["billed"] == {f"text {n}": 1 for n in range(ROWS)}
    assert state["running"] == []


@pytest.fixture
def late_provider() -> Iterator[Provider]:
    """Of four rows one gets an answer that fits its schema at once, the others later or never."""
    made = Provider(3, "--answers-late")
    yield made
    made.end()


@pytest.mark.parametrize(
    ("point", "count"),
    [
        *((point, 1) for point in MISFIT_POINTS),
        # There are four batches of rows that are asked for the first time.
        *(("after_counting", 6), ("after_note", 17), ("before_submit", 5), ("after_submit", 12)),
    ],
)
def test_killed_while_it_asks_again(point, count, late_provider, tmp_path):
    """Whoever dies between an answer that does not fit and the next, each is paid for and counted once."""
    command, kill = Command(tmp_path, late_provider), f"{point}:{count}:{tmp_path / 'fired'}"
    (tmp_path / "schema.json").write_text('{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}')
    words = ("run", "in.jsonl", "--model", "far", "-o", "out.jsonl", "--schema", "schema.json")
    code, result = command.run(*words, fault=kill)
    assert (tmp_path / "fired").exists(), result
    if code not in (0, 3):
        code, result = command.run(*words)
    assert code == 3, result
    asked = [min(n % 4, 2) + 1 for n in range(ROWS)]
    assert [line["custom_id"] for line in command.results()] == [f"c{n}" for n in range(ROWS) if n % 4 < 3]
    failed = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert [line["error"]["code"] for line in failed] == ["schema_mismatch"] * (ROWS // 4)
    assert all("yet" in line["response"]["body"]["choices"][0]["message"]["content"] for line in failed)
    state = late_provider.state()
    assert sum(state["billed"].values()) == sum(asked) and set(state["billed"].values()) == {1}
    assert state["running"] == []
    (job,) = [path.name for path in (tmp_path / "data" / "jobs").glob("job_*")]
    code, text = command.run("show", job, "--json")
    view = json.loads(text.splitlines()[-1])["job"]
    usage = view["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (3 * sum(asked), 2 * sum(asked))
    assert view["warnings"] == {"asked_again": ROWS // 2}
    code, text = command.run("ledger", "verify", job)
    assert code == 0, text


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("point", PROVIDER_POINTS)
def test_killed_at_a_point(point, count, command, provider, tmp_path):
    """Whoever dies between two steps of handing rows over, nothing is paid for twice or left behind."""
    code, result = command.run(fault=f"{point}:{count}:{tmp_path / 'fired'}")
    assert (tmp_path / "fired").exists(), result
    if code:
        code, result = command.run()
    assert code == 0, result
    check(command, provider)


@pytest.mark.parametrize("point", ["before_submit", "after_submit", "before_note"])
def test_killed_in_a_sample_and_after_it(point, command, provider, tmp_path):
    """The rows of a sample go in small batches of their own. Killed while they are there, and again while the rest is
    handed over, no row is billed twice."""
    words = ("run", "in.jsonl", "--model", "far", "-o", "out.jsonl")
    sample = (*words, "--sample", "30", "--seed", "5")
    command.run(*sample, fault=f"{point}:1:{tmp_path / 'fired'}")
    assert (tmp_path / "fired").exists()
    code, result = command.run(*sample)
    assert code == 0 and "its sample has run" in result, result
    state = provider.state()
    assert len(state["billed"]) == 30 and set(state["billed"].values()) == {1} and state["running"] == []
    command.run(*words, fault=f"{point}:2:{tmp_path / 'fired again'}")
    assert (tmp_path / "fired again").exists()
    code, result = command.run(*words)
    assert code == 0, result
    check(command, provider)


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment(seed, command, provider):
    """However often the owner and its workers are killed, and whenever, every row is billed and answered once."""
    chance = random.Random(seed)
    for _ in range(4):
        process = command.start()
        kill_later(process, command, chance)
        process.communicate(timeout=120)
        if process.returncode == 0:
            break
    code, result = command.run()
    assert code == 0, result
    check(command, provider)


def kill_later(process: subprocess.Popen[str], command: Command, chance: random.Random) -> None:
    """SIGKILL for the owner, or one of its workers, some time after the provider has come into it."""
    victim, after_s = chance.choice(["owner", "worker"]), chance.uniform(0.4, 1.6)
    sprung = threading.Event()
    sprung.wait(after_s)
    if process.poll() is None:
        for pid in [process.pid] if victim == "owner" else command.workers():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.mark.parametrize("provider", [100_000], indirect=True)
def test_killed_while_it_is_cancelled(command, provider):
    """A job that is killed while its batches are being ended leaves none behind once somebody comes back to it."""
    process = command.start()
    waiting = threading.Event()
    while len(provider.state()["running"]) < 2:
        assert process.poll() is None
        waiting.wait(0.05)
    (job,) = [path.name for path in (command.folder / "data" / "jobs").glob("job_*")]
    cancelling = command.start("cancel", job)
    while all(batch["status"] not in ("cancelling", "cancelled") for batch in provider.state()["batches"]):
        waiting.wait(0.01)
    for pid in (process.pid, *command.workers()):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    cancelling.communicate(timeout=120)  # it becomes the owner, and brings the job to its end
    code, text = command.run("show", job, "--json")
    view = json.loads(text.splitlines()[-1])["job"]
    assert (code, view["state"]) == (0, "cancelled"), text
    state = provider.state()
    assert state["running"] == [] and set(state["billed"].values()) <= {1}
    assert view["rows_ok"] == len(state["billed"])
