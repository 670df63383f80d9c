"""The published tritonclient over gRPC, against a real server: tensors raw both ways, streams, and all it asks."""

import json

import httpx2
import pytest
from google.protobuf.descriptor import FieldDescriptor
from story.client_envs import client_python
from story.deployed_functions import batchmill, page_file, run_example, run_script, server_of

from batchmill.dialects.open_inference.grpc.bodies import METHODS

FUNCTIONS = '''
import asyncio
from pathlib import Path
from typing import Annotated

import numpy as np

from batchmill import batched, tensor

HERE = Path(__file__).parent
Sixteen = Annotated[np.ndarray, tensor("INT32", [-1, 16])]
Wide = Annotated[np.ndarray, tensor("FP32", [-1, 1024])]
Half = Annotated[np.ndarray, tensor("FP16", [-1])]
Brain = Annotated[np.ndarray, tensor("BF16", [-1])]
Long = Annotated[np.ndarray, tensor("UINT64", [-1])]


def simple(INPUT0: Sixteen, INPUT1: Sixteen):
    """Add and subtract."""
    return {"OUTPUT0": INPUT0 + INPUT1, "OUTPUT1": INPUT0 - INPUT1}


def identity(INPUT0: Wide):
    return {"OUTPUT0": INPUT0}


def halves(INPUT0: Half):
    return {"OUTPUT0": INPUT0}


def brains(INPUT0: Brain):
    return {"OUTPUT0": INPUT0}


def longs(INPUT0: Long):
    return {"OUTPUT0": INPUT0}


def strings(INPUT0: list[str]):
    return {"OUTPUT0": INPUT0}


def labels(n: int):
    return {"scores": np.array([0.1, 0.7, 0.2], dtype=np.float32)}


def fail(n: int):
    raise ValueError(f"{n} is no good")


async def never(n: int):
    await asyncio.Event().wait()


@batched(8)
def double(n: list[int]):
    return [2 * each for each in n]


def count(to: int):
    for n in range(to):
        if n == 5:
            raise ValueError("no further than five")
        yield {"n": n, "half": n / 2}
'''
PAGE = "open-inference-grpc.md"
NAMES = (
    "simple", "identity", "halves", "brains", "longs", "strings", "labels", "fail", "never", "double", "count",
)  # fmt: skip
BEGIN = """
import threading
import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

client = triton.InferenceServerClient(address)


def given(name, array, datatype):
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def refused(call, *args, **named):
    try:
        call(*args, **named)
    except InferenceServerException as error:
        return [error.status(), error.message()]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("triton-grpc")
    deployments = [(f"functions.py:{name}", "--name", name) for name in NAMES]
    deployments.append(("functions.py:double", "--name", "together", "--batch-window", "20s"))
    (folder / "models.py").write_text(page_file(PAGE, "models.py"))
    deployments.append(("models.py:halve", "--name", "halve"))
    with server_of(folder, FUNCTIONS, deployments, "--grpc-port", "0") as running:
        yield running


@pytest.fixture(scope="module")
def run(server):
    """Runs a script with the client; `found` is what it leaves."""
    python = client_python("tritonclient")
    return lambda script, **told: run_script(python, BEGIN + script, address=server.grpc, **told)


def test_every_message_is_that_of_the_client():
    """Each method, field, number and type that the server knows is the client's own."""
    found = run_script(
        client_python("tritonclient"),
        """
from tritonclient.grpc import service_pb2


def fields(message, seen):
    if message.full_name in seen:
        return
    seen[message.full_name] = {
        each.name: [each.number, each.type, (each.message_type or each.enum_type or message).full_name]
        for each in message.fields
    }
    for each in message.fields:
        if each.message_type is not None:
            fields(each.message_type, seen)


for method in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
    fields(method.input_type, found)
    fields(method.output_type, found)
""",
    )
    seen = {}
    _own_fields(seen, *(each for method in METHODS.values() for each in (method.request, method.response)))
    for name, own in seen.items():
        assert own.items() <= {key: tuple(value) for key, value in found[name].items()}.items(), name
    assert len(seen) > 60


def _own_fields(seen, *messages):
    for message in (getattr(each, "DESCRIPTOR", each) for each in messages):
        if message.full_name in seen:
            continue
        seen[message.full_name] = {
            each.name: (each.number, each.type, (each.message_type or each.enum_type or message).full_name)
            for each in message.fields
        }
        _own_fields(seen, *(each.message_type for each in message.fields if each.type == FieldDescriptor.TYPE_MESSAGE))


