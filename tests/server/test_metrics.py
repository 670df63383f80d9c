"""What Prometheus reads."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.databases import POSTGRESQL, databases
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from services.webhook_support import EndedJobs

from batchmill.jobs.pools.tallies import ModelGauge
from batchmill.server.access_log import RequestRecord
from batchmill.server.metrics import MODEL_GAUGES, MODEL_RATIOS, Metrics, models
from batchmill.services.live_calls import LiveCall
from batchmill.services.webhooks.endpoints import EVENT_TYPES, EndedJob
from batchmill.services.webhooks.outbox import Outbox
from batchmill.states import JobState, PauseReason
from batchmill.store.sql import tables
from batchmill.types import AdapterStats, Commit, Lease, SegmentRef, Usage

DOCS = Path(__file__).parents[2] / "docs" / "webhooks-and-metrics.md"


@pytest.fixture
async def jobs(tmp_path: Path) -> AsyncIterator[EndedJobs]:
    async with EndedJobs(tmp_path) as opened:
        yield opened


@pytest.fixture
def outbox(jobs: EndedJobs) -> Outbox:
    return jobs.outbox()


@pytest.fixture
def metrics(jobs: EndedJobs, outbox: Outbox, tmp_path: Path) -> Metrics:
    return Metrics(jobs.database, jobs.jobs.dispatcher, outbox, tmp_path)


async def samples(metrics: Metrics, project: str | None = None) -> dict[tuple[str, ...], float]:
    """(name, label value …) -> value, of a page that a Prometheus parser has read."""
    page = (await metrics.render(project)).decode()
    found = {}
    for family in text_string_to_metric_families(page):
        assert family.documentation.endswith("."), family.name
        for sample in family.samples:
            key = (sample.name, *(value for _, value in sorted(sample.labels.items())))
            assert key not in found, f"{key} stands there twice"
            found[key] = sample.value
    return found


def commit(ok: int, failed: int, usage: Usage, **errors: int) -> Commit:
    return Commit(Lease("job", 0, 0, 1), 0, SegmentRef("s", 0, 1), b"", ok, failed, usage, errors)


async def test_rows_tokens_and_errors_are_counted(jobs: EndedJobs, metrics: Metrics):
    """Rows by project, model and result; tokens by kind; failed rows by code."""
    tallies = jobs.jobs.dispatcher.tallies
    tallies.count("p", "m", commit(3, 2, Usage(10, 4, 6), boom=2))
    tallies.count("p", "m", commit(1, 0, Usage(1, 0, 1)))
    tallies.count("other", "m", commit(1, 0, Usage()))
    tallies.count("p", "m", replace(commit(2, 0, Usage()), warnings={"truncated": 2}))
    found = await samples(metrics)
    assert found["batchmill_rows_total", "m", "p", "ok"] == 6
    assert found["batchmill_rows_total", "m", "p", "failed"] == 2
    assert found["batchmill_rows_total", "m", "other", "ok"] == 1
    result = {kind: found["batchmill_tokens_total", kind, "m", "p"] for kind in ("input", "cached", "output")}
    assert result == {"input": 11, "cached": 4, "output": 7}
    assert found["batchmill_row_errors_total", "boom", "m", "p"] == 2
    assert found["batchmill_reply_warnings_total", "truncated", "m", "p"] == 2


async def test_a_project_reads_of_its_own(jobs: EndedJobs, metrics: Metrics):
    """A page for one project has nothing of what others did, not even their names, and all that is nobody's."""
    tallies = jobs.jobs.dispatcher.tallies
    tallies.count("p", "m", commit(1, 1, Usage(), boom=1))
    tallies.count("p.secret", "m", commit(7, 1, Usage(), **{'project="p"': 1}))
    metrics.on_live_call(LiveCall("m", "/v1/x", 200, 0.1, "p.secret", Usage(1, 0, 1)))
    whole, own = await samples(metrics), await samples(metrics, "p")
    assert {key for key in whole if "p.secret" in key} and not {key for key in own if "p.secret" in key}
    assert {key for key in whole if "p.secret" not in key} == set(own)


async def test_requests_are_counted_by_route(metrics: Metrics):
    """HTTP requests are counted by method, route and status; what has no route or is not a method shares one label."""
    metrics.on_request(RequestRecord("r", "GET", "/v1/files/{file_id}", 200, seconds=0.02, project="p", key="k"))
    for method in ("GET", "BREW", "TEA"):
        metrics.on_request(RequestRecord("r", method, "", 404, seconds=0.001))
    found = await samples(metrics)
    assert found["batchmill_http_requests_total", "GET", "/v1/files/{file_id}", "200"] == 1
    assert found["batchmill_http_requests_total", "GET", "none", "404"] == 1
    assert found["batchmill_http_requests_total", "other", "none", "404"] == 2
    assert found["batchmill_http_request_duration_seconds_sum", "GET", "/v1/files/{file_id}"] == 0.02
    assert found["batchmill_http_request_duration_seconds_bucket", "0.01", "GET", "/v1/files/{file_id}"] == 0
    assert found["batchmill_http_request_duration_seconds_bucket", "0.025", "GET", "/v1/files/{file_id}"] == 1


