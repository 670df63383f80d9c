"""`batchmill deploy` and `batchmill models`: what options become, and what is printed."""

import json

import pytest
from msgspec.structs import replace

from batchmill.cli.clients import OwnerClient
from batchmill.cli.models import deploy as command
from batchmill.cli.session import Session
from batchmill.control import operations as own
from batchmill.control.app import ControlApp
from batchmill.errors import InvalidInput
from batchmill.types import Interface, Tensor
from batchmill.wire import bundles
from batchmill.wire import operations as table
from batchmill.wire.native import (
    AliasInfo,
    BackendInfo,
    DeployReply,
    FunctionDetail,
    VersionInfo,
)

READY = VersionInfo("f", "main", 3, "ready", 1_700_000_000.0, source="app.py:f")


class MemoryModels:
    """An owner's functions; keeps what it was asked."""

    def __init__(self, folder):
        self.folder, self.asked, self.is_new = folder, [], True
        self.app = ControlApp(
            [
                (own.DEPLOY_ARCHIVE, self.deploy),
                (table.SHOW_MODEL, self.show),
                (table.ROLLBACK_MODEL, self.rollback),
                (table.SET_ALIAS, self.set_alias),
            ]
        )

    async def deploy(self, call):
        place = self.folder / f"unpacked{len(self.asked)}"
        place.mkdir()
        with open(call.body.path, "rb") as bundle:
            self.asked.append(bundles.read(bundle, place))
        return DeployReply(READY, self.is_new)

    async def show(self, call):
        alias = AliasInfo("prod", [BackendInfo(3, weight=90), BackendInfo(2, weight=10)], [BackendInfo(1)])
        failed = VersionInfo(
            "f", "main", 4, "failed", 1.7e9, source="app.py:f", error="Traceback …\nValueError: \x1b[31mno"
        )
        return FunctionDetail("f", {"main": 3}, [alias], [READY, failed], None, {"modelbit": "curl …"})

    async def rollback(self, call):
        self.asked.append((call.name, call.body.branch, call.body.number))
        return READY

    async def set_alias(self, call):
        self.asked.append((call.names["name"], call.names["alias"], call.body))
        return AliasInfo(call.names["alias"], call.body.backends, call.body.mirrors)


@pytest.fixture
def models(app, place):
    made = MemoryModels(place)
    app.open = lambda config, project: OwnerClient(made.app, project)
    return made


