"""The protocol over HTTP: every case of how requests, replies and errors look, against functions that really run."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import numpy as np
import pytest
import pytest_asyncio
from dialects.open_inference.tensor_kit import deploy, outputs, tensor, tensor_server

LENGTH = "inference-header-content-length"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    async with tensor_server(tmp_path_factory.mktemp("tensors")) as (running, client):
        yield running, client


@pytest.fixture
def client(server):
    return server[1]


def simple(**more):
    ones, twos = [1] * 16, [2] * 16
    return {"inputs": [tensor("INPUT0", "INT32", ones, [1, 16]), tensor("INPUT1", "INT32", twos, [1, 16])]} | more


def binary(requests, parts, **more):
    """A body of JSON and what lies behind it, and its headers."""
    head = json.dumps({"inputs": requests} | more).encode()
    return {"content": head + b"".join(parts), "headers": {LENGTH: str(len(head))}}


def raw(name, datatype, shape, size):
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}


async def test_an_answer_names_its_version_and_echoes_the_id(client):
    """P1: an id comes back, and where there is none, none is made up."""
    reply = await client.post("/v2/models/simple/infer", json=simple(id="42"))
    response = reply.json()
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
    assert (response["model_name"], response["model_version"], response["id"]) == ("simple", "1", "42")
    assert response["outputs"][0] == {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16], "data": [3] * 16}
    assert "id" not in (await client.post("/v2/models/simple/infer", json=simple())).json()


@pytest.mark.parametrize("media", [None, "application/json", "text/plain", "application/octet-stream"])
async def test_no_content_type_is_asked_for(client, media):
    """The published client sends none."""
    content = json.dumps(simple()).encode()
    headers = {} if media is None else {"content-type": media}
    request = client.build_request("POST", "/v2/models/simple/infer", content=content, headers=headers)
    assert outputs(await client.send(request))["OUTPUT1"] == [-1] * 16


@pytest.mark.parametrize(
    "path", ["simple/versions/1", "simple/versions/latest", "simple@1", "simple@main", "simple@main/versions/1"]
)
async def test_a_version_may_be_named(client, path):
    """A version, a label, or both: the same function answers."""
    assert outputs(await client.post(f"/v2/models/{path}/infer", json=simple()))["OUTPUT0"] == [3] * 16


async def test_json_and_binary_inputs_mix_in_order(client):
    """P7: inputs in binary are read in their order, among others in JSON; outputs are binary where that is asked."""
    ones = np.ones((1, 16), dtype="<i4").tobytes()
    sent = binary(
        [raw("INPUT0", "INT32", [1, 16], len(ones)), tensor("INPUT1", "INT32", [2] * 16, [1, 16])], [ones],
        outputs=[{"name": "OUTPUT1", "parameters": {"binary_data": True}}, {"name": "OUTPUT0"}],
    )  # fmt: skip
    reply = await client.post("/v2/models/simple/infer", **sent)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/octet-stream"
    length = int(reply.headers[LENGTH])
    result = json.loads(reply.content[:length])
    assert [each["name"] for each in result["outputs"]] == ["OUTPUT1", "OUTPUT0"]
    assert result["outputs"][0]["parameters"] == {"binary_data_size": 64} and result["outputs"][1]["data"] == [3] * 16
    assert np.frombuffer(reply.content[length:], "<i4").tolist() == [-1] * 16


async def test_a_body_may_be_the_only_input(client):
    """A header of 0 makes all of the body one input; a function of two inputs refuses it (P9)."""
    data = np.array([0.5, 2], dtype="<f4").tobytes()
    reply = await client.post("/v2/models/identity/infer", content=data, headers={LENGTH: "0"})
    assert reply.status_code == 200, reply.text
    assert reply.content[int(reply.headers[LENGTH]) :] == data
    refused = await client.post("/v2/models/simple/infer", content=data, headers={LENGTH: "0"})
    assert refused.status_code == 400 and "must only have 1 input" in refused.json()["error"]


@pytest.mark.parametrize("length", ["99999999999", "-1", "x", "", "1e3", "2147483648", "9" * 400, "1 2"])
async def test_a_header_that_is_no_length_is_refused(client, length):
    """P11: whatever the header holds, the answer is a 400, and the server lives."""
    sent = binary([raw("INPUT0", "FP32", [1], 4)], [b"\0\0\0\0"])
    sent["headers"][LENGTH] = length
    reply = await client.post("/v2/models/identity/infer", **sent)
    assert reply.status_code == 400 and reply.json().keys() == {"error"}
    assert (await client.get("/v2/health/live")).json() == {"live": True}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b'{"inputs": 3}', b'{"inputs": [3]}', b"\xff\xfe", b"[" * 100_000,
        b'{"inputs":[{"name":"INPUT0","shape":[1],"datatype":"FP32","data":' + b"[" * 5000 + b"]" * 5000 + b"}]}",
        b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    ],
)  # fmt: skip
async def test_a_body_that_cannot_be_read_is_refused(client, content):
    """P5, P13: no JSON, JSON of another shape, or JSON nested too deep: a 400, and the server lives."""
    reply = await client.post("/v2/models/identity/infer", content=content)
    assert reply.status_code == 400 and reply.json().keys() == {"error"}
    assert (await client.get("/v2/health/ready")).json() == {"ready": True}


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([tensor("INPUT0", "FP32", [1, 2, 3], [2, 2])], ["INPUT0"]),
        ([tensor("INPUT0", "FP32", [1], [-1])], ["INPUT0"]),
        ([tensor("INPUT0", "FLOAT", [1])], ["FLOAT"]),
        ([tensor("INPUT9", "FP32", [1])], ["INPUT9"]),
        ([tensor("INPUT0", "FP32", [1]), tensor("INPUT0", "FP32", [1])], ["INPUT0"]),
        ([], ["INPUT0"]),
    ],
)
async def test_what_is_wrong_with_an_input_is_named(client, inputs, words):
    """Shapes, datatypes and names that do not fit are told with the input's name."""
    reply = await client.post("/v2/models/identity/infer", json={"inputs": inputs})
    assert reply.status_code == 400
    assert all(word in reply.json()["error"] for word in words)


