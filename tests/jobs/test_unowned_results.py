"""Results of an owner that cannot know whether it still owns the database."""

from __future__ import annotations

import json

import msgspec
import pytest

from batchmill.errors import DatabaseUnavailable, StorageFailed
from batchmill.jobs import runner
from batchmill.jobs.results.object_results import UploadOrder, upload_offloaded
from batchmill.jobs.results.parts.output_folders import ObjectFolder
from batchmill.jobs.results.result_lines import ResultLines
from batchmill.jobs.results.results import Manifest, ResultFile, errors_path
from batchmill.owner_term import TermFile, now_s
from batchmill.types import DatasetSpec, JobOrder, ModelSpec

ROWS = 20


@pytest.fixture
def folder(tmp_path):
    rows = [{"custom_id": f"r{n}", "url": "/v1/x", "body": {"n": n}} for n in range(ROWS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
    return tmp_path


async def test_an_owner_that_is_cut_off_publishes_nothing(folder, opened, monkeypatch):
    """Another process may have taken the database over: the job pauses with every row done, and is finished by whoever
    owns the database.
    """
    service = await opened()
    term = service._commit_log.ledger.database.term
    left_s = term.left_s

    def cut_off(point: str) -> None:
        if point == "before_publish":
            monkeypatch.setattr(term, "left_s", lambda: -1.0)

    monkeypatch.setattr(runner.faults, "point", cut_off)
    model = ModelSpec("double", "function", f"{folder / 'app.py'}:double")
    order = JobOrder(DatasetSpec([str(folder / "in.jsonl")]), [model], output=str(folder / "out.jsonl"))
    job = (await service.submit(order)).id
    view = [view async for view in service.watch(job, 0.05)][-1]
    assert (view.state, view.reason, view.rows_ok) == ("paused", "database_unavailable", ROWS)
    assert not (folder / "out.jsonl").exists()
    monkeypatch.setattr(runner.faults, "point", lambda _: None)
    monkeypatch.setattr(term, "left_s", left_s)
    await service.resume(job)
    view = [view async for view in service.watch(job, 0.05)][-1]
    assert (view.state, view.rows_ok) == ("completed", ROWS)
    assert len((folder / "out.jsonl").read_text().splitlines()) == ROWS


def test_the_children_of_a_stopped_owner_put_nothing(tmp_path):
    """A child process reads the end of its owner's term before each object: an owner that is stopped cannot end it."""
    (tmp_path / "store").mkdir()
    (tmp_path / "part").write_text("{}\n")
    (tmp_path / "out.jsonl").write_text("{}\n")
    url, term = f"file://{tmp_path}/store/", TermFile()
    file = ResultFile(str(tmp_path / "out.jsonl"), rows=1, bytes=3)
    order = UploadOrder(Manifest(file, None, rows=1, ok=1, failed=0, folded=0), f"{url}out.jsonl", False, term.path)
    for until_s, is_sound in ((now_s() - 1, False), (now_s() + 3600, True)):
        term.write(until_s)
        folder = ObjectFolder(url, term.path)
        steps = (
            lambda: folder.put_part(tmp_path / "part"),  # noqa: B023
            lambda: folder.put_manifest(b"{}", scratch="s", replaced=None),  # noqa: B023
            lambda: upload_offloaded(msgspec.json.encode(order), lambda _: None),
        )
        for step in steps:
            if is_sound:
                step()
                continue
            with pytest.raises(DatabaseUnavailable):
                step()
            assert list((tmp_path / "store").iterdir()) == []
    assert {path.name for path in (tmp_path / "store").iterdir()} == {"part", "manifest.json", "out.jsonl"}


@pytest.mark.parametrize("has_errors", [True, False])
def test_a_child_of_a_replaced_owner_leaves_the_errors_of_a_later_generation(tmp_path, has_errors):
    """It goes on after its successor has finished the job, and a retry of it: neither the file with errors that it has
    appears, nor does the one go that it has not.
    """
    output = tmp_path / "out.jsonl"
    late = ResultLines(output, True)
    late.write(b"old\n", 1, ok=not has_errors)
    successor = ResultLines(output, True)
    successor.write(b"new\n", 1, ok=has_errors)
    successor.publish()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix != ".part"}
    assert errors_path(output).exists() != has_errors
    with pytest.raises(StorageFailed, match="another process's now"):
        late.publish()
    late.discard()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
