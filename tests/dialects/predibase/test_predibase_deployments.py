"""Deployments over Predibase's API: made, followed until their engine is ready or has failed, changed, deleted."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest
import pytest_asyncio
from dialects.predibase.llm_server import WINDOW, open_llms

from batchmill.dialects.predibase.deployments import STARTS_WITHIN_S, compute_events, request_details
from batchmill.services.llms.records import LlmDeployment
from batchmill.types import Caller, EngineEvent, EngineView, LlmSettings, ModelSpec, Scope

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOTHING = dict.fromkeys([
    "customArgs", "cooldownTime", "hfToken", "minReplicas", "maxReplicas", "scaleUpRequestThreshold", "maxTotalTokens",
    "loraxImageTag", "requestLoggingEnabled", "directIngress", "preloadedAdapters", "speculator", "prefixCaching",
    "backend", "disableAdapters", "usesGuaranteedCapacity", "chunkedPrefill", "speculationDisableByBatchSize",
    "maxNumBatchedTokens", "cacheModel", "mergeAdapter", "computeSpec", "quantization", "accelerator",
])  # fmt: skip
REQUIRED = {
    "name", "uuid", "description", "type", "status", "model", "accelerator", "currentReplicas", "config",
    "usesGuaranteedCapacity",
}  # fmt: skip
LOOKS, LOOK_S = 1200, 0.05


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(tmp_path_factory):
    async with open_llms(tmp_path_factory.mktemp("deployments")) as found:
        yield found


@pytest.fixture
def http(opened):
    return opened[1]


async def create(http, name: str, *, status: int = 200, description: str = "", **config):
    body = {"name": name, "config": NOTHING | {"baseModel": "tiny"} | config, "description": description}
    reply = await http.post("/v2/deployments", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


async def get(http, name: str) -> dict:
    return (await http.get(f"/v2/deployments/{name}")).json()["data"]


async def until_over(http, name: str) -> dict:
    """The events with which a client that waits comes to its end."""
    for _ in range(LOOKS):
        reply = await http.get(f"/llms/{name}/events?detailed=false")
        assert reply.status_code == 200, reply.text
        response = reply.json()
        if {"Ready", "Failed"} & {each["eventType"] for each in response["ComputeEvents"]}:
            return response
        await asyncio.sleep(LOOK_S)
    raise AssertionError(response)


async def test_a_deployment(http):
    """It is made, gets ready, answers, is changed, and is gone once it is deleted."""
    await create(http, "first", description="ours", maxReplicas=1, cooldownTime=60)
    response = await until_over(http, "first")
    assert (response["name"], response["deploymentStatus"]) == ("first", "ready")
    found = await get(http, "first")
    assert set(found) >= REQUIRED
    assert (found["type"], found["status"], found["description"]) == ("private", "ready", "ours")
    assert found["model"] == {"name": "tiny", "maxInputLength": WINDOW}
    assert (found["currentReplicas"], found["config"]["cooldownTime"], found["config"]["hfToken"]) == (1, 60, None)
    reply = await http.post(
        "/default/deployments/v2/llms/first", json={"inputs": "abc", "parameters": {"adapter_id": "upper"}}
    )
    assert reply.json() == [{"generated_text": "ABC"}]
    reply = await http.put("/v2/deployments/first", json={"description": "changed"})
    assert reply.status_code == 200 and (await get(http, "first"))["description"] == "changed"
    assert (await until_over(http, "first"))["deploymentStatus"] == "ready"
    reply = await http.put(
        "/v2/deployments/first", json={"config": NOTHING | {"baseModel": None, "maxTotalTokens": 64}}
    )
    assert reply.status_code == 200, reply.text
    assert (await until_over(http, "first"))["deploymentStatus"] == "ready"
    found = await get(http, "first")
    assert (found["model"]["maxInputLength"], found["config"]["maxTotalTokens"]) == (64, 64)
    assert found["config"]["customArgs"] == ["--max-model-len=64"]
    assert (await http.delete("/v2/deployments/first")).status_code == 204
    for path in ("/v2/deployments/first", "/llms/first/events"):
        assert (await http.get(path)).status_code == 404
    assert (await http.post("/default/deployments/v2/llms/first", json={"inputs": "a"})).status_code == 404


async def test_one_that_cannot_start(opened):
    """A client that waits is told that it has failed, with the engine's last lines."""
    _, http, fake = opened
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_START_ERROR", "ValueError: no room for the cache")
        await create(http, "broken", customArgs=["--seed", "99"])
        reply = await until_over(http, "broken")
    assert reply["deploymentStatus"] == "failed"
    (failure,) = [each for each in reply["ComputeEvents"] if each["eventType"] == "Failed"]
    assert "no room for the cache" in failure["message"]
    found = await get(http, "broken")
    assert found["status"] == "failed" and "no room for the cache" in found["message"]


