"""The published inferless package against a real server, with the examples of its documentation unchanged."""

import json
import shutil
from pathlib import Path

import httpx2
import pytest
from story.client_envs import client_python
from story.deployed_functions import batchmill, deploy, page_file, run_example, run_script, server_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "inferless_app"
PROMPT = "There is a fine house in the forest"
LABELS = """
import json


class InferlessPythonModel:
    def initialize(self):
        pass

    def infer(self, inputs):
        match inputs["how"]:
            case "labels":
                return {"label_1": 0.398, "label_2": 0.563, "label_3": 0.434}
            case "images":
                return {"generated_images_base64": ["a", "b", "c"][: inputs.get("n", 3)]}
            case "keys":
                return {"result": json.dumps({"label_x": 0.4554, "label_y": 0.3232})}
            case "nested":
                return {"result": {"label_x": 0.4554}}
            case "seen":
                return {"seen": json.dumps({name: value for name, value in inputs.items() if name != "how"})}
        raise ValueError(f"{inputs['how']} is no way to do it")

    def finalize(self, args):
        pass
"""
LABELS_SCHEMA = """
INPUT_SCHEMA = {
    "how": {"datatype": "STRING", "required": True, "shape": [1], "example": ["labels"]},
    "n": {"datatype": "INT32", "required": False, "shape": [1]},
    "x": {"datatype": "FP64", "required": False, "shape": [-1]},
    "flag": {"datatype": "BOOL", "required": False, "shape": [1]},
    "words": {"datatype": "STRING", "required": False, "shape": [-1]},
    "grid": {"datatype": "INT64", "required": False, "shape": [2, 2]},
}
"""
STREAM = """
class InferlessPythonModel:
    def initialize(self):
        self.ended = 0

    def infer(self, inputs, stream_output_handler):
        for n in range(3):
            stream_output_handler.send_streamed_output({"n": n, "text": inputs["text"]})
        if inputs["text"] == "bad":
            raise ValueError("no more")

    def finalize(self):
        pass
"""
STREAM_SCHEMA = """
INPUT_SCHEMA = {"text": {"datatype": "STRING", "required": True, "shape": [1], "example": ["a"]}}
IS_STREAMING_OUTPUT = True
"""
CHAT = """
import json


class InferlessPythonModel:
    def initialize(self):
        pass

    def infer(self, inputs):
        message = json.loads(inputs["message"])
        return {"answer": message["content"].upper(), **{name: inputs[name] for name in inputs if name != "message"}}

    def finalize(self):
        pass
"""
CHAT_SCHEMA = """
INPUT_SCHEMA = {
    "message": {"datatype": "STRING", "required": True, "shape": [1], "example": ['{"role": "user", "content": "a"}']},
    "temperature": {"datatype": "FP32", "required": False, "shape": [1], "example": [0.5]},
    "max_tokens": {"datatype": "INT32", "required": False, "shape": [1], "example": [5]},
    "loud": {"datatype": "BOOL", "required": False, "shape": [1], "example": [True]},
}
"""
MASKED = """
class InferlessPythonModel:
    def initialize(self):
        pass

    def infer(self, inputs):
        kept = [each for each, mask in zip(inputs["input_ids"], inputs["attention_mask"]) if mask]
        return {"kept": kept, "label_1": 0.398}

    def finalize(self):
        pass
"""
TOGETHER = """
class InferlessPythonModel:
    def initialize(self):
        pass

    def infer(self, inputs):
        return [{"n": 2 * each["n"], "more": each.get("more", 0)} for each in inputs]

    def finalize(self):
        pass
"""
TOGETHER_SCHEMA = """
INPUT_SCHEMA = {
    "n": {"datatype": "INT32", "required": True, "shape": [1], "example": [1]},
    "more": {"datatype": "INT32", "required": False, "shape": [1]},
}
BATCH_SIZE = 4
"""
SAMPLE_INPUT = {
    "inputs": [
        {
            "name": "attention_mask",
            "shape": [1, 10],
            "datatype": "INT64",
            "data": [[1, 1, 1, 1, 1, 1, 1, 1, 1, 1]],
        },
        {
            "name": "input_ids",
            "shape": [1, 10],
            "datatype": "INT64",
            "data": [[3041, 5372, 502, 416, 597, 2420, 345, 1549, 588, 13]],
        },
    ]
}
SAMPLE_OUTPUT = {
    "outputs": [
        {"data": [""], "name": "kept", "shape": [-1], "datatype": "INT64"},
        {"name": "label_1", "shape": [1], "datatype": "FP64", "data": ["Sample Output"]},
    ]
}
BEGIN = """
import inferless
import requests
from inferless.api import InferlessOpenAIClient


def at(app):
    return f"{url}/api/v1/{app}/infer"


def failed(call, *args, **named):
    try:
        call(*args, **named)
    except Exception as error:
        return str(error)
"""


