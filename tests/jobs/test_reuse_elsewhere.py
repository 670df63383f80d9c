"""Rows take over results of earlier jobs whose files are durable in an object store, and of ledgers in PostgreSQL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.databases import POSTGRESQL, databases
from fakes.lost_machine import lose
from fakes.s3_server import bucket_client, s3_environment, s3_server

BUCKET = "reuse"
CODE = """
import os
def double(n):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"{n}\\n")
    return 2 * n
"""


class Stage:
    """Commands over a data directory in `folder`."""

    def __init__(self, folder: Path, config: str, environ: dict[str, str]) -> None:
        self.folder, self.data_dir, self._calls = folder, folder / "data", folder / "calls"
        (folder / "app.py").write_text(CODE)
        (folder / "batchmill.toml").write_text(f'{config}\n[secrets]\nkey_file = "{folder / "keys"}"\n')
        self._environ = {**os.environ, **environ, "CALLS": str(self._calls)}

    def run(self, name: str, numbers: range, kind: str = "jsonl") -> list[dict]:
        """The lines of the results of these rows; none of a table."""
        output = self.folder / f"{name}-out.{kind}"
        (self.folder / f"{name}.jsonl").write_text("".join(f'{{"n":{n}}}\n' for n in numbers))
        done = subprocess.run(
            [sys.executable, "-m", "batchmill", "--data-dir", str(self.data_dir), "run", f"{name}.jsonl", "--reuse",
             "--model", "function:app.py:double", "-o", output.name],
            cwd=self.folder, env=self._environ, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in output.read_text().splitlines()] if kind == "jsonl" else []

    def has_calls(self) -> bool:
        return self._calls.exists()

    def calls(self) -> list[int]:
        """What the function was called with since the last look, ascending."""
        found = sorted(map(int, self._calls.read_text().split()))
        self._calls.unlink()
        return found


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[str]:
    """Those of an empty PostgreSQL database."""
    databases.begin(POSTGRESQL)
    yield databases.settings(tmp_path)
    databases.end()


def test_a_ledger_in_postgresql(settings: str, tmp_path: Path) -> None:
    """A grown dataset runs its new rows alone, and each other row says whose result it has."""
    stage = Stage(tmp_path, settings, {})
    check_reuse(stage.run("first", range(50)), stage)


def test_files_in_an_object_store(tmp_path: Path) -> None:
    """So it does on a machine that has nothing of the earlier job: ranges of its results are read from the store."""
    with s3_server() as url, bucket_client(url, BUCKET):
        stage = Stage(tmp_path, f'[storage]\nobjects = "s3://{BUCKET}/batchmill"', s3_environment(url))
        first = stage.run("first", range(50))
        lose(stage.data_dir)
        check_reuse(first, stage)
        lose(stage.data_dir)
        again = stage.run("again", range(10, 60))  # the index of the first job is in the store: no dataset is brought
        assert [line["output"] for line in again] == [2 * n for n in range(10, 60)] and not stage.has_calls()
        taken_from = {line["reused_from"].split("/")[0] for line in again[:30]}
        homes = [stage.data_dir / "jobs" / job for job in taken_from]
        assert homes and not [home for home in homes if (home / "dataset").exists()]
        assert not [home for home in homes if (home / "segments").exists()]  # ranges of it were read


def test_answers_that_are_kept_in_an_object_store(tmp_path: Path) -> None:
    """Once its segments are gone, only the index and the copies of a job's answers are brought."""
    with s3_server() as url, bucket_client(url, BUCKET):
        config = f'[storage]\nobjects = "s3://{BUCKET}/batchmill"\n[retention]\nintermediate_s = 0'
        stage = Stage(tmp_path, config, s3_environment(url))
        stage.run("first", range(50), "csv")
        (first,) = (stage.data_dir / "jobs").iterdir()
        stage.run("other", range(100, 101))
        assert (first / "reuse" / "results").exists() and not (first / "segments").exists()
        lose(stage.data_dir)
        stage.calls()
        grown = stage.run("grown", range(40, 60))
        assert stage.calls() == list(range(50, 60)) and [line["output"] for line in grown] == [
            2 * n for n in range(40, 60)
        ]
        assert grown[0]["reused_from"] == f"{first.name}/40"
        assert (first / "reuse" / "results").exists() and not (first / "dataset").exists()


def check_reuse(first: list[dict], stage: Stage) -> None:
    """Args: first: the lines of a job of the rows 0 to 49, the only one so far."""
    assert [line["output"] for line in first] == [2 * n for n in range(50)]
    assert stage.calls() == list(range(50))
    grown = stage.run("grown", range(40, 60))
    assert stage.calls() == list(range(50, 60))
    assert [line["output"] for line in grown] == [2 * n for n in range(40, 60)]
    sources = [line.get("reused_from", "").rpartition("/") for line in grown]
    assert [row for _, _, row in sources] == [*map(str, range(40, 50)), *[""] * 10]
    assert len({job for job, _, _ in sources[:10]}) == 1
