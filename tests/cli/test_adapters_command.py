"""`batchmill adapters`: alone, beside a server, and at one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fakes.lora_files import WEIGHTS, lora, lora_files, write_base, write_lora
from fakes.running_server import running_server

from batchmill.cli.main import cli
from batchmill.cli.session import Session

CONFIG = """
[models.tiny]
engine = "vllm"
source = "tiny"
adapters = { fixed = "fixed" }
"""


class Place:
    """A folder with a model, two adapters and a data directory, in which commands are typed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_base(folder / "tiny")
        for name in ("fixed", "upper", "lower"):
            write_lora(folder / name)
        write_lora(folder / "other", lora_files() | {WEIGHTS: lora(takes=8)})
        (folder / "batchmill.toml").write_text(CONFIG)

    def run(self, *words: str) -> Result:
        where = [] if "--server" in words else ["--data-dir", str(self.folder / "data")]
        return CliRunner().invoke(cli, [*where, *words], obj=Session(), catch_exceptions=False)

    def said(self, *words: str) -> list[dict[str, Any]]:
        done = self.run("--json", *words)
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    for name in ("BATCHMILL_CONFIG", "BATCHMILL_SERVER", "BATCHMILL_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    return Place(tmp_path)


def goes_its_way(place: Place, *where: str) -> None:
    """From adding to removing, wherever the command works."""
    made = place.run("adapters", "add", "shout", "upper", "--base", "tiny", *where)
    assert (made.exit_code, made.stdout) == (0, "shout/1\n"), made.output
    assert made.stderr == "shout/1 is ready for tiny: rank 4\n"
    assert place.said("adapters", "add", "shout", "./lower", "--base", "tiny", *where)[0]["adapter"]["version"] == 2
    bad = place.run("adapters", "add", "shout", "other", "--base", "tiny", *where)
    assert bad.exit_code == 1
    assert "batchmill: the adapter shout/3 cannot be used: it does not fit tiny: its model.layers.0" in bad.stderr
    listed = [each["adapter"] for each in place.said("adapters", "list", *where)]
    assert [(each["name"], each["version"], each["state"]) for each in listed] == [
        ("shout", 1, "ready"), ("shout", 2, "ready"), ("shout", 3, "failed"),
    ]  # fmt: skip
    table = place.run("adapters", "list", "--base", "tiny", *where).stdout
    assert "shout/2  tiny  ready   4" in table
    shown = place.run("adapters", "show", "shout", *where).stdout
    assert shown.startswith("shout/2: ready, for tiny\n") and "trained for org/tiny" in shown
    assert "does not fit" in place.run("adapters", "show", "shout/3", *where).stdout
    models = place.run("models", *where).stdout
    assert "fixed, shout, shout/1, shout/2" in models
    assert place.run("adapters", "remove", "shout/1", *where).stdout == "removed: shout/1\n"
    assert place.said("adapters", "remove", "shout", *where) == [
        {"type": "adapters_removed", "names": ["shout/2", "shout/3"]}
    ]
    assert "there are no adapters" in place.run("adapters", "list", *where).stdout
    gone = place.run("adapters", "show", "shout", *where)
    assert (gone.exit_code, "there is no adapter 'shout'" in gone.stderr) == (2, True)


def test_alone(place: Place) -> None:
    """Without any other process a command does it itself."""
    goes_its_way(place)


def test_beside_a_server_and_at_it(place: Place) -> None:
    """Beside a server the command asks that; at one it sends what lies here. The server has them at once."""
    with running_server(place.folder, CONFIG) as server:
        goes_its_way(place)
        place.folder.joinpath("elsewhere").mkdir()
        assert place.run("adapters", "add", "shout", "upper", "--base", "tiny").stdout == "shout/4\n"
        place.run("adapters", "remove", "shout")
        refused = place.run("--server", server.url, "adapters", "add", "x", "org/name", "--base", "tiny")
        assert (refused.exit_code, "are not accepted over the API" in refused.stderr) == (1, True)
        refused = place.run("--server", server.url, "adapters", "list", "--project", "other")
        assert (refused.exit_code, "--project works only on this machine" in refused.stderr) == (2, True)


def test_at_a_server(place: Place) -> None:
    """With --server a folder of this machine is sent, and everything else is as at home."""
    with running_server(place.folder, CONFIG) as server:
        goes_its_way(place, "--server", server.url)


def test_projects(place: Place) -> None:
    """An adapter belongs to the project that was said; a list without one is of all."""
    place.said("adapters", "add", "shout", "upper", "--base", "tiny", "--project", "small")
    place.said("adapters", "add", "shout", "lower", "--base", "tiny")
    assert [each["adapter"]["project"] for each in place.said("adapters", "list")] == ["default", "small"]
    [only] = place.said("adapters", "list", "--project", "small")
    assert only["adapter"]["source"] == str(place.folder / "upper")
    assert place.run("adapters", "remove", "shout").exit_code == 0
    assert len(place.said("adapters", "list")) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["shout", "upper", "--base", "nobody"], "the model 'nobody' does not exist"),
        (["shout", "upper", "--base", "fixed"], "is an adapter: name its model"),
        (["tiny", "upper", "--base", "tiny"], "'tiny' is already the name of"),
        (["fixed", "upper", "--base", "tiny"], "'fixed' is already the name of"),
        (["shout/1", "upper", "--base", "tiny"], "is not a valid adapter name"),
        (["shout", "http://x/y", "--base", "tiny"], "is not an address of an object store"),
        (["shout", "upper", "--base", "tiny", "--token", "hf_secret_value"], "never the token itself"),
    ],
)
def test_what_is_refused(place: Place, words: list[str], expected: str) -> None:
    """What cannot be is refused in words, and leaves no version; a token that was pasted is not repeated."""
    done = place.run("adapters", "add", *words)
    assert (done.exit_code, expected in done.stderr) == (2, True), done.output
    assert "hf_secret_value" not in done.output
    assert "there are no adapters" in place.run("adapters", "list").stdout
