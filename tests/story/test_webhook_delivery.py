"""Webhooks, driven and verified by the published packages: openai against a real server, and Standard Webhooks."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
from fakes.running_server import RunningServer
from fakes.webhook_receiver import Delivery, WebhookReceiver
from openai import AsyncOpenAI, OpenAI
from openai_story import lines, result_lines, row, write_project
from standardwebhooks import Webhook

BATCH_EVENTS = ["batch.completed", "batch.failed", "batch.expired", "batch.cancelled"]
SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()
HOSTS = '[server]\nprivate_hosts = ["127.0.0.1"]\n'


@pytest.fixture
async def receiver() -> AsyncIterator[WebhookReceiver]:
    async with WebhookReceiver() as running:
        yield running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    config = write_project(tmp_path, HOSTS).read_text()
    running = RunningServer(tmp_path, config).start()
    yield running
    running.close()


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as opened:
        yield opened


async def submit(client: AsyncOpenAI, rows: list[dict], **fields) -> openai.types.Batch:
    file = await client.files.create(file=("rows.jsonl", lines(rows)), purpose="batch")
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **fields}
    return await client.batches.create(input_file_id=file.id, **body)


def unwrapped(delivery: Delivery, secret: str):
    """The event as both packages read it, its signature verified by each."""
    with OpenAI(api_key="none", webhook_secret=secret) as client:
        event = client.webhooks.unwrap(delivery.body, delivery.headers)
    assert Webhook(secret).verify(delivery.body, delivery.headers)["id"] == event.id
    return event


async def test_a_batch_that_ends_is_told(client: AsyncOpenAI, receiver: WebhookReceiver):
    """openai's `webhooks.unwrap` verifies the event of a completed batch, whose results are there by then."""
    made = await client.webhooks.create(event_types=BATCH_EVENTS, name="mine", url=receiver.url())
    batch = await submit(client, [row("a", "hello")])
    (delivery,) = await receiver.wait_for(1)
    event = unwrapped(delivery, made.signing_secret)
    assert (event.type, event.data.id) == ("batch.completed", batch.id)
    found = await client.batches.retrieve(event.data.id)
    assert (found.status, found.completed_at) == ("completed", event.created_at)
    assert found.output_file_id is not None
    content = await client.files.content(found.output_file_id)
    assert json.loads(content.text)["custom_id"] == "a"


async def test_other_ends_are_told(client: AsyncOpenAI, receiver: WebhookReceiver):
    """A batch whose file is refused, and one that is cancelled, have their own events."""
    made = await client.webhooks.create(event_types=BATCH_EVENTS, name="mine", url=receiver.url())
    refused = await submit(client, [{"custom_id": "a"}])
    (failed,) = await receiver.wait_for(1)
    event = unwrapped(failed, made.signing_secret)
    assert (event.type, event.data.id) == ("batch.failed", refused.id)
    batch = await submit(client, [row("a", "never", model="gated")])
    await client.batches.cancel(batch.id)
    cancelled = (await receiver.wait_for(2))[1]
    event = unwrapped(cancelled, made.signing_secret)
    assert (event.type, event.data.id) == ("batch.cancelled", batch.id)


async def test_endpoints_are_kept_by_the_openai_package(client: AsyncOpenAI, receiver: WebhookReceiver):
    """Every call that the package has on webhook endpoints works, and shows a secret only when it is new."""
    made = await client.webhooks.create(event_types=["batch.failed"], name="one", url=receiver.url())
    assert made.signing_secret.startswith("whsec_") and made.object == "webhook_endpoint"
    other = await client.webhooks.create(event_types=BATCH_EVENTS, name="two", url=receiver.url("/two"))
    listed = [each async for each in client.webhooks.list(limit=1)]
    assert {each.id for each in listed} == {made.id, other.id}
    found = await client.webhooks.retrieve(made.id)
    assert (found.name, found.event_types, found.url) == ("one", ["batch.failed"], receiver.url())
    assert found.signing_secret_hint is not None and made.signing_secret.endswith(found.signing_secret_hint[-4:])
    assert "signing_secret" not in (found.model_extra or {})
    changed = await client.webhooks.update(made.id, name="first", event_types=["batch.completed"])
    assert (changed.name, changed.event_types, changed.url) == ("first", ["batch.completed"], receiver.url())
    assert set(BATCH_EVENTS) <= set((await client.webhooks.event_types.list()).data)

    rotated = await client.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
    tried = await client.webhooks.test(made.id, event_type="batch.expired")
    assert (tried.success, tried.status_code, tried.webhook_endpoint_id) == (True, 204, made.id)
    for secret in (made.signing_secret, rotated.signing_secret):
        assert unwrapped(receiver.at("/hook")[0], secret).type == "batch.expired"
    last = await client.webhooks.rotate_secret(made.id)
    await client.webhooks.test(made.id, event_type="batch.failed")
    assert unwrapped(receiver.at("/hook")[1], last.signing_secret).type == "batch.failed"
    with pytest.raises(openai.InvalidWebhookSignatureError):
        unwrapped(receiver.at("/hook")[1], rotated.signing_secret)

    deleted = await client.webhooks.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    with pytest.raises(openai.NotFoundError):
        await client.webhooks.retrieve(made.id)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"url": "https://169.254.169.254/latest"}, "url_not_allowed"),
        ({"url": "http://10.0.0.1/"}, "url_not_allowed"),
        ({"url": "https://user:pw@example.com/"}, "url_not_allowed"),
        ({"event_types": ["response.completed"]}, "unknown_event_type"),
    ],
)
async def test_what_cannot_be_told_is_refused(client: AsyncOpenAI, fields: dict, code: str):
    """An address inside, credentials in a URL and an event nobody sends are refused in OpenAI's form."""
    body = {"event_types": BATCH_EVENTS, "name": "x", "url": "https://example.com/", **fields}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.webhooks.create(**body)
    assert (refused.value.code, refused.value.type) == (code, "invalid_request_error")


async def test_an_endpoint_that_does_not_answer_is_told_when_it_is_tried(
    client: AsyncOpenAI, receiver: WebhookReceiver
):
    """A test of an endpoint nobody listens at is an error that says so."""
    url = receiver.url()
    made = await client.webhooks.create(event_types=BATCH_EVENTS, name="x", url=url)
    await receiver.__aexit__()
    with pytest.raises(openai.BadRequestError, match="could not be reached"):
        await client.webhooks.test(made.id, event_type="batch.failed")


async def test_an_event_outlives_the_server(tmp_path: Path, receiver: WebhookReceiver):
    """A server that is killed while it delivers sends the event again when it is back, under the same id."""
    result = f'[[webhooks]]\nurl = "{receiver.url()}"\nsecret = "env:HOOK_SECRET"\nname = "ours"\n'
    config = write_project(tmp_path, HOSTS + result).read_text()
    server = RunningServer(tmp_path, config, env={"HOOK_SECRET": SECRET}).start()
    try:
        receiver.held.add("/hook")
        async with AsyncOpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
            batch = await submit(client, [row("a", "hello")])
        (first,) = await receiver.wait_for(1)
        server.kill()
        receiver.held.clear()
        receiver.release.set()
        server.start()
        _, second = await receiver.wait_for(2)
        assert (first.id, first.body) == (second.id, second.body)
        assert unwrapped(second, SECRET).data.id == batch.id
        with OpenAI(api_key="none", base_url=f"{server.url}/v1") as client:
            assert len(result_lines(client, client.batches.retrieve(batch.id).output_file_id)) == 1
    finally:
        server.close()
    assert SECRET not in server.log.read_text()
