"""The odd cases of the reference, over HTTP; the number is that of its table."""

from __future__ import annotations

import base64
import json
import re
import struct
from typing import Any
from urllib.parse import unquote

import openai
import pytest
import pytest_asyncio
from dialects.ml_commons.commons_kit import commons
from fakes.provider_fake import Wrong

ARGUMENT, STATUS, PARSE = "illegal_argument_exception", "status_exception", "parse_exception"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory):
    async with commons(tmp_path_factory.mktemp("cases")) as there:
        yield there


@pytest.fixture
async def there(tmp_path):
    async with commons(tmp_path) as there:
        yield there


def action(**fields: Any) -> dict[str, Any]:
    values = {"action_type": "predict", "method": "POST", "url": "https://example.com/v1", "request_body": "{}"}
    return {name: each for name, each in {**values, **fields}.items() if each is not None}


def made(**fields: Any) -> dict[str, Any]:
    values = {"name": "c", "version": 1, "protocol": "http", "credential": {"key": "k"}, "actions": [action()]}
    return {name: each for name, each in {**values, **fields}.items() if each is not None}


CREATES = [
    ("29-name", made(name=None), "Connector name is null"),
    ("29-version", made(version=None), "Connector version is null"),
    ("29-protocol", made(protocol=None), "Connector protocol is null"),
    ("30", made(protocol="ftp"), "Unsupported connector protocol. Please use one of \\[aws_sigv4, http"),
    ("31-null", made(credential=None), "Connector credential is null or empty list"),
    ("31-empty", made(credential={}), "Connector credential is null or empty list"),
    ("32", made(actions=None), "No actions configured for this connector"),
    ("35-keys", made(protocol="aws_sigv4", parameters={"region": "r", "service_name": "s"}), "Missing credential"),
    ("36-type", made(actions=[action(action_type=None)]), "action type can't be null"),
    ("36-url", made(actions=[action(url=None)]), "url can't be null"),
    ("36-method", made(actions=[action(method=None)]), "method can't be null"),
    ("39", made(actions=[action(headers={"authorization": "${parameters.k}"})]), "cannot use \\${parameters"),
    ("loopback", made(actions=[action(url="https://10.0.0.1/v1")]), "10.0.0.1"),
    ("plain", made(actions=[action(url="http://example.com/v1")]), "https"),
    ("metadata", made(actions=[action(url="https://169.254.169.254/latest")]), "169.254"),
    ("script", made(actions=[action(pre_process_function="return params;")]), "pre_process_function|script"),
    ("roles", made(backend_roles=["r"]), "access control"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("body", "reason"), [each[1:] for each in CREATES], ids=[each[0] for each in CREATES])
async def test_connectors_that_are_refused(shared, body, reason):
    """A connector that cannot be is refused with ML Commons' words, and nothing of it is kept."""
    status, kind, result = await shared.reason("POST", "/connectors/_create", body)
    assert (status, kind) == (400, ARGUMENT)
    assert re.search(reason, result), result


MODELS = [
    ("kind", {"name": "m", "connector_id": "x"}, 400, "model format is null"),
    ("name", {"function_name": "remote", "connector_id": "x"}, 400, "model name is null"),
    ("none", {"name": "m", "function_name": "remote"}, 400, "You must provide connector content when creating a"),
    ("inline", {"name": "m", "function_name": "remote", "connector": made(actions=[action(
        action_type="batch_predict")])}, 400, "Connector endpoint is required when creating a remote model without"),
    ("unknown", {"name": "m", "function_name": "remote", "connector_id": "x"}, 404, "Failed to find connector"),
    ("group", {"name": "m", "function_name": "remote", "connector": made(), "model_group_id": "x"}, 404,
     "Model group not found"),
]  # fmt: skip


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("body", "status", "expected"), [each[1:] for each in MODELS], ids=[each[0] for each in MODELS]
)
async def test_models_that_are_refused(shared, body, status, expected):
    """A model that cannot be is refused with ML Commons' words."""
    found = await shared.reason("POST", "/models/_register", body)
    assert found[0] == status and expected in found[2], found


