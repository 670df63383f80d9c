"""Damage to a job with real workers, and the way out of it that a person has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.job_service import end_of

from batchmill.errors import InvalidTransition, LedgerBroken
from batchmill.store.segments.files import SegmentFolder
from batchmill.store.segments.format import scan
from batchmill.types import DatasetSpec, JobOrder, ModelSpec, Policy

ROWS = 60
CODE = """
import os, time
def noted(n):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"{n}\\n")
    if os.path.exists(os.environ["BROKEN"]) and n % 10 == 0:
        raise ValueError(f"no {n}")
    return n
def slow(n):
    time.sleep(0.02)
    return n
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "app.py").write_text(CODE)
    rows = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/x", "body": {"n": n}} for n in range(ROWS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "calls").touch()
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("BROKEN", str(tmp_path / "broken"))
    return tmp_path


def order(folder: Path, function: str = "noted", policy: Policy | None = None) -> JobOrder:
    model = ModelSpec(function, "function", f"{folder / 'app.py'}:{function}")
    dataset = DatasetSpec([str(folder / "in.jsonl")])
    return JobOrder(dataset, [model], output=str(folder / "out.jsonl"), policy=policy or Policy())


def damage(folder: Path, job_id: str, generation: int = 0) -> list[int]:
    """Flip a bit in the first block of a generation; returns the rows in it."""
    home = folder / "data" / "jobs" / job_id / "segments"
    source = SegmentFolder(home)
    for name in source.names():
        path = home / name
        for block in scan(source, name):
            if block.generation == generation and block.ok:
                data = bytearray(path.read_bytes())
                data[block.payload_offset] ^= 1
                path.write_bytes(data)
                return sorted(block.rows())
    raise AssertionError("there is no such block")


def taken_calls(folder: Path) -> list[int]:
    calls = sorted(map(int, (folder / "calls").read_text().split()))
    (folder / "calls").write_text("")
    return calls


async def test_damage_is_mended_by_a_rebuild(folder, opened):
    """What a damaged range holds is refused with the way out in the message; rebuilt and resumed, only its rows run."""
    service = await opened()
    view = await end_of(service, (await service.submit(order(folder))).id)
    whole = (folder / "out.jsonl").read_bytes()
    assert taken_calls(folder) == list(range(ROWS))
    rows = damage(folder, view.id)
    with pytest.raises(LedgerBroken, match="ledger rebuild"):
        await service.partial(view.id)
    assert not list((folder / "data" / "partial").glob("*"))
    assert len((await service.verify(view.id)).broken) > 0
    report = await service.rebuild(view.id)
    assert (report.reopened, report.adopted, report.broken) == (len(rows), 0, []) and len(report.damaged) == 1
    assert 0 < len(rows) < ROWS
    await service.resume(view.id)
    ended = await end_of(service, view.id)
    assert (ended.state, ended.rows_ok, ended.rows_failed) == ("completed", ROWS, 0)
    assert taken_calls(folder) == rows
    assert (folder / "out.jsonl").read_bytes() == whole
    assert (await service.verify(view.id)).broken == []


async def test_damage_before_a_retry(folder, opened):
    """Rows of the first generation that are lost after a retry run again, in a generation of their own."""
    (folder / "broken").touch()
    service = await opened()
    first = await end_of(service, (await service.submit(order(folder))).id)
    assert first.rows_failed == ROWS // 10
    (folder / "broken").unlink()
    await service.retry(first.id)
    view = await end_of(service, first.id)
    assert (view.rows_ok, view.generation) == (ROWS, 1)
    whole = (folder / "out.jsonl").read_bytes()
    taken_calls(folder)
    rows = damage(folder, view.id)
    report = await service.rebuild(view.id)
    assert report.reopened == len(rows) and report.broken == []
    await service.resume(view.id)
    view = await end_of(service, view.id)
    assert (view.state, view.rows_ok, view.rows_failed, view.generation) == ("completed", ROWS, 0, 2)
    assert taken_calls(folder) == rows and (folder / "out.jsonl").read_bytes() == whole
    assert (await service.verify(view.id)).broken == []


async def test_a_lost_database_and_refused_rows(folder, opened):
    """A ledger from nothing knows the rows that were refused and folded, and the job ends as it did before."""
    source = folder / "in.jsonl"
    lines = source.read_text().splitlines()
    twin = lines[1].replace('"r1"', '"twin"')
    source.write_text("\n".join([*lines, "{nonsense", twin]) + "\n")
    service = await opened()
    wanted = order(folder, policy=Policy(on_invalid="skip", dedupe=True))
    before = await end_of(service, (await service.submit(wanted)).id)
    results = [(folder / name).read_bytes() for name in ("out.jsonl", "out.errors.jsonl")]
    await service.close()
    for path in (folder / "data").glob("batchmill.db*"):
        path.unlink()
    service = await opened()
    report = await service.rebuild(before.id)
    view = await service.show(before.id)
    assert (report.rows, report.rows_done, report.adopted, report.broken) == (ROWS + 2, ROWS, ROWS, [])
    assert (view.state, view.rows, view.rows_folded, view.rows_rejected) == ("paused", ROWS + 2, 1, 1)
    assert (view.rows_ok, view.rows_failed, view.errors) == (ROWS, 1, {"invalid_json": 1})
    taken_calls(folder)
    await service.resume(before.id)
    after = await end_of(service, before.id)
    assert (after.state, after.rows_ok, after.rows_failed) == ("completed", before.rows_ok, before.rows_failed)
    assert [(folder / name).read_bytes() for name in ("out.jsonl", "out.errors.jsonl")] == results
    assert taken_calls(folder) == []


async def test_a_cancelled_job_is_rebuilt_too(folder, opened):
    """A cancelled job is paused by a rebuild; cancelled again it has the results it had."""
    service = await opened()
    submitted = await service.submit(order(folder, "slow"))
    async for view in service.watch(submitted.id, 0.05):
        if view.rows_ok:
            break
    view = await service.cancel(submitted.id)
    assert (await service.verify(view.id)).broken == []
    result = (folder / "out.jsonl").read_bytes()
    assert (await service.rebuild(view.id)).broken == []
    assert (await service.show(view.id)).state == "paused"
    assert (await service.cancel(view.id)).rows_ok == view.rows_ok
    assert (folder / "out.jsonl").read_bytes() == result


async def test_a_running_job_is_not_rebuilt(folder, opened):
    """The ledger of a running job can be verified, not rebuilt."""
    service = await opened()
    submitted = await service.submit(order(folder, "slow"))
    async for view in service.watch(submitted.id, 0.05):
        if view.rows_ok:
            break
    with pytest.raises(InvalidTransition, match="running"):
        await service.rebuild(submitted.id)
    assert (await service.verify(submitted.id)).broken == []
    await service.pause(submitted.id)
