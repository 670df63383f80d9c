"""What calls of a deployed function print, asked of a real server by two projects: over HTTP, by SDK, by command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import httpx2
import pytest
from fakes.running_server import running_server

from batchmill import Client
from batchmill.errors import Forbidden, UnknownName

CODE = "def halve(n: int):\n    print('halving', n)\n    return 8 // n\n"
CONFIG = """
[functions]
isolate = "bubblewrap"
"""


@pytest.fixture(scope="module", params=["", CONFIG], ids=["", "isolated"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    (folder / "app.py").write_text(CODE)
    with running_server(folder, request.param) as running:
        yield running


def batchmill(server, *words, **environment):
    """A command that must succeed, and what it printed."""
    line = [sys.executable, "-m", "batchmill", *words]
    done = subprocess.run(
        line, cwd=server.folder, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def keys(server):
    """Keys of the project that deploys `halve` for everybody, of another one, and one that may not read logs."""

    def make(project, scope):
        local = ("--data-dir", str(server.data_dir))
        return batchmill(
            server, *local, "keys", "create", "--name", "k", "--project", project, "--scope", scope
        ).strip()

    made = SimpleNamespace(own=make("one", "deploy"), other=make("two", "admin"), small=make("one", "submit"))
    batchmill(server, "--server", server.url, "deploy", "app.py:halve", "--shared", BATCHMILL_API_KEY=made.own)
    return made


def call(server, key, n):
    """The id of a request."""
    headers = {"authorization": f"Bearer {key}"}
    reply = httpx2.post(f"{server.url}/v1/halve/latest", json={"data": n}, headers=headers, timeout=60)
    return reply.headers["x-request-id"]


def test_a_project_sees_what_its_own_calls_said(server, keys):
    """The function's project reads the lines and tracebacks of its own calls, by request too; no other project reads
    any of them; whoever runs the machine reads all."""
    fine, raised, other = call(server, keys.own, 4), call(server, keys.own, 0), call(server, keys.other, 8)
    with Client(server.url, api_key=keys.own) as client:
        model = client.model("halve")
        page = model.logs()
        own = [(each.stream, each.requests) for each in page.entries if each.requests]
        assert own == [("stdout", [fine]), ("stdout", [raised]), ("traceback", [raised])]
        assert [each.text for each in model.logs(request=fine).entries] == ["halving 4"]
        assert "ZeroDivisionError" in model.logs(request=raised).entries[1].text
        assert model.logs(request=other).entries == []
        later = call(server, keys.own, 2)
        [entry] = model.logs(after=page.next).entries
        assert (entry.text, entry.requests) == ("halving 2", [later])
    for key in (keys.other, keys.small):
        with Client(server.url, api_key=key) as client, pytest.raises(Forbidden):
            client.model("halve").logs()
    local = ("--data-dir", str(server.data_dir), "models", "logs", "halve")
    assert f"{other} | halving 8" in batchmill(server, *local, "--request", other)
    with Client(server.url, api_key=keys.own) as client, pytest.raises(UnknownName):
        client.model("no-such").logs()


def test_a_command_follows_them(server, keys):
    """`models logs --follow` prints lines of its own project as they are said."""
    call(server, keys.own, 3)
    words = ("--json", "--server", server.url, "models", "logs", "halve", "--follow", "--limit", "1")
    line = [sys.executable, "-m", "batchmill", *words]
    environment = os.environ | {"BATCHMILL_API_KEY": keys.own}
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True) as following:
        lines = (case["entry"] for case in map(json.loads, following.stdout) if case["type"] == "line")
        try:
            call(server, keys.other, 7)
            own = call(server, keys.own, 5)
            while (entry := next(lines))["text"] != "halving 5":
                assert entry["text"] == "halving 3"
            assert entry["requests"] == [own]
        finally:
            following.terminate()
