"""Reuse at its edges: many jobs, few descriptors, specs that changed after sealing, and jobs that are gone."""

from __future__ import annotations

import json
import os
import resource
import shutil
import threading
from pathlib import Path

import msgspec
import pytest
from fakes.answering_service import AnsweringService, choice
from fakes.databases import open_ledger
from fakes.job_service import job_service

from batchmill.config import RetentionEntry
from batchmill.datasets.request_digests import DIGEST_BYTES
from batchmill.engines.clock import SystemClock
from batchmill.errors import DatabaseUnavailable, TermOver
from batchmill.executors.local import LocalExecutor
from batchmill.jobs.intake import adapters, orders
from batchmill.jobs.intake.preparation import PrepareOrder, prepare
from batchmill.jobs.intake.reuse_index import JobIndex, build
from batchmill.jobs.intake.reuse_lookup import STRIPE_ROWS, look_up_offloaded
from batchmill.jobs.intake.reuse_orders import EarlierJob, LookupOrder, Reused, target_keys
from batchmill.jobs.intake.reuse_requests import read_requests
from batchmill.jobs.intake.reuse_results import ResultFiles
from batchmill.jobs.ledger.files import JobFiles
from batchmill.owner_term import TermFile
from batchmill.store import removals
from batchmill.store.removals import Removal
from batchmill.store.segments.files import SegmentFolder
from batchmill.store.segments.format import scan
from batchmill.types import DatasetSpec, JobOrder, JobView, ModelSpec, Policy

CODE = """
import os
def double(n):
    if os.path.exists(os.environ["FAILS"]) and n % 10 == 3:
        raise ValueError("not now")
    return 2 * n
"""
CHAT = "/v1/chat/completions"
ALL = Policy(reuse="all")


@pytest.fixture
async def service(tmp_path, monkeypatch):
    (tmp_path / "app.py").write_text(CODE)
    monkeypatch.setenv("FAILS", str(tmp_path / "fails"))
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    ledger = open_ledger(data_dir / "batchmill.db")
    opened = job_service(data_dir, ledger, LocalExecutor(data_dir / "workers"), SystemClock())
    await opened.recover()
    yield opened
    await opened.close(at_once=True)


def functions(folder: Path, rows, *, name: str = "in.jsonl", **more) -> JobOrder:
    (folder / name).write_text("".join(json.dumps({"n": n}) + "\n" for n in rows))
    model = ModelSpec("double", "function", f"{folder / 'app.py'}:double")
    fields = {"policy": ALL, "output": str(folder / f"{name}.out.jsonl"), **more}
    return JobOrder(DatasetSpec([str(folder / name)]), [model], **fields)


async def run(service, order: JobOrder) -> JobView:
    return await ended(service, (await service.submit(order)).id)


async def ended(service, job_id: str) -> JobView:
    view = [each async for each in service.watch(job_id, 0.02)][-1]
    assert view.state == "completed", view
    return view


def earlier(folder: Path, view: JobView, committed=None, term: str = "") -> EarlierJob:
    files = JobFiles(folder / "data", view.id)
    return EarlierJob(
        files.read_spec(), str(folder / "data"), 0, view.finished, files.segment_place, committed, term=term
    )


def look_up(folder: Path, view: JobView, jobs: list[EarlierJob], segments: str = "", term: str = "") -> Reused:
    files = JobFiles(folder / "data", view.id)
    order = LookupOrder(files.read_spec(), str(files.dataset), str(files.plan(0)), jobs, 0.0, segments, term=term)
    return msgspec.json.decode(look_up_offloaded(msgspec.json.encode(order), lambda _: None), type=Reused)


