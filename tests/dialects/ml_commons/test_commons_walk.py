"""The documented walk over HTTP: connector, model, batch, task, cancel, and calls for one answer."""

from __future__ import annotations

import asyncio

import pytest
from dialects.ml_commons.commons_kit import commons
from fakes.provider_fake import HANG, Wrong


@pytest.fixture
async def there(tmp_path):
    async with commons(tmp_path) as there:
        yield there


async def test_the_walk_of_the_documentation(there):
    """From a connector to a cancelled batch, each reply is of the form that the documentation has for it."""
    connector = there.service.connector()
    made = await there.done("POST", "/connectors/_create", connector)
    assert list(made) == ["connector_id"] and len(made["connector_id"]) == 20
    reply = await there.done("GET", f"/connectors/{made['connector_id']}")
    assert "credential" not in reply and reply["parameters"] == connector["parameters"]
    assert [each["action_type"] for each in reply["actions"]] == [
        "PREDICT", "BATCH_PREDICT", "BATCH_PREDICT_STATUS", "CANCEL_BATCH_PREDICT",
    ]  # fmt: skip
    body = {"name": "OpenAI model", "function_name": "remote", "description": "d", **made}
    registered = await there.done("POST", "/models/_register?deploy=true", body)
    assert list(registered) == ["task_id", "status", "model_id"] and registered["status"] == "CREATED"
    task = await there.done("GET", f"/tasks/{registered['task_id']}")
    assert (task["state"], task["task_type"], task["is_async"]) == ("COMPLETED", "REGISTER_MODEL", False)
    assert (await there.done("GET", f"/models/{registered['model_id']}"))["model_state"] == "DEPLOYED"

    body = {"parameters": {"input_file_id": "file-x"}}
    begun = await there.done("POST", f"/models/{registered['model_id']}/_batch_predict", body)
    assert list(begun) == ["task_id", "status", "remote_job"] and begun["status"] == "CREATED"
    assert begun["remote_job"]["id"] == "batch_1" and begun["remote_job"]["dlq"] is None
    task = await there.done("GET", f"/tasks/{begun['task_id']}")
    assert {name: task[name] for name in ("task_type", "function_name", "state", "input_type", "is_async")} == {
        "task_type": "BATCH_PREDICTION", "function_name": "REMOTE", "state": "RUNNING", "input_type": "REMOTE",
        "is_async": False,
    }  # fmt: skip
    assert task["remote_job"]["status"] == "validating" and len(task["worker_node"]) == 1
    assert await there.done("POST", f"/tasks/{begun['task_id']}/_cancel_batch") == {"status": "OK"}
    assert await there.done("POST", f"/tasks/{begun['task_id']}/_cancel") == {"status": "OK"}
    assert (await there.done("GET", f"/tasks/{begun['task_id']}"))["state"] == "CANCELLING"


async def test_one_answer(there):
    """A call for one answer comes back as tensors, whether it gives parameters or documents."""
    model = await there.model()
    reply = await there.done("POST", f"/models/{model}/_predict", {"parameters": {"input": ["a", "bcd"]}})
    (result,) = reply["inference_results"]
    assert result["status_code"] == 200
    first = {"name": "sentence_embedding", "data_type": "FLOAT32", "shape": [3], "data": [1.0, 0.5, -1.0]}
    assert result["output"][0] == first and result["output"][1]["data"][0] == 3.0
    reply = await there.done("POST", f"/_predict/text_embedding/{model}", {"text_docs": ["xy"]})
    assert reply["inference_results"][0]["output"][0]["data"][0] == 2.0
    slashed = await there.done("POST", f"/models/{model}/_predict/", {"parameters": {"input": ["a"]}})
    assert slashed["inference_results"][0]["output"][0] == first
    few = "/_predict?filter_path=inference_results.status_code&pretty"
    reply = await there.done("POST", f"/models/{model}{few}", {"parameters": {"input": ["a"]}})
    assert reply == {"inference_results": [{"status_code": 200}]}


async def test_the_services_own_refusal_is_told(there):
    """65: what the service answers is handed on with its status, as `Error from remote service`."""
    model = await there.model(await there.connector(credential={"openAI_key": "wrong"}))
    status, kind, reason = await there.reason("POST", f"/models/{model}/_predict", {"parameters": {"input": ["a"]}})
    assert (status, kind) == (401, "status_exception") and "Incorrect API key provided" in reason
    assert "wrong" not in reason
    status, _, reason = await there.reason("POST", f"/models/{model}/_batch_predict", {})
    assert status == 401 and reason.startswith("Error from remote service: ")


