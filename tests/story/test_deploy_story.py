"""Deploying to a real server: by command and by SDK, replaced under load, refused, rolled back, split."""

import asyncio
import importlib
import io
import json
import subprocess
import sys
import tarfile
import threading
from collections import Counter

import httpx2
import pytest
from deployed_functions import batchmill
from fakes.running_server import RunningServer

from batchmill import AsyncClient, Client
from batchmill.errors import Conflict, InvalidInput, ModelFailed, UnknownName
from batchmill.wire.bundles import BUNDLE_MEDIA
from batchmill.wire.native import BackendInfo

DOUBLER = "def example_doubler(foo: int):\n    '''Double a number.'''\n    return {factor} * foo\n"
MODULE = "from factors import five\n\n\ndef times_five(foo: int) -> int:\n    return five * foo\n"


@pytest.fixture
def server(tmp_path):
    server = RunningServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server):
    with Client(server.url) as client:
        yield client


def written(server, times=2):
    path = server.folder / "app.py"
    path.write_text(DOUBLER.format(factor=times))
    return f"{path}:example_doubler"


def ask(server, path="example_doubler/latest", data=10):
    return httpx2.post(f"{server.url}/v1/{path}", json={"data": data}, timeout=60).json()


def test_a_command_beside_the_server_deploys_to_it(server):
    """`batchmill deploy` beside a running server goes through it: the next call reaches the new version."""
    written(server)
    done = batchmill(server.folder, "deploy", "app.py:example_doubler", "--example", '{"foo": 3}')
    assert "example_doubler@main/1 is ready: example_doubler(foo: INT64)" in done.stdout, done.stderr
    assert ask(server) == {"data": 20}
    again = batchmill(server.folder, "deploy", "app.py:example_doubler")
    assert "already version 1" in again.stdout


def test_a_broken_version_is_refused_and_the_old_one_serves(server, client):
    """Code that does not load, or fails on its example, is refused with its traceback; `latest` stays."""
    client.deploy(written(server))
    path = server.folder / "app.py"
    path.write_text("def example_doubler(foo: int):\n    return 1 / 0\n1 / 0\n")
    with pytest.raises(ModelFailed, match="ZeroDivisionError") as caught:
        client.deploy(f"{path}:example_doubler")
    assert caught.value.code == "deploy_failed" and str(server.folder) not in caught.value.message
    shown = httpx2.get(f"{server.url}/batchmill/v1/models/example_doubler").text
    assert "ZeroDivisionError" in shown and str(server.folder / "data") not in shown
    path.write_text("def example_doubler(foo: int):\n    return 1 / 0\n")
    with pytest.raises(ModelFailed, match="ZeroDivisionError"):
        client.deploy(f"{path}:example_doubler", examples=[{"foo": 1}])
    assert ask(server) == {"data": 20}
    assert [each.state for each in client.model("example_doubler").show().versions] == ["ready", "failed", "failed"]
    assert "ZeroDivisionError" in client.model("example_doubler").log(version=2)


def test_no_call_is_lost_while_a_version_is_replaced(server, client):
    """Calls go on while a new version comes: each gets the old answer or the new one, and none an error."""
    client.deploy(written(server, 2))
    assert ask(server) == {"data": 20}
    is_over, seen = threading.Event(), Counter()

    def call():
        with httpx2.Client(timeout=60) as http:
            while not is_over.is_set():
                seen[http.post(f"{server.url}/v1/example_doubler/latest", json={"data": 10}).text] += 1

    callers = [threading.Thread(target=call) for _ in range(4)]
    for each in callers:
        each.start()
    client.deploy(written(server, 3))
    assert ask(server) == {"data": 30}
    is_over.set()
    for each in callers:
        each.join()
    assert set(seen) <= {'{"data":20}', '{"data":30}'} and seen['{"data":20}'] > 0


def test_versions_aliases_and_rollback(server, client):
    """Versions stay callable by number; an alias splits its calls; a rollback moves `latest`; what is used stays."""
    for times in (2, 3, 4):
        client.deploy(written(server, times))
    model = client.model("example_doubler")
    assert [ask(server, f"example_doubler/{number}")["data"] for number in (1, 2, 3)] == [20, 30, 40]
    model.set_alias("prod", {1: 50, 2: 50}, mirrors=[3])
    assert {ask(server, "example_doubler/prod")["data"] for _ in range(40)} == {20, 30}
    assert model.rollback().number == 2
    assert ask(server)["data"] == 30
    with pytest.raises(Conflict):
        model.remove(version=1)
    model.set_alias("prod", [BackendInfo(3)])
    assert [each.number for each in model.remove(version=1)] == [1]
    assert "error" in ask(server, "example_doubler/1")
    client.deploy(written(server, 9), branch="feat/x")
    assert ask(server, "example_doubler/feat~x/latest")["data"] == 90
    assert model.merge("feat/x").number == 4
    assert ask(server)["data"] == 90
    assert model.restart().reference == "example_doubler@main/5"
    assert ask(server)["data"] == 90


