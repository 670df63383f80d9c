"""Results of a server's short jobs stay reusable once retention has removed what a retry needs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from fakes.answering_service import AnsweringService, choice
from fakes.databases import open_ledger
from fakes.job_service import end_of, job_service

from batchmill.children.offload import CHILD_DIED, Offload
from batchmill.config.entries import ProjectEntry, RetentionEntry
from batchmill.engines.clock import SystemClock
from batchmill.errors import LedgerBroken
from batchmill.executors.local import LocalExecutor
from batchmill.jobs import retention
from batchmill.jobs.intake import reuse_jobs
from batchmill.jobs.intake.reuse_orders import KEEP_SMALL
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.service import JobService
from batchmill.store.sql.tables import outcome_blocks, packed_jobs
from batchmill.types import DatasetSpec, JobOrder, JobView, ModelSpec, Policy

NONE, ALL = Policy(reuse="none"), Policy(reuse="all")


@pytest.fixture
async def chat(monkeypatch) -> AsyncIterator[AnsweringService]:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    async with AnsweringService(lambda body: choice(body["messages"][-1]["content"])) as fake:
        yield fake


@pytest.fixture
async def projects() -> dict[str, ProjectEntry]:
    return {"default": ProjectEntry()}


@pytest.fixture
async def service(tmp_path, projects) -> AsyncIterator[JobService]:
    """A service whose jobs keep only their results after the first sweep."""
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
    opened = job_service(
        data, open_ledger(data / "batchmill.db"), LocalExecutor(data / "workers"), SystemClock(), projects=projects,
        retention=RetentionEntry(intermediate_s=0.0, retry_s=0.0),
    )  # fmt: skip
    await opened.recover()
    yield opened
    await opened.close(at_once=True)


def written(folder: Path, texts: list[str]) -> Path:
    path = folder / f"{'-'.join(texts)}.jsonl"
    path.write_text("".join(json.dumps(asking(text)) + "\n" for text in texts))
    return path


def asking(text: str) -> dict:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return {"custom_id": text, "method": "POST", "url": "/v1/chat/completions", "body": body}


async def asked(service: JobService, chat: AnsweringService, path: Path, policy: Policy = NONE) -> JobView:
    """A short job of a server that has completed."""
    model = ModelSpec("m", "http", "m", base_url=chat.url, api_key="env:OPENAI_API_KEY", allowed=["m"])
    return await ended(service, model, path, policy)


async def ended(service: JobService, model: ModelSpec, path: Path, policy: Policy) -> JobView:
    order = JobOrder(
        DatasetSpec([str(path)], format="openai"), [model], origin={"frontend": "openai"}, policy=policy,
        default_model=False,
    )  # fmt: skip
    view = await end_of(service, (await service.submit(order)).id)
    assert view.state == "completed", view
    return view


async def is_dropped(service: JobService) -> bool:
    """Whether the database holds no datasets and outcomes any more."""
    tables = packed_jobs, outcome_blocks
    found = await service._ledger.database.read(lambda db: [db.execute(each.select()).first() for each in tables])
    return found == [None, None]


def index_of(service: JobService, view: JobView, folder: Path) -> Path:
    return JobFiles(folder / "data", view.id).reuse / "index.json"


async def test_they_are_found_after_retention(service, chat, tmp_path):
    """Nobody looked before: retention indexes the answers, and the input may go. What is removed leaves nothing."""
    path = written(tmp_path, ["a", "b"])
    first = await asked(service, chat, path)
    assert not index_of(service, first, tmp_path).exists()
    await service.retention.sweep()
    assert await is_dropped(service)
    path.unlink()
    again = await asked(service, chat, written(tmp_path, ["a", "b", "c"]), ALL)
    assert (again.rows_reused, len(chat.bodies)) == (2, 3)
    assert b"reused_from" in Path(again.output).read_bytes()
    for view in (first, again):
        await service.remove(view.id)
        assert not (tmp_path / "data" / "jobs" / view.id).exists()


async def test_own_functions_are_not_kept(service, tmp_path):
    """What a function of one's own returned is not indexed, as of any other job."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"custom_id":"r","method":"POST","url":"/v1/x","body":{"model":"double","n":1}}\n')
    model = ModelSpec("double", "function", f"{tmp_path / 'app.py'}:double", allowed=["double"])
    view = await ended(service, model, path, NONE)
    await service.retention.sweep()
    assert await is_dropped(service) and not index_of(service, view, tmp_path).exists()


async def test_only_those_that_are_looked_at_are_kept(service, projects, chat, tmp_path):
    """Jobs beyond the newest `reuse_jobs_max` get no index, and lose the one that they have."""
    projects["default"] = ProjectEntry(reuse_jobs_max=2)
    views = [await asked(service, chat, written(tmp_path, [text])) for text in "abc"]
    await service.retention.sweep()
    assert [index_of(service, view, tmp_path).exists() for view in views] == [False, True, True]
    again = await asked(service, chat, written(tmp_path, ["b", "c"]), ALL)
    assert again.rows_reused == 2
    await service.retention.sweep()
    assert [index_of(service, view, tmp_path).exists() for view in (*views, again)] == [False, False, True, True]
    assert not (tmp_path / "data" / "jobs" / views[1].id).exists()


