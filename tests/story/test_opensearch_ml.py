"""The published opensearch-py-ml, unmodified, against a real server whose connectors lead to a fake OpenAI."""

from __future__ import annotations

import pytest
from fakes.beside import beside
from fakes.remote_service import RemoteService
from fakes.running_server import running_server
from story.client_envs import client_python
from story.deployed_functions import run_script

CONFIG = '[server]\nprivate_hosts = ["127.0.0.0/8"]\n[ml_commons]\npoll_s = 0.2\n'
BEGIN = """
import warnings

warnings.simplefilter("ignore")
from opensearchpy import ConflictError, OpenSearch
from opensearch_py_ml.ml_commons import MLCommonClient

client = OpenSearch([{"host": "127.0.0.1", "port": port}], timeout=60)
ml = MLCommonClient(client)
"""


@pytest.fixture(scope="module")
def service():
    with beside(RemoteService()) as service:
        yield service


@pytest.fixture(scope="module")
def run(tmp_path_factory, service):
    with running_server(tmp_path_factory.mktemp("opensearch_ml"), CONFIG) as running:

        def run(script, **fields):
            given = {"port": running.port, "body": service.connector(), **fields}
            return run_script(client_python("opensearch_ml"), BEGIN + script, **given)

        yield run


WALK = """
connector_id = ml.connector.create_standalone_connector(body)["connector_id"]
found["connectors"] = len(ml.connector.list_connectors()["hits"]["hits"])
found["name"] = ml.connector.get_connector(connector_id)["name"]
told = {"name": "m", "function_name": "remote", "connector_id": connector_id}
model = client.plugins.ml.register_model(body=told)["model_id"]
found["deployed"] = ml.deploy_model(model)
found["model"] = ml.get_model_info(model)["model_state"]
found["inference"] = ml.generate_model_inference(model, {"parameters": {"input": ["abc"]}})
found["embedding"] = ml.generate_embedding(model, ["a", "bc"])
path = f"/_plugins/_ml/models/{model}/_batch_predict"
task = client.transport.perform_request("POST", path, body={"parameters": {}})["task_id"]
found["task"] = ml.get_task_info(task)["state"]
found["searched"] = ml.search_task({"query": {"term": {"task_type": "BATCH_PREDICTION"}}})["hits"]["total"]["value"]
found["models"] = ml.search_model({"query": {"match_all": {}}})["hits"]["total"]["value"]
profile = ml.get_profile()["nodes"]
found["profile"] = [sorted(each) for each in profile.values()]
try:
    ml.undeploy_model(model, list(profile))
except ConflictError as refused:
    found["refused"] = refused.info["error"]["reason"]
found["ids"] = {"model": model, "task": task, "connector": connector_id, "nodes": list(profile)}
"""
END = """
found["task"] = ml.get_task_info(task, wait_until_task_done=True)["state"]
found["undeployed"] = list(ml.undeploy_model(model, nodes).values())
found["deleted"] = [ml.delete_model(model)["result"], ml.connector.delete_connector(connector)["result"]]
"""


def test_a_model_from_its_connector_to_its_end(run, service):
    """Connector, model, inference, embedding, batch, searches and profile, all by the client's own methods.

    A model whose batch runs at its provider is not undeployed.
    """
    found = run(WALK)
    assert (found["connectors"], found["name"], found["model"]) == (1, "OpenAI Embedding model", "DEPLOYED")
    assert (found["deployed"]["state"], found["deployed"]["task_type"]) == ("COMPLETED", "DEPLOY_MODEL")
    assert found["inference"]["inference_results"][0]["output"][0]["data"] == [3.0, 0.5, -1.0]
    assert len(found["embedding"]["inference_results"][0]["output"]) == 2
    assert (found["task"], found["searched"], found["models"]) == ("RUNNING", 1, 1)
    assert found["profile"] == [["models", "tasks"]]
    assert found["ids"]["task"] in found["refused"] and "RUNNING at the provider" in found["refused"]
    service.finish()
    ended = run(END, **found["ids"])
    assert (ended["task"], ended["undeployed"]) == ("COMPLETED", [{"stats": {found["ids"]["model"]: "undeployed"}}])
    assert ended["deleted"] == ["deleted", "deleted"]


def test_the_client_waits_for_a_task(run, service):
    """`get_task_info(wait_until_task_done=True)` ends when the batch has ended at its provider."""
    found = run(
        "connector_id = ml.connector.create_standalone_connector(body)['connector_id']\n"
        "told = {'name': 'w', 'function_name': 'remote', 'connector_id': connector_id}\n"
        "model = client.plugins.ml.register_model(body=told, params={'deploy': 'true'})['model_id']\n"
        "path = f'/_plugins/_ml/models/{model}/_batch_predict'\n"
        "found['task'] = client.transport.perform_request('POST', path, body={'parameters': {}})['task_id']\n"
    )
    service.finish()
    result = run(
        "found['task'] = ml.get_task_info(task, wait_until_task_done=True)\n"
        "found['deleted'] = ml.delete_task(task)['result']\n",
        task=found["task"],
    )
    assert result["task"]["state"] == "COMPLETED" and result["task"]["remote_job"]["output_file_id"] == "file-out"
    assert result["deleted"] == "deleted"


GROUPS = """
groups = ml.model_access_control
groups.register_model_group(name="g", description="d", access_mode="private")
found["id"] = group = groups.get_model_group_id_by_name("g")
groups.update_model_group({"description": "other"}, group)
hits = groups.search_model_group_by_name("g", _source="description")["hits"]["hits"]
found["hits"] = [each["_source"] for each in hits]
found["deleted"] = groups.delete_model_group_by_name("g")["result"]
found["gone"] = groups.get_model_group_id_by_name("g")
"""


def test_model_groups(run):
    """Groups are registered, found by their name, changed and deleted by the client's own methods."""
    found = run(GROUPS)
    assert found["id"] and found["hits"] == [{"description": "other"}]
    assert (found["deleted"], found["gone"]) == ("deleted", None)
