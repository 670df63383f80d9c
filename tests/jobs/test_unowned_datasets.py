"""Datasets and plans of an owner that may have been replaced: its successor seals the same job in the same folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from batchmill.datasets import layout
from batchmill.errors import BatchmillError, DatabaseUnavailable, InvalidDataset
from batchmill.jobs import runner
from batchmill.jobs.intake.preparation import Prepared, PrepareOrder, prepare
from batchmill.jobs.ledger.files import JobFiles, clear_unsealed
from batchmill.owned_files import OwnedFiles
from batchmill.owner_term import TermFile, now_s
from batchmill.types import DatasetSpec, JobOrder, ModelSpec, Policy
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import TableForm

ROWS, WAIT_S = 20, 0.3


class Sealing:
    """A child of the first owner, which ends as a thread here."""

    def __init__(self, tmp_path: Path) -> None:
        (tmp_path / "in.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(ROWS)))
        self.spec = JobSpec(
            id="job_1", dataset=DatasetSpec([str(tmp_path / "in.jsonl")]), models=[ModelSpec("m", "function", "a:f")],
            form=TableForm(), policy=Policy(), output=None, identity="", code={}, created=0.0,
        )  # fmt: skip
        self.folders = [tmp_path / name for name in ("dataset", "plan")]
        for folder in self.folders:
            folder.mkdir()
        self.term, self.found = TermFile(), []

    def order(self, term: str = "") -> bytes:
        return msgspec.json.encode(PrepareOrder(self.spec, *map(str, self.folders), term=term))

    def begin(self, progress: Callable[[float], None] = lambda _: None) -> threading.Thread:
        def run() -> None:
            try:
                self.found.append(msgspec.json.decode(prepare(self.order(self.term.path), progress), type=Prepared))
            except BatchmillError as error:
                self.found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def files(self) -> dict[str, tuple[int, bytes]]:
        paths = [path for folder in self.folders for path in folder.iterdir()]
        return {str(path): (path.stat().st_ino, path.read_bytes()) for path in paths}


@pytest.fixture
def sealing(tmp_path):
    return Sealing(tmp_path)


def test_a_child_of_a_stopped_owner_leaves_the_dataset_of_its_successor(sealing):
    """It waits, and goes on where its owner is the owner after all."""
    prepare(sealing.order(), lambda _: None)
    before = sealing.files()
    thread = sealing.begin()  # its term is over
    thread.join(WAIT_S)
    assert thread.is_alive() and sealing.files() == before
    sealing.term.write(now_s() + 60)
    thread.join(10)
    assert sealing.found[0].plan.rows == ROWS


def test_a_child_of_a_stopped_owner_that_fails_removes_nothing(sealing):
    """What it had written is gone, and under the same names lies the dataset of its successor."""
    sealing.term.write(now_s() + 60)
    seal = sealing.folders[0] / layout.SEAL

    def stopped(_: float) -> None:
        sealing.term.write(0.0)
        seal.write_text("of the successor")
        raise InvalidDataset("something it has written is not there any more", code="unreadable")

    thread = sealing.begin(stopped)
    thread.join(WAIT_S)
    assert thread.is_alive() and seal.read_text() == "of the successor"
    del sealing.term  # the owner ends, and the child with it
    thread.join(10)
    assert isinstance(sealing.found[0], DatabaseUnavailable) and seal.read_text() == "of the successor"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
    return tmp_path


async def test_an_owner_that_is_cut_off_clears_no_dataset(folder, opened, monkeypatch):
    """When its child has ended, it removes what is not sealed only while it is the owner."""
    (folder / "in.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(ROWS)))
    service, unfinished = await opened(), []
    database = service._commit_log.ledger.database

    def cut_off(point: str) -> None:
        if point == "after_prepare":
            (dataset,) = (folder / "data" / "jobs").glob("job_*/dataset")
            (dataset / layout.SEAL).unlink()  # its successor has begun to seal
            unfinished.extend(dataset / name for name in (layout.OFFSETS, layout.CHUNKS))
            monkeypatch.setattr(database.term, "left_s", lambda: -1.0)

    monkeypatch.setattr(runner.faults, "point", cut_off)
    model = ModelSpec("double", "function", f"{folder / 'app.py'}:double")
    order = JobOrder(DatasetSpec([str(folder / "in.jsonl")], copy=True), [model], output=str(folder / "out.jsonl"))
    job = (await service.submit(order)).id
    view = [view async for view in service.watch(job, 0.05)][-1]
    assert view.state == "paused" and unfinished
    assert all(path.exists() for path in unfinished)
    assert JobFiles((folder / "data"), job).spec.exists()


@pytest.mark.parametrize("left_s", [0.0, 1.0])
async def test_an_owner_that_was_replaced_while_it_started_clears_no_job(folder, opened, monkeypatch, left_s):
    """A dataset that its successor is sealing, and the folder of a job that it has just made, look like leftovers."""
    service = await opened()
    (unsealed := folder / "data" / "jobs" / "job_theirs" / "dataset").mkdir(parents=True)
    (unsealed / layout.OFFSETS).touch()
    monkeypatch.setattr(service._commit_log.ledger.database.term, "left_s", lambda: left_s)
    owned = OwnedFiles(service._commit_log.ledger.database.term)
    with suppress(DatabaseUnavailable):
        clear_unsealed(folder / "data", ["job_theirs"], owned)
    assert (unsealed / layout.OFFSETS).exists() == (left_s == 0.0)
    await service.recover(resume_server_jobs=False)
    assert unsealed.exists() == (left_s == 0.0)
