"""What belongs to the machine's user is out of reach for a remote caller, whatever key and headers it sends."""

from __future__ import annotations

import httpx2
import pytest
from click.testing import CliRunner
from fakes.running_server import running_server

from batchmill.cli.main import cli
from batchmill.cli.session import Session
from batchmill.control import operations as own
from batchmill.wire import operations as table
from batchmill.wire.operations import Endpoint

OWN = [each for each in vars(own).values() if isinstance(each, Endpoint)]


@pytest.fixture
def key(tmp_path, monkeypatch):
    """Make a key beside the data directory."""
    monkeypatch.chdir(tmp_path)

    def make(project: str, scope: str) -> str:
        words = ("--data-dir", str(tmp_path / "data"), "keys", "create", "--name", "k", "--project", project)
        done = CliRunner().invoke(cli, [*words, "--scope", scope], obj=Session(), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout.strip()

    return make


def test_no_remote_caller_reaches_the_machines_operations(tmp_path, key):
    """With an admin's key, or one that may deploy, each operation of the control socket is a path that is not there."""
    keys = {scope: key("one", scope) for scope in ("admin", "deploy")}
    other = key("two", "read")
    with running_server(tmp_path, "") as server, httpx2.Client(base_url=server.url, trust_env=False) as http:
        found = {}
        for scope, secret in keys.items():
            headers = {"authorization": f"Bearer {secret}", own.PROJECT: "two", "host": "127.0.0.1"}
            for each in OWN:
                names = ["x"] * each.path.count("{")
                body = {"content": b"{}", "headers": headers | {"content-type": "application/json"}}
                found[scope, each.name] = http.request(each.method, each.fill(*names), **body).status_code
            listed = http.get(table.LIST_KEYS.path, headers=headers).json()["keys"]
            assert {each["project"] for each in listed} == {"one"}
        assert len(OWN) > 15 and set(found.values()) == {404}, found
        assert http.get(table.LIST_KEYS.path, headers={"authorization": f"Bearer {other}"}).status_code == 403
