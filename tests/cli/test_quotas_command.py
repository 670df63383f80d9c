"""`batchmill quotas`: alone, beside a server, and at one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fakes.running_server import running_server

from batchmill.cli.main import cli
from batchmill.cli.session import Session
from batchmill.types import Quotas

CONFIG = "[quotas]\nkeys = 7\n[projects.small.quotas]\nkeys = 2\ndisk = 1048576\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "*")
    (tmp_path / "batchmill.toml").write_text(CONFIG)

    def call(*words: str) -> Result:
        where = [] if "--server" in words else ["--data-dir", str(tmp_path / "data")]
        return CliRunner().invoke(cli, [*where, *words], obj=Session(), catch_exceptions=False)

    return call


def received(done: Result) -> dict[str, tuple[int, int]]:
    assert done.exit_code == 0, done.output
    lines: list[dict[str, Any]] = [json.loads(line)["quota"] for line in done.stdout.splitlines()]
    return {each["quota"]: (each["used"], each["most"]) for each in lines}


def test_what_a_project_has_is_told_wherever_the_command_works(run, tmp_path: Path) -> None:
    """Alone, beside a server and at one: every quota, what the project has of it and may have."""
    run("keys", "create", "--name", "a", "--project", "small", "--scope", "read")
    alone = received(run("--json", "quotas", "--project", "small"))
    assert set(alone) == set(Quotas.__struct_fields__)
    assert (alone["keys"], alone["disk"]) == ((1, 2), (0, 1 << 20))
    assert received(run("--json", "quotas"))["keys"] == (0, 7)
    with running_server(tmp_path, CONFIG) as server:
        key = run("keys", "create", "--name", "b", "--project", "small", "--scope", "read").stdout.strip()
        beside = received(run("--json", "quotas", "--project", "small"))
        assert beside == alone | {"keys": (2, 2)}
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("BATCHMILL_API_KEY", key)
            assert received(run("--json", "quotas", "--server", server.url)) == beside
            refused = run("quotas", "--project", "small", "--server", server.url)
    assert (refused.exit_code, "the project is that of your key" in refused.stderr) == (2, True)
    lines = run("quotas", "--project", "small").stdout.splitlines()
    assert lines[0].split("  ")[0] == "QUOTA" and "disk" in lines[-1] and lines[-1].endswith("1 MiB")
