"""Nodes removed, and owners killed, in the middle of tasks that seal a dataset and gather its results: a real cluster.

The proxy before the object store holds what tasks put, so that each fault meets running tasks on two nodes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import msgspec
import pytest
from fakes.faulty_objects import FaultyObjects, Hold, faulty_objects
from fakes.s3_server import bucket_client, s3_environment, s3_server
from ray_support import ray_nodes
from test_nodes_without_files import BUCKET, Stage, batchmill, says
from test_parts_on_nodes import objects_below

from batchmill.datasets.layout import SUMMED_LINES
from batchmill.datasets.orders import SealOrder
from batchmill.datasets.sealing import seal
from batchmill.jobs.intake.node_sealing import BYTES_MIN
from batchmill.jobs.results.parts.output_folders import PartManifest
from batchmill.types import DatasetSpec

TEXT_BYTES = 60_000
ROWS = BYTES_MIN // TEXT_BYTES + 40  # of two spans
PART_ROWS = -(-ROWS // 4)
APP = "def size(n, text):\n    return [n, len(text)]\n"
NODES = 2  # each runs one task at a time
LOOK_S = 0.5
SEALING, GATHERING = "/scratch/", "/out/part-"  # in the paths of what tasks put


class Cluster:
    """A stage whose nodes are removed and added.

    Args: dataset: the files of the sealed input.
    """

    def __init__(self, stage: Stage, plan: FaultyObjects, dataset: dict[str, bytes]) -> None:
        self.stage, self.plan, self.dataset = stage, plan, dataset
        self._oldest, self._added = 1, NODES

    def replace_node(self) -> None:
        """Remove the node that has been there for longest, and add another."""
        self.stage.nodes.does(f"remove {self._oldest}")
        self._oldest += 1
        self.stage.nodes.does("add 1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with s3_server() as url, bucket_client(url, BUCKET) as client, faulty_objects(url) as plan:
        made = Stage(tmp_path_factory.mktemp("tasks"), plan.url, client)
        with ray_nodes(0, *[1] * NODES, environ=s3_environment(plan.url), hidden=made.hidden) as made.nodes:
            text = "x" * TEXT_BYTES
            body = "".join(json.dumps({"n": n, "text": text}) + "\n" for n in range(ROWS))
            client.put_object(Bucket=BUCKET, Key="in.jsonl", Body=body.encode())
            yield Cluster(made, plan, sealed(tmp_path_factory.mktemp("here"), body))


def sealed(folder: Path, body: str) -> dict[str, bytes]:
    """The files of a dataset that this process seals."""
    (folder / "in.jsonl").write_text(body)
    (folder / "dataset").mkdir()
    seal(SealOrder(DatasetSpec([f"{folder}/in.jsonl"]), targets={"m": (0, 0)}), folder / "dataset", lambda _: None)
    return {name: (folder / "dataset" / name).read_bytes() for name in SUMMED_LINES}


class Job:
    """The same command again and again, until its results are there. At the end of the context none of them runs."""

    def __init__(self, cluster: Cluster, folder: Path, name: str) -> None:
        self._cluster, self._folder, self._name = cluster, folder, name
        (folder / "app.py").write_text(APP)
        (folder / "batchmill.toml").write_text(cluster.stage.config(name))
        self._words = (
            "run", f"s3://{BUCKET}/in.jsonl", "--model", "function:app.py:size", "-o", f"s3://{BUCKET}/{name}/out/",
            "--part-rows", str(PART_ROWS),
        )  # fmt: skip

        self._ending = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def start(self) -> subprocess.Popen[str]:
        process = self._ending.enter_context(batchmill(self._folder, self._cluster.stage.url, *self._words))
        self._ending.callback(process.kill)
        return process

    @contextmanager
    def in_the_middle(self, phase: str, process: subprocess.Popen[str]) -> Iterator[Hold]:
        """Every node has a task that puts something, and waits until the end of the context."""
        with self._cluster.plan.holding("PUT", phase) as hold:
            while not hold.until(lambda hold: hold.begun >= NODES, LOOK_S):
                assert process.poll() is None, process.communicate()
            yield hold

    def check(self, process: subprocess.Popen[str]) -> None:
        """Its results and its dataset are right, its ledger is sound, and nothing of its tasks is left."""
        printed, _ = process.communicate()
        assert process.returncode == 0, printed
        stage = self._cluster.stage
        found = objects_below(stage.client, f"{self._name}/out/")
        manifest = msgspec.json.decode(found.pop("manifest.json"), type=PartManifest)
        assert set(found) == manifest.names
        results = [json.loads(line)["output"] for part in manifest.parts for line in found[part.name].splitlines()]
        assert results == [[n, TEXT_BYTES] for n in range(ROWS)]
        shown = json.loads(says(self._folder, stage.url, "jobs", "--json").splitlines()[0])["job"]
        says(self._folder, stage.url, "ledger", "verify", shown["id"])
        assert not [key for key in objects_below(stage.client, f"{self._name}/jobs/") if SEALING in key]
        dataset = stage.hidden / self._name / "jobs" / shown["id"] / "dataset"
        assert {name: (dataset / name).read_bytes() for name in SUMMED_LINES} == self._cluster.dataset


@pytest.mark.timeout(300)
def test_nodes_end(cluster: Cluster, tmp_path: Path) -> None:
    """What the tasks of a lost node were to do is done by others, both while rows are sealed and gathered."""
    with Job(cluster, tmp_path, "nodes") as job:
        process = job.start()
        for phase in (SEALING, GATHERING):
            with job.in_the_middle(phase, process):
                cluster.replace_node()
        job.check(process)


@pytest.mark.timeout(300)
def test_owners_end(cluster: Cluster, tmp_path: Path) -> None:
    """The tasks of a killed owner end, though nobody tells them, and the next one seals and gathers the same: also if
    a node ends meanwhile.
    """
    with Job(cluster, tmp_path, "owners") as job:
        for phase in (SEALING, GATHERING):
            process = job.start()
            with job.in_the_middle(phase, process) as hold:
                process.kill()
                process.communicate()
                hold.until(lambda hold: hold.gone == hold.begun)
                if phase == GATHERING:
                    cluster.replace_node()
        job.check(job.start())