def test_options_become_an_order(call, models, place):
    """Every option of `deploy` reaches the order that is sent, in the units of the order."""
    (place / "req.txt").write_text("a==1\n")
    (place / "example.json").write_text('{"foo": 1}')
    result = call(
        "deploy", "app.py:f", "--name", "g", "--branch", "feat/x", "--requirements", "req.txt", "--python", "3.11",
        "--env", "A=b=c", "--secret", "K=env:NAME", "--secret", "L=file:key.txt", "--workers", "2", "--memory", "512MB",
        "--timeout", "1.5m", "--gpus", "1", "--batch-size", "8", "--batch-window", "5ms", "--dataframe", "a,b",
        "--idempotent", "--private", "--received-shapes", "--example", "example.json", "--example", "[1]",
        "--example", "2",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (order,) = models.asked
    expected = {name: getattr(order, name) for name in order.__struct_fields__}
    assert expected == {
        "name": "g", "target": "app.py:f", "branch": "feat/x", "source": "app.py:f", "requirements": "a==1\n",
        "python": "3.11", "environment": {"A": "b=c"}, "secrets": {"K": "env:NAME", "L": f"file:{place / 'key.txt'}"},
        "workers": 2, "gpus": 1, "memory_bytes": 512_000_000, "timeout_s": 90.0, "batch_size": 8,
        "batch_window_s": 0.005, "frame_columns": ["a", "b"], "is_idempotent": True, "is_deterministic": False,
        "received_shapes": True,
        "examples": [{"foo": 1}, [1], [2]], "has_samples": False, "is_shared": False, "kind": "model",
    }  # fmt: skip
    assert "f@main/3 is ready" in result.output


def test_the_same_again_is_said(call, models):
    """A deployment that changed nothing says which version it is already; with --json it says so too."""
    models.is_new = False
    assert "already version 3" in call("deploy", "app.py:f").output
    line = json.loads(call("--json", "deploy", "app.py:f").output)
    assert (line["type"], line["is_new"], line["version"]["number"]) == ("deployed", False, 3)


@pytest.mark.parametrize(
    "words",
    [["app.py:f", "--memory", "lots"], ["app.py:f", "--timeout", "soon"], ["nothing.py:f"], ["app.py:f", "--env", "A"],
     ["app.py:f", "--example", "{"], ["app.py:f", "--include", "none*"], ["app.py:f", "--dataframe", "a,a"]],
)  # fmt: skip
def test_what_makes_no_sense_is_a_usage_error(call, models, words):
    """A value that cannot be read ends with exit code 2, and nothing is sent."""
    assert call("deploy", *words).exit_code == 2
    assert models.asked == []


def test_columns_come_from_names_or_an_example(tmp_path):
    """The columns of a data frame are named, or stand in a CSV's head or a JSON row."""
    (tmp_path / "a.csv").write_text('x,"y z"\n1,2\n')
    (tmp_path / "a.jsonl").write_text('{"x": 1, "y": 2}\n{"x": 3}\n')
    (tmp_path / "a.json").write_text('[{"x": 1}]')
    assert command.columns_of("x, y", tmp_path) == ["x", "y"]
    assert command.columns_of("a.csv", tmp_path) == ["x", "y z"]
    assert command.columns_of("a.jsonl", tmp_path) == ["x", "y"]
    assert command.columns_of("a.json", tmp_path) == ["x"]
    with pytest.raises(InvalidInput):
        command.columns_of("", tmp_path)


def test_a_secrets_file_is_the_servers_own_at_a_server(monkeypatch, place):
    """At a server a path of a secret is left as it is written: it is there that it is read."""
    session = Session()
    session.server = "http://127.0.0.1:1"
    expected = command.settings_of(session, {"secrets": ("K=file:/run/key",)})
    assert expected == {"secrets": {"K": "file:/run/key"}}


def test_versions_and_aliases_are_shown(call, models):
    """`models show` and `versions` print what there is; what code said reaches no terminal as commands."""
    shown = call("models", "show", "f").output
    assert "f@prod: main/3 90 %, main/2 10 %; copies to main/1" in shown and "curl …" in shown
    listed = call("models", "versions", "f").output
    assert "main/3   latest" in listed and "main/4   failed" in listed and "ValueError: no" in listed
    assert "\x1b" not in listed


def test_changes_are_asked_for_as_they_are_written(call, models):
    """Numbers, weights and branches of `rollback` and `alias` are read as people write them."""
    assert call("models", "rollback", "f", "2").exit_code == 0
    assert call("models", "alias", "f", "prod", "3=90", "feat/x/4=10", "--mirror", "5").exit_code == 0
    assert models.asked[0] == ("f", "main", 2)
    _, alias, asked = models.asked[1]
    assert alias == "prod" and asked.mirrors == [BackendInfo(5)]
    assert asked.backends == [BackendInfo(3, weight=90), BackendInfo(4, "feat/x", 10)]
    assert call("models", "alias", "f", "prod").exit_code == 2
    assert call("models", "alias", "f", "prod", "three").exit_code == 2


@pytest.mark.parametrize(
    ("inputs", "takes_more", "expected"),
    [
        ([], False, "f()"),
        ([], True, "f(…)"),
        ([Tensor("a", "INT64"), Tensor("b", None, [-1, 2], required=False)], True, "f(a: INT64, b?: any[-1,2], …)"),
    ],
)
def test_a_signature(inputs, takes_more, expected):
    """What a function takes reads as one would write it, further arguments included."""
    version = replace(READY, interface=Interface(inputs, takes_more=takes_more))
    assert command.signature_of(version) == expected
