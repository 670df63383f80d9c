"""What becomes of a function's results in a V2 reply: the cases O* of the reference."""

import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from tensor_requests_kit import SEED, STRICT, UNTYPED, asked, outputs, reply, schema, tensor, written

from batchmill.errors import InvalidInput, ModelFailed
from batchmill.types import Interface, Tensor
from batchmill.wire.calls import CallError, FunctionResults

NAN = struct.pack("<d", math.nan)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            {"label_1": 0.398, "label_2": 0.563, "label_3": 0.434},  # O1
            [("label_1", "FP64", [1], [0.398]), ("label_2", "FP64", [1], [0.563]), ("label_3", "FP64", [1], [0.434])],
        ),
        ({"result": json.dumps({"a": 1})}, [("result", "BYTES", [1], ['{"a": 1}'])]),  # O3
        ({"a": 3, "b": True}, [("a", "INT64", [1], [3]), ("b", "BOOL", [1], [True])]),  # O5
        ({"a": [1, 2.5]}, [("a", "FP64", [2], [1.0, 2.5])]),  # O7
        ({"a": [1.5, 2]}, [("a", "FP64", [2], [1.5, 2.0])]),
        ({"a": ["x", "y"]}, [("a", "BYTES", [2], ["x", "y"])]),
        ({"a": [[1, 2], [3, 4]]}, [("a", "INT64", [2, 2], [1, 2, 3, 4])]),  # O11
        ({"a": [["a", "b"]]}, [("a", "BYTES", [1, 2], ["a", "b"])]),
        ({"a": 2**64 - 1}, [("a", "UINT64", [1], [2**64 - 1])]),
        ({}, []),
        (5, [("output", "INT64", [1], [5])]),
        ([1, 2], [("output", "INT64", [2], [1, 2])]),
        ({"$object": {"$a": 1}}, [("$a", "INT64", [1], [1])]),
    ],
)
def test_results_become_outputs(value: Any, expected: Any):
    """Types are those of the values, names and order those of the dict; data are flat, the shape has the structure."""
    assert outputs(value) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": None}, "Output a is None"),  # O9
        (None, "Output output is None"),
        ({"a": ["a", 1]}, "item 1 is int"),  # O19
        ({"a": [1, "a"]}, "item 1 is str"),
        ({"a": [True, 1]}, "item 1 is int"),
        ({"a": [1.0, None]}, "at index 1 is None"),
        ({"a": []}, "Please provide a non-empty list as output."),
        ({"a": [[1], [2, 3]]}, "different lengths"),
        ({"a": [[1], 2]}, "different lengths"),
        ({"a": {"b": 1}}, "Output a is of type dictionary or tuple which is currently not supported."),
        ({"a": [{"b": 1}]}, "You can try json.dumps(a)"),
        ({"a": 2**64}, "64 bits"),
    ],
)
def test_results_that_are_no_tensors_are_the_models_error(value: Any, words: str):
    """A result without a datatype is an error that names the output and the value."""
    with pytest.raises(ModelFailed) as caught:
        reply(value)
    assert caught.value.code == "bad_return"
    assert words in caught.value.message


@pytest.mark.parametrize("value", [5, [1], None, "text"])
def test_an_app_must_return_a_dict(value: Any):
    """What Inferless' `infer` returns is a dictionary, or an error (O21)."""
    with pytest.raises(ModelFailed, match="must return a dictionary"):
        STRICT.write(
            asked({"inputs": []}, Interface(takes="dict")), FunctionResults(json.dumps([value]).encode()), "m", "1"
        )


def app(*outputs_: Tensor) -> Interface:
    return Interface([], list(outputs_), takes="dict", has_schema=True)


@pytest.mark.parametrize(
    ("declared", "value", "expected"),
    [
        (Tensor("a", "FP32"), 0.5, ("a", "FP32", [1], [0.5])),
        (Tensor("a", "FP32"), 1, ("a", "FP32", [1], [1.0])),
        (Tensor("a", "INT8"), 5, ("a", "INT8", [1], [5])),
        (Tensor("a", "INT8"), 5.0, ("a", "INT8", [1], [5])),
        (Tensor("a", "STRING", [-1]), [], ("a", "BYTES", [0], [])),
        (Tensor("a", "STRING", [-1]), ["x"], ("a", "BYTES", [1], ["x"])),
    ],
)
def test_what_an_app_declares_is_the_datatype(declared: Tensor, value: Any, expected: Any):
    """A value that fits it has the datatype that the app's output schema says; of an empty list it is the only one."""
    assert outputs({"a": value}, app(declared)) == [expected]


@pytest.mark.parametrize(("datatype", "value"), [("INT8", 300), ("INT64", 0.5), ("FP64", "a"), ("BOOL", 1)])
def test_what_does_not_fit_its_declaration_is_an_error(datatype: str, value: Any):
    """A value that would change to be what the schema says is the model's error."""
    with pytest.raises(ModelFailed, match="the declared"):
        reply({"a": value}, app(Tensor("a", datatype)))


