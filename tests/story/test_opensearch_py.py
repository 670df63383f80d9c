"""The published opensearch-py, unmodified, against a real server whose connectors lead to a fake OpenAI."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fakes.beside import beside
from fakes.provider_fake import LOST_REPLY, Wrong
from fakes.remote_service import RemoteService
from fakes.running_server import running_server
from story.client_envs import client_python
from story.deployed_functions import page_file, run_example, run_script

CONFIG = '[server]\nprivate_hosts = ["127.0.0.0/8"]\n[ml_commons]\npoll_s = 0.2\n'
BEGIN = """
import opensearchpy
from opensearchpy import OpenSearch

client = OpenSearch([{"host": "127.0.0.1", "port": port}], http_auth=("anybody", key), timeout=60)
ml = client.plugins.ml


def raised(call, *given, **named):
    try:
        call(*given, **named)
    except opensearchpy.exceptions.OpenSearchException as error:
        return [type(error).__name__, error.status_code, error.info["error"]["reason"]]


def model_of(body):
    made = ml.create_connector(body=body)
    told = {"name": "a model", "function_name": "remote", "description": "d", **made}
    return made["connector_id"], ml.register_model(body=told, params={"deploy": "true"})


def batch(model, /, **parameters):
    path = f"/_plugins/_ml/models/{model}/_batch_predict"
    return client.transport.perform_request("POST", path, body={"parameters": parameters})
"""


@pytest.fixture(scope="module")
def service():
    with beside(RemoteService()) as service:
        yield service


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("opensearch"), CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def keys(server):
    line = [sys.executable, "-m", "batchmill", "--data-dir", str(server.data_dir), "keys", "create", "--name", "k"]
    return {
        scope: subprocess.run([*line, "--scope", scope], capture_output=True, text=True, check=True).stdout.strip()
        for scope in ("admin", "read")
    }


@pytest.fixture(scope="module")
def run(server, service, keys):
    def run(script, who="admin", **expected):
        given = {"port": server.port, "key": keys[who], "connector": service.connector(), **expected}
        return run_script(client_python("opensearch"), BEGIN + script, **given)

    return run


def test_what_scripts_do_before_and_after(run):
    """Settings, health, statistics, a dry run and an interface answer the client as OpenSearch does."""
    found = run("""