def test_the_server_tells_of_itself_and_its_functions(run):
    """Health, metadata, configuration and readiness are those that HTTP tells."""
    found = run(
        """
found["live"], found["ready"] = client.is_server_live(), client.is_server_ready()
found["server"] = client.get_server_metadata(as_json=True)
found["model"] = client.get_model_metadata("simple", as_json=True)
found["same"] = client.get_model_metadata("simple", model_version="1", as_json=True) == found["model"]
found["config"] = client.get_model_config("double", as_json=True)["config"]
found["stream"] = client.get_model_config("count").config.model_transaction_policy.decoupled
found["models"] = [
    client.is_model_ready(*each) for each in (("simple",), ("simple", "1"), ("none",), ("simple", "7"))
]
found["missing"] = refused(client.get_model_metadata, "none")
found["old"] = refused(client.get_model_metadata, "simple", model_version="7")
"""
    )
    assert (found["live"], found["ready"], found["same"], found["stream"]) == (True, True, True, True)
    assert found["server"]["name"] == "batchmill" and "binary_tensor_data" in found["server"]["extensions"]
    assert found["model"]["inputs"] == [
        {"name": name, "datatype": "INT32", "shape": ["-1", "16"]} for name in ("INPUT0", "INPUT1")
    ]
    assert (found["model"]["versions"], found["model"]["platform"]) == (["1"], "batchmill_python")
    assert found["config"]["input"][0]["data_type"] == "TYPE_INT64"
    assert (found["config"]["max_batch_size"], found["models"]) == (8, [True, True, False, False])
    assert found["missing"][0] == "StatusCode.NOT_FOUND" and "none" in found["missing"][1]
    assert found["old"][0] == "StatusCode.NOT_FOUND" and "7" in found["old"][1]


@pytest.mark.parametrize("named", [True, False])
def test_add_and_subtract(run, named):
    """The client's own first example, with outputs asked for by name or not."""
    found = run(
        """
a = np.arange(16, dtype=np.int32).reshape(1, 16)
b = np.full((1, 16), 2**31 - 20, dtype=np.int32)
outputs = [triton.InferRequestedOutput("OUTPUT1")] if named else None
answer = client.infer(
    "simple", [given("INPUT0", a, "INT32"), given("INPUT1", b, "INT32")], outputs=outputs, request_id="42"
)
found["response"] = answer.get_response(as_json=True)
found["difference"] = bool((answer.as_numpy("OUTPUT1") == a - b).all())
found["sum"] = None if named else bool((answer.as_numpy("OUTPUT0") == a + b).all())
found["dtype"] = str(answer.as_numpy("OUTPUT1").dtype)
""",
        named=named,
    )
    assert (found["difference"], found["dtype"], found["sum"]) == (True, "int32", None if named else True)
    response = found["response"]
    assert (response["id"], response["model_name"], response["model_version"]) == ("42", "simple", "1")
    assert [each["name"] for each in response["outputs"]] == (["OUTPUT1"] if named else ["OUTPUT0", "OUTPUT1"])
    assert all(each["shape"] == ["1", "16"] for each in response["outputs"])
    assert "parameters" not in response


def test_tensors_come_back_bit_for_bit(run):
    """FP32 [64, 1024], FP16, BF16, 64-bit integers and text are what they were, NaN and infinities included."""
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
longs = np.array([2**64 - 1], dtype=np.uint64)
found["longs"] = client.infer("longs", [given("INPUT0", longs, "UINT64")]).as_numpy("OUTPUT0").tolist()
words = np.array(["a", "zwölf", ""], dtype=np.object_)
answer = client.infer("strings", [given("INPUT0", words, "BYTES")]).as_numpy("OUTPUT0")
found["words"] = [each.decode() for each in answer.tolist()]
"""
    )
    assert found == {
        "wide": True, "half": True, "brain": pytest.approx([0.5, -1e30, 3], rel=0.01), "longs": [2**64 - 1],
        "words": ["a", "zwölf", ""],
    }  # fmt: skip


def test_a_sequence_means_nothing_to_a_model_without_one(run):
    """Sequence and priority are taken, as Triton's ordinary models take them."""
    found = run(
        """
for name, sequence in (("number", 7), ("text", "talk")):
    answer = client.infer(
        "labels", [given("n", np.array([4]), "INT64")], sequence_id=sequence, sequence_start=True, priority=3
    )
    found[name] = answer.as_numpy("scores").size
"""
    )
    assert found["number"] == found["text"] == 3


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_messages_may_be_compressed(run, algorithm):
    """What the client compresses is read."""
    found = run(
        """
a = np.ones((8, 1024), dtype=np.float32)
answer = client.infer("identity", [given("INPUT0", a, "FP32")], compression_algorithm=algorithm)
found["same"] = bool((answer.as_numpy("OUTPUT0") == a).all())
""",
        algorithm=algorithm,
    )
    assert found == {"same": True}