def test_an_output_that_is_declared_and_missing():
    """The reference's words name it; one that need not be there is left out, and so is its None."""
    with pytest.raises(ModelFailed, match="b not found in the inference response"):
        reply({"a": 1}, app(Tensor("a", "INT64"), Tensor("b", "INT64")))
    assert outputs({"a": 1, "b": None}, app(Tensor("a", "INT64"), Tensor("b", "INT64", required=False))) == [
        ("a", "INT64", [1], [1])
    ]


def test_a_hint_makes_floats_of_integers_and_nothing_else():
    """A hint never coerces: only an integer where it says float is one, as Python itself would have it."""
    hinted = Interface([Tensor("x")], [Tensor("output", "FP64")])
    assert outputs(3, hinted) == [("output", "FP64", [1], [3.0])]
    assert outputs("a", hinted) == [("output", "BYTES", [1], ["a"])]


def test_a_single_result_has_the_declared_name():
    """A result that is not a dict is the one output that is declared."""
    assert outputs(3, Interface([Tensor("x")], [Tensor("score", "INT64")]))[0][0] == "score"
    with pytest.raises(ModelFailed, match="dictionary of its outputs"):
        reply(3, Interface([Tensor("x")], [Tensor("a"), Tensor("b")]))


@pytest.mark.parametrize(
    ("datatype", "values"),
    [("INT16", [1, -2]), ("UINT8", [0, 255]), ("FP32", [0.5, -1.0]), ("FP16", [0.5, 2.0]), ("BOOL", [True, False])],
)
def test_arrays_keep_their_datatype_and_shape(datatype: str, values: list[Any]):
    """A numpy array of length n is an output of shape [n] (O13), as JSON and as binary."""
    numpy = {"INT16": "<i2", "UINT8": "<u1", "FP32": "<f4", "FP16": "<f2", "BOOL": "?"}[datatype]
    data = np.array(values, numpy).tobytes()
    results = FunctionResults(json.dumps([{"a": {"$array": [0, datatype, [2]]}}]).encode(), buffers=[data])
    found = json.loads(written(results)[0])["outputs"][0]
    assert (found["datatype"], found["shape"], found["data"]) == (datatype, [2], values)
    body, head = written(results, parameters={"binary_data_output": True})
    assert body[int(head) :] == data


def test_lists_of_numpys_scalars_are_one_tensor():
    """A list of scalars keeps their datatype; of several, numbers are FP64."""
    scalar = {"$array": [0, "FP32", []]}
    results = FunctionResults(json.dumps([{"a": [scalar, scalar]}]).encode(), buffers=[struct.pack("<f", 0.5)])
    assert json.loads(written(results)[0])["outputs"][0]["datatype"] == "FP32"
    results = FunctionResults(json.dumps([{"a": [scalar, 1]}]).encode(), buffers=[struct.pack("<f", 0.5)])
    found = json.loads(written(results)[0])["outputs"][0]
    assert (found["datatype"], found["data"]) == ("FP64", [0.5, 1.0])


def test_nan_is_null_in_json_and_itself_in_binary():
    """A reply is never invalid JSON (O17)."""
    results = FunctionResults(b'[{"a":{"$array":[0,"FP64",[]]}}]', buffers=[NAN])
    body, head = written(results)
    assert (json.loads(body)["outputs"][0]["data"], head) == ([None], b"")
    body, head = written(results, parameters={"binary_data_output": True})
    assert body[int(head) :] == NAN


def test_bytes_are_binary_or_utf8():
    """BYTES that are not an UTF-8 have a place in a binary reply only, and JSON says so."""
    results = FunctionResults(b'[{"a":{"$array":[0,"BYTES",[]]}}]', buffers=[b"\x01\x00\x00\x00\xff"])
    body, head = written(results, parameters={"binary_data_output": True})
    assert body[int(head) :] == b"\x01\x00\x00\x00\xff"
    with pytest.raises(ModelFailed, match="not UTF-8"):
        written(results)


def test_a_bf16_output_is_rounded_to_the_nearest():
    """An array of FP32 becomes the BF16 that is declared."""
    data = np.array([1.0, 1.005859375, -2.5, np.nan], "<f4").tobytes()
    results = FunctionResults(b'[{"a":{"$array":[0,"FP32",[4]]}}]', buffers=[data])
    found = json.loads(written(results, app(Tensor("a", "BF16", [-1])))[0])["outputs"][0]
    assert (found["datatype"], found["data"]) == ("BF16", [1.0, 1.0078125, -2.5, None])