def app(folder, name, code, schema):
    home = folder / name
    home.mkdir()
    (home / "app.py").write_text(code)
    (home / "input_schema.py").write_text(schema)
    deploy(folder, name, "--name", name)


def masked(folder, name, sample_output, is_refused=False):
    """An app with the older sample input and output instead of a schema."""
    home = folder / name
    home.mkdir()
    (home / "app.py").write_text(MASKED)
    (home / "input.json").write_text(json.dumps(SAMPLE_INPUT))
    (home / "output.json").write_text(json.dumps(sample_output))
    if not is_refused:
        deploy(folder, name, "--name", name)
        return ""
    done = batchmill(folder, "deploy", name, "--name", name)
    assert done.returncode != 0
    return done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inferless")
    (folder / "batchmill.toml").write_text("")
    shutil.copytree(EXAMPLE, folder / "seed_app", ignore=shutil.ignore_patterns("__pycache__"))
    deploy(folder, "seed_app", "--name", "seed")
    app(folder, "labels", LABELS, LABELS_SCHEMA)
    app(folder, "stream", STREAM, STREAM_SCHEMA)
    app(folder, "talk", CHAT, CHAT_SCHEMA)
    masked(folder, "masked", SAMPLE_OUTPUT)
    app(folder, "together", TOGETHER, TOGETHER_SCHEMA)
    page = [page_file("inferless.md", f"my_app/{name}") for name in ("app.py", "input_schema.py")]
    app(folder, "my_app", *page)
    with server_of(folder, "", []) as running:
        yield running


@pytest.fixture(scope="module")
def run(server):
    python = client_python("inferless")
    return lambda script, **expected: run_script(python, BEGIN + script, url=server.url, **expected)


def values(answer):
    """The data of each output, by name."""
    return {each["name"]: each["data"] for each in answer["outputs"]}


def test_the_documentations_own_example_works_unchanged(run):
    """The seed's schema and prompt, with 512 in an INT8: the app gets a text and a list."""
    found = run(
        """
found["data"] = inferless.call(at("seed"), "key", data={"prompt": prompt, "shape": [512, 1]})
found["inputs"] = inferless.call(at("seed"), "key", inputs={"inputs": [
    {"name": "prompt", "shape": [1], "datatype": "BYTES", "data": [prompt]},
    {"name": "shape", "shape": [2], "datatype": "INT8", "data": [512, 1]},
]})
found["alone"] = inferless.call(at("seed"), "key", data={"prompt": prompt})
""",
        prompt=PROMPT,
    )
    assert values(found["data"])["shape"] == values(found["inputs"])["shape"] == [512, 1]
    assert values(found["alone"])["shape"] == [256, 1]
    assert [(each["name"], each["datatype"], each["shape"]) for each in found["data"]["outputs"]] == [
        ("house", "FP64", [1]), ("forest", "FP64", [1]), ("river", "FP64", [1]), ("found", "BYTES", [2]),
        ("shape", "INT64", [2]), ("result", "BYTES", [1]),
    ]  # fmt: skip
    assert json.loads(values(found["data"])["result"][0]) == {"best": "house"}


