"""What a function is given for the tensors of a V2 request: the cases T*, I* and P* of the reference."""

import json
from typing import Any

import numpy as np
import pytest
from tensor_requests_kit import LENIENT, PROMPT, SEED, STRICT, UNTYPED, asked, column_of, schema, tensor, value_of

from batchmill.errors import InvalidInput
from batchmill.types import Interface, Tensor
from batchmill.wire.json_bytes import DEPTH_MAX

BIG = 9223372036854775807


@pytest.mark.parametrize(
    ("declared", "received", "expected"),
    [
        (("BYTES", [1]), ("BYTES", [1], ["fine"]), "fine"),  # T1
        (("BYTES", [-1]), ("BYTES", [1], ["only"]), ["only"]),  # T5
        (("BYTES", [2, 2]), ("BYTES", [2, 2], ["a", "b", "c", "d"]), [["a", "b"], ["c", "d"]]),  # T7
        (("BYTES", [2, 2]), ("BYTES", [2, 2], [["a", "b"], ["c", "d"]]), [["a", "b"], ["c", "d"]]),
        (("INT64", [1]), ("INT64", [1], [5]), 5),  # T9
        (("FP32", [1]), ("FP32", [1], [0.5]), 0.5),
        (("BOOL", [1]), ("BOOL", [1], [True]), True),
        (("FP32", [1]), ("FP32", [1], [1]), 1.0),  # T13
        (("FP16", [2]), ("FP16", [2], [1, 0.25]), [1.0, 0.25]),
        (("BF16", [1]), ("BF16", [1], [0.5]), 0.5),
        (("INT64", [1]), ("INT64", [1], [BIG]), BIG),  # T21
        (("UINT64", [1]), ("UINT64", [1], [2**64 - 1]), 2**64 - 1),
        (("INT8", [2]), ("INT8", [2], [-128, 127]), [-128, 127]),
        (("INT32", [2]), ("INT32", [2], [1.0, 2]), [1, 2]),
        (("INT64", [-1]), ("INT64", [0], []), []),
        (("INT64", [-1]), ("INT64", [0], None), []),
        (("INT64", [-1, 2]), ("INT64", [0, 2], []), []),
        (("INT64", [2, 3]), ("INT64", [2, 3], [[1, [2]], 3, [4, 5, 6]]), [[1, 2, 3], [4, 5, 6]]),  # irregular nesting
        (("INT64", [1]), ("INT64", [], [7]), 7),
        (("INT64", [2]), ("INT64", [1, 2], [1, 2]), [1, 2]),  # I17
        (("INT64", [10]), ("INT64", [1, 10], [[1] * 10]), [1] * 10),
        (("BYTES", [1]), ("BYTES", [1, 1], [["hi"]]), "hi"),
        (("STRING", [1]), ("BYTES", [1], ["ü€"]), "ü€"),
        (("BYTES", [1]), ("STRING", [1], ["a"]), "a"),
        ((None, [1]), ("BYTES", [1], ["a"]), "a"),
    ],
)
def test_tensors_become_values(declared: Any, received: Any, expected: Any):
    """The schema decides single value against list, nested or flat data are the same, and numbers are exact."""
    found = value_of(tensor(*received), schema(*declared))
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("declared", "received", "code", "words"),
    [
        (("INT8", [2]), ("INT8", [2], [512, 1]), "number_out_of_range", "512"),  # T3
        (("UINT8", [1]), ("UINT8", [1], [-1]), "number_out_of_range", "UINT8"),
        (("INT64", [1]), ("INT64", [1], [2**63]), "number_out_of_range", str(2**63)),
        (("UINT64", [1]), ("UINT64", [1], [2**64]), "number_out_of_range", "UINT64"),
        (("INT64", [1]), ("INT64", [1], [10**40]), "number_out_of_range", "INT64"),
        (("FP32", [1]), ("FP32", [1], [1e39]), "number_out_of_range", "FP32"),
        (("FP16", [1]), ("FP16", [1], [70000]), "number_out_of_range", "FP16"),
        (
            ("INT64", [2, 2]),
            ("INT64", [2, 2], [1, 2, 3]),
            "shape_mismatch",
            "does not match true shape of 'data'",
        ),  # T15
        (("BOOL", [3]), ("BOOL", [3], [True]), "shape_mismatch", "'x'"),  # T17
        (("BOOL", [1]), ("BOOL", [1], [1]), "invalid_value", "not BOOL"),  # T19
        (("BOOL", [1]), ("BOOL", [1], ["true"]), "invalid_value", '"true"'),
        (("INT64", [2]), ("INT64", [2], [1, 2.5]), "invalid_value", "2.5, which is not INT64"),  # I13
        (("INT64", [1]), ("INT64", [1], [True]), "invalid_value", "true"),
        (("INT64", [1]), ("INT64", [1], ["1"]), "invalid_value", "not INT64"),
        (("INT64", [1]), ("INT64", [1], [9.3e18]), "invalid_value", "not INT64"),  # exact it would not be
        (("FP32", [1]), ("FP32", [1], [None]), "invalid_value", "null"),
        (("FP32", [1]), ("FP32", [1], [True]), "invalid_value", "true"),
        (("BYTES", [1]), ("BYTES", [1], [3]), "invalid_value", "element 0 is 3"),
        (("INT64", [1]), ("INT64", [1], 5), "invalid_value", "must be an array"),
        (("INT64", [1]), ("INT64", [1], {"a": 1}), "invalid_value", "must be an array"),
        (("INT64", [1]), ("INT64", [-1], [1]), "invalid_shape", "non-unsigned-integer"),
        (("INT64", [2]), ("INT64", [3], [1, 2, 3]), "invalid_shape", "expected [2]"),  # T27
        (("INT64", [2]), ("INT64", [3], [1, 2, 3]), "invalid_shape", "got [3]"),
        (("INT64", [1]), ("INT64", [0, 1], []), "invalid_shape", "no rows"),
        (("INT64", [1]), ("INT64", [2**40], []), "invalid_shape", "elements"),
        (("INT64", [1]), ("INT64", [1] * 40, [1]), "invalid_shape", "40 dimensions"),
        (("INT64", [1]), ("INT32", [1], [1]), "invalid_datatype", "expected INT64, got INT32"),
        (("INT64", [1]), (None, [1], [1]), "invalid_datatype", "null"),  # I15
        (("INT64", [1]), ("FLOAT", [1], [1]), "invalid_datatype", "FLOAT"),
        (("INT64", [1]), (3, [1], [1]), "invalid_datatype", "there are BOOL"),
        (("INT64", [1]), ("INT64", [1], None), "invalid_field", "no field was set"),
    ],
)
def test_wrong_tensors_are_refused(declared: Any, received: Any, code: str, words: str):
    """A tensor that is not what it says, or not what its input declares, is the caller's error, which names both."""
    with pytest.raises(InvalidInput) as caught:
        value_of(tensor(*received), schema(*declared))
    assert caught.value.code == code
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("shape", "expected"),
    [([1], "only"), ([2], ["only", "only"]), ([1, 1], [["only"]]), ([0], [])],
)
def test_received_shapes_decide_where_a_version_says_so(shape: list[int], expected: Any):
    """With Inferless' own rule a tensor of shape [1] is one value, and any other a list over its first axis."""
    sent = tensor("BYTES", shape, ["only"] * int(np.prod(shape)))
    assert value_of(sent, schema("STRING", [-1]), received_shapes=True) == expected


