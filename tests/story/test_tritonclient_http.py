"""The published tritonclient over HTTP, against a real server: tensors in JSON and binary, and everything it asks."""

import pytest
from story.client_envs import client_python
from story.deployed_functions import run_example, run_script, server_of

FUNCTIONS = '''
from typing import Annotated

import numpy as np

from batchmill import batched, tensor

Sixteen = Annotated[np.ndarray, tensor("INT32", [-1, 16])]
Wide = Annotated[np.ndarray, tensor("FP32", [-1, 1024])]
Half = Annotated[np.ndarray, tensor("FP16", [-1])]
Brain = Annotated[np.ndarray, tensor("BF16", [-1])]
Words = Annotated[np.ndarray, tensor("BYTES", [-1])]


def simple(INPUT0: Sixteen, INPUT1: Sixteen):
    """Add and subtract."""
    return {"OUTPUT0": INPUT0 + INPUT1, "OUTPUT1": INPUT0 - INPUT1}


def identity(INPUT0: Wide):
    return {"OUTPUT0": INPUT0}


def halves(INPUT0: Half):
    return {"OUTPUT0": INPUT0}


def brains(INPUT0: Brain):
    return {"OUTPUT0": INPUT0}


def strings(INPUT0: list[str]):
    return {"OUTPUT0": INPUT0}


def labels(n: int):
    return {"scores": np.array([0.1, 0.7, 0.2], dtype=np.float32)}


def fail(n: int):
    raise ValueError(f"{n} is no good")


@batched(8)
def double(n: list[int]):
    return [2 * each for each in n]


@batched(8)
def short(n: list[int], good: list[bool]):
    return n if all(good) else n[:-1]


def count(to: int):
    for n in range(to):
        yield {"n": n}


def greet(text_input: str, times: int = 1):
    return " ".join([text_input] * times)
'''
NAMES = (
    "simple", "identity", "halves", "brains", "strings", "labels", "fail", "double", "short", "count", "greet",
)  # fmt: skip
BEGIN = """
import numpy as np
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

client = http.InferenceServerClient(address, concurrency=16)


def given(name, array, datatype, binary=True):
    tensor = http.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def refused(call, *args, **named):
    try:
        call(*args, **named)
    except InferenceServerException as error:
        return [error.status(), error.message()]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("triton")
    deployments = [(f"functions.py:{name}", "--name", name) for name in NAMES]
    deployments.append(("functions.py:double", "--name", "together", "--batch-window", "20s"))
    with server_of(folder, FUNCTIONS, deployments) as running:
        yield running


@pytest.fixture(scope="module")
def run(server):
    """Runs a script with the client; `found` is what it leaves."""
    python = client_python("tritonclient")
    return lambda script, **fields: run_script(python, BEGIN + script, address=f"127.0.0.1:{server.port}", **fields)


def test_the_server_tells_of_itself_and_its_functions(run):
    """Health, metadata, configuration and readiness are what the client expects of any server of the protocol."""
    found = run(
        """