async def test_a_thousand_jobs_need_few_descriptors(tmp_path, service):
    """A lookup holds no file of an index open, and some segments only."""
    first = await run(service, functions(tmp_path, range(20)))
    second = await run(service, functions(tmp_path, range(20), name="b.jsonl"))
    assert second.rows_reused == 20
    third = await run(service, functions(tmp_path, range(15, 25), name="c.jsonl"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 30, hard))
    try:
        found = look_up(tmp_path, third, [earlier(tmp_path, first)] * 1000, str(tmp_path / "segments"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (found.rows, found.skipped) == (5, [])


async def test_a_child_of_an_ended_owner_leaves_the_index_of_its_successor(tmp_path, service):
    """The successor may have removed the segments: what rows may take over is in the index alone then."""
    first = await run(service, functions(tmp_path, range(20)))
    await run(service, functions(tmp_path, range(20), name="b.jsonl"))
    home = tmp_path / "data" / "jobs" / first.id / "reuse"
    before = {path.name: path.read_bytes() for path in home.iterdir()}
    assert len(before) > 2
    for job in (earlier(tmp_path, first, term="/nonexistent"), earlier(tmp_path, first, [], term="/nonexistent")):
        with pytest.raises(TermOver):
            build(job)
        assert {path.name: path.read_bytes() for path in home.iterdir()} == before


async def test_a_child_of_a_stopped_owner_leaves_the_segments_of_its_successor(tmp_path, service):
    """They have the same names, and their blocks are committed by then: it waits, and ends with its owner."""
    first = await run(service, functions(tmp_path, range(20)))
    second = await run(service, functions(tmp_path, range(20), name="b.jsonl"))
    (segment,) = (tmp_path / "data" / "jobs" / second.id / "segments").glob("reuse0-*.seg")
    before, terms, found = segment.read_bytes(), [TermFile()], []

    def late() -> None:
        try:
            found.append(look_up(tmp_path, second, [earlier(tmp_path, first)], str(segment.parent), terms[0].path))
        except DatabaseUnavailable as error:
            found.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive() and segment.read_bytes() == before
    terms.clear()  # the owner ends
    thread.join(10)
    assert isinstance(found[0], DatabaseUnavailable) and segment.read_bytes() == before


async def test_children_share_the_rows_of_a_lookup(tmp_path, service):
    """Each takes stripes of its own, and together they take all: no row twice, none left out."""
    rows = STRIPE_ROWS + 100
    first = await run(service, functions(tmp_path, range(rows)))
    second = await run(service, functions(tmp_path, range(rows), name="b.jsonl"))
    assert second.rows_reused == rows
    files, folder = JobFiles(tmp_path / "data", second.id), tmp_path / "segments"
    order = LookupOrder(
        files.read_spec(), str(files.dataset), str(files.plan(0)), [earlier(tmp_path, first)], 0.0, str(folder)
    )
    for part, expected in enumerate((STRIPE_ROWS, 100)):
        data = msgspec.json.encode(msgspec.structs.replace(order, part=part, parts=2))
        assert msgspec.json.decode(look_up_offloaded(data, lambda _: None), type=Reused).rows == expected
    source = SegmentFolder(folder)
    found = [row for name in source.names() for block in scan(source, name) for row in block.rows()]
    source.close()
    assert sorted(found) == list(range(rows))


async def test_a_retried_job_is_taken_from(tmp_path, service):
    """A retry makes the index of its job outdated: the next lookup writes it anew, and no row is paid for twice."""
    (tmp_path / "fails").touch()
    first = await run(service, functions(tmp_path, range(20)))
    assert first.rows_failed == 2
    again = await run(service, functions(tmp_path, range(20), name="b.jsonl"))
    assert again.rows_reused == 18
    await service.remove(again.id)
    (tmp_path / "fails").unlink()
    await service.retry(first.id)
    assert (await ended(service, first.id)).rows_ok == 20
    view = await run(service, functions(tmp_path, range(20), name="c.jsonl"))
    assert view.rows_reused == 18


async def test_a_damaged_index_costs_no_call(tmp_path, service):
    """An index that is not what was written is written anew within the same lookup."""
    first = await run(service, functions(tmp_path, range(20)))
    await service.remove((await run(service, functions(tmp_path, range(20), name="b.jsonl"))).id)
    place = JobFiles(tmp_path / "data", first.id).reuse / "0.records"
    place.write_bytes(bytes(place.stat().st_size))
    view = await run(service, functions(tmp_path, range(20), name="c.jsonl"))
    assert view.rows_reused == 20


async def test_a_job_that_is_removed_during_a_lookup(tmp_path, service):
    """Its results are not there any more: rows run, and nothing raises."""
    first = await run(service, functions(tmp_path, range(20)))
    second = await run(service, functions(tmp_path, range(20), name="b.jsonl"))
    keys = target_keys(JobFiles(tmp_path / "data", first.id).read_spec())
    index = JobIndex(earlier(tmp_path, first), keys)
    digests = read_requests(JobFiles(tmp_path / "data", second.id).dataset).digests
    digests = digests[digests[:, 0].argsort()]
    found, places = index.find(keys[0], digests)
    assert len(found) == 20 and digests.shape[1] * 8 == DIGEST_BYTES
    files = ResultFiles()
    assert all(b'"output":' in line for line in files.lines(index.paths, places))
    files.close()
    shutil.rmtree(JobFiles(tmp_path / "data", first.id).home)
    assert files.lines(index.paths, places) == [None] * 20
    assert len(index.find(keys[0], digests)[0]) == 0
    shutil.rmtree(JobFiles(tmp_path / "data", second.id).home)
    view = await run(service, functions(tmp_path, range(20), name="c.jsonl"))
    assert (view.rows_ok, view.rows_reused) == (20, 0)


async def test_retention_moves_results_during_a_lookup(tmp_path, service):
    """What was found in a segment is found in the copy that retention has made before it removed the segment."""
    first = await run(service, functions(tmp_path, range(20), output=str(tmp_path / "first.csv")))
    second = await run(service, functions(tmp_path, range(20), name="b.jsonl"))
    keys = target_keys(JobFiles(tmp_path / "data", first.id).read_spec())
    digests = read_requests(JobFiles(tmp_path / "data", second.id).dataset).digests
    digests = digests[digests[:, 0].argsort()]
    found_before, found_after = (JobIndex(earlier(tmp_path, first), keys) for _ in range(2))
    _, places = found_before.find(keys[0], digests)
    service.retention.entry = RetentionEntry(intermediate_s=0.0, retry_s=0.0)
    await service.retention.sweep()
    assert not JobFiles(tmp_path / "data", first.id).segments.exists()
    files = ResultFiles()
    assert files.lines(found_before.paths, places) == [None] * 20
    assert found_before.renew() and not found_before.renew()
    for index in (found_before, found_after):
        found, places = index.find(keys[0], digests)
        assert len(found) == 20 and all(b'"output":' in line for line in files.lines(index.paths, places))
    files.close()


async def test_published_results_that_are_gone(tmp_path, service):
    """The file of a job whose segments are gone was emptied or removed: rows run, and nothing pauses."""
    service.retention.entry = RetentionEntry(intermediate_s=0.0, retry_s=0.0)
    first = await run(service, functions(tmp_path, range(20)))
    await run(service, functions(tmp_path, range(5), name="b.jsonl"))
    await service.retention.sweep()
    assert not JobFiles(tmp_path / "data", first.id).segments.exists()
    Path(first.output).write_bytes(b"")
    view = await run(service, functions(tmp_path, range(10, 20), name="c.jsonl"))
    assert (view.rows_ok, view.rows_reused) == (10, 0)
    await service.remove(view.id)
    Path(first.output).unlink()
    view = await run(service, functions(tmp_path, range(10, 20), name="d.jsonl"))
    assert (view.rows_ok, view.rows_reused) == (10, 0)


async def test_deleted_results_are_not_taken(tmp_path, service):
    """A result file that was deleted, or has expired, is no source, though the segments of its job are there."""
    first = await run(service, functions(tmp_path, range(20)))
    gone = Removal("file-1", first.project, first.id, "the key k", first.finished)
    await service._ledger.database.write(removals.insert, msgspec.structs.replace(gone, id=f"{first.id}/parts"))
    view = await run(service, functions(tmp_path, range(20), name="b.jsonl"))
    assert view.rows_reused == 20
    await service.remove(view.id)
    await service._ledger.database.write(removals.insert, gone)
    view = await run(service, functions(tmp_path, range(20), name="c.jsonl"))
    assert (view.rows_ok, view.rows_reused) == (20, 0)


async def test_adapters_that_no_row_uses_change_no_target(tmp_path, service):
    """A job drops them from its spec after its rows were sealed: no row takes over another's result."""
    body = {"messages": [{"role": "user", "content": "hello"}]}

    def rows(model: str) -> str:
        row = {"custom_id": "1", "method": "POST", "url": CHAT, "body": {"model": model, **body}}
        path = tmp_path / f"{model.replace('/', '-')}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        return str(path)

    async with AnsweringService(lambda _: choice("hi", "stop")) as chat:
        other = ModelSpec("m", "http", "m", base_url=chat.url, api_key="env:OPENAI_API_KEY")
        await run(service, JobOrder(DatasetSpec([rows("m")]), [other], policy=ALL))
        places = {"a/1": "/adapters/a", "b/1": "/adapters/b"}
        base = ModelSpec("base", "llm", "base", adapters=places, adapter_rank=16)
        for name, expected in (("b/1", 0), ("m", 1)):
            spec = orders.describe(JobOrder(DatasetSpec([rows(name)]), [base, other], policy=ALL), 0.0)
            dataset, plan = tmp_path / f"{expected}-dataset", tmp_path / f"{expected}-plan"
            dataset.mkdir()
            plan.mkdir()
            prepare(msgspec.json.encode(PrepareOrder(spec, str(dataset), str(plan))), lambda _: None)
            dropped = adapters.drop_unused(spec, {0: ["b/1"]})
            assert (await service.count_reused(dropped, str(dataset), str(plan))).rows == expected