def test_errors_are_sentences_with_a_status(run):
    """What the caller did wrong, who is unknown, and what the function raised, each has a status of its own."""
    found = run(
        """
a, b = np.ones((1, 16), dtype=np.int32), np.ones((1, 16), dtype=np.float32)
found["missing"] = refused(client.infer, "simple", [given("INPUT0", a, "INT32")])
found["datatype"] = refused(client.infer, "simple", [given("INPUT0", a, "INT32"), given("INPUT1", b, "FP32")])
found["unknown"] = refused(client.infer, "nobody", [given("INPUT0", a, "INT32")])
found["raised"] = refused(client.infer, "fail", [given("n", np.array([3]), "INT64")])
found["stream"] = refused(client.infer, "count", [given("to", np.array([3]), "INT64")])
found["deadline"] = refused(client.infer, "never", [given("n", np.array([3]), "INT64")], client_timeout=0.2)
shared = triton.InferInput("n", [1], "INT64")
shared.set_shared_memory("region", 8)
found["shared"] = refused(client.infer, "double", [shared])
"""
    )
    status = {name: case[0].removeprefix("StatusCode.") for name, case in found.items()}
    assert status == {
        "missing": "INVALID_ARGUMENT", "datatype": "INVALID_ARGUMENT", "unknown": "NOT_FOUND", "raised": "INTERNAL",
        "stream": "UNIMPLEMENTED", "deadline": "DEADLINE_EXCEEDED", "shared": "INVALID_ARGUMENT",
    }  # fmt: skip
    assert "['INPUT1']" in found["missing"][1] and "INPUT1" in found["datatype"][1]
    assert found["raised"][1].strip().splitlines()[-1] == "ValueError: 3 is no good"
    assert "decoupled" in found["stream"][1] and "shared memory" in found["shared"][1]


def test_calls_of_many_clients_meet_in_batches(run):
    """Eight single-row calls at once are one call of the function, and each gets its own answer (P15)."""
    found = run(
        """
def counts():
    [stats] = client.get_inference_statistics("together", as_json=True)["model_stats"]
    return stats


before = counts()
answers, done = {}, threading.Semaphore(0)


def hear(n, result, error):
    answers[n] = str(error) if error else int(result.as_numpy("output")[0])
    done.release()


for n in range(8):
    inputs = [given("n", np.array([n]), "INT64")]
    client.async_infer("together", inputs, lambda result, error, n=n: hear(n, result, error))
for n in range(8):
    done.acquire(timeout=60)
found["answers"] = [answers[n] for n in range(8)]
found["before"], found["after"] = before, counts()
"""
    )
    before, after = found["before"], found["after"]
    assert found["answers"] == [2 * n for n in range(8)]
    assert int(after["inference_count"]) - int(before.get("inference_count", 0)) == 8
    assert int(after["execution_count"]) - int(before.get("execution_count", 0)) == 1
    [batch] = after["batch_stats"]
    assert batch["batch_size"] == "8" and int(batch["compute_infer"]["ns"]) > 0
    assert after["inference_stats"]["success"]["count"] == "8" and int(after["last_inference"]) > 1e12


STREAM = """
heard, over = [], threading.Semaphore(0)


def hear(result, error):
    response = result.get_response() if result is not None else None
    last = response is None or response.parameters["triton_final_response"].bool_param
    values = {}
    if error is None:
        values = {each.name: result.as_numpy(each.name).tolist() for each in response.outputs}
    heard.append([response.id if response is not None else "", last, values, error.message() if error else None])
    if last:
        over.release()


client.start_stream(hear)
"""


def test_a_stream_of_calls_is_answered_in_order(run):
    """Requests sent one behind the other in a stream are all answered, each with its id, in their order."""
    found = run(
        STREAM
        + """
for n in range(200):
    client.async_stream_infer("double", [given("n", np.array([n]), "INT64")], request_id=str(n))
for n in range(200):
    over.acquire(timeout=60)
client.stop_stream()
found["heard"] = heard
"""
    )
    assert found["heard"] == [[str(n), True, {"output": [2 * n]}, None] for n in range(200)]


def test_a_generator_gives_many_answers_to_one_request(run):
    """Each value is an answer; who asks for it gets an empty last one, and an error of the function ends its own
    request alone.
    """
    found = run(
        STREAM
        + """
for to in (3, 9, 2):
    client.async_stream_infer(
        "count", [given("to", np.array([to]), "INT64")], request_id=str(to), enable_empty_final_response=True
    )
    over.acquire(timeout=60)
client.async_stream_infer("nobody", [given("to", np.array([1]), "INT64")], request_id="who")
over.acquire(timeout=60)
client.stop_stream()
found["heard"] = heard
"""
    )
    events = found["heard"]
    assert all(error is None for _, last, _, error in events if not last)
    values = {each: [case[2] for case in events if case[0] == each and not case[1]] for each in ("3", "9", "2")}
    assert values == {each: [{"n": [n], "half": [n / 2]} for n in range(min(int(each), 5))] for each in ("3", "9", "2")}
    last = [case for case in events if case[1]]
    assert [case[0] for case in last] == ["3", "", "2", ""]  # of an error the client tells nothing but its message
    assert last[0] == ["3", True, {}, None] and last[2] == ["2", True, {}, None]
    assert last[1][3].strip().splitlines()[-1] == "ValueError: no further than five"
    assert "nobody" in last[3][3]