@pytest.mark.parametrize(
    ("shape", "values", "expected"),
    [
        ([2, 1], [5, 6], [2, 1]),
        ([2], [5, 6], [2]),
        ([2, 1], [[1, 2], [3, 4]], [2, 2]),
        ([1, 1], [7], [1, 1]),
    ],
)
def test_rows_of_a_batch_are_one_tensor(shape: list[int], values: list[Any], expected: list[int]):
    """The first axis of a request's tensors is that of its reply's."""
    interface = Interface([Tensor("x", "INT64")])
    found = json.loads(written(FunctionResults(json.dumps(values).encode()), interface, shape)[0])["outputs"][0]
    assert found["shape"] == expected
    assert found["data"] == np.array(values).reshape(-1).tolist()


@pytest.mark.parametrize(
    ("values", "words"),
    [([[1], [1, 2]], "shape"), ([{"a": 1}, {"b": 1}], "different outputs"), ([1, "a"], "mixes types")],
)
def test_rows_that_do_not_fit_together_are_an_error(values: list[Any], words: str):
    """Rows of one request have equal names, shapes and kinds, or no tensor holds them."""
    with pytest.raises(ModelFailed, match=words):
        written(FunctionResults(json.dumps(values).encode()), Interface([Tensor("x", "INT64")]), [2, 1])


def test_integers_and_floats_of_a_batch_are_floats():
    """One row of floats makes the tensor FP64; a large integer makes it UINT64."""
    interface = Interface([Tensor("x", "INT64")])
    found = json.loads(written(FunctionResults(b"[1,2.5]"), interface, [2, 1])[0])["outputs"][0]
    assert (found["datatype"], found["data"]) == ("FP64", [1.0, 2.5])
    found = json.loads(written(FunctionResults(b"[1,18446744073709551615]"), interface, [2, 1])[0])["outputs"][0]
    assert (found["datatype"], found["data"]) == ("UINT64", [1, 2**64 - 1])


@pytest.mark.parametrize(
    ("request_shape", "array_shape", "expected"),
    [([1], [1, 2, 3], [2, 3]), ([2, 1], [2, 3], [2, 3]), ([2, 1], [2], [2, 1]), ([2], [2], [2]), ([1], [1], [1])],
)
def test_columns_of_arrays_lose_the_axis_that_was_not_asked_for(
    request_shape: list[int], array_shape: list[int], expected: list[int]
):
    """A result's first axis is the row: it stays where the request had rows, and goes where it had one call."""
    data = np.arange(int(np.prod(array_shape)), dtype="<i4").tobytes()
    columns = json.dumps({"y": {"$array": [0, "INT32", array_shape]}}).encode()
    rows_first = Interface([Tensor("x", "INT64" if len(request_shape) > 1 or request_shape == [2] else None)])
    body, _ = written(FunctionResults(columns=columns, buffers=[data]), rows_first, request_shape)
    assert json.loads(body)["outputs"][0]["shape"] == expected


def test_columns_of_another_length_are_an_error():
    """An array that has not one item for each row is the model's error."""
    with pytest.raises(ModelFailed, match="for 2 rows"):
        written(
            FunctionResults(columns=b'{"y":{"$array":[0,"INT8",[3]]}}', buffers=[b"abc"]),
            Interface([Tensor("x", "INT64")]),
            [2, 1],
        )


def test_the_outputs_that_are_wanted():
    """A request gets those it names, in its order (O15), and an error for one that is not there."""
    value = {"a": 1, "b": "x"}
    assert outputs(value, outputs=[{"name": "b"}]) == [("b", "BYTES", [1], ["x"])]
    assert [each[0] for each in outputs(value, outputs=[{"name": "b"}, {"name": "a"}])] == ["b", "a"]
    assert [each[0] for each in outputs(value, outputs=[])] == ["a", "b"]  # none is named
    with pytest.raises(InvalidInput) as caught:
        reply(value, outputs=[{"name": "c"}])
    assert caught.value.code == "unknown_output"


def test_an_unknown_output_of_an_app_is_refused_before_it_runs():
    """Where the outputs are declared, asking for another is refused as the body is read."""
    with pytest.raises(InvalidInput, match="unexpected inference output 'c'"):
        asked({"inputs": [], "outputs": [{"name": "c"}]}, app(Tensor("a", "INT64")))


def test_binary_outputs_are_chosen_one_by_one():
    """An output's own `binary_data` goes before the request's `binary_data_output`."""
    chosen = [{"name": "a", "parameters": {"binary_data": False}}, {"name": "b"}]
    results = FunctionResults(b'[{"a":1,"b":2}]')
    body, head = written(results, outputs=chosen, parameters={"binary_data_output": True})
    first, second = json.loads(body[: int(head)])["outputs"]
    assert first["data"] == [1]
    assert second["parameters"] == {"binary_data_size": 8}
    assert "data" not in second
    assert body[int(head) :] == struct.pack("<q", 2)