async def test_one_whose_input_is_gone_is_left_out(service, chat, tmp_path):
    """Its requests are not known any more: retention goes on with the others."""
    for text in "ab":
        path = written(tmp_path, [text])
        await asked(service, chat, path)
        if text == "a":
            path.unlink()
    await service.retention.sweep()
    assert await is_dropped(service)
    again = await asked(service, chat, written(tmp_path, ["a", "b"]), ALL)
    assert (again.rows_reused, again.rows_ok) == (1, 2)


class Noting:
    """An `Offload` that notes how many jobs each child process indexes, and may fail for many."""

    def __init__(self, offload: Offload, *, many_fail: bool = False) -> None:
        self._offload, self._many_fail = offload, many_fail
        self.sizes: list[int] = []

    async def __call__(self, target: str, order: bytes, *rest, **options) -> bytes:
        if target == KEEP_SMALL:
            self.sizes.append(len(msgspec.json.decode(order)))
            if self._many_fail and self.sizes[-1] > 1:
                raise LedgerBroken("the child process died", code=CHILD_DIED)
        return await self._offload(target, order, *rest, **options)


async def jobs_but_one(service, chat, tmp_path, texts: str, *, many_fail: bool):
    """A job of each text, of which that of "c" cannot be indexed: its requests are not known any more.

    Returns: their views, and what notes how many jobs a child process indexes.
    """
    views = {text: await asked(service, chat, written(tmp_path, [text])) for text in texts}
    (tmp_path / "c.jsonl").unlink()
    earlier = service.retention._reusable
    earlier._offload = noting = Noting(earlier._offload, many_fail=many_fail)
    return views, noting


@pytest.mark.parametrize("many_fail", [False, True])
async def test_the_first_lookup_indexes_many_at_once(many_fail, service, chat, tmp_path, monkeypatch):
    """A child process indexes several jobs. One that cannot be indexed is left out, and costs no other."""
    monkeypatch.setattr(reuse_jobs, "SMALL_JOBS_MAX", 3)
    texts = "abcdefg"
    views, noting = await jobs_but_one(service, chat, tmp_path, texts, many_fail=many_fail)
    again = await asked(service, chat, written(tmp_path, list(texts)), ALL)
    assert (again.rows_reused, again.rows_ok) == (6, 7)
    assert noting.sizes == ([3, 1, 1, 1, 3, 1, 1, 1, 1] if many_fail else [3, 3, 1])
    assert [index_of(service, views[text], tmp_path).exists() for text in texts] == [text != "c" for text in texts]
    noting.sizes.clear()
    assert (await asked(service, chat, written(tmp_path, [*texts, "h"]), ALL)).rows_reused == 7
    assert noting.sizes == [1], "the one that was left out"


async def test_many_outcomes_are_sent_in_parts(service, chat, tmp_path, monkeypatch):
    """What a child process gets at once has a bound of bytes, too."""
    monkeypatch.setattr(reuse_jobs, "SMALL_BYTES", 1)
    for text in "abc":
        await asked(service, chat, written(tmp_path, [text]))
    earlier = service.retention._reusable
    earlier._offload = noting = Noting(earlier._offload)
    again = await asked(service, chat, written(tmp_path, ["a", "b", "c"]), ALL)
    assert again.rows_reused == 3 and noting.sizes == [1, 1, 1]


@pytest.mark.parametrize("many_fail", [False, True])
async def test_retention_indexes_many_at_once(many_fail, service, chat, tmp_path, monkeypatch):
    """Before it removes anything of them, as a lookup does. One that cannot be indexed costs no other."""
    monkeypatch.setattr(retention, "INDEXED_MAX", 4)
    monkeypatch.setattr(reuse_jobs, "SMALL_JOBS_MAX", 3)
    texts = "abcdef"
    views, noting = await jobs_but_one(service, chat, tmp_path, texts, many_fail=many_fail)
    await service.retention.sweep()
    assert noting.sizes == ([3, 1, 1, 1, 1, 1, 2, 1, 1] if many_fail else [3, 1, 1, 2]), "c is tried once more"
    assert await is_dropped(service)
    assert [index_of(service, views[text], tmp_path).exists() for text in texts] == [text != "c" for text in texts]
    again = await asked(service, chat, written(tmp_path, list(texts)), ALL)
    assert (again.rows_reused, again.rows_ok) == (5, 6)


async def test_retention_goes_on_where_a_job_cannot_be_looked_at(service, chat, tmp_path, monkeypatch):
    """Before jobs are indexed together, too: it keeps everything, and the others go on."""
    views = {text: await asked(service, chat, written(tmp_path, [text])) for text in "abc"}
    earlier = service.retention._reusable
    is_kept = earlier._is_kept

    async def is_kept_or_fails(record, spec, files):
        if spec.id == views["a"].id:
            raise OSError("its folder cannot be read")
        return await is_kept(record, spec, files)

    monkeypatch.setattr(earlier, "_is_kept", is_kept_or_fails)
    await service.retention.sweep()
    left = await service._ledger.database.read(lambda db: db.execute(sa.select(packed_jobs.c.job)).scalars().all())
    assert left == [views["a"].id]
    assert [index_of(service, views[text], tmp_path).exists() for text in "abc"] == [False, True, True]