async def test_integers_are_exact(client):
    """T21: the largest and the smallest of 64 bits pass through untouched."""
    for n in (2**63 - 1, -(2**63), 2**53 + 1):
        reply = await client.post("/v2/models/exact/infer", json={"inputs": [tensor("n", "INT64", [n])]})
        assert outputs(reply) == {"n": [n]}


async def test_what_json_lacks_is_null(client):
    """O17: NaN is null in JSON, never a word that no parser reads."""
    reply = await client.post("/v2/models/nan/infer", json={"inputs": [tensor("n", "INT64", [1])]})
    assert outputs(reply) == {"x": [None, 1.0]}


async def test_an_optional_input_and_unknown_members(client):
    """An input may be left out where the function lets it; members that clients add are passed over."""
    body = {"inputs": [tensor("n", "INT64", [1], optional=True), tensor("bonus", "INT64", [2], optional=True)]}
    assert outputs(await client.post("/v2/models/exact/infer", json=body)) == {"n": [3]}


async def test_what_a_function_raises_is_told(client):
    """The status says that it is not the caller's fault; the last line is the error."""
    reply = await client.post("/v2/models/fail/infer", json={"inputs": [tensor("n", "INT64", [3])]})
    assert reply.status_code == 500
    assert reply.json()["error"].strip().splitlines()[-1] == "ValueError: 3 is no good"


@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE", "PATCH"])
async def test_another_method_is_405(client, method):
    """P23: in Triton's words."""
    reply = await client.request(method, "/v2/models/simple/infer")
    assert (reply.status_code, reply.json()) == (405, {"error": "Method Not Allowed"})


@pytest.mark.parametrize("path", ["/v2/nothing", "/v2/models/simple/nothing", "/v2/", "/v2/models"])
async def test_an_unknown_path_is_404(client, path):
    """In Triton's words."""
    reply = await client.get(path)
    assert (reply.status_code, reply.json()) == (404, {"error": "Not Found"})


