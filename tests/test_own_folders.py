"""The tests leave no folders in the temporary folder of the machine."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from fakes import postgres_server, preloaded
from fakes.own_folders import make_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of the machine."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_folders_of_killed_processes(folder: Path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    (folder / f"batchmill-x-{ended.pid}-abc" / "data").mkdir(parents=True)
    (folder / "batchmill-x-other-abc").mkdir()
    first = make_folder("batchmill-x")
    second = make_folder("batchmill-x")
    assert {each.name for each in folder.iterdir()} == {first.name, second.name, "batchmill-x-other-abc"}


def test_a_start_of_the_preloaded_process_fails(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    program = tmp_path_factory.mktemp("program") / "server.py"
    program.write_text("import time\nprint('no', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setattr(preloaded, "SERVER", program)
    with pytest.raises(AssertionError):
        _ = preloaded.Preloaded().address
    assert list(folder.iterdir()) == []


def test_a_start_of_a_database_server_fails(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    programs = tmp_path_factory.mktemp("programs")
    (programs / "initdb").write_text('#!/bin/sh\nmkdir "$2"\nexit 1\n')
    (programs / "initdb").chmod(0o755)
    monkeypatch.setattr(postgres_server, "find_programs", lambda: programs)
    monkeypatch.setattr(postgres_server, "user", lambda: None)
    with pytest.raises(AssertionError):
        postgres_server.PostgresServer()
    assert list(folder.iterdir()) == []