def test_rows_of_a_batch():
    """One axis more than the schema has counts rows, of every input alike."""
    interface = Interface([Tensor("x", "INT64", [1]), Tensor("y", "FP32", [2])], has_schema=True)
    inputs = [tensor("INT64", [3, 1], [1, 2, 3]), {**tensor("FP32", [3, 2], [1, 2, 3, 4, 5, 6]), "name": "y"}]
    found = asked({"inputs": inputs}, interface)
    assert found.rows == 3
    assert json.loads(found.calls) == {"x": [1, 2, 3], "y": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]}


@pytest.mark.parametrize("shape", [[1, 2], [2, 2], [2]])
def test_inputs_with_different_rows_are_refused(shape: list[int]):
    """Inputs that do not have equally many rows are refused, with the shapes of all."""
    interface = Interface([Tensor("x", "INT64", [1]), Tensor("y", "INT64", [2])], has_schema=True)
    inputs = [tensor("INT64", [3, 1], [1, 2, 3]), {**tensor("INT64", shape, [1] * int(np.prod(shape))), "name": "y"}]
    with pytest.raises(InvalidInput, match="equally many rows"):
        asked({"inputs": inputs}, interface)


@pytest.mark.parametrize(
    ("tensor_of", "calls", "shape", "rows", "expected"),
    [
        (Tensor("x"), "row", [1], 1, [1]),
        (Tensor("x"), "row", [1, 2], 1, [[[1, 1]]]),
        (Tensor("x", "INT64"), "row", [3], 3, [1, 1, 1]),
        (Tensor("x", "INT64"), "row", [3, 1], 3, [1, 1, 1]),
        (Tensor("x", "INT64", [-1]), "row", [3], 1, [[1, 1, 1]]),
        (Tensor("x", "INT64", [-1]), "row", [2, 3], 2, [[1, 1, 1]] * 2),
        (Tensor("x"), "list", [3], 3, [1, 1, 1]),
        (Tensor("x"), "list", [3, 2], 3, [[1, 1]] * 3),
        (Tensor("x"), "frame", [3], 3, [1, 1, 1]),
        (Tensor("x", None, [-1], is_array=True), "row", [2, 3], 1, [[[1, 1, 1]] * 2]),
        (Tensor("x", None, [-1], is_array=True), "list", [2, 3], 2, [[1, 1, 1]] * 2),
        (Tensor("x", None, [-1], is_array=True), "list", [2], 2, [1, 1]),
    ],
)
def test_without_a_schema_a_hint_says_what_is_a_row(
    tensor_of: Tensor, calls: str, shape: list[int], rows: int, expected: Any
):
    """A function of many rows takes the first axis for them; one that takes a single value is called for each."""
    found = asked({"inputs": [tensor("INT64", shape, [1] * int(np.prod(shape)))]}, Interface([tensor_of], calls=calls))
    assert (found.rows, column_of(found)) == (rows, expected)