async def test_an_order_that_arrives_twice(http):
    """An order whose reply was lost is sent again: the same one is the same deployment, another is refused."""
    first = await create(http, "twice")
    assert (await create(http, "twice"))["data"]["uuid"] == first["data"]["uuid"]
    refused = await create(http, "twice", status=409, maxTotalTokens=64)
    assert "twice" in refused["error"]


async def test_an_order_that_a_crash_cut_off(opened):
    """What was written down and not started yet is started when the order arrives again; what was stopped is not."""
    running, http, _ = opened
    body = json.dumps({"name": "cut-off", "config": {"baseModel": "tiny", "maxTotalTokens": 128}}).encode()
    caller, settings = Caller("default", Scope.ADMIN), LlmSettings("tiny", {"max-model-len": 128})
    details = request_details(running.services.clock.now()) | {"digest": hashlib.sha256(body).hexdigest()}
    await running.services.llms.create(caller, "cut-off", settings, details=details)
    headers = {"content-type": "application/json"}
    assert (await http.post("/v2/deployments", content=body, headers=headers)).status_code == 200
    assert (await until_over(http, "cut-off"))["deploymentStatus"] == "ready"
    await running.services.llms.stop(caller, "cut-off")
    again = await http.post("/v2/deployments", content=body, headers=headers)
    assert (again.status_code, again.json()["data"]["status"]) == (200, "stopped")
    await running.services.llms.delete(caller, "cut-off")


async def test_changes_while_it_is_deleted(http):
    """Whoever is first: each is answered, and none with an error of the server's own."""
    for number in range(3):
        await create(http, f"gone-{number}")
        place = f"/v2/deployments/gone-{number}"
        replies = await asyncio.gather(
            *(http.put(place, json={"config": {"maxTotalTokens": 64 + n}}) for n in range(4)),
            http.delete(place),
            *(http.get(f"/llms/gone-{number}/events") for _ in range(2)),
        )
        assert {each.status_code for each in replies} <= {200, 204, 404}, [each.text for each in replies]
        assert (await http.get(place)).status_code == 404


async def test_lists(http):
    """Models of the configuration are shared, those that were deployed private."""
    await create(http, "listed")
    for kind, there, absent in (
        ("", {"tiny", "listed"}, set()),
        ("?type=shared", {"tiny", "sorter"}, {"listed"}),
        ("?type=serverless", {"tiny"}, {"listed"}),
        ("?type=private", {"listed"}, {"tiny"}),
        ("?type=dedicated", {"listed"}, {"tiny"}),
    ):
        names = {each["name"] for each in (await http.get(f"/v2/deployments{kind}")).json()["data"]}
        assert names >= there and not names & absent
    assert (await get(http, "tiny"))["price"] is not None


