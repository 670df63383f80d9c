"""Files that cells name, of jobs whose workers may run on other machines and see the data directory alone."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes.answering_service import AnsweringService, choice
from fakes.batch_provider import BatchProvider
from fakes.databases import open_ledger
from fakes.job_service import end_of, job_service
from msgspec.structs import replace

from batchmill.config import RetentionEntry
from batchmill.engines.clock import SystemClock
from batchmill.executors.local import LocalExecutor
from batchmill.jobs.service import JobService
from batchmill.types import DatasetSpec, JobOrder, JobView, MediaColumn, ModelSpec, Policy, Sample

GIF = b"GIF89a"


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[JobService, AnsweringService]]:
    """A service of a cluster with a shared folder, and a model that answers with the image."""
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    data = tmp_path / "data"
    data.mkdir()
    ledger = open_ledger(data / "batchmill.db")
    retention = RetentionEntry(intermediate_s=0.0, retry_s=0.0)
    service = job_service(
        data, ledger, LocalExecutor(data / "workers"), SystemClock(), is_shared=True, retention=retention
    )
    answer = lambda body: choice(body["messages"][0]["content"][0]["image_url"]["url"])  # noqa: E731
    async with AnsweringService(answer) as model:
        await service.recover(resume_server_jobs=True)
        yield service, model
        await service.close(at_once=True)


def order(folder: Path, model: AnsweringService, *names: str, **policy: object) -> JobOrder:
    (folder / "in.jsonl").write_text("".join(json.dumps({"img": name}) + "\n" for name in names))
    spec = ModelSpec("m", "http", "s", base_url=model.url, api_key="env:OPENAI_API_KEY")
    return JobOrder(
        DatasetSpec([str(folder / "in.jsonl")], media_folder=""), [spec], prompt="?", policy=Policy(**policy),
        media=[MediaColumn("image", "img")],
    )  # fmt: skip


def outputs(view: JobView) -> list[bytes]:
    assert view.output is not None
    lines = map(json.loads, Path(view.output).read_text().splitlines())
    return [b64decode((line["output"] or ",").partition(",")[2]) for line in lines]


def copies(home: Path) -> list[bytes]:
    return sorted(path.read_bytes() for path in (home / "media").rglob("*") if path.is_file())


async def test_workers_read_copies_in_the_data_directory(stage, tmp_path: Path) -> None:
    """One of equal contents; a file that is gone fails its row. They count to the job, and go when its rows cannot run
    again: the files stay."""
    service, model = stage
    for name, data in (("a.gif", GIF), ("b.gif", GIF + b"b"), ("same.gif", GIF)):
        (tmp_path / name).write_bytes(data)
    job = (await service.submit(order(tmp_path, model, "a.gif", "b.gif", "same.gif", "gone.gif"))).id
    view = await end_of(service, job)
    assert (view.state, outputs(view)) == ("completed", [GIF, GIF + b"b", GIF, b""]), view.message
    home = tmp_path / "data" / "jobs" / job
    assert copies(home) == [GIF, GIF + b"b"]
    await service.retention.sweep()
    assert not (home / "media").exists() and (home / "results.jsonl").exists()
    assert (tmp_path / "a.gif").read_bytes() == GIF


async def test_a_provider_gets_copies_too(stage, tmp_path: Path) -> None:
    """They are read when the file is written that is uploaded."""
    service, model = stage
    (tmp_path / "a.gif").write_bytes(GIF)
    async with BatchProvider() as provider:
        provider.answer = lambda body: body["messages"][0]["content"][0]["image_url"]["url"]
        far = ModelSpec(
            "m", "provider_batch", "gpt", base_url=provider.base_url, api_key="env:OPENAI_API_KEY", provider="openai",
            engine_args={"poll_s": 0.01, "poll_max_s": 0.02},
        )  # fmt: skip
        wanted = replace(order(tmp_path, model, "a.gif", "a.gif"), models=[far])
        view = await end_of(service, (await service.submit(wanted)).id)
    assert (view.state, outputs(view)) == ("completed", [GIF, GIF]), view.message


async def test_a_refused_dataset_leaves_no_copies(stage, tmp_path: Path) -> None:
    """A job of which no row runs keeps nothing of what its cells name."""
    service, model = stage
    (tmp_path / "a.gif").write_bytes(GIF)
    wrong = order(tmp_path, model, "a.gif")
    (tmp_path / "in.jsonl").write_text(f"{json.dumps({'img': 'a.gif'})}\n[1]\n")
    view = await end_of(service, (await service.submit(wrong)).id)
    assert view.state == "failed" and "were refused" in view.message
    assert copies(tmp_path / "data" / "jobs" / view.id) == []


async def test_a_damaged_dataset_is_made_anew(stage, tmp_path: Path) -> None:
    """Of the same files; its rows then read the copies that they had, and no file."""
    service, model = stage
    for name, data in (("a.gif", GIF), ("b.gif", GIF + b"b")):
        (tmp_path / name).write_bytes(data)
    wanted = replace(order(tmp_path, model, "a.gif", "b.gif"), sample=Sample(1))
    job = (await service.submit(wanted)).id
    assert (await end_of(service, job)).reason == "sampled"
    (tmp_path / "data" / "jobs" / job / "dataset" / "offsets.u64").write_bytes(b"")
    assert (await service.rebuild(job)).broken == []
    for name in ("a.gif", "b.gif"):
        (tmp_path / name).unlink()
    assert (await service.submit(replace(wanted, sample=None))).id == job
    view = await end_of(service, job)
    assert (view.state, outputs(view)) == ("completed", [GIF, GIF + b"b"]), view.message


async def test_jobs_share_copies(stage, tmp_path: Path) -> None:
    """Two jobs with equal files have one copy, which is there until both need it no more."""
    service, model = stage
    for name, data in (("a.gif", GIF), ("b.gif", GIF + b"b")):
        (tmp_path / name).write_bytes(data)
    views = [await end_of(service, (await service.submit(order(tmp_path, model, "a.gif"))).id)]
    held = replace(order(tmp_path, model, "a.gif", "b.gif"), sample=Sample(1))
    views.append(await end_of(service, (await service.submit(held)).id))
    homes = [tmp_path / "data" / "jobs" / view.id for view in views]
    files = [path for home in homes for path in (home / "media").rglob("*") if path.is_file()]
    assert len({path.stat().st_ino for path in files}) == 2 and len(files) == 3
    await service.retention.sweep()
    assert not (homes[0] / "media").exists() and copies(homes[1]) == [GIF, GIF + b"b"]
    assert len(list((tmp_path / "data" / "media").glob("default/*/*"))) == 2
    await service.cancel(views[1].id)
    await end_of(service, views[1].id)
    await service.remove(views[1].id)
    assert not list((tmp_path / "data" / "media").glob("default/*/*"))