@pytest.mark.parametrize(
    ("hint", "datatype", "data", "fits"),
    [
        ("INT64", "INT8", 5, True),
        ("FP64", "FP32", 0.5, True),
        ("FP64", "INT64", 5, True),
        ("STRING", "BYTES", "a", True),
        (None, "BYTES", "a", True),
        ("INT64", "BYTES", "a", False),
        ("INT64", "FP32", 0.5, False),
        ("STRING", "INT64", 5, False),
        ("BOOL", "INT64", 1, False),
    ],
)
def test_a_hint_means_any_width_of_its_kind(hint: str | None, datatype: str, data: Any, fits: bool):
    """Without a schema a tensor may be of any datatype of the hint's kind, and an integer where a float is meant."""
    interface = Interface([Tensor("x", hint)])
    if fits:
        assert value_of(tensor(datatype, [1], [data]), interface) == data
    else:
        with pytest.raises(InvalidInput, match="unexpected datatype"):
            value_of(tensor(datatype, [1], [data]), interface)


def test_absent_optional_inputs_are_left_out():
    """The dict of a function lacks an optional input that did not come (T11)."""
    found = asked({"inputs": [PROMPT]}, SEED)
    assert json.loads(found.calls) == {"prompt": ["There is a fine house in the forest"]}


