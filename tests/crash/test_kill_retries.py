"""Killed before a retry is stored, and right after, a job is as it was, or its failed rows run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.lost_machine import lose
from fakes.s3_server import bucket_client, s3_environment, s3_server

from batchmill.faults import RETRY_POINTS

ROWS = 40
OWNERS_MAX = 5  # each deletes what nothing names, for as long as it runs
CODE = """
import os
def fragile(n):
    if n % 2 and not os.path.exists("mended"):
        raise ValueError(f"no {n}")
    return n
"""


def run(folder: Path, *words: str, fault: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **more, "BATCHMILL_FAULT": fault}
    command = [sys.executable, "-m", "batchmill", "--data-dir", str(folder / "data"), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


def failed_job(folder: Path, **environ: str) -> Path:
    """The folder of a job with every other row failed."""
    (folder / "app.py").write_text(CODE)
    (folder / "in.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(ROWS)))
    done = run(folder, "run", "in.jsonl", "--model", "function:app.py:fragile", "-o", "out.jsonl", **environ)
    assert done.returncode == 3, done.stderr
    (job,) = (folder / "data" / "jobs").iterdir()
    return job


def shown(folder: Path, job: str, **environ: str) -> dict:
    done = run(folder, "show", job, "--json", **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["job"]


def check_results(folder: Path) -> None:
    assert [json.loads(line)["output"] for line in (folder / "out.jsonl").read_text().splitlines()] == [*range(ROWS)]


@pytest.mark.parametrize("point", RETRY_POINTS)
def test_killed_at_a_retry(point: str, tmp_path: Path) -> None:
    """The next owner removes what a retry has written that is not stored, and goes on with one that is."""
    job = failed_job(tmp_path)
    before = (job / "job.json").read_text()
    (tmp_path / "app.py").write_text(CODE + "# mended\n")  # which the retry has in its description
    (tmp_path / "mended").touch()
    run(tmp_path, "retry", job.name, fault=f"{point}:1:{tmp_path / 'fired'}")
    assert (tmp_path / "fired").exists() and (job / "plan-1").exists()
    assert len(list((tmp_path / "data" / "retries").iterdir())) == 1
    is_stored = point == "after_retry"
    assert ((job / "job.json").read_text() == before) == (point == "after_retry_plan")
    view = shown(tmp_path, job.name)
    assert (view["state"], view["generation"]) == (("paused", 1) if is_stored else ("completed", 0))
    assert list((tmp_path / "data" / "retries").iterdir()) == []
    assert ((job / "job.json").read_text() != before, (job / "plan-1").exists()) == (is_stored, is_stored)
    done = run(tmp_path, "resume" if is_stored else "retry", job.name)
    assert done.returncode == 0, done.stderr
    check_results(tmp_path)
    assert "sound" in run(tmp_path, "ledger", "verify", job.name).stdout


@pytest.mark.parametrize("is_lost", [False, True])
def test_killed_at_a_retry_with_an_object_store(is_lost: bool, tmp_path: Path) -> None:
    """The plan in the store goes too, with the next owner, also if the data directory is lost."""
    with s3_server() as url, bucket_client(url, "retries") as client:
        environment = s3_environment(url)
        config = f'[storage]\nobjects = "s3://retries/batchmill"\n[secrets]\nkey_file = "{tmp_path / "keys"}"\n'
        (tmp_path / "batchmill.toml").write_text(config)
        job = failed_job(tmp_path, **environment)
        (tmp_path / "mended").touch()
        run(tmp_path, "retry", job.name, fault=f"after_retry_spec:1:{tmp_path / 'fired'}", **environment)
        assert (tmp_path / "fired").exists() and plans(client) == {"plan-0", "plan-1"}
        if is_lost:
            lose(tmp_path / "data")
        for _ in range(OWNERS_MAX):
            assert shown(tmp_path, job.name, **environment)["generation"] == 0
            if plans(client) == {"plan-0"}:
                break
        assert plans(client) == {"plan-0"}
        done = run(tmp_path, "retry", job.name, **environment)
        assert done.returncode == 0, done.stderr
        check_results(tmp_path)


def plans(client: Any) -> set[str]:
    """The plans that the store has of the only job."""
    keys = [each["Key"] for each in client.list_objects_v2(Bucket="retries").get("Contents", [])]
    return {part for key in keys for part in key.split("/") if part.startswith("plan-")}