@pytest.mark.parametrize(
    ("config", "status", "words"),
    [
        ({"baseModel": "nobody"}, 404, "nobody"),
        ({"loraxImageTag": "main"}, 400, "loraxImageTag"),
        ({"backend": "v2"}, 400, "backend"),
        ({"quantization": "eetq"}, 400, "quantization"),
        ({"customArgs": ["--trust-remote-code"]}, 400, "trust-remote-code"),
        ({"preloadedAdapters": ["nobody/1"]}, 404, "nobody/1"),
        ({"surprise": 1}, 400, "surprise"),
    ],
)
async def test_configs_that_are_refused(http, config, status, words):
    """By the name of the field, and nothing is deployed."""
    assert words in (await create(http, "refused", status=status, **config))["error"]
    assert (await http.get("/v2/deployments/refused")).status_code == 404


async def test_the_configurations_own(http):
    """A model of the configuration is not a caller's to change or delete."""
    for reply in (
        await http.put("/v2/deployments/tiny", json={"description": "x"}),
        await http.delete("/v2/deployments/tiny"),
    ):
        assert reply.status_code == 409 and "configuration" in reply.json()["error"]


async def test_a_token_is_never_told(http):
    """No reply has it."""
    made = await create(http, "gated", hfToken="hf_verysecret")
    results = [made, await get(http, "gated"), (await http.get("/v2/deployments")).json()]
    assert "verysecret" not in str(results)


async def test_recommended_config(http):
    """The config of a base model that there is; an accelerator is none of ours."""
    place = "/v2/deployments/recommended-config"
    reply = await http.get(f"{place}?baseModel=tiny&quantization=fp8")
    assert (reply.json()["baseModel"], reply.json()["quantization"]) == ("tiny", "fp8")
    assert (await http.get(f"{place}?baseModel=nobody")).status_code == 404
    assert "accelerator" in (await http.get(f"{place}?baseModel=tiny&accelerator=a100")).json()["error"]


async def test_request_logs(http):
    """There are none, said where the client looks for words."""
    reply = await http.get("/v2/deployments/tiny/request-logs?from=2026-01-01T00:00:00&to=2026-01-02T00:00:00")
    assert reply.status_code == 422 and "no log" in reply.json()["error"]["message"]


MODEL = ModelSpec("d", "llm", "m")
SINCE = 1000.0


def events(state: str, *kinds: tuple[str, float], late: bool = False, **fields) -> list[str]:
    """The types of the events of a deployment whose engine was asked for at SINCE."""
    details = fields.pop("details", request_details(SINCE))
    deployment = LlmDeployment("i", "p", "d", LlmSettings("m"), None, details, 500.0, 500.0, MODEL, **fields)
    view = EngineView(state, events=[EngineEvent(at, kind, "why") for kind, at in kinds], message="why")
    now = SINCE + (STARTS_WITHIN_S + 1 if late else 1)
    return [each.event_type for each in compute_events(deployment, view, now=now, detailed=True).events]


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (events("stopped"), []),
        (events("stopped", ("ready", 900.0)), []),
        (events("stopped", late=True), ["Ready"]),
        (events("starting", ("starting", 1000.5)), ["Initializing"]),
        (events("waiting", ("waiting", 1000.5)), ["Pending"]),
        (events("ready", ("ready", 900.0)), ["Ready"]),
        (events("ready", ("starting", 1001.0), ("ready", 1002.0)), ["Initializing", "Ready"]),
        (events("starting", ("failed", 1001.0), ("restarted", 1002.0)), ["Crashed", "Restarting"]),
        (events("failed", ("failed", 1001.0)), ["Crashed", "Failed"]),
        (events("ready", ("ready", 900.0), ("updating", 1000.1), serving=LlmSettings("m")), ["Updating"]),
        (events("ready", ("updating", 1000.1), ("ready", 1000.9), serving=LlmSettings("m")), ["Updating"]),
        (events("ready", ("update_failed", 1001.0), serving=LlmSettings("m"), problem="no"), ["Failed"]),
        (events("ready", ("updating", 1000.1), ("updated", 1001.0)), ["Updating", "Ready"]),
        (events("stopped", is_stopped=True, late=True), []),
    ],
)
async def test_events_end_a_wait_at_the_right_time(found, wanted):
    """What was ready before it was asked for again ends no wait; what waits for a first call, or has failed, does."""
    assert found == wanted