def test_the_documentations_returns_become_outputs(run):
    """Scalars, lists of any length and texts of JSON; a nested dictionary is refused in the vendor's words."""
    found = run(
        """
for how in ("labels", "images", "keys"):
    found[how] = inferless.call(at("labels"), "key", data={"how": how})
found["nested"] = failed(inferless.call, at("labels"), "key", data={"how": "nested"})
"""
    )
    labels = [{"name": f"label_{n}", "datatype": "FP64", "shape": [1], "data": [value]} for n, value in
              [(1, 0.398), (2, 0.563), (3, 0.434)]]  # fmt: skip
    assert found["labels"]["outputs"] == labels
    assert [found["images"]["outputs"][0][name] for name in ("shape", "data")] == [[3], ["a", "b", "c"]]
    assert json.loads(values(found["keys"])["result"][0]) == {"label_x": 0.4554, "label_y": 0.3232}
    assert "status code 500" in found["nested"]
    assert "result is of type dictionary or tuple which is currently not supported" in found["nested"]


def test_what_the_client_sends_arrives_as_it_was(run):
    """Each kind of value that the client labels by itself, one by one and in a batch of one."""
    found = run(
        """
data = {"how": "seen", "n": 3, "x": [0.5, 1.5], "flag": True, "words": ["a", "b"], "grid": [[1, 2], [3, 4]]}
found["plain"] = inferless.call(at("labels"), "key", data=data)
found["batch"] = inferless.call(at("labels"), "key", data={"how": "seen", "x": [0.5, 1.5]}, is_batch=True)
found["one"] = inferless.call(at("labels"), "key", data={"how": "seen", "x": [0.5], "words": ["a"]})
"""
    )
    seen = json.loads(values(found["plain"])["seen"][0])
    assert seen == {"n": 3, "x": [0.5, 1.5], "flag": True, "words": ["a", "b"], "grid": [[1, 2], [3, 4]]}
    assert json.loads(values(found["batch"])["seen"][0]) == {"x": [0.5, 1.5]}
    assert json.loads(values(found["one"])["seen"][0]) == {"x": [0.5], "words": ["a"]}


def test_the_older_samples_are_a_schema(run, server):
    """The documentation's sample input, with its dimension for the request, is what the app is called with (seed)."""
    found = run(
        """
found["answer"] = inferless.call(at("masked"), "key", inputs=sample)
""",
        sample=SAMPLE_INPUT,
    )
    ids = SAMPLE_INPUT["inputs"][1]["data"][0]
    kept = values(found["answer"])["kept"]
    assert kept == ids and values(found["answer"])["label_1"] == [0.398]


def test_output_names_of_the_older_samples_are_checked(server):
    """An app that does not return what its sample output names is refused when it is deployed, by that name."""
    wrong = {"outputs": [{"name": "generated_text", "shape": [1], "datatype": "BYTES", "data": ["Sample Output"]}]}
    assert "generated_text" in masked(server.folder, "wrongly_named", wrong, is_refused=True)


def test_an_app_gets_lists_and_says_how_long_they_wait(run, server):
    """With BATCH_SIZE an app gets a list of dicts; its window is 500 ms where it names none (I3)."""
    found = run(
        """
import threading

def call(n):
    return inferless.call_async(
        at("together"), "key", data={"n": n}, callback=lambda error, told: found.update({n: told})
    )


threads = [call(n) for n in range(4)]
for thread in threads:
    thread.join()
found["batch"] = inferless.call(at("together"), "key", data={"n": 5, "more": 1}, is_batch=True)
"""
    )
    assert [values(found[str(n)]) for n in range(4)] == [{"n": [2 * n], "more": [0]} for n in range(4)]
    assert values(found["batch"]) == {"n": [10], "more": [1]} and found["batch"]["outputs"][0]["shape"][0] == 1
    config = httpx2.get(f"{server.url}/v2/models/together/config").json()
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"] == {"preferred_batch_size": [4], "max_queue_delay_microseconds": 500000}


def test_calls_in_the_background(run):
    """`call_async` tells its callback the answer, or the error."""
    found = run(
        """
told = []
for how in ("labels", "wrong"):
    inferless.call_async(
        at("labels"), "key", data={"how": how}, callback=lambda *each: told.append([str(each[0]), each[1]])
    ).join()
found["told"] = told
"""
    )
    [good, bad] = found["told"]
    assert good[0] == "None" and values(good[1])["label_1"] == [0.398]
    assert bad[1] is None and "status code 500" in bad[0] and "ValueError: wrong is no way to do it" in bad[0]