def test_the_repository_is_told_and_functions_are_loaded_and_unloaded(run):
    """The index names every function; one that was unloaded is not ready until it is loaded again."""
    found = run(
        """
def index():
    return {each.name: each.state for each in client.get_model_repository_index().models}


found["index"] = index()
client.unload_model("labels")
found["unloaded"] = [client.is_model_ready("labels"), index()["labels"]]
found["refused"] = refused(client.infer, "labels", [given("n", np.array([1]), "INT64")])
client.load_model("labels")
found["loaded"] = [client.is_model_ready("labels"), index()["labels"]]
found["answer"] = client.infer("labels", [given("n", np.array([1]), "INT64")]).as_numpy("scores").shape
found["config"] = refused(client.load_model, "labels", config="{}")
"""
    )
    assert set(NAMES) <= set(found["index"])
    assert found["unloaded"] == [False, "UNAVAILABLE"]
    assert found["refused"][0] == "StatusCode.UNAVAILABLE" and "load" in found["refused"][1]
    assert found["loaded"] == [True, "READY"] and found["answer"] == [3]
    assert found["config"][0] == "StatusCode.INVALID_ARGUMENT" and "config" in found["config"][1]


def test_settings_are_told_and_not_changed(run):
    """Log and trace settings can be read; changing one, and shared memory, is refused by name."""
    found = run(
        """
found["log"] = client.get_log_settings(as_json=True)["settings"]
found["same"] = client.update_log_settings({"log_info": True}, as_json=True)["settings"] == found["log"]
found["verbose"] = refused(client.update_log_settings, {"log_verbose_level": 1})
found["trace"] = client.get_trace_settings(as_json=True)["settings"]
found["model"] = client.get_trace_settings(model_name="simple", as_json=True)["settings"] == found["trace"]
found["level"] = refused(client.update_trace_settings, settings={"trace_level": ["TIMESTAMPS"]})
found["memory"] = len(client.get_system_shared_memory_status().regions)
found["cuda"] = len(client.get_cuda_shared_memory_status().regions)
client.unregister_system_shared_memory()
client.unregister_cuda_shared_memory()
found["register"] = refused(client.register_system_shared_memory, "region", "/region", 64)
"""
    )
    assert found["log"]["log_error"] == {"bool_param": True} and found["same"]
    assert found["trace"]["trace_level"] == {"value": ["OFF"]} and found["model"]
    assert {found[name][0] for name in ("verbose", "level", "register")} == {"StatusCode.INVALID_ARGUMENT"}
    assert "log_verbose_level" in found["verbose"][1] and "trace_level" in found["level"][1]
    assert (found["memory"], found["cuda"]) == (0, 0) and "shared memory" in found["register"][1]


def test_the_pages_program_prints_what_the_page_says(server):
    """The program of docs/open-inference-grpc.md works as it stands there."""
    port = int(server.grpc.rpartition(":")[2])
    printed, result = run_example(client_python("tritonclient"), PAGE, "tritonclient", port, "127.0.0.1:8001")
    assert printed == result


def test_with_keys_every_call_wants_one(server, run):
    """Once there is a key, a call without it is refused, but not health; /metrics counts both."""
    made = batchmill(server.folder, "keys", "create", "--name", "story", "--json")
    assert made.returncode == 0, made.stderr
    key = json.loads(made.stdout.splitlines()[-1])["key"]
    found = run(
        """
inputs = [given("n", np.array([4]), "INT64")]
found["none"] = refused(client.infer, "double", inputs)
found["live"] = client.is_server_live()
found["ready"] = refused(client.is_model_ready, "double")
for form in (key, f"Bearer {key}"):
    found[form] = client.infer("double", inputs, headers={"authorization": form}).as_numpy("output").tolist()
""",
        key=key,
    )
    assert found["none"][0] == "StatusCode.UNAUTHENTICATED" and found["live"] is True
    assert found["ready"][0] == "StatusCode.UNAUTHENTICATED"
    assert found[key] == found[f"Bearer {key}"] == [8]
    page = httpx2.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {key}"}, timeout=60).text
    for status in (200, 401):
        labels = f'method="GRPC",route="/inference.GRPCInferenceService/ModelInfer",status="{status}"'
        assert f"batchmill_http_requests_total{{{labels}}}" in page