def test_missing_inputs_are_named():
    """The error counts the inputs, optional ones apart, and names those that are missing."""
    interface = Interface([Tensor("A"), Tensor("B"), Tensor("C"), Tensor("D", required=False)])
    with pytest.raises(InvalidInput) as caught:
        asked({"inputs": [{**tensor("INT64", [1], [1]), "name": "A"}]}, interface)
    assert caught.value.message == (
        "expected between 3 and 4 inputs but got 1 inputs. Got input(s) ['A'], but missing required input(s)"
        " ['B', 'C']. Please provide all required input(s)."
    )


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        ({"inputs": [PROMPT, PROMPT]}, "repeated_parameter", "'prompt' already exists"),  # T23
        ({"inputs": [PROMPT, tensor("INT64", [1], [1])]}, "unknown_argument", "unexpected inference input 'x'"),
        ({}, "missing_argument", "['prompt']"),
        ({"inputs": [PROMPT], "parameters": {"a": {"b": 1}}}, "invalid_field", "parameters"),
        ({"inputs": [PROMPT], "parameters": {"triton_x": 1}}, "unsupported_parameter", "reserved"),
        ({"inputs": [PROMPT], "parameters": {"sequence_id": 1.5}}, "invalid_field", "sequence_id"),
        ({"inputs": [PROMPT], "parameters": {"sequence_id": "x" * 129}}, "invalid_field", "128"),
        ({"inputs": [PROMPT], "parameters": {"sequence_start": 1}}, "invalid_field", "sequence_start"),
        ({"inputs": [PROMPT], "parameters": {"priority": -2}}, "invalid_field", "priority"),
        ({"inputs": [PROMPT], "parameters": {"headers": "x"}}, "unsupported_parameter", "headers"),
        ({"inputs": [PROMPT], "parameters": {"timeout": -1}}, "invalid_field", "microseconds"),
        ({"inputs": [PROMPT], "parameters": {"binary_data_output": 1}}, "invalid_field", "binary_data_output"),
        ({"inputs": [PROMPT], "id": 5}, "invalid_field", "id"),
        ({"inputs": [PROMPT], "outputs": [{"name": "y"}, {"name": "y"}]}, "repeated_parameter", "'y' already exists"),
        ({"inputs": [{**PROMPT, "parameters": {"triton_a": 1}}]}, "unsupported_parameter", "triton_a"),
        (
            {"inputs": [{**PROMPT, "parameters": {"shared_memory_region": "r"}}]},
            "unsupported_parameter",
            "shared memory",
        ),
        ({"inputs": [{**PROMPT, "parameters": {"content_type": "base64"}}]}, "unsupported_parameter", "base64"),
        ({"inputs": [{**PROMPT, "parameters": {"binary_data_size": 3}}]}, "invalid_field", "both were set"),
        ({"inputs": [{"name": "prompt", "shape": [1], "data": ["a"]}]}, "invalid_datatype", "'prompt'"),
        ({"inputs": [{"name": "prompt", "datatype": "BYTES", "data": ["a"]}]}, "invalid_field", "shape"),
        ({"inputs": PROMPT}, "invalid_field", "inputs"),
        ([], "invalid_field", "array"),
    ],
)
def test_wrong_requests_are_refused(request_: Any, code: str, words: str):
    """What the protocol reserves, doubles or does not know the shape of is refused by name."""
    with pytest.raises(InvalidInput) as caught:
        asked(request_, SEED)
    assert caught.value.code == code
    assert words in caught.value.message


@pytest.mark.parametrize("shape", [[65_537, 0], [2**40, 0], [0, 2**31], [300, 0, 300]])
def test_rows_without_elements_are_not_for_nothing(shape: list[int]):
    """A few bytes of a request do not become as many empty lists as its shape says."""
    declared = schema("INT64", [-1] * len(shape))
    with pytest.raises(InvalidInput, match=r"input 'x' has no elements, and more than 65536 rows") as caught:
        value_of(tensor("INT64", shape, []), declared)
    assert caught.value.code == "invalid_shape"


@pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b'{"inputs":[{"data":[NaN]}]}', b"\xff\xfe", b'{"a":1}x'])
def test_malformed_json_is_the_callers_error(body: bytes):
    """What is not JSON is refused, and says so (P5)."""
    with pytest.raises(InvalidInput) as caught:
        STRICT.read(body, b"", SEED)
    assert caught.value.code in ("invalid_json", "invalid_encoding")


@pytest.mark.parametrize("depth", [DEPTH_MAX + 1, 2_000, 100_000])
def test_json_that_is_too_deep_is_refused(depth: int):
    """Nesting beyond every limit ends in an error, not in a crash (P13)."""
    data = b"[" * depth + b"1" + b"]" * depth
    body = b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT64","data":' + data + b"}]}"
    with pytest.raises(InvalidInput) as caught:
        STRICT.read(body, b"", UNTYPED)
    assert caught.value.code == "nesting_too_deep"


