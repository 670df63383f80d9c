"""What a real server tells those who look on: metrics, and traces sent to a collector."""

from __future__ import annotations

import asyncio
import gzip
import subprocess
import sys
from pathlib import Path

import httpx2
import openai
import pytest
from fakes.running_server import RunningServer
from fakes.webhook_receiver import WebhookReceiver
from openai import OpenAI
from openai_story import ended, row, submit, until, write_project
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

TRACE = "0af7651916cd43dd8448eb211c80319c"
SAY = [{"role": "user", "content": "hello"}]


def sample(page: str, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(page):
        for each in family.samples:
            if each.name == name and labels.items() <= each.labels.items():
                return each.value
    raise AssertionError(f"{name} {labels} is not in\n{page}")


def test_metrics_tell_what_was_done(tmp_path: Path):
    """After a batch and a live request the page has their rows, tokens, errors, requests and the model's workers."""
    config = write_project(tmp_path).read_text()
    server = RunningServer(tmp_path, config).start()
    try:
        with OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
            batch = ended(client, submit(client, [row("a", "hello"), row("b", "fail")]))
            client.chat.completions.create(model="chat", messages=SAY)
        reply = httpx2.get(f"{server.url}/metrics")
        page = reply.text
    finally:
        server.close()
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert (batch.status, batch.request_counts.failed if batch.request_counts else None) == ("completed", 1)
    fields = {"project": "default", "model": "chat"}
    assert sample(page, "batchmill_rows_total", result="ok", **fields) == 1
    assert sample(page, "batchmill_rows_total", result="failed", **fields) == 1
    assert sample(page, "batchmill_tokens_total", kind="output", **fields) == 1
    assert sample(page, "batchmill_row_errors_total", **fields) == 1
    assert sample(page, "batchmill_live_requests_total", model="chat", status="200") == 1
    assert sample(page, "batchmill_live_tokens_total", kind="input", **fields) == 5
    assert sample(page, "batchmill_model_workers", model="chat") >= 1
    assert sample(page, "batchmill_http_requests_total", method="POST", route="/v1/batches", status="200") == 1
    assert batch.id.removeprefix("batch_") not in page


async def test_traces_reach_a_collector(tmp_path: Path):
    """A request goes on with its caller's trace, a live call lies inside of it, and a job is linked to its request."""
    config = write_project(tmp_path).read_text()
    async with WebhookReceiver() as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url("")}
        server = await asyncio.to_thread(RunningServer(tmp_path, config, env=env).start)
        try:
            await asyncio.to_thread(_work, server.url)
        finally:
            await asyncio.to_thread(server.close)
        sent = collector.at("/v1/traces")
    spans = {span.name: span for delivery in sent for span in _spans(delivery.body, delivery.headers)}
    live, request = spans["live chat"], spans["POST /v1/chat/completions"]
    assert (request.trace_id.hex(), live.trace_id, live.parent_span_id) == (TRACE, request.trace_id, request.span_id)
    job, submitted = spans["job"], spans["POST /v1/batches"]
    assert [link.span_id for link in job.links] == [submitted.span_id]
    assert job.trace_id != submitted.trace_id


def _work(url: str) -> None:
    with OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0) as client:
        fields = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        client.chat.completions.create(model="chat", messages=SAY, extra_headers=fields)
        ended(client, submit(client, [row("a", "hello")]))
    until(lambda: "batchmill_jobs_ended_total{" in httpx2.get(f"{url}/metrics").text)


def _spans(body: bytes, headers: dict[str, str]) -> list[Span]:
    data = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
    found = ExportTraceServiceRequest.FromString(data)
    return [span for resource in found.resource_spans for scope in resource.scope_spans for span in scope.spans]


def test_metrics_need_a_key_where_there_are_keys(tmp_path: Path):
    """Once a key exists the page is for those who have one, and so are webhook endpoints for its administrators."""
    server = RunningServer(tmp_path, write_project(tmp_path).read_text()).start()
    try:
        keys = {scope: _key(server, scope) for scope in ("admin", "submit", "read")}
        assert httpx2.get(f"{server.url}/metrics").status_code == 401
        fields = {"authorization": f"Bearer {keys['read']}"}
        assert httpx2.get(f"{server.url}/metrics", headers=fields).status_code == 200
        with OpenAI(api_key=keys["submit"], base_url=f"{server.url}/v1", max_retries=0) as client:
            with pytest.raises(openai.PermissionDeniedError):
                client.webhooks.list()
            assert list(client.with_options(api_key=keys["admin"]).webhooks.list()) == []
    finally:
        server.close()


def _key(server: RunningServer, scope: str) -> str:
    words = ["--data-dir", str(server.data_dir), "keys", "create", "--name", scope, "--scope", scope]
    command = [sys.executable, "-m", "batchmill", *words]
    done = subprocess.run(command, cwd=server.folder, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()
