"""Modelbit's published client, unmodified and in an environment of its own, against a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from client_envs import client_python
from fakes.webhook_receiver import WebhookReceiver
from running_server import RunningServer

SCRIPT_S = 120.0
CODE = '''
import os, time
from pathlib import Path

COUNTED = Path(__file__).parent / "counted"


def example_doubler(foo: int):
    if isinstance(foo, int) and foo < 0:
        raise ValueError(f"{foo} is less than nothing")
    return 2 * foo


def of_dict(d: dict):
    return {"twice": d["my_key"] * 2}


def several(a: int, b: str, c: float):
    return [a, b, c]


def slow(seconds: float):
    time.sleep(seconds)
    return "done"


def counted(path: str):
    """Leaves a line for each time it is called."""
    with open(path, "a") as file:
        file.write("called\\n")
    raise RuntimeError("first line\\nsecond line")


def exits(path: str):
    with open(path, "a") as file:
        file.write("called\\n")
    os._exit(3)
'''
FRAMES = """
def frames(df):
    return [f"{index}: {row.city} {row.rooms}" for index, row in zip(df.index, df.itertuples())]
"""
# Reads cases as JSON, one call of get_inference each, and prints what became of each.
SCRIPT = """
import json, sys
import modelbit, pandas

for line in sys.stdin:
    case = json.loads(line)
    if "frame" in case:
        case["data"] = pandas.DataFrame(**case.pop("frame"))
    try:
        told = {"result": modelbit.get_inference(**case)}
    except Exception as error:
        told = {"error": str(error), "kind": type(error).__name__}
    print("@" + json.dumps(told), flush=True)
