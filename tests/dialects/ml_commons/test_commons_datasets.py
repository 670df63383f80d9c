"""Batches whose rows are files of this server: handed over, reconciled, and told of by their task."""

from __future__ import annotations

import asyncio
import json

import pytest
from dialects.ml_commons.commons_kit import commons
from fakes.batch_provider import BatchProvider

ENDED_S = 60


@pytest.fixture
async def there(tmp_path):
    async with commons(tmp_path, "[ml_commons]\npoll_s = 0.05\n") as there:
        yield there


@pytest.fixture
async def provider():
    async with BatchProvider(looks=1) as provider:
        yield provider


async def uploaded(there, lines: list[dict], name: str = "rows.jsonl") -> str:
    data = "".join(json.dumps(line) + "\n" for line in lines)
    reply = await there.http.post("/v1/files", data={"purpose": "batch"}, files={"file": (name, data)})
    return reply.json()["id"]


def rows(model: str, count: int) -> list[dict]:
    return [
        {"custom_id": f"row-{at}", "method": "POST", "url": "/v1/embeddings",
         "body": {"model": model, "input": f"text {at}"}}
        for at in range(count)
    ]  # fmt: skip


def to_provider(there, provider) -> dict:
    """A connector whose batches go to another service than its calls."""
    connector = there.service.connector()
    connector["parameters"]["provider"] = "openai"
    connector["actions"][1]["url"] = f"{provider.base_url}/batches"
    return connector


async def ended(there, task: str) -> dict:
    async with asyncio.timeout(ENDED_S):
        while (reply := await there.done("GET", f"/tasks/{task}"))["state"] in ("RUNNING", "CANCELLING"):
            await asyncio.sleep(0.05)
    return reply


async def results(there, expected: dict, which: str = "output_file_id") -> list[dict]:
    reply = await there.http.get(f"/v1/files/{expected['remote_job'][which]}/content")
    return [json.loads(line) for line in reply.text.splitlines()]


