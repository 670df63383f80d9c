"""A server whose deployed functions are isolated: they are called as ever, and find nothing of the server's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest
from fakes.running_server import RunningServer, running_server
from story.deployed_functions import batchmill, deploy

CODE = """
import os
import signal


def look(what):
    if what == "end":
        os.kill(os.getpid(), signal.SIGKILL)
    if what.startswith("variable:"):
        return os.environ.get(what[9:], "")
    try:
        return open(what).read()
    except OSError as error:
        return type(error).__name__
"""
CONFIG = """
[functions]
isolate = "bubblewrap"
network = false
"""


def test_a_server_with_isolated_functions(tmp_path: Path) -> None:
    """An isolated function is deployed, called live and by a job, and replaced when it dies; it reads neither the
    server's key file nor another version, and has its own secret and no other variable of the server's."""
    (tmp_path / "functions.py").write_text(CODE)
    with running_server(tmp_path, CONFIG, env={"CANARY": "canary-value", "OWN": "its own"}) as server:
        deploy(tmp_path, "functions.py:look", "--secret", "MINE=env:OWN", "--example", '{"what": "/etc/hostname"}')

        def look(what: str) -> Any:
            return httpx2.post(f"{server.url}/v1/look/latest", json={"data": what}, timeout=60).json().get("data")

        place = server.data_dir / "models" / "versions" / "look" / "main" / "1"
        assert (place / "deploy.json").exists() and look(str(place / "code" / "functions.py")) == CODE
        for hidden in (server.data_dir / "owner.lock", server.data_dir / "batchmill.db", place / "deploy.json"):
            assert hidden.exists() and look(str(hidden)) == "FileNotFoundError"
        assert [look(f"variable:{name}") for name in ("MINE", "CANARY", "OWN", "HOME")] == ["its own", "", "", "/tmp"]
        assert look("end") is None and look("variable:MINE") == "its own"
        (tmp_path / "rows.jsonl").write_text('{"what": "variable:HOME"}\n' * 3)
        done = batchmill(tmp_path, "run", "rows.jsonl", "--model", "look", "-o", "out.jsonl")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out.jsonl").read_text().count('"output":"/tmp"') == 3


def test_a_server_does_not_start_without_what_isolates(tmp_path: Path) -> None:
    """Where functions are to be isolated and the program is missing, the server says so and does not start."""
    server = RunningServer(tmp_path, CONFIG, env={"PATH": str(tmp_path)})
    with pytest.raises(AssertionError, match="there is no bwrap on the PATH"):
        server.start()