@pytest.mark.parametrize(
    ("values", "classes", "expected"),
    [
        ([0.1, 0.7, 0.2], 2, ["0.700000:1", "0.200000:2"]),
        ([0.1, 0.7, 0.2], 9, ["0.700000:1", "0.200000:2", "0.100000:0"]),
        ([5, 9], 1, ["9:1"]),
        ([[1, 2], [4, 3]], 1, ["2:1", "4:0"]),
    ],
)
def test_classification_gives_the_largest(values: Any, classes: int, expected: list[str]):
    """The extension answers with "value:index" of the largest values, the largest first."""
    found = outputs({"a": values}, outputs=[{"name": "a", "parameters": {"classification": classes}}])
    assert found[0][1] == "BYTES"
    assert found[0][3] == expected


def test_the_id_comes_back():
    """A request's id is in the reply, and no id is made up where there was none (P1)."""
    found = reply(1, id="42")
    assert (found["id"], found["model_name"], found["model_version"]) == ("42", "m", "3")
    assert "id" not in reply(1)


@pytest.mark.parametrize(
    ("error", "kind", "code", "last"),
    [
        (
            CallError("ValueError", "no", "Traceback:\n  x\nValueError: no"),
            ModelFailed,
            "function_error",
            "ValueError: no",
        ),
        (CallError("Mine", "a\nb", "Traceback:\nm.Mine: a\nb"), ModelFailed, "function_error", "Mine: a b"),
        (CallError("Mine", "a", "Traceback:\nm.Mine: a"), ModelFailed, "function_error", "m.Mine: a"),
        (CallError("timeout", "too slow"), ModelFailed, "timeout", "row 2 of 2: too slow"),
        (CallError("missing_argument", "x"), InvalidInput, "missing_argument", "row 2 of 2: x"),
    ],
)
def test_a_row_that_fails_fails_the_request(error: CallError, kind: Any, code: str, last: str):
    """The error is the row's, names it, and ends with `Type: message` where user code raised."""
    with pytest.raises(kind) as caught:
        written(FunctionResults(b"[1,null]", errors={1: error}), Interface([Tensor("x", "INT64")]), [2, 1])
    assert caught.value.code == code
    assert caught.value.message.split("\n")[-1] == last
    assert "row 2 of 2" in caught.value.message


def test_an_event_is_outputs():
    """An event of a stream is the outputs of one result, with the request's id."""
    found = asked({"inputs": [tensor("INT64", [1], [1])], "id": "7"}, UNTYPED)
    assert json.loads(STRICT.event(found, b'{"token":"a"}', [])) == {
        "id": "7",
        "outputs": [{"name": "token", "datatype": "BYTES", "shape": [1], "data": ["a"]}],
    }


def test_the_seeds_example_of_a_variable_list():
    """A list of strings under one name is one output of that length."""
    found = asked({"inputs": [{"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}, SEED)
    body, _ = STRICT.write(found, FunctionResults(b'[{"generated_images_base64":["a","b","c"]}]'), "m", "1")
    assert json.loads(body)["outputs"] == [
        {"name": "generated_images_base64", "datatype": "BYTES", "shape": [3], "data": ["a", "b", "c"]}
    ]


def answered(value, *tensors, interface=UNTYPED, result=None):
    """The outputs of a request with these inputs and this one result."""
    request = {"inputs": [tensor(*each) for each in tensors]}
    results = result or FunctionResults(json.dumps([value]).encode())
    body, _ = STRICT.write(asked(request, interface), results, "m", "3")
    return [(each["datatype"], each["data"]) for each in json.loads(body)["outputs"]]


def test_a_function_without_types_keeps_datatypes():
    """Plain numbers go back as numbers came; what does not fit, and what is declared, is as ever."""
    assert answered(5, ("INT32", [1], [4])) == [("INT32", [5])]
    assert answered([1.5, 2], ("FP32", [1], [4.0])) == [("FP32", [1.5, 2.0])]
    assert answered(1.5, ("INT32", [1], [4])) == [("FP64", [1.5])]
    assert answered(2**40, ("INT32", [1], [4])) == [("INT64", [2**40])]
    assert answered(1e300, ("FP32", [1], [4.0])) == [("FP64", [1e300])]
    assert answered(5, ("INT32", [1], [4]), interface=schema("INT32", [1])) == [("INT64", [5])]


def test_arrays_and_numbers_that_json_lacks():
    """An array has its own datatype; a float that is not a number goes as the others do."""
    for marker, datatype in (([0, "FP64", []], "FP64"), ([0, "FP64", [], True], "FP32")):
        value = FunctionResults(json.dumps([{"$array": marker}]).encode(), buffers=[struct.pack("<d", float("inf"))])
        assert answered(None, ("FP32", [1], [4.0]), result=value)[0][0] == datatype