@pytest.mark.parametrize(
    "path", ["nobody", "simple/versions/9", "simple/versions/x", "simple@nowhere", "nobody/versions/1", "a%2Fb"]
)
async def test_an_unknown_model_is_404(client, path):
    """Of every operation of a model."""
    for suffix in ("", "/ready", "/config", "/stats"):
        reply = await client.get(f"/v2/models/{path}{suffix}")
        assert reply.status_code == 404 and reply.json().keys() == {"error"}
    for suffix in ("/infer", "/generate", "/generate_stream", "/infer_stream"):
        assert (await client.post(f"/v2/models/{path}{suffix}", json=simple())).status_code == 404


async def test_a_model_says_what_it_takes(client):
    """P3: versions are texts, and -1 stays."""
    assert (await client.get("/v2/models/simple")).json() == {
        "name": "simple",
        "versions": ["1"],
        "platform": "batchmill_python",
        "inputs": [{"name": name, "datatype": "INT32", "shape": [-1, 16]} for name in ("INPUT0", "INPUT1")],
        "outputs": [],
    }
    assert (await client.get("/v2/models/simple/ready")).json() == {"name": "simple", "ready": True}
    reply = (await client.get("/v2/models/exact")).json()
    assert reply["inputs"][1] == {"name": "bonus", "datatype": "INT64", "shape": [1], "optional": True}


@pytest.mark.parametrize(("name", "write"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_bodies_may_be_compressed(client, name, write):
    """Both ways, JSON and binary: the header counts the JSON as it is without compression."""
    data = np.arange(1000, dtype="<f4").tobytes()
    sent = binary(
        [raw("INPUT0", "FP32", [1000], len(data))], [data], parameters={"binary_data_output": True}
    )  # fmt: skip
    headers = sent["headers"] | {"content-encoding": name, "accept-encoding": name}
    reply = await client.post("/v2/models/identity/infer", content=write(sent["content"]), headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-encoding"] == name
    assert reply.content[int(reply.headers[LENGTH]) :] == data


async def test_a_body_in_another_encoding_is_refused(client):
    """By name."""
    reply = await client.post("/v2/models/simple/infer", content=b"x", headers={"content-encoding": "br"})
    assert reply.status_code == 415 and "br" in reply.json()["error"]


# -- generate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ({"text_input": "a"}, "a"),
        ({"text_input": "a", "times": 2}, "a a"),
        ({"text_input": "a", "parameters": {"times": 3}}, "a a a"),
    ],
)
async def test_generate_calls_by_name(client, body, answer):
    """Members of the body and of `parameters` are arguments; one value is the text that is put out."""
    reply = await client.post("/v2/models/greet/generate", json=body)
    assert reply.json() == {"model_name": "greet", "model_version": "1", "text_output": answer}


async def test_generate_echoes_the_id_unless_it_is_an_argument(client):
    """A function that has a parameter `id` gets it; a dict's members are members of the answer."""
    reply = (await client.post("/v2/models/greet/versions/1/generate", json={"id": "7", "text_input": "a"})).json()
    assert reply == {"id": "7", "model_name": "greet", "model_version": "1", "text_output": "a"}
    reply = (await client.post("/v2/models/described/generate", json={"id": "7", "text_input": "a"})).json()
    assert reply == {"model_name": "described", "model_version": "1", "text": "a", "id": "7"}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"text_input": "a", "times": 2, "parameters": {"times": 3}}, "times"),
        ({"text_input": "a", "parameters": 3}, "parameters"),
        ({"text_input": "a", "id": 3}, "id"),
        ({"times": 2}, "text_input"),
        ({"text_input": "a", "tims": 2}, "tims"),
        ([], "object"),
    ],
)
async def test_generate_refuses_by_name(client, body, word):
    """What is missing, unknown, said twice or of another kind."""
    reply = await client.post("/v2/models/greet/generate", json=body)
    assert reply.status_code == 400 and word in reply.json()["error"]


async def test_generate_wants_one_answer(client):
    """A function of many answers is asked by another path, and the other way round."""
    reply = await client.post("/v2/models/count/generate", json={"to": 3})
    assert reply.status_code == 400 and "use generate_stream" in reply.json()["error"]
    reply = await client.post("/v2/models/greet/generate_stream", json={"text_input": "a"})
    assert reply.status_code == 400 and "does not stream" in reply.json()["error"]