found["live"], found["ready"] = client.is_server_live(), client.is_server_ready()
found["server"] = client.get_server_metadata()
found["model"] = client.get_model_metadata("simple")
found["version"] = client.get_model_metadata("simple", model_version="1")
found["config"] = client.get_model_config("simple")
found["models"] = [client.is_model_ready("simple"), client.is_model_ready("simple", "1"), client.is_model_ready("none")]
found["missing"] = refused(client.get_model_metadata, "none")
found["old"] = refused(client.get_model_metadata, "simple", model_version="7")
"""
    )
    assert (found["live"], found["ready"]) == (True, True)
    assert found["server"]["name"] == "batchmill" and "binary_tensor_data" in found["server"]["extensions"]
    assert found["model"] == found["version"]
    assert found["model"]["versions"] == ["1"]
    assert found["model"]["inputs"] == [
        {"name": name, "datatype": "INT32", "shape": [-1, 16]} for name in ("INPUT0", "INPUT1")
    ]
    assert found["config"]["input"][0]["data_type"] == "TYPE_INT32"
    assert found["models"] == [True, True, False]
    assert found["missing"][0] == "404" and "none" in found["missing"][1]
    assert found["old"][0] == "404" and "7" in found["old"][1]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_add_and_subtract(run, binary_in, binary_out):
    """The client's own first example: binary or JSON, both ways, with outputs asked for by name or not."""
    found = run(
        """
a = np.arange(16, dtype=np.int32).reshape(1, 16)
b = np.full((1, 16), 2**31 - 20, dtype=np.int32)
outputs = None if binary_out is None else [http.InferRequestedOutput("OUTPUT1", binary_data=binary_out)]
inputs = [given("INPUT0", a, "INT32", binary_in), given("INPUT1", b, "INT32", binary_in)]
answer = client.infer("simple", inputs, outputs=outputs, request_id="42")
found["response"] = answer.get_response()
found["difference"] = bool((answer.as_numpy("OUTPUT1") == a - b).all())
found["sum"] = None if binary_out is not None else bool((answer.as_numpy("OUTPUT0") == a + b).all())
found["dtype"] = str(answer.as_numpy("OUTPUT1").dtype)
""",
        binary_in=binary_in, binary_out=binary_out,
    )  # fmt: skip
    assert (found["difference"], found["dtype"]) == (True, "int32")
    assert found["sum"] is (True if binary_out is None else None)
    response = found["response"]
    assert (response["id"], response["model_name"], response["model_version"]) == ("42", "simple", "1")
    assert [each["name"] for each in response["outputs"]] == (
        ["OUTPUT0", "OUTPUT1"] if binary_out is None else ["OUTPUT1"]
    )
    assert all(each["shape"] == [1, 16] for each in response["outputs"])


def test_large_and_half_tensors_come_back_bit_for_bit(run):
    """FP32 [64, 1024], FP16, BF16 and text are what they were, NaN and infinities included."""
    found = run(
        """
import ml_dtypes

wide = np.random.default_rng(7).standard_normal((64, 1024)).astype(np.float32)
wide[0, :3] = [np.nan, np.inf, -np.inf]
answer = client.infer("identity", [given("INPUT0", wide, "FP32")])
found["wide"] = answer.as_numpy("OUTPUT0").tobytes() == wide.tobytes()
half = np.array([0.5, -65504, np.inf, 6e-8], dtype=np.float16)
answer = client.infer("halves", [given("INPUT0", half, "FP16")])
found["half"] = answer.as_numpy("OUTPUT0").tobytes() == half.tobytes()
brain = np.array([0.5, -1e30, 3], dtype=ml_dtypes.bfloat16)
found["brain"] = client.infer("brains", [given("INPUT0", brain, "BF16")]).as_numpy("OUTPUT0").tolist()
words = np.array(["a", "zwölf", ""], dtype=np.object_)
for binary in (True, False):
    outputs = [http.InferRequestedOutput("OUTPUT0", binary_data=binary)]
    answer = client.infer("strings", [given("INPUT0", words, "BYTES", binary)], outputs=outputs).as_numpy("OUTPUT0")
    found[f"words {binary}"] = [each.decode() if isinstance(each, bytes) else each for each in answer.tolist()]
"""
    )
    assert found == {
        "wide": True, "half": True, "brain": pytest.approx([0.5, -1e30, 3], rel=0.01),
        "words True": ["a", "zwölf", ""], "words False": ["a", "zwölf", ""],
    }  # fmt: skip