async def test_rows_go_through_the_providers_batches(there, provider):
    """A dataset is uploaded, run as a batch of the provider and reconciled: rows that it lost are sent again."""
    provider.fates = ["loses"]
    made = await there.done("POST", "/connectors/_create", to_provider(there, provider))
    model = await there.model(made["connector_id"])
    file = await uploaded(there, rows("text-embedding-ada-002", 20))
    begun = await there.done("POST", f"/models/{model}/_batch_predict", {"dataset": {"file_id": file}})
    assert begun["status"] == "CREATED" and begun["remote_job"]["route"] == "batch"
    reply = await ended(there, begun["task_id"])
    assert reply["state"] == "COMPLETED", reply
    assert reply["remote_job"]["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert {each["custom_id"] for each in await results(there, reply)} == {f"row-{at}" for at in range(20)}
    assert len(provider.batches) == 2 and provider.met["loses"] == 1
    assert {each["provider"] for each in reply["remote_job"]["jobs"]} == {"openai"}
    listed = await there.done("POST", "/tasks/_search", {"query": {"term": {"state": "COMPLETED"}}})
    assert begun["task_id"] in str(listed["hits"]["hits"])


async def test_rows_go_one_by_one(there):
    """Asked to go on-line, rows are calls of `predict`; those that the service refuses have errors of their own."""
    model = await there.model()
    file = await uploaded(there, [*rows(model, 5), {**rows(model, 1)[0], "custom_id": "bad", "body": {"model": model}}])
    body = {"dataset": {"file_id": file}, "route": "online", "metadata": {"team": "blue"}}
    begun = await there.done("POST", f"/models/{model}/_batch_predict", body)
    reply = await ended(there, begun["task_id"])
    assert reply["state"] == "COMPLETED_WITH_ERROR", reply
    assert reply["remote_job"]["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
    assert len(await results(there, reply)) == 5 and reply["remote_job"]["route"] == "online"
    assert [each["custom_id"] for each in await results(there, reply, "error_file_id")] == ["bad"]
    job = (await there.http.get(f"/batchmill/v1/jobs/{reply['remote_job']['id']}")).json()
    assert job["labels"] == {"team": "blue"}
    assert (await there.done("DELETE", f"/tasks/{begun['task_id']}"))["result"] == "deleted"


async def test_a_dataset_is_cancelled(there, provider):
    """The task's cancel ends the job, and the provider's batch with it."""
    provider.fates = ["never_ends"]
    made = await there.done("POST", "/connectors/_create", to_provider(there, provider))
    model = await there.model(made["connector_id"])
    file = await uploaded(there, rows(model, 3))
    begun = await there.done("POST", f"/models/{model}/_batch_predict", {"dataset": {"file_id": file}})
    async with asyncio.timeout(ENDED_S):
        while not provider.running:
            await asyncio.sleep(0.02)
    assert await there.done("POST", f"/tasks/{begun['task_id']}/_cancel") == {"status": "OK"}
    reply = await ended(there, begun["task_id"])
    assert reply["state"] == "CANCELLED" and provider.running == []
    assert (await there.reason("POST", f"/tasks/{begun['task_id']}/_cancel"))[0] == 409


async def test_an_order_that_comes_again_is_its_task(there):
    """With an Idempotency-Key the same order is the same task and job, however often it comes."""
    model = await there.model()
    file = await uploaded(there, rows(model, 2))
    body, key = {"dataset": {"file_ids": [file]}, "route": "online"}, {"headers": {"idempotency-key": "k"}}
    begun = [await there.done("POST", f"/models/{model}/_batch_predict", body, **key) for _ in range(3)]
    assert len({each["task_id"] for each in begun}) == 1
    assert len((await there.http.get("/batchmill/v1/jobs")).json()["jobs"]) == 1
    await ended(there, begun[0]["task_id"])
    await there.done("DELETE", f"/tasks/{begun[0]['task_id']}")
    again = await there.done("POST", f"/models/{model}/_batch_predict", body, **key)
    assert again["task_id"] == begun[0]["task_id"]


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        ({"dataset": {"file_id": "file-nothing"}}, 404, "file-nothing"),
        ({"dataset": {}}, 400, "a dataset is"),
        ({"dataset": {"file_id": "a", "file_ids": ["b"]}}, 400, "a dataset is"),
        ({"dataset": {"file": "a"}}, 400, "dataset.file"),
        ({"dataset": {"file_id": "a"}, "parameters": {"x": 1}}, 400, "leave `parameters` out"),
        ({"dataset": {"file_id": "a"}, "rout": "batch"}, 400, "did you mean 'route'"),
        ({"dataset": {"file_id": "a"}, "route": "slow"}, 400, "route"),
        ({"dataset": {"file_id": "a"}, "dlq": {"bucket": "b", "region": "r"}}, 400, "dlq"),
        ({"dataset": {"file_id": "a"}, "completion_window": "soon"}, 400, "completion_window"),
        ({"dataset": {"file_id": "a"}, "priority": 1000}, 400, "priority"),
    ],
    ids=str,
)
async def test_what_is_wrong_with_a_dataset(there, body, status, expected):
    """What does not fit is refused by name, and nothing is begun."""
    model = await there.model()
    found = await there.reason("POST", f"/models/{model}/_batch_predict", body)
    assert found[0] == status and expected in found[2], found
    assert (await there.done("POST", "/tasks/_search", {"query": {"term": {"task_type": "BATCH_PREDICTION"}}}))["hits"][
        "total"
    ]["value"] == 0


async def test_a_way_that_there_is_not(there):
    """A batch API that nobody knows is refused by name where it is asked for, with the way out."""
    model = await there.model()
    file = await uploaded(there, rows(model, 1))
    body = {"dataset": {"file_id": file}, "route": "batch"}
    status, _, reason = await there.reason("POST", f"/models/{model}/_batch_predict", body)
    assert status == 400 and '"provider": "openai"' in reason