def test_unknown_keys_are_ignored():
    """What Inferless' tools and other clients add to a request does no harm."""
    more = {"optional": True, "whatever": [1]}
    request = {"inputs": [{**PROMPT, **more}], "id": None, "outputs": None, "parameters": None, **more}
    assert asked(request, SEED).rows == 1


def test_parameters_without_meaning_here_pass():
    """Scalars that the protocol leaves to a model are taken, and what Triton's schedulers read, as its models do."""
    parameters = {"custom": "x", "other": 1.5, "sequence_start": True, "sequence_end": False, "priority": 2}
    for sequence in (0, 7, 2**64 - 1, "conversation"):
        request = {"inputs": [PROMPT], "parameters": parameters | {"sequence_id": sequence}}
        assert asked(request, SEED).timeout_s is None


def test_a_timeout_is_in_microseconds():
    """The parameter `timeout` limits the call."""
    assert asked({"inputs": [PROMPT], "parameters": {"timeout": 2_500_000}}, SEED).timeout_s == 2.5


@pytest.mark.parametrize(
    ("declared", "received", "expected"),
    [
        (("INT8", [2]), ("INT8", [2], [512, 1]), [512, 1]),  # the seed's own example
        (("INT32", [1]), ("INT64", [1], [2**40]), 2**40),
        (("FP32", [1]), ("FP64", [1], [0.5]), 0.5),
        (("FP32", [1]), ("INT64", [1], [2]), 2.0),
        (("INT32", [1]), ("FP64", [1], [3.0]), 3),
        (("BOOL", [1]), ("INT32", [1], [True]), True),  # InferlessOpenAIClient
        ((None, [1]), ("INT32", [1], [True]), True),
        (("INT32", [2]), ("INT32", [2], [True, 5]), [1, 5]),
        (("INT64", [1]), ("BOOL", [1], [False]), 0),
        (("STRING", [1]), ("BYTES", [1], ["a"]), "a"),
        (("INT64", [2]), ("INT64", [1, 2], [1, 2]), [1, 2]),  # I17
    ],
)
def test_inferless_clients_may_send_other_widths(declared: Any, received: Any, expected: Any):
    """In Inferless' dialect an integer wider than declared passes, and the kind that is declared counts."""
    found = value_of(tensor(*received), schema(*declared), form=LENIENT)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("declared", "received"),
    [
        (("INT64", [2]), ("INT64", [2], [1, 2.5])),  # I13
        (("INT64", [1]), (None, [1], [1])),  # I15
        (("INT64", [1]), ("BYTES", [1], ["1"])),
        (("STRING", [1]), ("INT64", [1], [1])),
        (("BOOL", [1]), ("INT32", [1], [1])),
        (("INT64", [1]), ("INT64", [1], [2**64])),
        (("BOOL", [1]), ("FP32", [1], [1.0])),
        (("INT64", [2]), ("INT64", [3], [1, 2, 3])),
    ],
)
def test_inferless_clients_may_not_send_other_kinds(declared: Any, received: Any):
    """What is not the kind that an input declares is refused in Inferless' dialect too."""
    with pytest.raises(InvalidInput):
        value_of(tensor(*received), schema(*declared), form=LENIENT)


def test_an_element_of_another_kind_is_told_by_what_is_wanted():
    """Where a tensor's own datatype is not the kind that its input declares, the message names the declared one."""
    with pytest.raises(InvalidInput, match=r"element 0 is 2\.5, which is not an integer$"):
        value_of(tensor("FP64", [1], [2.5]), schema("INT64", [1]), form=LENIENT)


def test_an_array_holds_integers_wider_than_declared():
    """A function that takes numpy arrays gets a wider one where the declared datatype does not hold the values."""
    found = asked({"inputs": [tensor("INT8", [2], [512, 1])]}, schema("INT8", [2], is_array=True), form=LENIENT)
    assert json.loads(found.calls)["x"]["$array"] == [0, "INT64", [1, 2]]
    assert column_of(found) == [[512, 1]]