def test_queries_and_sequences_are_taken_as_triton_takes_them(run):
    """A query is for proxies on the way; sequence and priority mean nothing to a model that knows neither."""
    found = run(
        """
query = {"tenant": "a b", "tag": ["x", "y"]}
found["live"] = client.is_server_live(query_params=query)
found["model"] = client.get_model_metadata("labels", query_params=query)["name"]
inputs = [given("n", np.array([4]), "INT64")]
for name, sequence in (("number", 7), ("text", "talk")):
    answer = client.infer(
        "labels", inputs, query_params=query, sequence_id=sequence, sequence_start=True, sequence_end=True, priority=3
    )
    found[name] = answer.as_numpy("scores").size
"""
    )
    assert (found["live"], found["model"]) == (True, "labels")
    assert found["number"] == found["text"] == 3


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_bodies_may_be_compressed_both_ways(run, algorithm):
    """What the client compresses is read, and it gets what it asks for."""
    found = run(
        """
a = np.ones((8, 1024), dtype=np.float32)
answer = client.infer(
    "identity", [given("INPUT0", a, "FP32")], request_compression_algorithm=algorithm,
    response_compression_algorithm=algorithm,
)
found["same"] = bool((answer.as_numpy("OUTPUT0") == a).all())
found["parsed"] = answer.get_response()["outputs"][0]["shape"]
""",
        algorithm=algorithm,
    )
    assert found == {"same": True, "parsed": [8, 1024]}


def test_errors_are_sentences_with_a_status(run):
    """What the caller did wrong is a 400, who is unknown a 404, what the function raised a 500 with its traceback."""
    found = run(
        """
a, b = np.ones((1, 16), dtype=np.int32), np.ones((1, 16), dtype=np.float32)
found["missing"] = refused(client.infer, "simple", [given("INPUT0", a, "INT32")])
found["datatype"] = refused(client.infer, "simple", [given("INPUT0", a, "INT32"), given("INPUT1", b, "FP32")])
found["unknown"] = refused(client.infer, "nobody", [given("INPUT0", a, "INT32")])
found["raised"] = refused(client.infer, "fail", [given("n", np.array([3]), "INT64")])
found["stream"] = refused(client.infer, "count", [given("to", np.array([3]), "INT64")])
found["output"] = refused(
    client.infer, "simple", [given("INPUT0", a, "INT32"), given("INPUT1", a, "INT32")],
    outputs=[http.InferRequestedOutput("OUTPUT9")],
)
"""
    )
    assert found["missing"][0] == "400" and "['INPUT1']" in found["missing"][1]
    assert found["datatype"][0] == "400" and "INPUT1" in found["datatype"][1]
    assert found["unknown"][0] == "404"
    assert found["raised"][0] == "500" and found["raised"][1].strip().splitlines()[-1] == "ValueError: 3 is no good"
    assert found["stream"][0] == "400" and "decoupled" in found["stream"][1]
    assert found["output"][0] == "400" and "OUTPUT9" in found["output"][1]


def test_calls_of_many_clients_meet_in_batches(run):
    """Eight single-row calls at once are one call of the function, and each gets its own answer (P15)."""
    found = run(
        """
def counts():
    [stats] = client.get_inference_statistics("together")["model_stats"]
    return stats


before = counts()
calls = [client.async_infer("together", [given("n", np.array([n]), "INT64")]) for n in range(8)]
found["answers"] = [int(call.get_result().as_numpy("output")[0]) for call in calls]
found["before"], found["after"] = before, counts()
"""
    )
    before, after = found["before"], found["after"]
    assert found["answers"] == [2 * n for n in range(8)]
    assert after["inference_count"] - before["inference_count"] == 8
    assert after["execution_count"] - before["execution_count"] == 1
    [batch] = after["batch_stats"]
    assert (batch["batch_size"], batch["compute_infer"]["count"]) == (8, 1) and batch["compute_infer"]["ns"] > 0
    assert after["inference_stats"]["success"]["count"] == 8 and after["last_inference"] > 1e12


def test_a_large_request_is_cut_and_joined(run):
    """Twenty rows in one request of a function of eight are calls of eight at most, joined in order (P19)."""
    found = run(
        """
answer = client.infer("double", [given("n", np.arange(20).reshape(20, 1), "INT64")]).as_numpy("output")
found["answer"], found["shape"] = answer.ravel().tolist(), list(answer.shape)
stats = client.get_inference_statistics("double", model_version="1")["model_stats"][0]
found["sizes"] = {each["batch_size"]: each["compute_infer"]["count"] for each in stats["batch_stats"]}
"""
    )
    assert found["answer"] == [2 * n for n in range(20)] and found["shape"][0] == 20
    assert found["sizes"] == {"4": 1, "8": 2}


