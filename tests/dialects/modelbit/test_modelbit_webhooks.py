"""M35: answers that are sent to a webhook, also by the server that comes after one that was killed."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext

import pytest
import sqlalchemy as sa
from dialects.modelbit.modelbit_kit import HOOKS, open_deployments
from dialects.open_server import open_server
from fakes.webhook_receiver import WebhookReceiver

from batchmill.errors import OverQuota, Unavailable
from batchmill.services.functions import late_replies
from batchmill.services.functions.late_replies import RUNNING_MAX, RUNNING_PROJECT_MAX, LateCall, LateCallOptions
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import late_calls


@pytest.fixture
async def receiver():
    async with WebhookReceiver() as running:
        yield running


async def promised(deployed, place, data, **fields) -> str:
    """The id of a call whose answer is to come."""
    reply = await deployed.call(place, data, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["batchId"]


async def until_none_waits(late) -> None:
    while await late.count_waiting():
        await asyncio.sleep(0.01)


async def test_an_answer_goes_to_its_webhook(tmp_path, receiver):
    """The reply has the id alone; the webhook gets the id in a header, and the body that the reply would have had."""
    async with open_deployments(tmp_path, "doubler", config=HOOKS) as deployed:
        batch_id = await promised(deployed, "doubler/latest", [[1, 10]], response_webhook=receiver.url("/hook?n=1"))
        (delivery,) = await receiver.wait_for(1)
        assert delivery.headers["x-mb-batch-id"] == batch_id
        assert delivery.headers["content-type"] == "application/json"
        assert json.loads(delivery.body) == {"data": [[1, 20]]}
        await promised(deployed, "doubler/latest", [[1, -1]], response_webhook=receiver.url("/failed"))
        (delivery,) = await receiver.wait_for(1, "/failed")
        assert json.loads(delivery.body)["error"].endswith("ValueError: -1 is less than nothing")
        fields = {"response_webhook": receiver.url("/link"), "response_format": "links"}
        await promised(deployed, "doubler/latest", 4, **fields)
        (delivery,) = await receiver.wait_for(1, "/link")
        assert (await deployed.http.get(json.loads(delivery.body)["data"])).json() == {"data": 8}
        await until_none_waits(deployed.running.services.late)


async def test_a_batch_shows_its_client_no_rows(tmp_path, receiver):
    """The published client wants `data` in the reply to a batch: it has no rows yet."""
    async with open_deployments(tmp_path, "doubler", config=HOOKS) as deployed:
        reply = await deployed.call("doubler/latest", [[1, 10]], response_webhook=receiver.url())
        assert reply.json() == {"batchId": reply.json()["batchId"], "data": []}
        reply = await deployed.call("doubler/latest", 10, response_webhook=receiver.url())
        assert set(reply.json()) == {"batchId"}
        await receiver.wait_for(2)


@pytest.mark.parametrize(
    "url",
    ["https://169.254.169.254/x", "http://10.0.0.1/", "http://example.com/", "https://u:p@example.com/", "nowhere"],
)
async def test_where_no_answer_is_sent(tmp_path, url):
    """An address inside, plain http and what is not an URL are refused before the function is called."""
    async with open_deployments(tmp_path, "doubler", config=HOOKS) as deployed:
        assert "not allowed" in await deployed.error("doubler/latest", 1, 400, response_webhook=url)
        assert await deployed.running.services.late.count_waiting() == 0


async def test_an_answer_outlives_the_server(tmp_path, receiver):
    """What was promised and not sent when the server ended is sent by the next one, under the same id."""
    receiver.held.add("/hook")
    async with open_deployments(tmp_path, "doubler", config=HOOKS) as deployed:
        batch_id = await promised(deployed, "doubler/latest", 4, response_webhook=receiver.url())
        await receiver.wait_for(1)
    receiver.held.clear()
    receiver.release.set()
    async with open_server(tmp_path, HOOKS):
        first, second = await receiver.wait_for(2)
    assert first.body == second.body == b'{"data":8}'
    assert [each.headers["x-mb-batch-id"] for each in (first, second)] == [batch_id, batch_id]


@pytest.mark.parametrize(("begun", "expected"), [(None, {"data": 8}), (1.0, None)])
async def test_a_call_that_a_dead_server_had(tmp_path, receiver, begun, expected):
    """A call that had not begun is made; one that had begun is answered with an error, and not made a second time."""
    async with open_deployments(tmp_path, "doubler", config=HOOKS):
        pass
    database = Database(tmp_path / "data" / "batchmill.db")
    order = LateCallOptions("modelbit", "rows", receiver.url(), "x-mb-batch-id")
    left = LateCall("ab12", "default", None, "doubler", "main", 1, order, b'{"data":4}', begun=begun)
    await database.write(late_replies.insert, left, 100)
    database.close()
    async with open_server(tmp_path, HOOKS):
        (delivery,) = await receiver.wait_for(1)
    body = json.loads(delivery.body)
    assert body == expected if expected is not None else body["error"].startswith("WorkerCrashed: the server ended")


async def test_a_project_of_dead_urls_holds_up_no_other(tmp_path, receiver):
    """Answers of one project to a URL that never takes them hold its own share, and the other project's arrive."""
    async with open_server(tmp_path, HOOKS):
        pass
    receiver.held.add("/dead")
    database = Database(tmp_path / "data" / "batchmill.db")

    async def leave(number: int, project: str, path: str) -> None:
        order = LateCallOptions("modelbit", "rows", receiver.url(path), "x-mb-batch-id")
        call = LateCall(f"{number:04x}", project, None, "f", "main", 1, order, b"", reply=b"{}", created=float(number))
        await database.write(late_replies.insert, call, 100)

    for number in range(RUNNING_MAX):
        await leave(number, "slow", "/dead")
    await leave(99, "other", "/hook")
    database.close()
    async with open_server(tmp_path, HOOKS):
        await receiver.wait_for(1)
        await receiver.wait_for(RUNNING_PROJECT_MAX, "/dead")
        assert len(receiver.at("/dead")) == RUNNING_PROJECT_MAX