settings = {"persistent": {"plugins.ml_commons.only_run_on_ml_node": "false"}}
found["settings"] = client.cluster.put_settings(body=settings)["acknowledged"]
found["read"] = client.cluster.get_settings()
found["refused"] = raised(client.cluster.put_settings, body={"persistent": {"plugins.ml_commons.x": 1}})
found["health"] = client.cluster.health(wait_for_status="yellow")["status"]
found["dry"] = ml.create_connector(body={"dry_run": True})
told = ml.create_connector(body=connector)
interface = {"input": {"required": ["parameters"]}}
fields = {"name": "checked", "function_name": "remote", "interface": interface, **told}
model = ml.register_model(body=fields, params={"deploy": "true"})["model_id"]
found["interface"] = ml.get_model(model_id=model)["interface"]
found["wrong"] = raised(ml.predict_model, model_id=model, body={"text_docs": ["a"]})
found["right"] = ml.predict_model(model_id=model, body={"parameters": {"input": ["a"]}})
found["stats"] = client.transport.perform_request("GET", "/_plugins/_ml/stats")
begun = batch(model)["task_id"]
found["kept"] = raised(ml.undeploy_model, model_id=model)
found["named"] = begun in found["kept"][2]
""")
    assert (found["settings"], found["read"], found["health"]) == (True, {"persistent": {}, "transient": {}}, "green")
    assert found["refused"][:2] == ["RequestError", 400] and found["dry"] == {"connector_id": "dryRunConnector"}
    assert found["interface"] == {"input": '{"required":["parameters"]}'}
    assert found["wrong"][1] == 400 and "Error validating input schema" in found["wrong"][2]
    assert found["right"]["inference_results"][0]["output"][0]["data"]
    assert found["stats"]["ml_model_count"] >= 1
    assert found["kept"][:2] == ["ConflictError", 409] and found["named"]


WALK = """
found["info"] = [client.ping(), client.info()["version"]["distribution"]]
connector_id, registered = model_of(connector)
found["connector"] = ml.get_connector(connector_id=connector_id)
found["registered"] = registered
found["register_task"] = ml.get_task(task_id=registered["task_id"])
model = registered["model_id"]
found["begun"] = begun = batch(model, model="text-embedding-3-large")
found["task"] = ml.get_task(task_id=begun["task_id"])
cancel = f"/_plugins/_ml/tasks/{begun['task_id']}/_cancel_batch"
found["cancelled"] = client.transport.perform_request("POST", cancel)
found["after"] = ml.get_task(task_id=begun["task_id"])["state"]
"""


def test_the_walk_of_the_documentation(run, service):
    """The walk that the documentation of batch predict describes, with its own words, from connector to cancel."""
    found = run(WALK)
    assert found["info"] == [True, "opensearch"]
    assert "credential" not in found["connector"] and service.key not in str(found)
    assert found["registered"]["status"] == "CREATED" and found["register_task"]["state"] == "COMPLETED"
    assert found["begun"]["status"] == "CREATED" and found["begun"]["remote_job"]["status"] == "validating"
    task = found["task"]
    assert (task["task_type"], task["function_name"], task["state"]) == ("BATCH_PREDICTION", "REMOTE", "RUNNING")
    assert task["remote_job"]["request_counts"] == {"total": 3, "completed": 0, "failed": 0}
    assert found["cancelled"] == {"status": "OK"} and found["after"] == "CANCELLING"


ANSWERS = """
_, registered = model_of(connector)
model = registered["model_id"]
found["parameters"] = ml.predict_model(model_id=model, body={"parameters": {"input": ["a", "bc"]}})
found["documents"] = ml.predict(algorithm_name="text_embedding", model_id=model, body={"text_docs": ["xyz"]})
found["few"] = ml.predict_model(
    model_id=model, body={"parameters": {"input": ["a"]}}, params={"filter_path": "**.shape"}
)
"""


def test_one_answer(run):
    """Embeddings come back as tensors, by model and by algorithm, with parameters that every request may have."""
    found = run(ANSWERS)
    output = found["parameters"]["inference_results"][0]["output"]
    assert [each["data"][0] for each in output] == [1.0, 2.0] and output[0]["name"] == "sentence_embedding"
    assert found["documents"]["inference_results"][0]["output"][0]["data"] == [3.0, 0.5, -1.0]
    assert found["few"] == {"inference_results": [{"output": [{"shape": [3]}]}]}


ERRORS = """
connector_id, registered = model_of(connector)
model = registered["model_id"]
found["missing"] = raised(ml.get_task, task_id="missing")
found["no_connector"] = raised(ml.get_connector, connector_id="missing")
found["in_use"] = raised(ml.delete_connector, connector_id=connector_id)
found["nameless"] = raised(ml.create_connector, body={**connector, "name": None})
found["blocked"] = raised(
    ml.create_connector, body={**connector, "actions": [{**connector["actions"][0], "url": "http://169.254.169.254/"}]}
)
found["deployed"] = raised(ml.delete_model, model_id=model)
found["unfilled"] = raised(ml.predict_model, model_id=model, body={"parameters": {}})
found["no_route"] = raised(client.transport.perform_request, "GET", "/_plugins/_ml/nothing")
found["no_method"] = raised(client.transport.perform_request, "DELETE", f"/_plugins/_ml/models/{model}/_predict")
found["running"] = raised(ml.delete_task, task_id=batch(model)["task_id"])
found["wrong"] = raised(ml.predict_model, model_id=model, body={"parameters": {"input": ["a"]}, "action_type": "fly"})
"""


def test_errors_have_the_clients_own_classes(run):
    """What is wrong comes as the client's exception for it, with ML Commons' words."""
    found = run(ERRORS)
    kinds = {name: case[:2] for name, case in found.items()}
    assert kinds == {
        "missing": ["NotFoundError", 404],
        "no_connector": ["NotFoundError", 404],
        "in_use": ["ConflictError", 409],
        "nameless": ["RequestError", 400],
        "blocked": ["RequestError", 400],
        "deployed": ["RequestError", 400],
        "unfilled": ["RequestError", 400],
        "no_route": ["NotFoundError", 404],
        "no_method": ["TransportError", 405],
        "running": ["RequestError", 400],
        "wrong": ["RequestError", 400],
    }
    reasons = {name: case[2] for name, case in found.items()}
    assert reasons["missing"] == "Failed to find task" and reasons["nameless"] == "Connector name is null"
    assert reasons["running"] == "Task cannot be deleted in running state. Try after some time."
    assert reasons["wrong"] == "Wrong Action Type of fly"
    assert reasons["no_connector"] == "Failed to find connector with the provided connector id: missing"


def test_a_key_does_what_its_scope_holds(run):
    """A key that may read finds everything and changes nothing; the name in front of it does not matter."""
    found = run(
        "found['search'] = ml.search_connectors(body={'query': {'match_all': {}}})['hits']['total']['relation']\n"
        "found['make'] = raised(ml.create_connector, body=connector)\n",
        who="read",
    )
    assert found["search"] == "eq" and found["make"][:2] == ["AuthorizationException", 403]


def test_searches(run):
    """Searches by POST, with what clients ask for: terms, sizes, members of the source, an order."""
    found = run(
        "body = {**connector, 'name': 'searched for'}\n"
        "model_of(body)\n"
        "query = {'query': {'term': {'name.keyword': 'searched for'}}, '_source': ['name']}\n"
        "found['connectors'] = ml.search_connectors(body=query)['hits']['hits']\n"
        "query = {'query': {'match': {'name': 'model'}}, 'size': 1, 'sort': [{'created_time': 'desc'}]}\n"
        "found['models'] = len(ml.search_models(body=query)['hits']['hits'])\n"
        "query = {'query': {'bool': {'must': [{'term': {'task_type': 'REGISTER_MODEL'}}]}}}\n"
        "found['tasks'] = ml.search_tasks(body=query)['hits']['total']['value']\n"
    )
    assert [each["_source"] for each in found["connectors"]] == [{"name": "searched for"}]
    assert found["models"] == 1 and found["tasks"] >= 1


def test_a_lost_reply_costs_once(run, service):
    """The client repeats a gateway's error three times at once; the provider has one batch, and somebody is told."""
    _, model = model_of(run)
    before = len(service.jobs)
    service.fail("POST", "/v1/batches", Wrong(504, b"gateway", keeps=True))
    found = run(f"found['told'] = raised(batch, {model!r})")
    assert found["told"][:2] == ["ConflictError", 409] and "it is unknown" in found["told"][2]
    service.fail("POST", "/v1/batches", LOST_REPLY)
    found = run(f"found['told'] = raised(batch, {model!r}, input_file_id='file-other')")
    assert found["told"][:2] == ["TransportError", 500] and "Error communicating" in found["told"][2]
    assert len(service.jobs) == before + 2


