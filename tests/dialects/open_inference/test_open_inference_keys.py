"""What keys open of the tensor dialects: to look, to call, to load, and only what their project may use."""

from __future__ import annotations

import pytest
import pytest_asyncio
from dialects.open_inference.tensor_kit import outputs, tensor, tensor_server

from batchmill.types import Scope

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODY = {"inputs": [tensor("n", "INT64", [1])]}
UNLOAD = "/v2/repository/models/exact/unload"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    """A client, and the headers of a key of each scope and of one that may use one function."""
    async with tensor_server(tmp_path_factory.mktemp("keys"), ("exact", "fail")) as (running, client):
        keys, headers = running.services.keys, {}
        wanted = [(scope.value, scope, None) for scope in Scope] + [("one", Scope.ADMIN, frozenset({"fail"}))]
        for name, scope, models in wanted:
            made = await keys.create(name=name, project="default", scope=scope, models=models)
            headers[name] = {"authorization": f"Bearer {made.key}"}
        yield client, headers


@pytest.fixture
def client(server):
    return server[0]


@pytest.fixture
def headers(server):
    return server[1]


async def test_health_needs_no_key(client):
    """What watches a server has none; everything else is refused without one."""
    assert (await client.get("/v2/health/live")).status_code == 200
    assert (await client.get("/v2/health/ready")).status_code == 200
    for path in ("/v2", "/v2/models/exact", "/v2/models/stats"):
        refused = await client.get(path)
        assert refused.status_code == 401 and "API key" in refused.json()["error"]
    assert (await client.post("/v2/models/exact/infer", json=BODY)).status_code == 401
    assert (await client.post("/api/v1/exact/infer", json=BODY)).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "body", "least"),
    [
        ("GET", "/v2/models/exact", None, "read"),
        ("GET", "/v2/models/exact/stats", None, "read"),
        ("POST", "/v2/repository/index", {}, "read"),
        ("POST", "/v2/models/exact/infer", BODY, "submit"),
        ("POST", "/v2/models/exact/generate", {"n": 1}, "submit"),
        ("POST", "/api/v1/exact/infer", BODY, "submit"),
        ("POST", "/v2/repository/models/exact/load", {}, "admin"),
        ("POST", "/v2/logging", {}, "admin"),
    ],
)
async def test_each_scope_reaches_so_far(client, headers, method, path, body, least):
    """Reading, calling, loading: each needs its scope or a wider one."""
    reached = [
        scope.value
        for scope in Scope
        if (await client.request(method, path, json=body, headers=headers[scope.value])).status_code == 200
    ]
    order = [scope.value for scope in Scope]
    assert reached == order[order.index(least) :]


async def test_a_function_that_a_key_may_not_use_is_not_there(client, headers):
    """In the same words as one that nobody knows; and no list holds it."""
    for path, words in (("exact", "'exact'"), ("nobody", "'nobody'")):
        refused = await client.post(f"/v2/models/{path}/infer", json=BODY, headers=headers["one"])
        assert refused.status_code == 404
        assert refused.json()["error"] == f"the model {words} does not exist or you do not have access to it"
    index = (await client.post("/v2/repository/index", headers=headers["one"])).json()
    assert {each["name"] for each in index} == {"fail"}
    stats = (await client.get("/v2/models/stats", headers=headers["one"])).json()["model_stats"]
    assert {each["name"] for each in stats} == {"fail"}
    assert (await client.post(UNLOAD, headers=headers["one"])).status_code == 404
    reply = await client.post("/v2/models/exact/infer", json=BODY, headers=headers["submit"])
    assert outputs(reply) == {"n": [1]}