async def test_a_project_is_promised_its_share_of_answers(tmp_path):
    """Where calls of one project wait up to its share, its next one is refused, and another project's is not."""
    database, quota = Database(tmp_path / "batchmill.db"), 3
    order = LateCallOptions("modelbit", "rows", "https://example.com/", "x-mb-batch-id")

    def waiting(name: str, project: str, size_bytes: int) -> dict[str, object]:
        call = {"id": name, "project": project, "name": "f", "branch": "main", "number": 1, "order": b"{}"}
        return {**call, "body": b"", "bytes": size_bytes, "created": 0.0, "due": 0.0}

    def fill(db: sa.Connection) -> None:
        rows = [waiting(f"many-{number}", "many", 1) for number in range(quota)]
        rows.append(waiting("large", "large", late_replies.PROJECT_BYTES_MAX))
        db.execute(late_calls.insert(), rows)

    try:
        await database.write(fill)
        for project, code in (("many", "quota_exceeded"), ("large", "too_many_bytes"), ("other", None)):
            call = LateCall(f"{project}-more", project, None, "f", "main", 1, order, b"x")
            with pytest.raises((OverQuota, Unavailable)) if code else nullcontext() as refused:
                await database.write(late_replies.insert, call, quota)
            assert refused is None or refused.value.code == code
    finally:
        database.close()


async def test_an_endpoint_that_is_gone_is_told_no_more(tmp_path, receiver):
    """410 ends the deliveries of an answer."""
    receiver.answers["/hook"] = [410]
    async with open_deployments(tmp_path, "doubler", config=HOOKS) as deployed:
        await promised(deployed, "doubler/latest", 4, response_webhook=receiver.url())
        await until_none_waits(deployed.running.services.late)
        assert len(receiver.at("/hook")) == 1