def test_a_function_object_is_deployed_with_its_modules(server, client, monkeypatch):
    """`client.deploy(fn)` sends its module and what that imports; its document and example say how to call it."""
    (server.folder / "code").mkdir()
    (server.folder / "code" / "scoring_of_test.py").write_text(MODULE)
    (server.folder / "code" / "factors.py").write_text("five = 5\n")
    monkeypatch.syspath_prepend(server.folder / "code")
    reply = client.deploy(importlib.import_module("scoring_of_test").times_five)
    assert (reply.version.name, reply.version.number, reply.is_new) == ("times_five", 1, True)
    assert ask(server, "times_five/latest", [[1, 2], [2, 3]]) == {"data": [[1, 10], [2, 15]]}
    model = client.model("times_five")
    document = model.openapi()
    assert "/v1/times_five/latest" in document["paths"]
    command = model.show().examples["modelbit"]
    done = subprocess.run(["bash", "-c", f"{command} -s"], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == {"data": [[1, 5], [2, 5]]}


def test_a_script_deploys_a_lambda(server):
    """In a script, a lambda or function travels as source, with the constants that it names."""
    script = server.folder / "script.py"
    script.write_text(
        "import math\nfrom batchmill import Client\nFACTOR = 7\n"
        "def helper(x):\n    return math.floor(x) * FACTOR\n"
        "by_seven = lambda foo: helper(foo)\n"
        f"with Client({server.url!r}) as client:\n"
        "    print(client.deploy(by_seven, name='by_seven').version.reference)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "by_seven@main/1", done.stderr
    assert ask(server, "by_seven/latest", 2.5) == {"data": 14}


def test_a_job_and_a_batch_file_use_what_is_deployed(server, client):
    """A table and a file of OpenAI rows run on a deployed function; a job keeps to the version of its submission."""
    client.deploy(written(server, 2))
    table = server.folder / "in.jsonl"
    table.write_text('{"foo": 1}\n{"foo": 2}\n')
    job = client.submit(str(table), model="example_doubler")
    client.deploy(written(server, 3))
    assert job.wait(60).state == "completed"
    assert [line["output"] for line in job.results()] == [2, 4]
    rows = [
        {"custom_id": name, "method": "POST", "url": "/v1/functions", "body": {"model": model, "foo": 10}}
        for name, model in (("a", "example_doubler"), ("b", "example_doubler@1"), ("c", "example_doubler@main/2"))
    ]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = client.submit(str(table))
    assert job.wait(60).state == "completed", job.view
    assert {line["custom_id"]: line["response"]["body"] for line in job.results()} == {"a": 30, "b": 20, "c": 30}


async def test_the_asynchronous_client_does_the_same(server):
    """AsyncClient deploys and looks after functions as Client does."""
    async with AsyncClient(server.url) as client:
        reply = await client.deploy(written(server))
        assert reply.version.reference == "example_doubler@main/1"
        assert (await client.model("example_doubler").show()).latest == {"main": 1}
        assert [each.name async for each in _models(client)] == ["example_doubler"]
        assert len(await client.model("example_doubler").remove()) == 1
        with pytest.raises(UnknownName):
            await client.model("example_doubler").show()
    assert await asyncio.to_thread(ask, server, "example_doubler/latest") != {"data": 20}


async def _models(client):
    for each in await client.models():
        yield each


def test_only_bundles_are_deployed(server):
    """No form or JSON is taken for a bundle, and an archive that reaches out of its folder is refused."""
    url = f"{server.url}/batchmill/v1/models"
    assert httpx2.post(url, content=b"{}", headers={"content-type": "application/json"}).status_code == 415
    assert httpx2.post(url, files={"file": b"x"}).status_code == 415
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in (("deploy.json", b'{"name":"x","target":"app.py:f"}'), ("code/../../evil.py", b"x")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    reply = httpx2.post(url, content=out.getvalue(), headers={"content-type": BUNDLE_MEDIA})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_bundle")
    assert not list(server.folder.rglob("evil.py"))


def test_a_closure_is_refused(client):
    """What cannot be the same elsewhere is refused before anything is sent."""
    inner = 3
    with pytest.raises(InvalidInput, match="closure over inner"):
        client.deploy(lambda foo: foo * inner, name="closed")


def test_what_was_deployed_outlives_the_server(server, client):
    """A server that was killed has its versions again, and one that was being deployed has failed."""
    client.deploy(written(server))
    server.kill()
    server.start()
    assert ask(server) == {"data": 20}
