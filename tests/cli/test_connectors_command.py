"""`batchmill connectors`: what is read, kept, and said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from batchmill.cli.main import cli
from batchmill.cli.session import Session

FIELDS: dict[str, Any] = {
    "name": "Local",
    "version": 1,
    "protocol": "http",
    "description": "somewhere inside",
    "parameters": {"model": "m"},
    "credential": {"key": "env:LOCAL_KEY", "other": "in-the-file-itself"},
    "actions": [{"action_type": "predict", "method": "POST", "url": "http://127.0.0.1:9/x", "request_body": "{}"}],
}


class Place:
    """A folder with a data directory, in which commands are typed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *words: str) -> Result:
        line = ["--data-dir", str(self.folder / "data"), *words]
        return CliRunner().invoke(cli, line, obj=Session(), catch_exceptions=False)

    def said(self, *words: str) -> list[dict[str, Any]]:
        done = self.run("--json", *words)
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    def write(self, name: str, data: Any) -> str:
        (self.folder / name).write_text(data if isinstance(data, str) else json.dumps(data))
        return name


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path)


def test_from_making_to_deleting(place: Place) -> None:
    """A connector is made of a file with a model of it, shown without secrets, changed, and goes with both."""
    made = place.said("connectors", "create", place.write("c.json", FIELDS), "--model", "local")[0]
    connector_id, model_id = made["connector"]["id"], made["model"]["id"]
    listed = place.run("connectors", "list").stdout
    assert connector_id in listed and model_id in listed and "command" in listed
    shown = place.run("connectors", "show", connector_id).stdout
    assert "predict: POST http://127.0.0.1:9/x" in shown
    assert "credential key: env:LOCAL_KEY" in shown
    assert f"credential other: secret:connector/{connector_id}/other" in shown
    assert model_id in place.run("models").stdout

    change = place.write("u.json", {"parameters": {"model": "n"}})
    refused = place.run("connectors", "update", connector_id, change)
    assert (refused.exit_code, "undeploy the models first" in refused.stderr) == (2, True)
    assert "revision 2" in place.run("connectors", "update", connector_id, change, "--redeploy").stdout
    assert "parameter model: n" in place.run("connectors", "show", connector_id).stdout

    assert place.run("connectors", "delete", connector_id).exit_code == 2
    assert place.said("connectors", "delete", connector_id, "--models") == [
        {"type": "connector_deleted", "id": connector_id}
    ]
    assert place.said("secrets", "list") == []
    assert "there are no connectors" in place.run("connectors", "list").stdout


def test_projects(place: Place) -> None:
    """A connector belongs to the project that was said, and can be listed by it."""
    place.write("c.json", FIELDS)
    ours = place.said("connectors", "create", "c.json")[0]["connector"]
    theirs = place.said("connectors", "create", "c.json", "--project", "small")[0]["connector"]
    assert [ours["project"], theirs["project"]] == ["default", "small"]
    assert [each["connector"]["id"] for each in place.said("connectors", "list", "--project", "small")] == [
        theirs["id"]
    ]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        (FIELDS | {"nme": "x"}, "no field 'nme'; did you mean 'name'?"),
        (FIELDS | {"name": None}, "Connector name is null"),
        (FIELDS | {"actions": [{"action_type": "predict", "method": "POST"}]}, "url can't be null"),
    ],
)
def test_what_cannot_be_read(place: Place, data: Any, words: str) -> None:
    """A file that is not a connector, or misspells one, is refused with what is wrong, and leaves nothing."""
    done = place.run("connectors", "create", place.write("c.json", data))
    assert done.exit_code == 2
    assert words in done.stderr
    assert place.said("connectors", "list") == []


def test_it_works_on_this_machine_alone(place: Place) -> None:
    """What a command makes is trusted: none makes it at a server."""
    place.write("c.json", FIELDS)
    for words in (["create", "c.json"], ["list"], ["show", "x"], ["update", "x", "c.json"], ["delete", "x"]):
        done = place.run("--server", "http://127.0.0.1:1", "connectors", *words)
        assert (done.exit_code, "has no --server" in done.stderr) == (2, True)


def test_unknown_ids_and_files(place: Place) -> None:
    """What is not there is named."""
    done = place.run("connectors", "show", "nobody")
    assert (done.exit_code, "connector id: nobody" in done.stderr) == (2, True)
    done = place.run("connectors", "create", "nowhere.json")
    assert (done.exit_code, "nowhere.json cannot be read" in done.stderr) == (2, True)