async def test_a_blind_repeat_is_the_same_task(there):
    """A batch that comes again before its reply was delivered is one batch; afterwards it is another."""
    model = await there.model()
    first = await there.done("POST", f"/models/{model}/_batch_predict", {"parameters": {}})
    second = await there.done("POST", f"/models/{model}/_batch_predict", {"parameters": {}})
    assert first["task_id"] != second["task_id"] and len(there.service.jobs) == 2
    key = {"headers": {"idempotency-key": "one"}}
    ids = {(await there.done("POST", f"/models/{model}/_batch_predict", {}, **key))["task_id"] for _ in range(3)}
    assert len(ids) == 1 and len(there.service.jobs) == 3


async def test_who_answers_here(there):
    """`GET /` says what a client of OpenSearch asks before anything else."""
    reply = (await there.http.get("/")).json()
    assert reply["version"]["distribution"] == "opensearch" and reply["tagline"].startswith("The OpenSearch Project")
    assert (await there.http.head("/")).status_code == 200


async def test_everything_is_found_by_search(there):
    """Connectors, models, groups and tasks are found by GET and by POST, as documents of their indexes."""
    model = await there.model(name="findable")
    await there.done("POST", f"/models/{model}/_batch_predict", {})
    wanted = {
        "/connectors/_search": ("name.keyword", "OpenAI Embedding model", ".plugins-ml-connector"),
        "/models/_search": ("model_state", "DEPLOYED", ".plugins-ml-model"),
        "/model_groups/_search": ("name", "findable", ".plugins-ml-model-group"),
        "/tasks/_search": ("task_type", "BATCH_PREDICTION", ".plugins-ml-task"),
    }
    for path, (field, value, index) in wanted.items():
        kind = "match" if field == "name" else "term"
        query = {"query": {"bool": {"must": [{kind: {field: value}}]}}}
        for method in ("GET", "POST"):
            reply = await there.done(method, path, query)
            assert reply["hits"]["total"]["value"] == 1, (path, reply)
            (hit,) = reply["hits"]["hits"]
            assert hit["_index"] == index and there.service.key not in str(hit)
        assert (await there.done("GET", path))["hits"]["total"]["value"] >= 1
    status, kind, _ = await there.reason("POST", "/models/_search", {"query": {"more_like_this": {}}})
    assert (status, kind) == (400, "parsing_exception")


async def test_models_come_and_go(there):
    """Deploy, undeploy, update and delete, under their names of today and of once."""
    connector = await there.connector()
    model = await there.model(connector)
    status, _, reason = await there.reason("DELETE", f"/models/{model}")
    assert (status, reason) == (
        400, "Model cannot be deleted in deploying or deployed state. Try undeploy model first then delete"
    )  # fmt: skip
    undeployed = await there.done("POST", f"/models/{model}/_undeploy", {})
    (node,) = undeployed
    assert undeployed[node] == {"stats": {model: "undeployed"}}
    assert (await there.done("POST", f"/models/{model}/_unload"))[node]["stats"] == {model: "not_found"}
    deployed = await there.done("POST", f"/models/{model}/_load")
    assert (deployed["task_type"], deployed["status"]) == ("DEPLOY_MODEL", "COMPLETED")
    assert (await there.done("GET", f"/tasks/{deployed['task_id']}"))["worker_node"] == [node]
    assert (await there.done("POST", "/models/_undeploy", {"model_ids": [model]}))[node]["stats"][model] == "undeployed"
    changed = await there.done("PUT", f"/models/{model}", {"description": "other"})
    assert (changed["result"], changed["_index"]) == ("updated", ".plugins-ml-model")
    assert (await there.done("GET", f"/models/{model}"))["description"] == "other"
    status, _, reason = await there.reason("DELETE", f"/connectors/{connector}")
    assert status == 409 and "are still using this connector" in reason
    assert (await there.done("DELETE", f"/models/{model}"))["result"] == "deleted"
    assert (await there.done("DELETE", f"/connectors/{connector}"))["result"] == "deleted"


async def test_model_groups(there):
    """A group is registered, shown, changed and deleted; while it holds a model it stays."""
    made = await there.done("POST", "/model_groups/_register", {"name": "g", "access_mode": "private"})
    assert made["status"] == "CREATED"
    group = made["model_group_id"]
    assert await there.done("PUT", f"/model_groups/{group}", {"description": "d"}) == {"status": "Updated"}
    assert (await there.done("GET", f"/model_groups/{group}"))["description"] == "d"
    model = await there.model(model_group_id=group)
    assert (await there.done("GET", f"/models/{model}"))["model_group_id"] == group
    assert (await there.reason("DELETE", f"/model_groups/{group}"))[0] == 409
    await there.done("POST", f"/models/{model}/_undeploy")
    await there.done("DELETE", f"/models/{model}")
    assert (await there.done("DELETE", f"/model_groups/{group}"))["result"] == "deleted"


