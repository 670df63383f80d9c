"""A file system that fails once costs a worker and its segment, and no row."""

from __future__ import annotations

import asyncio
import errno
import json
import os

import pytest

from batchmill.errors import StorageFull
from batchmill.jobs import runner
from batchmill.jobs.ledger import outcome_map
from batchmill.jobs.ledger.commits import CommitLog
from batchmill.states import JobState
from batchmill.types import DatasetSpec, JobOrder, ModelSpec

ROWS = 200
# Loaded by every interpreter: in the worker's own process a call of the system fails, once.
CODE = """
import os, pathlib, sys

failed = pathlib.Path(__file__).with_name("failed")
real = os.{call}

def fails(fd, *more):
    if not failed.exists() and ".seg" in os.readlink(f"/proc/self/fd/{{fd}}"):
        failed.touch()
        raise OSError({number}, os.strerror({number}))
    return real(fd, *more)

if "batchmill.executors.worker" in sys.orig_argv:
    os.{call} = fails
"""


@pytest.fixture
def folder(tmp_path):
    rows = [{"custom_id": f"r{n}", "url": "/v1/x", "body": {"n": n}} for n in range(ROWS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize(
    ("call", "number"), [("fdatasync", errno.EIO), ("write", errno.EIO), ("fdatasync", errno.EMFILE)]
)
async def test_a_segment_that_fails_costs_no_row(folder, opened, monkeypatch, call, number):
    """The worker whose segment failed is replaced, the job goes on by itself, and each row has one result."""
    (folder / "sitecustomize.py").write_text(CODE.format(call=call, number=number))
    (folder / "app.py").write_text("def double(n):\n    return 2 * n\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    service = await opened()
    model = ModelSpec("double", "function", f"{folder / 'app.py'}:double")
    order = JobOrder(DatasetSpec([str(folder / "in.jsonl")]), [model], output=str(folder / "out.jsonl"))
    job = (await service.submit(order)).id
    view = [view async for view in service.watch(job, 0.05)][-1]
    assert (view.state, view.rows_ok) == ("completed", ROWS)
    assert (folder / "failed").exists()
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"r{n}" for n in range(ROWS)]
    assert (await service.verify(job)).broken == []


async def test_a_segment_that_cannot_be_read_is_not_adopted(folder, opened, monkeypatch):
    """What a dead worker left in a file that cannot be read any more is run again; the job does not stop for it."""
    (folder / "app.py").write_text(
        "import os, pathlib, signal\n"
        "def double(n):\n"
        "    died = pathlib.Path(__file__).with_name('died')\n"
        f"    if n == {ROWS - 1} and not died.exists():\n"
        "        died.touch()\n"
        "        os.kill(os.getppid(), signal.SIGKILL)\n"
        "        signal.pause()\n"
        "    return 2 * n\n"
    )
    refused: list[str] = []

    def unreadable(source, name):
        refused.append(name)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    service = await opened()
    model = ModelSpec("double", "function", f"{folder / 'app.py'}:double")
    order = JobOrder(DatasetSpec([str(folder / "in.jsonl")]), [model], output=str(folder / "out.jsonl"))
    # The segment is written by another process: reading it fails in the owner alone.
    monkeypatch.setattr(outcome_map, "read_head", unreadable)
    job = (await service.submit(order)).id
    view = [view async for view in service.watch(job, 0.05)][-1]
    assert (view.state, view.rows_ok) == ("completed", ROWS)
    assert refused


async def test_a_job_whose_files_the_machine_refuses_pauses(folder, opened, monkeypatch):
    """A job that cannot read its files says which and the way out; a server lets it go on by itself."""
    (folder / "app.py").write_text("def double(n):\n    return 2 * n\n")
    service = await opened()
    model = ModelSpec("double", "function", f"{folder / 'app.py'}:double")
    order = JobOrder(DatasetSpec([str(folder / "in.jsonl")]), [model], output=str(folder / "out.jsonl"))

    def refused(folder):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(folder))

    with monkeypatch.context() as patched:
        patched.setattr(runner, "PlanReader", refused)
        job = (await service.submit(order)).id
        view = [view async for view in service.watch(job, 0.05)][-1]
    assert (view.state, view.reason) == ("paused", "storage_failed")
    assert "plan-0: Too many open files; raise the limit" in view.message and "internal" not in view.message
    await asyncio.gather(*await service._maintenance.poll())  # as a server does every few seconds
    view = [view async for view in service.watch(job, 0.05)][-1]
    assert (view.state, view.rows_ok) == ("completed", ROWS)


async def test_a_job_whose_pause_has_no_room_goes_on(folder, opened, monkeypatch):
    """The disk is so full that not even the reason of a pause is stored: a server resumes the job all the same."""
    (folder / "app.py").write_text("def double(n):\n    return 2 * n\n")
    service = await opened()
    model = ModelSpec("double", "function", f"{folder / 'app.py'}:double")
    order = JobOrder(DatasetSpec([str(folder / "in.jsonl")]), [model], output=str(folder / "out.jsonl"))
    real = CommitLog.write

    def refused(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    async def full(self, call, *arguments, **fields):
        if JobState.PAUSED in arguments:
            raise StorageFull("the ledger cannot be written")
        return await real(self, call, *arguments, **fields)

    with monkeypatch.context() as patched:
        patched.setattr(runner, "PlanReader", refused)
        patched.setattr(CommitLog, "write", full)
        job = (await service.submit(order)).id
        await service._active.get(job).wait_stopped()
    assert (await service.show(job)).state not in ("paused", "completed")
    await asyncio.gather(*await service._maintenance.poll())  # as a server does every few seconds
    view = [view async for view in service.watch(job, 0.05)][-1]
    assert (view.state, view.rows_ok) == ("completed", ROWS)


@pytest.mark.parametrize(
    ("number", "error", "expected"),
    [(errno.ENOSPC, StorageFull, "No space left"), (errno.EIO, OSError, "Input/output error")],
)
async def test_a_description_that_cannot_be_written(folder, opened, monkeypatch, number, error, expected):
    """An order whose description the disk refuses is refused with that file named, and leaves nothing; the same order
    is taken as soon as the disk writes again."""
    (folder / "app.py").write_text("def double(n):\n    return 2 * n\n")
    service = await opened()
    model = ModelSpec("double", "function", f"{folder / 'app.py'}:double")
    order = JobOrder(DatasetSpec([str(folder / "in.jsonl")]), [model], output=str(folder / "out.jsonl"))
    real, homes = os.fsync, folder / "data" / "jobs"

    def refused(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if "job.json" in path:
            raise OSError(number, os.strerror(number), path)
        real(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refused)
        with pytest.raises(error, match=expected) as caught:
            await service.submit(order)
    assert "job.json" in str(caught.value)
    assert not list(homes.glob("*")) and not await service.list()
    job = (await service.submit(order)).id
    view = [view async for view in service.watch(job, 0.05)][-1]
    assert (view.state, view.rows_ok) == ("completed", ROWS)
