"""Parts of results that nodes write which see nothing of the data directory: tasks of a real cluster."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.s3_server import bucket_client, s3_environment, s3_server
from ray_support import ENVIRONMENT, ray_nodes, ray_python
from test_nodes_without_files import BUCKET, Stage, batchmill

from batchmill.jobs.results.parts.output_folders import PartManifest

DRIVER = Path(__file__).parent.parent / "fakes" / "task_runs.py"
WAITS = DRIVER.with_name("task_waits.py")
ROWS, PART_ROWS = 4000, 1000
SOME_FAILED = 3  # exit code
APP = """
def double(n):
    if n % 1000 == 7:
        raise ValueError(f"{n} is refused")
    return 2 * n
"""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Its nodes kill the first task that has put a part."""
    with s3_server() as url, bucket_client(url, BUCKET) as client:
        made = Stage(tmp_path_factory.mktemp("parts"), url, client)
        environ = {
            **s3_environment(url), "BATCHMILL_FAULT": f"after_part:1:{made.fault}", "PYTHONPATH": str(DRIVER.parent),
        }  # fmt: skip
        with ray_nodes(0, 1, 1, environ=environ, hidden=made.hidden) as made.nodes:
            text = "".join(json.dumps({"n": n}) + "\n" for n in range(ROWS))
            client.put_object(Bucket=BUCKET, Key="in.jsonl", Body=text.encode())
            yield made


def objects_below(client: Any, prefix: str) -> dict[str, bytes]:
    found = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
    return {
        each["Key"].removeprefix(prefix): client.get_object(Bucket=BUCKET, Key=each["Key"])["Body"].read()
        for each in found
    }


@pytest.mark.timeout(180)
def test_a_task_dies_when_it_has_put_its_part(stage: Stage, tmp_path: Path) -> None:
    """All parts that count were written on nodes, the killed one's by another try; nothing else stays."""
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "batchmill.toml").write_text(stage.config("job"))
    output = f"s3://{BUCKET}/out/"
    words = ("run", f"s3://{BUCKET}/in.jsonl", "--model", "function:app.py:double", "-o", output)
    running = batchmill(tmp_path, stage.url, *words, "--part-rows", str(PART_ROWS))
    printed, _ = running.communicate(timeout=150)
    assert running.returncode == SOME_FAILED, printed
    found = objects_below(stage.client, "out/")
    manifest = msgspec.json.decode(found.pop("manifest.json"), type=PartManifest)
    assert stage.fault.exists(), "no task was killed"
    attempts = {part.name.rpartition("-")[2].partition(".")[0] for part in manifest.parts}
    assert len(attempts) == ROWS // PART_ROWS and manifest.attempt not in attempts, printed
    assert set(found) == manifest.names
    outputs = [json.loads(line) for part in manifest.parts for line in found[part.name].splitlines()]
    assert [each.get("output") for each in outputs] == [None if n % 1000 == 7 else 2 * n for n in range(ROWS)]
    assert manifest.failed == ROWS // 1000
    left = stage.client.list_objects_v2(Bucket=BUCKET, Prefix="job/jobs/")["Contents"]
    assert not [each["Key"] for each in left if "/scratch/" in each["Key"]], "what nodes were given stayed"


@pytest.mark.timeout(180)
def test_tasks_end_with_their_job_and_their_owner(stage: Stage, tmp_path: Path) -> None:
    """The process of a task is killed when nobody waits for it, and once its owner's term is over; a new one does not
    begin then. A reply that is too long is not passed on. A task puts objects within the term alone: a driver that is
    stopped renews it too late, and it then waits. It ends once the prefix is another database's.
    """
    done = subprocess.run(
        [ray_python(), "-P", str(DRIVER), stage.nodes.address, str(tmp_path / "cache"), str(tmp_path)],
        capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, timeout=150, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "ended True True", "over True False the database", "talked 3",
        "talked TOO_LONG: it returned more than 8388608 bytes, which were not read", "late the database False",
        "stopped False", "given up False the prefix is another's",
    ], done.stderr  # fmt: skip


def test_tasks_do_not_wait_for_ever() -> None:
    """One for which the cluster has no node, or none with room, goes back to its owner. Those that wait look at the
    nodes together, and a look that failed is no answer for the next.
    """
    done = subprocess.run(
        [ray_python(), "-P", str(WAITS)], capture_output=True, text=True, env={**os.environ, **ENVIRONMENT},
        timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "shared {b'done'} 1",
        "failed True ConnectionError: the head does not reply b'done'",
        "gone False the cluster has had no node with a CPU for tasks for 0 s",
        "full False no node of the cluster had room for it within 0 s",
    ], done.stderr  # fmt: skip