async def test_live_requests_are_counted_and_timed(metrics: Metrics):
    """Live requests are counted by model and status, with their tokens and how long they took."""
    metrics.on_live_call(LiveCall("m", "/v1/chat/completions", 200, 0.3, "p", Usage(5, 2, 3)))
    metrics.on_live_call(LiveCall("m", "/v1/chat/completions", 0, 1.0, "p", error="model_failed"))
    found = await samples(metrics)
    assert found["batchmill_live_requests_total", "m", "200"] == 1
    assert found["batchmill_live_requests_total", "m", "none"] == 1
    assert found["batchmill_live_request_duration_seconds_count", "m"] == 2
    assert found["batchmill_live_tokens_total", "output", "m", "p"] == 3


async def test_jobs_are_counted_by_state(jobs: EndedJobs, metrics: Metrics):
    """Jobs that have not come to rest are measured by state, those that have are counted."""
    await jobs.end(1)
    running = await jobs.end(2)
    await jobs.database.call(jobs.ledger.note, running, state=JobState.RUNNING)
    metrics.on_job_ended(EndedJob("job_1", 0, "cancelled", 1.0, 2.0, "p"))
    found = await samples(metrics)
    assert found["batchmill_jobs", "running"] == 1
    assert ("batchmill_jobs", "cancelled") not in found
    assert found["batchmill_jobs_ended_total", "p", "cancelled"] == 1


async def test_the_oldest_job_and_pauses_are_measured(jobs: EndedJobs, metrics: Metrics):
    """The creation of the oldest job of each state, and paused jobs by reason; never of ended jobs."""
    for number in (1, 2, 3):
        job = await jobs.end(number)
        state, reason = (JobState.RUNNING, None) if number < 3 else (JobState.PAUSED, PauseReason.QUOTA)
        await jobs.database.call(jobs.ledger.note, job, state=state, reason=reason, created=100.0 * number)
    await jobs.end(4)
    found = await samples(metrics)
    assert found["batchmill_oldest_job_created_timestamp_seconds", "running"] == 100
    assert found["batchmill_oldest_job_created_timestamp_seconds", "paused"] == 300
    assert found["batchmill_jobs", "running"] == 2
    assert found["batchmill_jobs_paused", "quota"] == 1
    assert len([key for key in found if key[0] == "batchmill_oldest_job_created_timestamp_seconds"]) == 2


async def test_spending_is_counted(jobs: EndedJobs, metrics: Metrics):
    """The cost of counted rows, of models with a price alone."""
    tallies = jobs.jobs.dispatcher.tallies
    tallies.count("p", "m", commit(1, 0, Usage()), 0.25)
    tallies.count("p", "m", commit(1, 0, Usage()), 0.5)
    tallies.count("p", "free", commit(1, 0, Usage()), None)
    found = await samples(metrics)
    assert {key[1:]: value for key, value in found.items() if key[0] == "batchmill_cost_usd_total"} == {
        ("m", "p"): 0.75
    }


async def test_commits_are_counted_and_timed(metrics: Metrics):
    """Every commit counts, and each transaction is timed once, however many it wrote."""
    metrics.on_commits(3, 0.02)
    metrics.on_commits(1, 0.3)
    found = await samples(metrics)
    assert found["batchmill_commits_total",] == 4
    assert found["batchmill_commit_duration_seconds_count",] == 2
    assert found["batchmill_commit_duration_seconds_bucket", "0.025"] == 1


async def test_provider_batches_are_counted(jobs: EndedJobs, metrics: Metrics):
    """Batches of unfinished jobs count until all their rows have an outcome."""
    job, ended = await jobs.end(1), await jobs.end(2)
    await jobs.database.call(jobs.ledger.note, job, state=JobState.RUNNING)

    def note(db: sa.Connection) -> None:
        for each, shard, done in ((job, 7, 1), (job, 8, 2), (ended, 7, 1)):
            generation = db.execute(sa.select(tables.jobs.c.generation).where(tables.jobs.c.id == each)).scalar_one()
            key = {"job": each, "generation": generation, "shard": shard}
            db.execute(tables.shards.insert().values(**key, lo=0, hi=2, epoch=1, done=done, bitmap=b""))
            db.execute(tables.notes.insert().values(**key, key="tag", data=b"{}", changed=1.0))

    await jobs.database.write(note)
    assert (await samples(metrics))["batchmill_provider_batches",] == 1


async def test_database_and_disk_are_measured(jobs: EndedJobs, metrics: Metrics, tmp_path: Path):
    """The size and the owners of the database, and the file system of the data directory, unless it is gone."""
    found = await samples(metrics)
    assert found["batchmill_database_size_bytes",] >= 64 * 1024
    assert (("batchmill_owner_epoch",) in found) == (databases.kind == POSTGRESQL)
    assert found.get(("batchmill_owner_epoch",), 1) >= 1
    assert 0 < found["batchmill_disk_free_bytes",] <= found["batchmill_disk_size_bytes",]
    lost = Metrics(jobs.database, jobs.jobs.dispatcher, jobs.outbox(), tmp_path / "lost")
    assert not [key for key in await samples(lost) if key[0].startswith("batchmill_disk")]