REQUESTS = [
    (
        "unknown-path",
        "GET",
        "/nothing/like/it",
        None,
        404,
        STATUS,
        "no handler found for uri [/_plugins/_ml/nothing/like/it] and method [GET]",
    ),
    (
        "wrong-method",
        "DELETE",
        "/connectors/_create",
        None,
        405,
        ARGUMENT,
        "Incorrect HTTP method for uri [/_plugins/_ml/connectors/_create] and method [DELETE], allowed: [POST]",
    ),
    ("24", "POST", "/connectors/_create", b"", 400, PARSE, "Create Connector request has empty body"),
    ("update", "PUT", "/connectors/x", b" ", 400, PARSE, "Failed to update connector: Request body is empty"),
    ("batch", "POST", "/models/x/_batch_predict", b"", 404, STATUS, "Failed to find model with the provided model id"),
    ("json", "POST", "/models/_register", b"{", 400, PARSE, "the body is not JSON"),
    ("list", "POST", "/models/_register", b"[]", 400, PARSE, "must be a JSON object"),
    ("46", "POST", "/models/x/_batch_predict", b"{}", 404, STATUS, "Failed to find model with the provided model id"),
    ("first", "POST", "/models/x/_predict", b'{"odd', 404, STATUS, "Failed to find model with the provided model id"),
    ("61", "POST", "/tasks/x/_cancel", b"", 404, STATUS, "Fail to find task"),
    ("62", "GET", "/tasks/x", None, 404, STATUS, "Failed to find task"),
    ("query", "GET", "/tasks/x?prety=true", None, 400, ARGUMENT, "did you mean 'pretty'"),
    ("format", "GET", "/tasks/x?format=yaml", None, 400, ARGUMENT, "format"),
    ("search", "POST", "/tasks/_search", b'{"query": {"odd": {}}}', 400, "parsing_exception", "odd"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind", "expected"),
    [each[1:] for each in REQUESTS],
    ids=[each[0] for each in REQUESTS],
)
async def test_requests_that_are_refused(shared, method, path, body, status, kind, expected):
    """What cannot be answered is refused in the envelope of OpenSearch, with its type and its words."""
    headers = {"content-type": "application/json"}
    found = await shared.reason(method, path, content=body, headers=headers)
    assert found[:2] == (status, kind) and expected in found[2], found


async def test_unknown_fields_of_a_connector_are_left_out(there):
    """33: a connector may hold what nobody knows; it is not kept."""
    reply = await there.done("POST", "/connectors/_create", there.service.connector(novelty={"a": 1}))
    assert "novelty" not in await there.done("GET", f"/connectors/{reply['connector_id']}")


async def test_a_dry_run_keeps_nothing(there):
    """A connector that is only tried gets the id that ML Commons gives it."""
    reply = await there.done("POST", "/connectors/_create", there.service.connector(dry_run=True))
    assert reply == {"connector_id": "dryRunConnector"}
    assert (await there.done("GET", "/connectors/_search"))["hits"]["total"]["value"] == 0


async def test_what_the_body_says_goes_before_the_path(there):
    """48: `action_type` of the body decides what is done, in either path."""
    model = await there.model()
    reply = await there.done("POST", f"/models/{model}/_predict", {"action_type": "batch_predict", "parameters": {}})
    for kind, why in (("fly", "Wrong Action Type of fly"), ("execute", "Wrong action type in the rest")):
        found = await there.reason("POST", f"/models/{model}/_predict", {"action_type": kind})
        assert found[:2] == (400, ARGUMENT) and why in found[2]
    assert reply["remote_job"]["id"] == "batch_1"
    body = {"action_type": "predict", "parameters": {"input": ["a"]}}
    assert "inference_results" in await there.done("POST", f"/models/{model}/_batch_predict", body)


async def test_parameters_are_of_one_call(there):
    """79: what one call overrides is as it was for the next."""
    model = await there.model()
    await there.done("POST", f"/models/{model}/_batch_predict", {"parameters": {"input_file_id": "mine"}})
    await there.done("POST", f"/models/{model}/_batch_predict", {"parameters": {"endpoint": "/v1/x"}})
    assert [(each["input_file_id"], each["endpoint"]) for each in there.service.bodies] == [
        ("mine", "/v1/embeddings"), ("file-given", "/v1/x"),
    ]  # fmt: skip


async def test_a_parameter_that_nobody_fills(there):
    """16: a placeholder without a value is a 400 that names it; the service is not called, no task is left."""
    connector = there.service.connector()
    del connector["parameters"]["input_file_id"]
    made = await there.done("POST", "/connectors/_create", connector)
    model = await there.model(made["connector_id"])
    status, _, reason = await there.reason("POST", f"/models/{model}/_batch_predict", {})
    assert (status, reason) == (400, "Some parameter placeholder not filled in payload: input_file_id")
    assert there.service.bodies == []
    query = {"query": {"term": {"task_type": "BATCH_PREDICTION"}}}
    assert (await there.done("GET", "/tasks/_search", query))["hits"]["total"]["value"] == 0


async def test_a_transform_job(there):
    """51, 71: of a job that has only an ARN, status and cancel are asked for by the name at its end."""
    made = await there.done("POST", "/connectors/_create", there.service.transforms())
    model = await there.model(made["connector_id"])
    body = {"parameters": {"TransformJobName": "job-1"}}
    begun = await there.done("POST", f"/models/{model}/_batch_predict", body)
    assert begun["remote_job"]["TransformJobArn"].endswith("/job-1")
    assert there.service.bodies[0]["TransformInput"] == {"DataSource": {"S3": "s3://here"}}
    task = await there.done("GET", f"/tasks/{begun['task_id']}")
    assert (task["state"], there.service.bodies[-1]) == ("RUNNING", {"TransformJobName": "job-1"})
    assert await there.done("POST", f"/tasks/{begun['task_id']}/_cancel") == {"status": "OK"}
    assert (await there.done("GET", f"/tasks/{begun['task_id']}"))["state"] == "CANCELLING"
    there.service.jobs["job-1"].state = "Stopped"
    task = await there.done("GET", f"/tasks/{begun['task_id']}")
    assert task["state"] == "CANCELLED" and task["remote_job"]["TransformJobArn"].endswith("/job-1")


async def test_an_invocation_job(there):
    """41: as Data Prepper sends it; the slash of the job's ARN is encoded once where it stands in a path."""
    made = await there.done("POST", "/connectors/_create", there.service.invocations())
    model = await there.model(made["connector_id"])
    config = {"s3InputDataConfig": {"s3Uri": "s3://bucket/in"}}
    fields = {"inputDataConfig": config, "jobName": "DataPrepper-batch-job-1", "outputDataConfig": {"a": 1}}
    begun = await there.done("POST", f"/models/{model}/_batch_predict", {"parameters": fields})
    assert there.service.bodies == [fields]
    assert begun["remote_job"]["processedJobArn"] == begun["remote_job"]["jobArn"].replace("/", "%2F")
    place = f"/tasks/{begun['task_id']}"
    assert (await there.done("GET", place))["state"] == "RUNNING"
    await there.done("POST", f"{place}/_cancel")
    assert (await there.done("GET", place))["state"] == "CANCELLING"
    (path,) = {path for method, path, _ in there.service.calls if method == "GET"}
    assert path.count("/") == 2 and unquote(path).endswith(begun["remote_job"]["jobArn"])


async def test_a_dlq_is_refused(there):
    """A queue for failures is half said, or said: either way it is refused by name, and nothing is begun."""
    model = await there.model()
    for dlq, case in (
        ({"bucket": "b"}, "DLQ bucketName or region cannot be null"),
        ({"bucket": "b", "region": "r"}, "dlq is not"),
    ):
        status, _, reason = await there.reason("POST", f"/models/{model}/_batch_predict", {"dlq": dlq})
        assert status == 400 and reason.startswith(case)
    assert there.service.bodies == []


async def test_a_field_nobody_knows(there):
    """What a batch does not know is refused by name: it would be paid for without it."""
    model = await there.model()
    status, _, reason = await there.reason("POST", f"/models/{model}/_batch_predict", {"parameter": {}})
    assert status == 400 and "'parameter'" in reason


async def test_an_action_nobody_knows(there):
    """49, 50: a call without a body, or with an action that there is not, is refused in the API's words."""
    model = await there.model()
    for path in ("_predict", "_batch_predict"):
        assert await there.reason("POST", f"/models/{model}/{path}") == (400, PARSE, "request body is required")
    for action, words in (("fly", "Wrong Action Type of fly"), ("execute", "Wrong action type in the rest")):
        status, kind, reason = await there.reason("POST", f"/models/{model}/_predict", {"action_type": action})
        assert (status, kind) == (400, ARGUMENT) and words in reason


@pytest.mark.parametrize("status", [400, 403, 404, 422, 429, 500, 503])
async def test_the_services_status_is_handed_on(there, status):
    """65: a batch that the provider refuses has the provider's own status and words."""
    model = await there.model()
    there.service.fail("POST", "/v1/batches", Wrong(status, {"message": "runtime error"}))
    found = await there.reason("POST", f"/models/{model}/_batch_predict", {})
    assert found == (status, STATUS, 'Error from remote service: {"message": "runtime error"}')


async def test_a_model_that_is_disabled(there):
    """A model may be turned off, and is then neither called nor given a batch."""
    model = await there.model()
    await there.done("PUT", f"/models/{model}", {"is_enabled": False})
    for path in ("_predict", "_batch_predict"):
        status, _, reason = await there.reason("POST", f"/models/{model}/{path}", {"parameters": {"input": ["a"]}})
        assert (status, reason) == (403, "Model is disabled.")


async def test_deploying_by_hand(tmp_path):
    """Without automatic deployment a call says what to do first, and how the feature is turned on that is off."""
    config = "[ml_commons]\nmodel_auto_deploy = false\noffline_batch_inference_enabled = false\n"
    async with commons(tmp_path, config) as there:
        body = {"name": "m", "function_name": "remote", "connector_id": await there.connector()}
        model = (await there.done("POST", "/models/_register", body))["model_id"]
        status, _, reason = await there.reason("POST", f"/models/{model}/_predict", {"parameters": {"input": ["a"]}})
        assert status == 400 and reason.startswith("Model not ready yet. Please run this first: POST /_plugins/_ml")
        await there.done("POST", f"/models/{model}/_deploy")
        await there.done("POST", f"/models/{model}/_predict", {"parameters": {"input": ["a"]}})
        status, kind, reason = await there.reason("POST", f"/models/{model}/_batch_predict", {})
        assert (status, kind) == (400, "illegal_state_exception")
        assert reason.startswith("Offline Batch Inference is currently disabled.")


async def test_a_model_may_have_a_connector_of_its_own(there):
    """An inline connector is made with its model and shown with it, without what it was given in confidence."""
    model = (
        await there.done(
            "POST", "/models/_register?deploy",
            {"name": "own", "function_name": "remote", "connector": there.service.connector()},
        )
    )["model_id"]  # fmt: skip
    reply = await there.done("GET", f"/models/{model}")
    assert reply["connector"]["name"] == "OpenAI Embedding model" and "credential" not in reply["connector"]
    assert there.service.key not in str(reply) and "connector_id" not in reply
    body = {"parameters": {"input": ["abcd"]}}
    answer = await there.done("POST", f"/models/{model}/_predict", body)
    assert answer["inference_results"][0]["output"][0]["data"][0] == 4.0


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/connectors/_create", "Create Connector request has empty body"),
        ("PUT", "/models/x", "Failed to update model: Request body is empty"),
    ],
)
async def test_no_body_at_all(there, method, path, words):
    """A request without a body, which therefore says no type of one either, is told what is missing."""
    assert await there.reason(method, path) == (400, PARSE, words)


