"""A data directory that is deleted in each phase of a job goes on from its object store, on another machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.answering_service import AnsweringService, choice
from fakes.beside import beside
from fakes.faulty_objects import faulty_objects
from fakes.lost_machine import lose, run_until
from fakes.s3_server import bucket_client, s3_environment, s3_server

from batchmill.faults import COPY_POINTS

ROWS = 3000
BUCKET = "lost-machines"
COUNTING = """
import os
def double(n):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"{n}\\n")
    return 2 * n
"""
# Points at which some rows have run; what is put or counted by then must not run again.
POINTS = (
    "after_create", "after_prepare", "before_publish_objects", "after_publish_objects", "before_put", "after_put",
    "after_commit", "before_publish", "after_publish",
)  # fmt: skip


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url, bucket_client(url, BUCKET):
        yield url


class Room:
    """A folder with a function, rows and a configuration; the data directory is below it, the key file is not."""

    def __init__(self, folder: Path, s3: str, prefix: str, bucket: str = BUCKET) -> None:
        self.folder, self.data_dir, self.calls = folder, folder / "data", folder / "calls"
        (folder / "app.py").write_text(COUNTING)
        rows = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/x", "body": {"n": n}} for n in range(ROWS)]
        (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "batchmill.toml").write_text(
            f'[storage]\nobjects = "s3://{bucket}/{prefix}"\n[secrets]\nkey_file = "{folder / "keys"}"\n'
        )
        self.environment = {**os.environ, **s3_environment(s3), "CALLS": str(self.calls)}
        self.batchmill = [sys.executable, "-m", "batchmill", "--data-dir", str(self.data_dir)]
        self.command = [
            *self.batchmill, "run", "in.jsonl", "-o", "out.jsonl", "--model", "function:app.py:double", "--workers", "2"
        ]  # fmt: skip

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=100
        )

    def run_until(self, fault: str) -> None:
        fired = self.folder / "fired"
        run_until(fired, self.command, self.folder, {**self.environment, "BATCHMILL_FAULT": f"{fault}:{fired}"})

    def called(self) -> Counter[int]:
        return Counter(int(line) for line in self.calls.read_text().splitlines()) if self.calls.exists() else Counter()

    def check_results(self) -> None:
        lines = [json.loads(line) for line in (self.folder / "out.jsonl").read_text().splitlines()]
        assert [line["custom_id"] for line in lines] == [f"r{n}" for n in range(ROWS)]
        assert [line["response"]["body"] for line in lines] == [2 * n for n in range(ROWS)]


@pytest.mark.parametrize("point", POINTS)
def test_lost_at_a_point(point: str, s3: str, tmp_path: Path) -> None:
    """The same command on an empty data directory gives every row exactly one result, and the ledger is sound."""
    room = Room(tmp_path, s3, point)
    room.run_until(f"{point}:1")
    before = room.called()
    lose(room.data_dir)
    done = room.run(*room.command)
    assert done.returncode == 0, done.stderr
    room.check_results()
    if point in ("before_publish", "after_publish"):
        assert room.called() == before, "every row had its outcome in the store"
    lose(room.data_dir)  # also what has ended can be audited anywhere
    (job,) = re.findall("job_[0-9a-f]+", room.run(*room.batchmill, "jobs").stdout)
    verified = room.run(*room.batchmill, "ledger", "verify", job)
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.parametrize("point", [*COPY_POINTS, "before_put"])
def test_files_that_cells_name_are_lost(point: str, s3: str, tmp_path: Path) -> None:
    """Sealed, a job needs none of them on another machine; killed before, it takes those that it has copied."""
    room = Room(tmp_path, s3, f"media-{point}")
    contents = [b"GIF89a" + bytes([n % 40]) for n in range(60)]
    for n, data in enumerate(contents):
        (tmp_path / f"{n}.gif").write_bytes(data)
    rows = [{"id": n, "img": f"{n}.gif"} for n in range(len(contents))]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with beside(
        AnsweringService(lambda body: choice(body["messages"][0]["content"][0]["image_url"]["url"]))
    ) as service:
        with (tmp_path / "batchmill.toml").open("a") as file:
            file.write(f'[models.m]\nengine = "openai"\nsource = "s"\nbase_url = "{service.url}"\n')
        room.environment["OPENAI_API_KEY"] = "k"
        room.command = [
            *room.batchmill, "run", "in.jsonl", "-o", "out.jsonl", "--model", "m", "--prompt", "?", "--image", "img"
        ]  # fmt: skip
        room.run_until(f"{point}:1")
        lose(room.data_dir)
        if point == "before_put":
            for n in range(len(contents)):
                (tmp_path / f"{n}.gif").unlink()
        done = room.run(*room.command)
        assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    sent = [b64decode(line["output"].partition(",")[2]) for line in lines]
    assert sent == contents
    with bucket_client(s3, f"unused-{point.replace('_', '-')}") as client:
        found = client.list_objects_v2(Bucket=BUCKET, Prefix=f"media-{point}/jobs/")["Contents"]
    assert len([each for each in found if "/media/" in each["Key"]]) == 40


def test_credentials_that_expire(s3: str, tmp_path: Path) -> None:
    """Results that the store refuses pause the job, which says so; with new credentials it goes on."""
    with faulty_objects(s3) as plan:
        room = Room(tmp_path, plan.url, "expired")
        plan.serve("PUT", 2)  # the dataset and the plan
        plan.always["PUT"] = "expired"
        done = room.run(*room.command)
        assert done.returncode != 0 and "give credentials that are valid" in done.stderr, done.stderr
        before = room.called()
        plan.always.clear()
        done = room.run(*room.command)
        assert done.returncode == 0, done.stderr
    room.check_results()
    again = sum(room.called().values()) - ROWS
    assert again < sum(before.values()) or not before, "what was spooled is put, and does not run again"


def test_a_store_that_fails(s3: str, tmp_path: Path) -> None:
    """SlowDown, resets, lost replies and truncated bodies change nothing: every row has one result."""
    with faulty_objects(s3) as plan:
        room = Room(tmp_path, plan.url, "faults")
        plan.fail("PUT", "slow_down", "lost_reply", "reset", "lost_reply", "slow_down")
        room.run_until("before_publish:1")
        lose(room.data_dir)
        plan.fail("GET", "slow_down", "truncated", "reset", "truncated")
        before = room.called()
        done = room.run(*room.command)
        assert done.returncode == 0, done.stderr
        assert not plan.faults
    room.check_results()
    assert room.called() == before


def test_a_job_that_is_removed(s3: str, tmp_path: Path) -> None:
    """A removed job leaves no object but the prefix's owner, also where its removal was interrupted and the data
    directory was lost."""
    with bucket_client(s3, "removed-jobs") as client:
        room = Room(tmp_path, s3, "jobs", "removed-jobs")
        assert room.run(*room.command).returncode == 0
        (job,) = re.findall("job_[0-9a-f]+", room.run(*room.batchmill, "jobs").stdout)
        assert client.list_objects_v2(Bucket="removed-jobs")["KeyCount"] >= 4
        fired = tmp_path / "removed"
        environment = {**room.environment, "BATCHMILL_FAULT": f"after_remove:1:{fired}"}
        run_until(fired, [*room.batchmill, "jobs", "rm", job], tmp_path, environment)
        lose(room.data_dir)
        room.run(*room.batchmill, "jobs")
        (left,) = client.list_objects_v2(Bucket="removed-jobs")["Contents"]
        assert left["Key"].endswith("/owner.json")
