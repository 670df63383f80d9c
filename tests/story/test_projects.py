"""Who may do what: every operation of a real server without a key, with too small a one, and with another project's."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
import sys
import time

import httpx2
import pytest
from fakes.running_server import running_server

from batchmill.engines.clock import SystemClock
from batchmill.jobs.pools.quarantine import Quarantine
from batchmill.store.sql.database import Database
from batchmill.types.models import Suspect
from batchmill.wire import bundles
from batchmill.wire.bundles import BUNDLE_MEDIA, DeployOrder

CONFIG = """
[models.echo]
engine = "function"
source = "app.py:echo"

[models.secret]
engine = "function"
source = "app.py:echo"
"""
OPEN = {"GET /health", "GET /openapi.json", "GET /ready", "GET /v2/health/live", "GET /v2/health/ready"}
# Opened by the signature in its address.
SIGNED = {"GET /modelbit/links/{file_id}.json", "GET /predibase/files/{file_id}", "PUT /predibase/uploads/{dataset_id}"}
# Parameters that name what belongs to the server, not to a project: models and their parts, shared memory.
MODELS = ("model", "path", "deployment", "name", "alias", "number", "region")
# Of a reply: there is nothing in it of others, and that is no error; or what every project sees the same of.
CHOSEN = ("model_ids", "task_ids", "index", "node_id", "stat")
_PARAMETER = re.compile(r"\{([a-z_]+)\}")
# What a request for one thing must hold, so that nothing but the thing is wrong with it.
BODIES = {
    "PATCH /batchmill/v1/jobs/{job_id}": {"json": {"priority": 1}},
    "POST /batchmill/v1/jobs/{job_id}/remote/{tag}": {"json": {"remote_id": None}},
    "POST /v1/uploads/{upload_id}/complete": {"json": {"part_ids": ["part_x"]}},
    "POST /v1/uploads/{upload_id}/parts": {"files": {"data": ("upload", b"x")}},
    "POST /v1/webhook_endpoints/{webhook_endpoint_id}": {"json": {"name": "x"}},
    "POST /v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret": {"json": {}},
    "POST /v1/webhook_endpoints/{webhook_endpoint_id}/test": {"json": {"event_type": "batch.completed"}},
    "PUT /_plugins/_ml/connectors/{connector_id}": {"json": {"description": "x"}},
    "PUT /_plugins/_ml/model_groups/{model_group_id}": {"json": {"description": "x"}},
    "PUT /_plugins/_ml/models/{model_id}": {"json": {"description": "x"}},
    "POST /_plugins/_ml/models/{model_id}/_predict": {"json": {"parameters": {"input": ["x"]}}},
    "POST /_plugins/_ml/models/{model_id}/_batch_predict": {"json": {"parameters": {}}},
    "POST /_plugins/_ml/_predict/{algorithm}/{model_id}": {"json": {"text_docs": ["x"]}},
}
CONNECTOR = {
    "name": "c", "version": "1", "protocol": "http", "credential": {"key": "not-a-real-one"},
    "actions": [{"action_type": "predict", "method": "POST", "url": "https://example.com/v1", "request_body": "{}"}],
}  # fmt: skip
CLEARING = ("admin", "DELETE /batchmill/v1/quarantine")  # would take from the tests what only an engine's death makes
DIGEST = "3f" * 32  # of a request of the project one that an engine died of


async def quarantine_one(data_dir):
    """Write down, as a server does, that an engine died of a request."""
    data_dir.mkdir(mode=0o700)
    database = Database(data_dir / "batchmill.db")
    kept = Quarantine(SystemClock(), database)
    kept.suspect("llm", Suspect(DIGEST, "one", "/v1/chat/completions", 2, time.time()))
    await kept.close()
    database.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("projects")
    asyncio.run(quarantine_one(folder / "data"))
    (folder / "app.py").write_text("def echo(**body):\n    return {}\n")
    with running_server(folder, CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def keys(server):
    """A key of each scope of the project one, and the widest one of the project two."""

    def make(project, scope, *words):
        line = [sys.executable, "-m", "batchmill", "--data-dir", str(server.data_dir), "keys", "create", "--name", "k"]
        line += ["--project", project, "--scope", scope, *words]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()

    made = {scope: make("one", scope) for scope in ("read", "submit", "admin", "deploy")}
    return made | {"other": make("two", "deploy"), "narrow": make("one", "submit", "--model", "echo")}


@pytest.fixture
def asking(server, keys):
    """Ask as the owner of a key."""
    with httpx2.Client(base_url=server.url, timeout=60) as client:

        def ask(who, method, path, headers=(), **options):
            key = {"authorization": f"Bearer {keys[who]}"} if who else {}
            return client.request(method, path, headers=key | dict(headers), **options)

        yield ask


@pytest.fixture
def operations(server):
    paths = httpx2.get(f"{server.url}/openapi.json").json()["paths"]
    return {f"{method.upper()} {path}": case for path, methods in paths.items() for method, case in methods.items()}


def made_by(ask, who):
    """One of everything that has an id, by the name of its parameter."""
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
           "body": {"model": "echo", "messages": [{"role": "user", "content": "x"}]}}  # fmt: skip
    sent = ask(who, "POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", json.dumps(row))}).json()
    order = {"input_file_id": sent["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = ask(who, "POST", "/v1/batches", json=order).json()["id"]
    upload = {"bytes": 1, "filename": "a", "mime_type": "text/plain", "purpose": "batch"}
    connector = ask(who, "POST", "/_plugins/_ml/connectors/_create", json=CONNECTOR).json()["connector_id"]
    fields = {"name": "m", "function_name": "remote", "connector_id": connector}
    registered = ask(who, "POST", "/_plugins/_ml/models/_register", json=fields).json()
    group = ask(who, "GET", f"/_plugins/_ml/models/{registered['model_id']}").json()["model_group_id"]
    begun = ask(who, "POST", "/v2/datasets/upload", json={"fileName": "a.csv", "mimeType": "text/csv"}).json()
    assert httpx2.put(begun["presignedUrl"], content=b"a\n1\n").status_code == 200
    named = {"name": f"rows of {begun['uploadToken']}", "uploadToken": begun["uploadToken"]}
    dataset = ask(who, "PUT", "/v2/datasets/upload", json=named).json()["uuid"]
    endpoint = {"name": "a", "url": "https://example.com/hook", "event_types": ["batch.completed"]}
    return {
        "file_id": sent["id"],
        "batch_id": batch,
        "job_id": batch.replace("batch_", "job_"),
        "dataset_id": dataset,
        "upload_id": ask(who, "POST", "/v1/uploads", json=upload).json()["id"],
        "key_id": ask(who, "GET", "/batchmill/v1/keys").json()["keys"][0]["id"],
        "connector_id": connector,
        "model_id": registered["model_id"],
        "task_id": registered["task_id"],
        "model_group_id": group,
        "algorithm": "text_embedding",
        "tag": "bm-0000000000000000",
        "digest": ask(who, "GET", "/batchmill/v1/quarantine").json()["requests"][0]["digest"],
        "webhook_endpoint_id": ask(who, "POST", "/v1/webhook_endpoints", json=endpoint).json()["id"],
    }


def filled(path, ids):
    return _PARAMETER.sub(lambda match: ids[match[1]], path)


def test_every_operation_needs_a_key(asking, operations, keys):
    """Without a key nothing is answered but what is open on purpose, and the refusal says nothing of what exists."""
    result = {each: asking(None, *_PARAMETER.sub("x", each).split()).status_code for each in operations}
    assert {each for each, status in result.items() if status != 401} == OPEN | SIGNED
    assert {result[each] for each in SIGNED} == {403}
    assert all(status == 200 for each, status in result.items() if each in OPEN)


def test_every_operation_needs_its_scope(asking, operations):
    """A key does what its scope holds: more is refused before anything is looked at."""
    held = {"read": {"read"}, "submit": {"read", "submit"}, "admin": {"read", "submit", "admin"}}
    wrong = [
        (who, each)
        for each, case in operations.items()
        for who in held
        if (scope := case.get("x-batchmill-scope")) is not None
        if (who, each) != CLEARING
        if (asking(who, *_PARAMETER.sub("x", each).split()).status_code == 403) is (scope in held[who])
    ]
    assert wrong == []


def test_projects_do_not_see_each_other(asking, operations):
    """Whatever has an id is, for another project, as if it did not exist: the same status and the same words."""
    mine = made_by(asking, "admin")
    unknown = {name: f"{value[:-8]}{'0' * 8}" for name, value in mine.items()}
    tried = 0
    for each in operations:
        method, path = each.split()
        if each in SIGNED or not _PARAMETER.search(path) or {*_PARAMETER.findall(path)} & {*MODELS, *CHOSEN}:
            continue
        foreign = asking("other", method, filled(path, mine), **BODIES.get(each, {}))
        absent = asking("other", method, filled(path, unknown), **BODIES.get(each, {}))
        assert (foreign.status_code, absent.status_code) == (404, 404), (each, foreign.text)
        assert words(foreign, mine) == words(absent, unknown), each
        tried += 1
    assert tried > 20
    for name, value in made_by(asking, "admin").items():
        assert value, name


def words(reply, ids):
    text = reply.text.replace(reply.headers["x-request-id"], "REQUEST")
    for value in ids.values():
        text = text.replace(value, "ID")
    return text


def test_lists_hold_only_ones_own(asking, operations):
    """No list of another project names anything of this one."""
    mine = made_by(asking, "admin")
    for each in operations:
        method, path = each.split()
        if method == "GET" and "{" not in path and each not in OPEN:
            text = asking("other", method, path).text
            assert not [value for value in mine.values() if value in text], each


def test_after_of_another_project(asking):
    """A page after something of another project is as one after something unknown."""
    mine = made_by(asking, "admin")
    for path, after in (("/v1/files", mine["file_id"]), ("/v1/batches", mine["batch_id"])):
        foreign = asking("other", "GET", path, params={"after": after})
        absent = asking("other", "GET", path, params={"after": after[:-8] + "0" * 8})
        assert foreign.status_code == absent.status_code != 200, path


def test_models_of_a_narrow_key(asking):
    """A key with models of its own sees and calls only these, live and in the rows of a file."""
    assert [each["id"] for each in asking("narrow", "GET", "/v1/models").json()["data"]] == ["echo"]
    live = {"model": "secret", "messages": [{"role": "user", "content": "x"}]}
    foreign = asking("narrow", "POST", "/v1/chat/completions", json=live)
    absent = asking("narrow", "POST", "/v1/chat/completions", json=live | {"model": "nobody"})
    assert (foreign.status_code, absent.status_code) == (404, 404)
    assert foreign.text.replace("secret", "M") == absent.text.replace("nobody", "M")
    rows = "".join(
        json.dumps({"custom_id": m, "method": "POST", "url": "/v1/chat/completions", "body": live | {"model": m}})
        + "\n"
        for m in ("echo", "secret")
    )
    sent = asking("narrow", "POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", rows)}).json()
    order = {"input_file_id": sent["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = asking("narrow", "POST", "/v1/batches", json=order).json()
    while batch["status"] not in ("failed", "completed"):
        time.sleep(0.01)
        batch = asking("narrow", "GET", f"/v1/batches/{batch['id']}").json()
    assert batch["status"] == "failed" and batch["errors"]["data"][0]["line"] == 2


def deployed_by(ask, who, text, **settings):
    """What became of a deployment of a function `doubler`."""
    order = DeployOrder(**{"name": "doubler", "target": "app.py:doubler", "source": "one-secret.py:f"} | settings)
    out = io.BytesIO()
    bundles.write(out, order, {"app.py": text.encode()})
    return ask(who, "POST", "/batchmill/v1/models", content=out.getvalue(), headers={"content-type": BUNDLE_MEDIA})


def test_who_may_bring_code(asking):
    """An admin's key brings no code and makes no key that may; what a key brings is its own project's: to another its
    name is taken, it is not there, and where it is shared it can be called and neither stopped nor read."""
    text, one = "def doubler(foo: int):\n    return 2 * foo\n", "/batchmill/v1/models/doubler"
    assert deployed_by(asking, "admin", text).status_code == 403
    for who in ("admin", "deploy"):
        refused = asking(who, "POST", "/batchmill/v1/keys", json={"name": "more", "scope": "deploy"})
        assert refused.status_code == 403 and "batchmill keys create --scope deploy" in refused.text
    assert deployed_by(asking, "deploy", text).status_code == 201

    unload = ("POST", "/v2/repository/models/doubler/unload")
    taken = deployed_by(asking, "other", text + "# other\n")
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken") and "one" not in taken.text
    requests = [("GET", one), ("DELETE", one), ("POST", f"{one}/rollback"), unload]
    assert {asking("other", *each).status_code for each in requests} == {404}
    assert asking("other", "POST", "/v1/doubler/latest", json={"data": 2}).status_code == 404
    assert asking("submit", "POST", "/v1/doubler/latest", json={"data": 2}).json() == {"data": 4}

    assert deployed_by(asking, "deploy", text, is_shared=True).json()["version"]["key"]
    assert asking("other", "POST", "/v1/doubler/latest", json={"data": 2}).json() == {"data": 4}
    seen = asking("other", "GET", one)
    assert seen.status_code == 200 and "one-secret.py" not in seen.text and '"one"' not in seen.text
    requests = [("DELETE", one), ("POST", f"{one}/restart"), ("GET", f"{one}/log"), ("GET", f"{one}/logs"), unload]
    assert {asking("other", *each).status_code for each in requests} == {403}
    assert asking("deploy", "DELETE", one).status_code == 200