async def test_an_interface_is_kept_and_used(there):
    """What a model is asked and what it answers must fit the schemas it was registered with, told again as texts."""
    body = {"type": "object", "properties": {"parameters": {"type": "object", "required": ["input"]}}}
    fields = {"type": "object", "required": ["inference_results"]}
    model = await there.model(interface={"input": body, "output": json.dumps(fields)})
    kept = (await there.done("GET", f"/models/{model}"))["interface"]
    assert json.loads(kept["input"]) == body and json.loads(kept["output"]) == fields
    path = f"/models/{model}/_predict"
    await there.done("POST", path, {"parameters": {"input": ["a"]}})
    status, _, reason = await there.reason("POST", path, {"parameters": {"other": 1}})
    assert status == 400 and reason.startswith("Error validating input schema: $.parameters: required property 'input'")
    other = {"type": "object", "required": ["never"]}
    await there.done("PUT", f"/models/{model}", {"interface": {"output": other}})
    status, _, reason = await there.reason("POST", path, {"parameters": {"input": ["a"]}})
    assert status == 400 and "please update your 'output' field" in reason
    await there.done("POST", f"/models/{model}/_batch_predict", {})  # of a batch the input is not checked


async def test_a_dry_run_need_not_say_all(there):
    """What is said is checked, what is missing is not."""
    for case in ({"dry_run": True}, {"dry_run": "true", "name": "n"}):
        assert await there.done("POST", "/connectors/_create", case) == {"connector_id": "dryRunConnector"}
    assert (await there.reason("POST", "/connectors/_create", {"dry_run": True, "protocol": "smtp"}))[0] == 400


