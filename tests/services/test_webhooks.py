"""Endpoints of webhooks: registered, changed, given new secrets, tried, and never another project's."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fakes.webhook_receiver import WebhookReceiver
from standardwebhooks import Webhook
from webhook_support import ALL, FILE_SECRET, EndedJobs

from batchmill.config import KEY_FILE, WebhookEntry
from batchmill.errors import InvalidConfig, InvalidInput, UnknownName
from batchmill.services.secrets.box import SecretBox
from batchmill.services.webhooks import outbox as outbox_records
from batchmill.services.webhooks.endpoints import KEPT_S, NAME_CHARS_MAX, WebhookService

URL = "https://example.com/hook"


@pytest.fixture
async def jobs(tmp_path: Path) -> AsyncIterator[EndedJobs]:
    async with EndedJobs(tmp_path) as opened:
        yield opened


@pytest.fixture
def webhooks(jobs: EndedJobs) -> WebhookService:
    return jobs.webhooks


async def test_an_endpoint_is_registered_and_its_secret_kept_nowhere(jobs: EndedJobs, webhooks: WebhookService):
    """The secret is shown once; afterwards only its end is, and no file of the data directory holds it."""
    made, secret = await webhooks.create("default", name="mine", url=URL, event_types=["batch.failed"] * 2)
    assert await webhooks.get("default", made.id) == made
    assert (made.events, made.hint) == (["batch.failed"], f"whsec_…{secret.reveal()[-4:]}")
    assert secret.reveal() not in repr((made, secret))
    for path in jobs.folder.rglob("*"):
        if path.is_file():
            assert secret.reveal().encode() not in path.read_bytes()
            assert secret.reveal().removeprefix("whsec_").encode() not in path.read_bytes()


async def test_an_endpoint_is_changed_and_deleted(jobs: EndedJobs, webhooks: WebhookService):
    """Only what is given changes, only a change moves the time of it, and a deleted endpoint is unknown."""
    made, _ = await webhooks.create("default", name="mine", url=URL, event_types=ALL)
    jobs.clock.at += 10
    assert await webhooks.update("default", made.id, name="mine") == made
    changed = await webhooks.update("default", made.id, url="https://example.com/other", event_types=["batch.failed"])
    assert (changed.name, changed.url, changed.events) == ("mine", "https://example.com/other", ["batch.failed"])
    assert (changed.created, changed.updated) == (made.created, made.created + 10)
    assert await webhooks.get("default", made.id) == changed
    await webhooks.delete("default", made.id)
    with pytest.raises(UnknownName):
        await webhooks.get("default", made.id)


async def test_endpoints_are_paged_the_newest_first(jobs: EndedJobs, webhooks: WebhookService):
    """Pages follow each other without a gap, whatever was made in the same second."""
    made = []
    for number in range(5):
        made.append((await webhooks.create("default", name=str(number), url=URL, event_types=ALL))[0].id)
        jobs.clock.at += number % 2
    seen, after, more = [], None, True
    while more:
        page, more = await webhooks.list("default", after=after, limit=2)
        seen += [each.id for each in page]
        after = seen[-1]
    assert sorted(seen) == sorted(made)
    assert seen[0] in made[-2:]
    with pytest.raises(UnknownName):
        await webhooks.list("default", after="we_nobody", limit=2)


async def test_another_projects_endpoint_is_unknown(webhooks: WebhookService):
    """Every verb answers a foreign id as one that never was."""
    made, _ = await webhooks.create("theirs", name="x", url=URL, event_types=ALL)
    attempts = [
        lambda id: webhooks.get("mine", id),
        lambda id: webhooks.update("mine", id, name="y"),
        lambda id: webhooks.delete("mine", id),
        lambda id: webhooks.rotate("mine", id, keep_old=True),
        lambda id: webhooks.test("mine", id, "batch.failed"),
        lambda id: webhooks.list("mine", after=id, limit=1),
    ]
    for attempt in attempts:
        words = []
        for endpoint_id in (made.id, "we_" + "0" * 24):
            with pytest.raises(UnknownName) as refused:
                await attempt(endpoint_id)
            assert refused.value.code == "unknown_webhook_endpoint"
            words.append(refused.value.message.replace(endpoint_id, "ID"))
        assert words[0] == words[1]
    assert (await webhooks.get("theirs", made.id)).name == "x"


@pytest.mark.parametrize(
    ("expected", "code"),
    [
        ({"name": ""}, "invalid_name"),
        ({"name": "a\x1b[0m"}, "invalid_name"),
        ({"name": "x" * (NAME_CHARS_MAX + 1)}, "invalid_name"),
        ({"url": "http://example.com/"}, "url_not_allowed"),
        ({"url": "https://169.254.169.254/"}, "url_not_allowed"),
        ({"event_types": []}, "unknown_event_type"),
        ({"event_types": ["response.completed"]}, "unknown_event_type"),
    ],
)
async def test_what_cannot_work_is_refused(webhooks: WebhookService, expected: dict, code: str):
    """A name, a URL or a type of event that cannot be is refused when it is made and when it is changed."""
    with pytest.raises(InvalidInput) as refused:
        await webhooks.create("default", **{"name": "x", "url": URL, "event_types": ALL} | expected)
    assert refused.value.code == code
    made, _ = await webhooks.create("default", name="x" * NAME_CHARS_MAX, url=URL, event_types=ALL)
    with pytest.raises(InvalidInput) as refused:
        await webhooks.update("default", made.id, **expected)
    assert refused.value.code == code


async def test_a_secret_is_rotated(jobs: EndedJobs, webhooks: WebhookService):
    """A new secret replaces the old one at once, or beside it for a day where that is asked for."""
    made, first = await webhooks.create("default", name="x", url=URL, event_types=ALL)

    async def keys() -> list[str]:
        listener = await webhooks.delivery_target(made.id)
        assert listener is not None
        return [each.reveal() for each in listener.keys]

    changed, second = await webhooks.rotate("default", made.id, keep_old=True)
    assert await keys() == [second.reveal(), first.reveal()]
    assert changed.hint == f"whsec_…{second.reveal()[-4:]}"
    jobs.clock.at += KEPT_S
    assert await keys() == [second.reveal()]
    _, third = await webhooks.rotate("default", made.id, keep_old=False)
    assert await keys() == [third.reveal()]


async def test_a_lost_key_file_leaves_a_way_out(jobs: EndedJobs, tmp_path: Path):
    """With another key file an endpoint can be looked at and given a new secret; the old one says what is wrong."""
    made, _ = await jobs.webhooks.create("default", name="x", url=URL, event_types=ALL)
    (tmp_path / KEY_FILE).unlink()
    webhooks = WebhookService(jobs.database, jobs.clock, jobs.config, SecretBox(jobs.config.secrets_key))
    assert (await webhooks.get("default", made.id)).hint is None
    with pytest.raises(InvalidConfig, match=r"secrets\.key"):
        await webhooks.delivery_target(made.id)
    _, secret = await webhooks.rotate("default", made.id, keep_old=False)
    listener = await webhooks.delivery_target(made.id)
    assert listener is not None and listener.keys[0].reveal() == secret.reveal()
    webhooks.close()


async def test_an_endpoint_is_tried(webhooks: WebhookService):
    """A sample goes out at once, signed; what the endpoint answers is told, and so is that it did not."""
    async with WebhookReceiver() as receiver:
        made, secret = await webhooks.create("default", name="x", url=receiver.url(), event_types=["batch.failed"])
        assert await webhooks.test("default", made.id, "batch.completed") == 204
        receiver.answers["/hook"] = [500]
        assert await webhooks.test("default", made.id, "batch.completed") == 500
        delivery = receiver.deliveries[0]
    sent = datetime.fromtimestamp(int(delivery.headers["webhook-timestamp"]), UTC)
    signature = Webhook(secret.reveal()).sign(delivery.id, sent, delivery.body.decode())
    assert delivery.headers["webhook-signature"] == signature
    with pytest.raises(InvalidInput, match="could not be reached") as refused:
        await webhooks.test("default", made.id, "batch.completed")
    assert refused.value.code == "webhook_unreachable"
    with pytest.raises(InvalidInput, match="batch.completed"):
        await webhooks.test("default", made.id, "batch.finished")


async def test_a_host_that_is_closed_later_is_not_called(tmp_path: Path):
    """An endpoint that was registered while its host was allowed is judged again by each delivery."""
    async with WebhookReceiver() as receiver:
        async with EndedJobs(tmp_path) as jobs:
            endpoint_id = await jobs.register(receiver.url())
        async with EndedJobs(tmp_path) as jobs:
            jobs.config.server.private_hosts.clear()
            webhooks = WebhookService(jobs.database, jobs.clock, jobs.config, SecretBox(jobs.config.secrets_key))
            with pytest.raises(InvalidInput, match="private"):
                await webhooks.test("default", endpoint_id, "batch.failed")
            webhooks.close()
        assert receiver.deliveries == []


async def test_deleting_an_endpoint_ends_what_was_on_its_way(jobs: EndedJobs):
    """Events for an endpoint that is deleted are deleted with it."""
    endpoint_id = await jobs.register("https://example.com/")
    await jobs.end(1)
    outbox = jobs.outbox()
    ends = await jobs.database.read(outbox_records.unannounced, 10)
    await jobs.database.write(outbox_records.announce, ends, 0.0, jobs.webhooks.endpoints_for)
    assert await outbox.count_waiting() == 1
    await jobs.webhooks.delete("default", endpoint_id)
    assert await outbox.count_waiting() == 0


@pytest.mark.parametrize(
    ("entry", "secret", "why"),
    [
        (WebhookEntry("https://127.0.0.2/", "env:HOOK"), FILE_SECRET, "private"),
        (WebhookEntry(URL, "env:HOOK", events=["batch.done"]), FILE_SECRET, "batch.done"),
        (WebhookEntry(URL, "env:NO_SUCH_HOOK"), FILE_SECRET, "NO_SUCH_HOOK"),
        (WebhookEntry(URL, "env:HOOK"), "hunter2hunter2", "openssl rand"),
        (WebhookEntry(URL, "file:nowhere"), FILE_SECRET, "nowhere"),
    ],
)
async def test_a_wrong_endpoint_of_the_file_is_told_at_start(
    jobs: EndedJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: WebhookEntry, secret: str, why: str
):
    """An endpoint of the configuration that cannot work stops the start, and the message says which and why."""
    monkeypatch.setenv("HOOK", secret)
    jobs.config.webhooks.append(entry)
    with pytest.raises(InvalidConfig, match=why) as refused:
        WebhookService(jobs.database, jobs.clock, jobs.config, SecretBox(jobs.config.secrets_key))
    assert secret not in refused.value.message


async def test_a_secret_of_the_file_lies_beside_the_file(jobs: EndedJobs, tmp_path: Path):
    """A path of the configuration is relative to it, and one endpoint cannot stand there twice."""
    (tmp_path / "hook.secret").write_text(FILE_SECRET + "\n")
    entry = WebhookEntry(URL, "file:hook.secret", name="n")
    jobs.config.webhooks.append(entry)
    webhooks = WebhookService(jobs.database, jobs.clock, jobs.config, SecretBox(jobs.config.secrets_key))
    (endpoint_id,) = await jobs.database.read(webhooks.endpoints_for, "default", "batch.completed")
    listener = await webhooks.delivery_target(endpoint_id)
    assert listener is not None and [each.reveal() for each in listener.keys] == [FILE_SECRET]
    jobs.config.webhooks.append(entry)
    with pytest.raises(InvalidConfig, match="twice"):
        WebhookService(jobs.database, jobs.clock, jobs.config, SecretBox(jobs.config.secrets_key))
    webhooks.close()
