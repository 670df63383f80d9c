"""Rows that nodes check which see nothing of the data directory: tasks of a real cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.s3_server import bucket_client, s3_environment, s3_server
from ray_support import ray_nodes
from test_nodes_without_files import BUCKET, Stage, says

from batchmill.jobs.intake.node_sealing import BYTES_MIN

TEXT_BYTES = 60_000
ROWS = BYTES_MIN // TEXT_BYTES + 40  # of two spans
APP = "def size(n, text):\n    return [n, len(text)]\n"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Its nodes kill the first task that has checked its rows."""
    with s3_server() as url, bucket_client(url, BUCKET) as client:
        made = Stage(tmp_path_factory.mktemp("sealing"), url, client)
        environ = {**s3_environment(url), "BATCHMILL_FAULT": f"after_span:1:{made.fault}"}
        with ray_nodes(0, 1, 1, environ=environ, hidden=made.hidden) as made.nodes:
            text = "x" * TEXT_BYTES
            body = "".join(json.dumps({"n": n, "text": text}) + "\n" for n in range(ROWS))
            client.put_object(Bucket=BUCKET, Key="in.jsonl", Body=body.encode())
            yield made


@pytest.mark.timeout(300)
def test_a_task_and_then_the_owner_die(stage: Stage, tmp_path: Path) -> None:
    """The killed task's rows are checked by another try. What nodes found for a killed owner is removed by the next,
    which seals the same dataset, runs every row once and leaves nothing.
    """
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "batchmill.toml").write_text(stage.config("job"))
    words = ("run", f"s3://{BUCKET}/in.jsonl", "--model", "function:app.py:size", "-o", "out.jsonl")
    killed = subprocess.run(
        [sys.executable, "-P", "-m", "batchmill", *words], cwd=tmp_path, capture_output=True, text=True, timeout=150,
        env={**os.environ, **s3_environment(stage.url), "BATCHMILL_FAULT": f"after_spans:1:{tmp_path / 'fault'}"},
        check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    assert stage.fault.exists(), "no task was killed"
    prefixes = scratch(stage)
    assert len({name.split("/")[5] for name in prefixes}) >= 3, prefixes  # two spans, one of them twice
    printed = says(tmp_path, stage.url, *words)
    assert "checked" not in printed, printed
    results = [json.loads(line)["output"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert results == [[n, TEXT_BYTES] for n in range(ROWS)]
    assert scratch(stage) == []


def scratch(stage: Stage) -> list[str]:
    """The names of what nodes have found."""
    found = stage.client.list_objects_v2(Bucket=BUCKET, Prefix="job/jobs/").get("Contents", [])
    return [each["Key"] for each in found if "/scratch/" in each["Key"]]