"""


def batchmill(folder: Path, *words: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "batchmill", *words, "--data-dir", str(folder / "data")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SCRIPT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modelbit")
    (folder / "app.py").write_text(CODE)
    (folder / "frames.py").write_text(FRAMES)
    (folder / "batchmill.toml").write_text('[server]\nprivate_hosts = ["127.0.0.1"]\n')
    with RunningServer(folder) as running:
        for name in ("example_doubler", "of_dict", "several", "slow", "counted", "exits"):
            batchmill(folder, "deploy", f"app.py:{name}", "--name", name)
        yield running


class Client:
    """The package, at one server."""

    def __init__(self, server: RunningServer) -> None:
        self._port = server.url.rpartition(":")[2]
        self._python = client_python("modelbit")

    def ask(self, *cases: dict) -> list[dict]:
        """What became of each call, in this order."""
        region = f"0.0.1:{self._port}/:5000"
        lines = [json.dumps({"workspace": "127", "region": region} | case) for case in cases]
        done = subprocess.run(
            [self._python, "-W", "ignore", "-c", SCRIPT], input="\n".join(lines), capture_output=True, text=True,
            timeout=SCRIPT_S, env={**os.environ, "MB_JUPYTER_CLUSTER": "127.0.0.1:9"},
        )  # fmt: skip
        output = [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("@")]
        assert len(output) == len(cases), done.stdout + done.stderr
        return output

    def answers(self, *cases: dict) -> list[object]:
        """Of calls that all succeed."""
        reply = self.ask(*cases)
        assert all("result" in each for each in reply), reply
        return [each["result"] for each in reply]


@pytest.fixture(scope="module")
def client(server):
    return Client(server)


def test_every_form(client):
    """One call, batches with several arguments and with dictionaries, odd ids: each as the documentation shows it."""
    doubler = {"deployment": "example_doubler"}
    result = client.answers(
        {**doubler, "data": [[1, 10], [2, 11], [3, 12]]},
        {**doubler, "data": 10},
        {**doubler, "data": [["b", 1], ["a", 2], [None, 3]]},
        {**doubler, "data": [1, 10]},
        {**doubler, "data": [[1, 10]], "version": 1},
        {"deployment": "of_dict", "data": [[1, {"my_key": 25}], [2, {"my_key": 30}]]},
        {"deployment": "several", "data": [[1, 1, "two", 3.0], [2, 4, "five", 6.0]]},
        {"deployment": "several", "data": [1, "two", 3.0]},
        {"deployment": "several", "data": {"a": 1, "b": "two", "c": 3.0}},
    )
    assert result == [
        {"data": [[1, 20], [2, 22], [3, 24]]},
        {"data": 20},
        {"data": [["b", 2], ["a", 4], [None, 6]]},
        {"data": [1, 10, 1, 10]},
        {"data": [[1, 20]]},
        {"data": [[1, {"twice": 50}], [2, {"twice": 60}]]},
        {"data": [[1, [1, "two", 3.0]], [2, [4, "five", 6.0]]]},
        {"data": [1, "two", 3.0]},
        {"data": [1, "two", 3.0]},
    ]


def test_many_rows_are_a_few_requests(client, server):
    """M31: 7,000 rows are three requests, whose results come back in the order of the rows."""
    before = server.log.count("/v1/{deployment}/{branch}/{version}")
    (result,) = client.answers({"deployment": "example_doubler", "data": [[n, n] for n in range(7000)]})
    assert result == {"data": [[n, 2 * n] for n in range(7000)]}
    requests = client.answers(
        {"deployment": "example_doubler", "data": [[n, n] for n in range(10)], "batch_size": 4, "batch_concurrency": 2}
    )
    assert requests == [{"data": [[n, 2 * n] for n in range(10)]}]
    assert before == 0 or before < server.log.count("/v1/{deployment}/{branch}/{version}")


def test_data_frames(client, server):
    """A data frame is sent as rows, and the function gets one frame with its index."""
    python = client_python("modelbit")
    batchmill(
        server.folder, "deploy", "frames.py:frames", "--name", "frames", "--dataframe", "city,rooms", "--python", python
    )
    frame = {"data": {"city": ["Rome", "Oslo"], "rooms": [2, 3]}, "index": [10, 11]}
    (result,) = client.answers({"deployment": "frames", "frame": frame})
    assert result == {"data": [[10, "10: Rome 2"], [11, "11: Oslo 3"]]}


def test_branches(client, server):
    """A branch with a slash is reached as the client writes it."""
    batchmill(server.folder, "deploy", "app.py:example_doubler", "--name", "example_doubler", "--branch", "feat/x")
    (result,) = client.answers({"deployment": "example_doubler", "branch": "feat/x", "data": 4})
    assert result == {"data": 8}


def test_errors_are_shown_and_not_repeated(client, tmp_path):
    """The client raises the last line of an error, and has called the function once."""
    path, exits = str(tmp_path / "raised"), str(tmp_path / "exited")
    began = time.monotonic()
    reply = client.ask(
        {"deployment": "example_doubler", "data": [[1, 1], [2, -7]]},
        {"deployment": "counted", "data": path},
        {"deployment": "exits", "data": [[1, exits]]},
        {"deployment": "nobody", "data": [[1, 1]]},
        {"deployment": "example_doubler", "version": "99", "data": 1},
        {"deployment": "slow", "data": [[1, 30]], "timeout_seconds": 1},
    )
    assert [each["kind"] for each in reply] == ["ModelbitError"] * len(reply)
    raised, multi, crashed, nobody, version, late = [each["error"] for each in reply]
    assert raised.endswith("ValueError: -7 is less than nothing")
    assert multi.endswith("RuntimeError: first line second line")
    assert "WorkerCrashed: " in crashed and "nobody" in nobody and "99" in version and "TimeoutError: " in late
    assert Path(path).read_text() == "called\n" and Path(exits).read_text() == "called\n"
    assert time.monotonic() - began < 60  # repetitions would take 30 s for each


def test_an_answer_behind_a_link(client):
    """A single call with `response_format` answers with a link."""
    (result,) = client.answers({"deployment": "example_doubler", "data": 4, "response_format": "links"})
    assert result["data"].startswith("http://127.0.0.1:") and ".json?" in result["data"]


async def test_a_webhook_is_refused_where_it_is_no_https(client):
    """The client itself sends an https webhook alone; one that leads nowhere public is refused by the server."""
    (result,) = client.ask(
        {"deployment": "example_doubler", "data": 4, "response_webhook": "https://169.254.169.254/hook"}
    )
    assert "not allowed" in result["error"]


async def test_webhooks(client):
    """An https webhook is taken: the reply to one call has its id, that to a batch has no rows yet."""
    async with WebhookReceiver() as receiver:
        hook = receiver.url().replace("http://", "https://")
        case = {"deployment": "example_doubler", "response_webhook": hook, "response_webhook_ignore_timeout": True}
        one, batch = client.answers({**case, "data": 4}, {**case, "data": [[1, 4]]})
    assert set(one) == {"batchId"} and batch == {"data": []}


def test_keys(server, client):
    """With keys, the raw key opens and a wrong one is refused in the client's words. The last test: keys stay."""
    key = batchmill(server.folder, "keys", "create", "--name", "modelbit").split()[-1]
    right, wrong = client.ask(
        {"deployment": "example_doubler", "data": 4, "api_key": key},
        {"deployment": "example_doubler", "data": 4, "api_key": "mi123:ms456"},
    )
    assert right == {"result": {"data": 8}}
    assert "Unauthenticated: " in wrong["error"]