def test_errors_say_what_is_wrong(run):
    """The client's exception holds the status and the error of a missing input, an unknown app and a wrong type."""
    found = run(
        """
found["missing"] = failed(inferless.call, at("seed"), "key", data={"shape": [1, 2]})
found["unknown"] = failed(inferless.call, at("nobody"), "key", data={"prompt": "a"})
found["type"] = failed(inferless.call, at("seed"), "key", data={"prompt": 3})
found["empty"] = failed(inferless.call, at("seed"), "key")
import numpy as np

found["array"] = failed(inferless.call, at("labels"), "key", data={"how": "seen", "flag": np.array([True])})
found["mixed"] = failed(inferless.call, at("labels"), "key", data={"how": "seen", "grid": [[1, 2.5], [3, 4]]})
"""
    )
    assert "status code 400" in found["missing"] and "prompt" in found["missing"]
    assert "status code 404" in found["unknown"] and "nobody" in found["unknown"]
    assert "status code 400" in found["type"] and "prompt" in found["type"]
    assert "status code 400" in found["empty"]
    assert "status code 400" in found["mixed"] and "2.5" in found["mixed"]
    assert "status code 400" in found["array"] and "datatype" in found["array"]  # the client sends none


def test_the_openai_client_of_the_package(run):
    """`InferlessOpenAIClient` posts to its base URL: the message as text, what else it is given as optional inputs."""
    found = run(
        """
client = InferlessOpenAIClient(api_key="key", base_url=at("talk"))
found["answer"] = client.call_infer({"role": "user", "content": "hi"}, temperature=0.25, max_tokens=5)
found["flag"] = client.call_infer({"role": "user", "content": "hi"}, loud=True)
"""
    )
    assert values(found["answer"]) == {"answer": ["HI"], "temperature": [0.25], "max_tokens": [5]}
    assert values(found["flag"])["loud"] == [True]  # which the client labels INT32


def test_an_app_sends_events_as_they_come(run, server):
    """Each event is `data: {"outputs": …}`; the stream ends by itself, and an error is its last event (P21)."""
    found = run(
        """
def read(text):
    body = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [text]}]}
    with requests.post(at("stream"), json=body, stream=True) as reply:
        lines = [line.decode() for line in reply.iter_lines() if line]
        return [reply.status_code, reply.headers["content-type"], lines]


found["good"], found["bad"] = read("a"), read("bad")
"""
    )
    status, media, lines = found["good"]
    assert (status, media) == (200, "text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [values(each) for each in events] == [{"n": [n], "text": ["a"]} for n in range(3)]
    assert json.loads(found["bad"][2][-1].removeprefix("data: "))["error"].endswith("ValueError: no more")
    assert len(found["bad"][2]) == 4
    again = httpx2.post(f"{server.url}/api/v1/labels/infer", json={
        "inputs": [{"name": "how", "shape": [1], "datatype": "BYTES", "data": ["labels"]}]
    })  # fmt: skip
    assert again.status_code == 200


def test_the_strict_address_holds_integers_to_their_width(server):
    """The same body at /v2 is refused: 512 is not an INT8 there (T3)."""
    body = {"inputs": [
        {"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["a"]},
        {"name": "shape", "shape": [2], "datatype": "INT8", "data": [512, 1]},
    ]}  # fmt: skip
    refused = httpx2.post(f"{server.url}/v2/models/seed/infer", json=body)
    assert refused.status_code == 400 and "512" in refused.json()["error"]
    reply = httpx2.get(f"{server.url}/v2/models/seed").json()
    assert reply["inputs"] == [
        {"name": "prompt", "datatype": "BYTES", "shape": [1]},
        {"name": "shape", "datatype": "INT8", "shape": [2], "optional": True},
    ]


def test_the_pages_program_prints_what_the_page_says(server):
    """The program of docs/inferless.md works as it stands there, with the app that the page shows."""
    printed, result = run_example(client_python("inferless"), "inferless.md", "inferless", server.port)
    assert printed == result