async def test_the_profile(there):
    """The node's profile holds deployed models and tasks that run; the ones named in the path or the body."""
    model = await there.model()
    task = (await there.done("POST", f"/models/{model}/_batch_predict", {}))["task_id"]
    reply = await there.done("GET", "/profile")
    (node,) = reply["nodes"].values()
    assert list(node["models"]) == [model] and list(node["tasks"]) == [task]
    assert list((await there.done("GET", f"/profile/models/{model}"))["nodes"].values())[0].keys() == {"models"}
    named = await there.done("GET", f"/profile/tasks/x,{task}", {"return_all_tasks": True})
    assert list(next(iter(named["nodes"].values()))["tasks"]) == [task]
    assert await there.done("GET", "/profile/tasks/nothing") == {}


async def test_a_model_may_be_limited(there):
    """A model's own rate is kept, in ML Commons' words."""
    model = await there.model(rate_limiter={"limit": "1", "unit": "MINUTES"})
    await there.done("POST", f"/models/{model}/_predict", {"parameters": {"input": ["a"]}})
    status, _, reason = await there.reason("POST", f"/models/{model}/_predict", {"parameters": {"input": ["a"]}})
    assert (status, reason) == (429, "Request is throttled at model level.")


async def test_a_rate_refuses_and_never_waits(there):
    """As many calls as a unit of time allows are answered at once, at each frontend, and the next one is refused."""
    model = await there.model(name="limited", rate_limiter={"limit": "3", "unit": "DAYS"})
    body = {"parameters": {"input": ["a"]}}
    for _ in range(2):
        await there.done("POST", f"/models/{model}/_predict", body)
    openai = {"json": {"model": "limited", "input": ["a"]}}
    assert (await there.http.post("/v1/embeddings", **openai)).status_code == 200
    assert (await there.http.post("/v1/embeddings", **openai)).status_code == 429
    assert (await there.reason("POST", f"/models/{model}/_predict", body))[0] == 429


async def test_a_full_pool_refuses(there):
    """While all connections of a connector are taken, a call waits for `connection_timeout` and is one too many."""
    config = {"max_connection": 1, "connection_timeout": 1}
    model = await there.model(await there.connector(client_config=config))
    body = {"parameters": {"input": ["a"]}}
    there.service.fail("POST", "/v1/embeddings", Wrong(act=HANG))
    hanging = asyncio.ensure_future(there.ask("POST", f"/models/{model}/_predict", body))
    while not there.service.calls:
        await asyncio.sleep(0)
    status, _, reason = await there.reason("POST", f"/models/{model}/_predict", body)
    assert (status, "Acquire operation took longer" in reason) == (429, True)
    there.service.let_go.set()
    await hanging


async def test_a_batch_at_a_provider_keeps_its_model(there):
    """While a task runs its model is not undeployed, deleted or led elsewhere: a refusal names the task."""
    connector = await there.connector()
    model, idle = await there.model(connector), await there.model(connector, name="idle")
    task = (await there.done("POST", f"/models/{model}/_batch_predict", {}))["task_id"]
    other = await there.connector()
    for method, path, body in (
        ("POST", f"/models/{model}/_undeploy", {}),
        ("POST", "/models/_undeploy", {"model_ids": [idle, model]}),
        ("PUT", f"/models/{model}", {"connector_id": other}),
    ):
        status, _, reason = await there.reason(method, path, body)
        assert status == 409 and task in reason and "_cancel" in reason, path
    assert (await there.done("GET", f"/models/{idle}"))["model_state"] == "DEPLOYED"  # none of them or all
    assert (await there.reason("DELETE", f"/models/{model}"))[0] == 400
    assert (await there.reason("DELETE", f"/connectors/{connector}"))[0] == 409
    await there.done("PUT", f"/models/{model}", {"description": "changed"})
    await there.done("POST", f"/tasks/{task}/_cancel")
    there.service.finish()
    assert (await there.done("GET", f"/tasks/{task}"))["state"] == "COMPLETED"
    await there.done("POST", "/models/_undeploy", {"model_ids": [idle, model]})
    await there.done("DELETE", f"/models/{model}")