def test_a_wrong_number_of_results_is_an_error_and_the_next_call_works(run):
    """A batch that gives one result too few is refused with both numbers; nothing else is harmed (P17)."""
    found = run(
        """
n, good, bad = np.arange(8).reshape(8, 1), np.ones((8, 1), dtype=bool), np.zeros((8, 1), dtype=bool)
found["bad"] = refused(client.infer, "short", [given("n", n, "INT64"), given("good", bad, "BOOL")])
answer = client.infer("short", [given("n", n, "INT64"), given("good", good, "BOOL")])
found["good"] = answer.as_numpy("output").ravel().tolist()
"""
    )
    assert found["bad"][0] == "500" and "7" in found["bad"][1] and "8" in found["bad"][1]
    assert found["good"] == list(range(8))


def test_the_repository_is_told_and_functions_are_loaded_and_unloaded(run):
    """The index names every function; one that was unloaded is not ready until it is loaded again."""
    found = run(
        """
def index():
    return {each["name"]: each["state"] for each in client.get_model_repository_index()}


found["index"] = index()
client.unload_model("labels")
found["unloaded"] = [client.is_model_ready("labels"), index()["labels"]]
found["refused"] = refused(client.infer, "labels", [given("n", np.array([1]), "INT64")])
client.load_model("labels")
found["loaded"] = [client.is_model_ready("labels"), index()["labels"]]
found["answer"] = client.infer("labels", [given("n", np.array([1]), "INT64")]).as_numpy("scores").shape
found["config"] = refused(client.load_model, "labels", config="{}")
found["file"] = refused(client.load_model, "labels", config="{}", files={"file:1/model.py": b"x"})
"""
    )
    assert set(found["index"].values()) == {"READY"} and set(NAMES) <= set(found["index"])
    assert found["unloaded"] == [False, "UNAVAILABLE"]
    assert found["refused"][0] == "503" and "load" in found["refused"][1]
    assert found["loaded"] == [True, "READY"] and found["answer"] == [3]
    assert found["config"][0] == "400" and "config" in found["config"][1]
    assert found["file"][0] == "400"


def test_classes_of_an_output(run):
    """`class_count` gives the best as VALUE:INDEX."""
    found = run(
        """
outputs = [http.InferRequestedOutput("scores", class_count=2)]
answer = client.infer("labels", [given("n", np.array([1]), "INT64")], outputs=outputs)
found["classes"] = [each.decode() for each in answer.as_numpy("scores").ravel().tolist()]
"""
    )
    assert [each.split(":")[1] for each in found["classes"]] == ["1", "2"]


def test_settings_are_told_and_not_changed(run):
    """Log and trace settings can be read; changing one, and shared memory, is refused by name."""
    found = run(
        """
found["log"] = client.get_log_settings()
found["same"] = client.update_log_settings({"log_info": True}) == found["log"]
found["verbose"] = refused(client.update_log_settings, {"log_verbose_level": 1})
found["trace"] = client.get_trace_settings()
found["model"] = client.get_trace_settings(model_name="simple") == found["trace"]
found["level"] = refused(client.update_trace_settings, settings={"trace_level": ["TIMESTAMPS"]})
found["memory"] = client.get_system_shared_memory_status()
client.unregister_system_shared_memory()
client.unregister_cuda_shared_memory()
found["register"] = refused(client.register_system_shared_memory, "region", "/region", 64)
"""
    )
    assert found["log"]["log_error"] is True and found["same"]
    assert found["trace"]["trace_level"] == ["OFF"] and found["model"]
    assert found["verbose"][0] == found["level"][0] == found["register"][0] == "400"
    assert "log_verbose_level" in found["verbose"][1] and "trace_level" in found["level"][1]
    assert found["memory"] == [] and "shared memory" in found["register"][1]


def test_the_pages_program_prints_what_the_page_says(server):
    """The program of docs/open-inference.md works as it stands there."""
    printed, result = run_example(client_python("tritonclient"), "open-inference.md", "tritonclient", server.port)
    assert printed == result