def model_of(run):
    made = run("found['made'] = model_of(connector)")["made"]
    return made[0], made[1]["model_id"]


def test_credentials_are_changed_without_redeploying(run, service):
    """A deployed model's calls have the new credential as soon as its connector has it, rows and batches alike."""
    connector_id, model = model_of(run)
    try:
        service.key = "another-key-of-the-tests"
        found = run(
            f"found['before'] = raised(batch, {model!r})\n"
            f"ml.update_connector(connector_id={connector_id!r}, body={{'credential': {{'openAI_key': new}}}})\n"
            f"found['batch'] = batch({model!r})['status']\n"
            f"told = ml.predict_model(model_id={model!r}, body={{'parameters': {{'input': ['a']}}}})\n"
            "found['answer'] = told['inference_results'][0]['status_code']\n",
            new=service.key,
        )
        assert found["before"][:2] == ["AuthenticationException", 401]
        assert (found["batch"], found["answer"]) == ("CREATED", 200)
    finally:
        service.key = RemoteService.key


def test_no_secret_was_told(server, service, keys):
    """After all that, neither the log nor any file of the server holds a credential of a connector."""
    paths = [path for path in server.folder.rglob("*") if path.is_file()]
    assert len(paths) > 3
    output = [path.name for path in paths if b"key-of-the-tests" in path.read_bytes()]
    assert output == []


def test_the_pages_program(tmp_path):
    """The program of docs/opensearch-ml-commons.md works as it stands there, with the files that the page shows."""
    page = "opensearch-ml-commons.md"
    (tmp_path / "app.py").write_text(page_file(page, "app.py"))
    with running_server(tmp_path, page_file(page, "batchmill.toml")) as server:
        printed, result = run_example(client_python("opensearch"), page, "opensearch", server.port)
    assert printed == result