def events(reply):
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/event-stream")
    *lines, rest = reply.text.split("\n\n")
    assert rest == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_a_stream_has_an_event_for_each_value(client):
    """P21: as many events as there are values, each with the model's name; then the end."""
    reply = events(await client.post("/v2/models/count/generate_stream", json={"to": 3, "id": "7"}))
    assert reply == [{"id": "7", "model_name": "count", "model_version": "1", "n": n} for n in range(3)]
    inputs = {"inputs": [tensor("to", "INT64", [2])]}
    reply = events(await client.post("/v2/models/count/infer_stream", json=inputs))
    assert [each["outputs"][0]["data"] for each in reply] == [[0], [1]]


async def test_an_error_in_a_stream_is_its_last_event(client):
    """The status has been sent: what is raised later comes as an event."""
    response = events(await client.post("/v2/models/count/generate_stream", json={"to": 1, "bad": True}))
    assert response[0]["n"] == 0 and response[1]["error"].strip().splitlines()[-1] == "ValueError: no more"
    reply = await client.post("/v2/models/count/generate_stream", json={"too": 1})
    assert reply.status_code == 400


# -- the repository, statistics ----------------------------------------------------------------------------------------


async def test_a_new_version_is_the_latest(server, client):
    """A version that is deployed is there at once, beside those before."""
    running, _ = server
    await deploy(running, "renewed", "def renewed(n: int):\n    return {'n': n}\n")
    await deploy(running, "renewed", "def renewed(n: int):\n    return {'n': -n}\n")
    body = {"inputs": [tensor("n", "INT64", [1])]}
    reply = [
        outputs(await client.post(f"/v2/models/renewed{path}/infer", json=body))["n"][0]
        for path in ("", "/versions/1", "/versions/2", "@1")
    ]
    assert reply == [-1, 1, -1, 1]
    assert (await client.get("/v2/models/renewed")).json()["versions"] == ["1", "2"]
    index = (await client.post("/v2/repository/index", content=b"")).json()
    assert [each for each in index if each["name"] == "renewed"] == [
        {"name": "renewed", "version": version, "state": "READY", "reason": ""} for version in ("1", "2")
    ]


async def test_unloaded_is_not_ready_until_loaded(client):
    """Calls are refused meanwhile, the index says so, and `ready` leaves it out."""
    body = {"inputs": [tensor("n", "INT64", [1])]}
    assert (await client.post("/v2/repository/models/exact/unload", json={})).status_code == 200
    refused = await client.get("/v2/models/exact/ready")
    assert refused.status_code == 400 and refused.json()["ready"] is False
    assert (await client.post("/v2/models/exact/infer", json=body)).status_code == 503
    index = (await client.post("/v2/repository/index", json={"ready": True})).json()
    assert "exact" not in [each["name"] for each in index]
    assert (await client.post("/v2/repository/models/exact/load", content=b"")).status_code == 200
    assert outputs(await client.post("/v2/models/exact/infer", json=body)) == {"n": [1]}


@pytest.mark.parametrize("parameters", [{"config": "{}"}, {"file:1/model.py": "eA=="}])
async def test_a_model_cannot_be_changed_by_loading_it(client, parameters):
    """Its code and settings are a version's own: what would change them is refused by name."""
    reply = await client.post("/v2/repository/models/exact/load", json={"parameters": parameters})
    assert reply.status_code == 400 and next(iter(parameters)) in reply.json()["error"]


async def test_statistics_count_rows_and_calls(client):
    """What was called is counted: rows, calls of user code and requests, good and bad."""
    body = {"inputs": [tensor("n", "INT64", [3])]}
    before = (await client.get("/v2/models/fail/stats")).json()["model_stats"][0]
    await asyncio.gather(*[client.post("/v2/models/fail/infer", json=body) for _ in range(3)])
    after = (await client.get("/v2/models/fail/versions/1/stats")).json()["model_stats"][0]
    assert after["inference_stats"]["fail"]["count"] - before["inference_stats"]["fail"]["count"] == 3
    everything = (await client.get("/v2/models/stats")).json()["model_stats"]
    assert {each["name"] for each in everything} >= {"fail", "simple", "greet"}