async def test_settings_of_the_cluster(there):
    """Settings that are so, or would change nothing here, are acknowledged; others are refused with their place."""
    harmless = {
        "plugins.ml_commons.only_run_on_ml_node": False,
        "plugins": {"ml_commons": {"native_memory_threshold": 99, "model_access_control_enabled": "false"}},
        "plugins.ml_commons.trusted_connector_endpoints_regex": ["^https://api[.]openai[.]com/.*$"],
        "plugins.ml_commons.connector.private_ip_enabled": True,
    }
    reply = await there.http.put("/_cluster/settings", json={"persistent": harmless})
    assert reply.status_code == 200 and reply.json()["acknowledged"] is True
    assert reply.json()["persistent"]["plugins"]["ml_commons"]["only_run_on_ml_node"] == "false"
    flat = await there.http.put("/_cluster/settings?flat_settings=true", json={"transient": harmless})
    assert flat.json()["transient"]["plugins.ml_commons.native_memory_threshold"] == "99"
    for wrong, words in (
        ({"persistent": {"plugins.ml_commons.model_access_control_enabled": True}}, "own project"),
        ({"transient": {"plugins.ml_commons.max_batch_inference_tasks": 7}}, "ml_commons.max_batch_inference_tasks"),
        ({"persistent": {"cluster.routing.allocation.enable": "all"}}, "not recognized"),
        ({"persistent": {}}, "no settings"),
        ({"other": {}}, "'other' is unknown"),
    ):
        reply = await there.http.put("/_cluster/settings", json=wrong)
        assert reply.status_code == 400 and words in reply.json()["error"]["reason"], wrong
    response = (await there.http.get("/_cluster/settings?include_defaults=true&flat_settings=true")).json()
    assert response["defaults"]["plugins.ml_commons.max_batch_inference_tasks"] == "100"


