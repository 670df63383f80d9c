"""A server that is killed while it takes a batch of ML Commons: no second batch, and no job without its task."""

from __future__ import annotations

import json
import time

import httpx2
import pytest
from fakes.beside import beside
from fakes.remote_service import RemoteService
from fakes.running_server import RunningServer

from batchmill.faults import TASK_POINTS

PREFIX = "/_plugins/_ml"
CONFIG = '[server]\nprivate_hosts = ["127.0.0.0/8"]\n[ml_commons]\npoll_s = 0.1\n'
KEY = {"idempotency-key": "one"}
ENDED_S = 60.0


def begin(http: httpx2.Client, service: RemoteService) -> tuple[str, str]:
    """A model that is deployed, and a file of one row for it."""
    made = http.post(f"{PREFIX}/connectors/_create", json=service.connector()).json()
    fields = {"name": "m", "function_name": "remote", **made}
    model = http.post(f"{PREFIX}/models/_register?deploy=true", json=fields).json()["model_id"]
    row = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": model, "input": "text"}}
    sent = {"file": ("rows.jsonl", json.dumps(row) + "\n")}
    return model, http.post("/v1/files", data={"purpose": "batch"}, files=sent).json()["id"]


def ended(http: httpx2.Client, task: str) -> dict:
    until = time.monotonic() + ENDED_S
    while (reply := http.get(f"{PREFIX}/tasks/{task}").json())["state"] == "RUNNING":
        assert time.monotonic() < until, reply
        time.sleep(0.01)
    return reply


@pytest.mark.timeout(120)
@pytest.mark.parametrize("point", TASK_POINTS)
def test_a_kill_between_a_task_and_its_batch(tmp_path, point):
    """After a kill at any point the order is known: as a task that says what to check, or as the job that it became."""
    with beside(RemoteService()) as service:
        server = RunningServer(tmp_path, CONFIG, env={"BATCHMILL_FAULT": f"{point}:1:{tmp_path / 'killed'}"})
        try:
            server.start()
            with httpx2.Client(base_url=server.url, timeout=60) as http:
                model, file = begin(http, service)
                is_dataset = point == "after_task_job"
                body = {"dataset": {"file_id": file}, "route": "online"} if is_dataset else {"parameters": {}}
                place = f"{PREFIX}/models/{model}/_batch_predict"
                with pytest.raises(httpx2.TransportError):
                    http.post(place, json=body, headers=KEY)
            server.wait()
            assert (tmp_path / "killed").exists()
            server.start()
            with httpx2.Client(base_url=server.url, timeout=60) as http:
                again = http.post(place, json=body, headers=KEY)
                query = {"query": {"term": {"task_type": "BATCH_PREDICTION"}}}
                (task,) = http.post(f"{PREFIX}/tasks/_search", json=query).json()["hits"]["hits"]
                if is_dataset:
                    assert again.json()["task_id"] == task["_id"]
                    assert ended(http, task["_id"])["state"] == "COMPLETED"
                    assert len(service.bodies) in (1, 2), "its row may have been in flight"
                    return
                assert again.status_code == 409 and task["_id"] in again.json()["error"]["reason"]
                assert task["_source"]["state"] == "FAILED" and "Look there" in task["_source"]["error"]
                assert len(service.jobs) == (1 if point == "after_hand_over" else 0)
                http.delete(f"{PREFIX}/tasks/{task['_id']}").raise_for_status()
                assert http.post(place, json=body, headers=KEY).status_code == 200
        finally:
            server.close()