async def test_webhooks_are_counted(jobs: EndedJobs, metrics: Metrics, outbox: Outbox):
    """Deliveries are counted by what came of them, and events that wait are measured."""
    await jobs.register("https://192.0.2.1.example/")
    await jobs.end(1)
    outbox.counts["delivered"] += 2
    async with jobs.running() as other:
        await other.run_once()
    found = await samples(metrics)
    assert found["batchmill_webhook_deliveries_total", "delivered"] == 2
    assert found["batchmill_webhook_deliveries_total", "given_up"] == 0
    assert found["batchmill_webhook_events_waiting",] == 1


async def test_adapters_are_counted(jobs: EndedJobs, metrics: Metrics):
    """Rows, tokens, hits, loads and time of each adapter; whose they are nobody knows, so projects see none."""
    sums = jobs.jobs.dispatcher.tallies.adapters
    sums.add("m", [], [AdapterStats("a/1", 8, 100, 40, hits=6, loads=2, busy_s=0.5)])
    sums.add("m", [], [AdapterStats("b/1")])
    found = await samples(metrics)
    names = ("rows_total", "hits_total", "loads_total", "busy_seconds_total", "hit_ratio")
    assert [found[f"batchmill_adapter_{name}", "a/1", "m"] for name in names] == [8, 6, 2, 0.5, 0.75]
    assert [found["batchmill_adapter_tokens_total", "a/1", kind, "m"] for kind in ("input", "output")] == [100, 40]
    assert ("batchmill_adapter_hit_ratio", "b/1", "m") not in found
    assert not [key for key in await samples(metrics, "p") if key[0].startswith("batchmill_adapter_")]


@pytest.mark.once
def test_models_are_measured():
    """Every gauge of a model is there; two pools of one name are one model: counts add up, shares are their mean."""
    fields = {
        "workers": 2, "ready": 1, "in_flight": 30, "limit": 64, "live": 3, "live_waiting": 4, "kv_usage": 0.5,
        "note": "", "failure": "", "jobs": 5, "jobs_waiting": 1, "rows_waiting": 1000, "adapters_loaded": 4,
        "replicas": 2, "wanted": 3, "waits": "memory",
    }  # fmt: skip
    gauges = [ModelGauge("m", cached_share=0.25, **fields), ModelGauge("m", cached_share=None, **fields)]
    families = {family.name: family for family in models(gauges)}
    assert len(families) == len(MODEL_GAUGES) + len(MODEL_RATIOS)
    values = {name: family.samples[0].value for name, family in families.items()}
    assert values["batchmill_model_rows_in_flight"] == 60
    assert values["batchmill_model_rows_in_flight_limit"] == 128
    assert values["batchmill_model_rows_waiting"] == 2000
    assert values["batchmill_model_adapters_loaded"] == 8
    assert (values["batchmill_model_replicas"], values["batchmill_model_replicas_wanted"]) == (4, 6)
    assert values["batchmill_model_waiting"] == 2
    assert values["batchmill_model_kv_cache_usage_ratio"] == 0.5
    assert values["batchmill_model_prefix_cache_hit_ratio"] == 0.25


async def test_a_page_holds_nothing_private(metrics: Metrics):
    """Keys, request ids and error texts of requests are in no label."""
    metrics.on_request(
        RequestRecord("req_secret", "GET", "/v1/files", 200, project="p", key="k-secret", code="c-secret")
    )
    page = await metrics.render()
    assert b"secret" not in page
    assert b"batchmill_build_info" in page and b"process_resident_memory_bytes" in page


async def test_counters_never_go_back(jobs: EndedJobs, metrics: Metrics):
    """Every counter of a later page is at least what it was."""
    tallies = jobs.jobs.dispatcher.tallies
    tallies.count("p", "m", commit(3, 2, Usage(10, 4, 6), boom=2))
    metrics.on_live_call(LiveCall("m", "/v1/chat/completions", 200, 0.3, "p", Usage(5, 2, 3)))
    before = await samples(metrics)
    tallies.count("p", "m", commit(1, 0, Usage(1, 1, 1)))
    after = await samples(metrics)
    totals = [key for key in before if key[0].endswith(("_total", "_count", "_bucket", "_sum"))]
    assert totals and all(after[key] >= before[key] for key in totals)


async def test_the_page_of_the_docs_names_every_metric(metrics: Metrics):
    """docs/webhooks-and-metrics.md has each metric of batchmill's, and no other."""
    page = (await metrics.render()).decode()
    names = {
        family.name + ("_total" if family.type == "counter" else "") for family in text_string_to_metric_families(page)
    }
    output = set(re.findall(r"`(batchmill_[a-z_]+)`", DOCS.read_text()))
    assert output == {name for name in names if name.startswith("batchmill_")}
    assert set(re.findall(r"`((?:batch|job)\.[a-z]+)`", DOCS.read_text())) == set(EVENT_TYPES)