async def test_trusted_endpoints_are_the_configurations(tmp_path):
    """Where endpoints are configured, no request makes them more."""
    config = """[ml_commons]
trusted_connector_endpoints = ["http://127[.]0[.]0[.]1:.*"]
"""
    async with commons(tmp_path, config) as there:
        name = "plugins.ml_commons.trusted_connector_endpoints_regex"
        for case, status in ((["http://127[.]0[.]0[.]1:.*"], 200), ([".*"], 400)):
            reply = await there.http.put("/_cluster/settings", json={"persistent": {name: case}})
            assert reply.status_code == status, reply.text


async def test_health_and_stats(there):
    """The cluster is green, has one node, and counts what a project has and calls."""
    reply = (await there.http.get("/_cluster/health?wait_for_status=yellow&timeout=5s")).json()
    assert (reply["status"], reply["number_of_nodes"], reply["timed_out"]) == ("green", 1, False)
    late = await there.http.get("/_cluster/health/.plugins-ml-model?wait_for_nodes=%3E%3D2")
    assert late.status_code == 408 and late.json()["timed_out"]
    model = await there.model()
    await there.done("POST", f"/models/{model}/_predict", {"parameters": {"input": ["a"]}})
    reply = await there.done("GET", "/stats")
    assert (reply["ml_connector_count"], reply["ml_model_count"], reply["ml_model_index_status"]) == (1, 1, "green")
    (node,) = reply["nodes"]
    assert reply["nodes"][node]["ml_deployed_model_count"] == reply["nodes"][node]["ml_request_count"] == 1
    assert await there.done("GET", "/stats/ml_model_count") == {"ml_model_count": 1}
    one = await there.done("GET", f"/{node}/stats/ml_failure_count,ml_request_count")
    assert one == {"nodes": {node: {"ml_request_count": 1, "ml_failure_count": 0}}}
    assert (await there.reason("GET", "/stats/ml_jvm_heap_usage"))[0] == 400
    assert (await there.reason("GET", "/other/stats"))[0] == 404


async def test_the_openai_package_reads_embeddings(there):
    """Through a connector whose post-processing makes tensors the package's own client gets its vectors."""
    await there.model(name="vectors")
    client = openai.AsyncOpenAI(base_url=f"{there.running.url}/v1", api_key="none", http_client=there.http)
    for encoding in ("float", "base64"):
        reply = await client.embeddings.create(model="vectors", input=["a", "three"], encoding_format=encoding)
        vectors = [each.embedding for each in reply.data]
        if encoding == "base64":
            vectors = [list(struct.unpack("<3f", base64.b64decode(each))) for each in vectors]
        assert vectors == [[1.0, 0.5, -1.0], [5.0, 0.5, -1.0]]
        assert (reply.model, reply.usage.prompt_tokens) == ("text-embedding-ada-002", 2)
