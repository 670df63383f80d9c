"""Between gRPC's messages and the bodies of the protocol's HTTP side."""

import json
import struct

import pytest

from batchmill.dialects.open_inference.grpc import bodies
from batchmill.dialects.open_inference.grpc.bodies import body_of, is_raw, message, read_reply, response_of
from batchmill.errors import InvalidInput, LedgerBroken, TooLarge

MAX = 1024 * 1024
InferRequest, InferResponse = message("ModelInferRequest"), message("ModelInferResponse")


def request(*inputs, raw=(), **fields):
    """A request; each input is (name, datatype, shape, contents field, elements)."""
    made = InferRequest(model_name="m", raw_input_contents=raw, **fields)
    for name, datatype, shape, *contents in inputs:
        tensor = made.inputs.add(name=name, datatype=datatype, shape=shape)
        if contents:
            getattr(tensor.contents, contents[0]).extend(contents[1])
    return made


def split(made, bytes_max=MAX):
    body, head = body_of(made, bytes_max)
    return json.loads(body[: int(head)]), body[int(head) :]


def reply(outputs, buffers=(), **fields):
    """A reply's body and head; each output is its JSON."""
    head = json.dumps({"model_name": "m", "model_version": "3", "outputs": outputs, **fields}).encode()
    return b"".join([head, *buffers]), str(len(head)).encode()


def output(name, datatype, shape, **more):
    return {"name": name, "datatype": datatype, "shape": shape, **more}


def test_raw_tensors_stand_behind_the_json_in_order():
    """Bytes of inputs are handed on as they came, each with its length, and outputs are asked for as bytes."""
    made = request(("a", "FP32", [1]), ("b", "BYTES", [2]), raw=[b"abcd", b"12345678"], id="42")
    result, rest = split(made)
    assert rest == b"abcd12345678"
    assert result == {
        "id": "42",
        "inputs": [
            {"name": "a", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}},
            {"name": "b", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 8}},
        ],
        "parameters": {"binary_data_output": True},
    }


@pytest.mark.parametrize(
    ("datatype", "field", "values", "packed"),
    [
        ("BOOL", "bool_contents", [True, False], b"\1\0"),
        ("INT8", "int_contents", [-128, 127], struct.pack("<2b", -128, 127)),
        ("INT16", "int_contents", [-300, 300], struct.pack("<2h", -300, 300)),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1], struct.pack("<2i", -(2**31), 2**31 - 1)),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1], struct.pack("<2q", -(2**63), 2**63 - 1)),
        ("UINT8", "uint_contents", [0, 255], b"\0\xff"),
        ("UINT16", "uint_contents", [0, 65535], b"\0\0\xff\xff"),
        ("UINT32", "uint_contents", [0, 2**32 - 1], struct.pack("<2I", 0, 2**32 - 1)),
        ("UINT64", "uint64_contents", [0, 2**64 - 1], struct.pack("<2Q", 0, 2**64 - 1)),
        ("FP32", "fp32_contents", [1.5, float("inf")], struct.pack("<2f", 1.5, float("inf"))),
        ("FP64", "fp64_contents", [0.1, -0.0], struct.pack("<2d", 0.1, -0.0)),
        ("BYTES", "bytes_contents", [b"", b"a\xff\0"], b"\0\0\0\0\3\0\0\0a\xff\0"),
    ],
)
def test_every_kind_of_contents_goes_there_and_back(datatype, field, values, packed):
    """Typed elements become the bytes of their datatype, and a reply's bytes become typed elements again."""
    made = request(("x", datatype, [2], field, values))
    result, rest = split(made)
    assert rest == packed
    assert result["inputs"][0]["parameters"] == {"binary_data_size": len(packed)}
    assert not is_raw(made)
    sent = reply([output("y", datatype, [2], parameters={"binary_data_size": len(packed)})], [packed])
    answer = InferResponse.FromString(response_of(*sent, raw=False))
    assert list(getattr(answer.outputs[0].contents, field)) == values
    assert not answer.raw_output_contents
    assert not answer.outputs[0].parameters
    raw = InferResponse.FromString(response_of(*sent, raw=True))
    assert list(raw.raw_output_contents) == [packed]
    assert not raw.outputs[0].HasField("contents")


@pytest.mark.parametrize(
    ("datatype", "field", "value"), [("INT8", "int_contents", 128), ("UINT16", "uint_contents", 65536)]
)
def test_integers_out_of_range_are_left_to_the_parser(datatype, field, value):
    """What does not fit is sent on as a number, so that it is refused in the words that HTTP has."""
    result, rest = split(request(("x", datatype, [1], field, [value])))
    assert (result["inputs"][0]["data"], rest) == ([value], b"")


def test_parameters_keep_their_types():
    """Each kind of parameter is JSON's own, and what only says how bytes travel is ours to say."""
    made = request(("x", "FP32", [1]), raw=[b"1234"])
    made.parameters["s"].string_param = "a"
    made.parameters["b"].bool_param = False
    made.parameters["i"].int64_param = -(2**63)
    made.parameters["u"].uint64_param = 2**64 - 1
    made.parameters["d"].double_param = 0.5
    made.parameters["binary_data_output"].bool_param = False
    made.inputs[0].parameters["binary_data_size"].int64_param = 77
    made.inputs[0].parameters["own"].int64_param = 7
    wanted = made.outputs.add(name="y")
    wanted.parameters["classification"].int64_param = 3
    result, _ = split(made)
    assert result["parameters"] == {
        "s": "a", "b": False, "i": -(2**63), "u": 2**64 - 1, "d": 0.5, "binary_data_output": True,
    }  # fmt: skip
    assert result["inputs"][0]["parameters"] == {"own": 7, "binary_data_size": 4}
    assert result["outputs"] == [{"name": "y", "parameters": {"classification": 3, "binary_data": True}}]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (request(("a", "FP32", [1]), ("b", "FP32", [1]), raw=[b"1234"]), "1 items for 2 inputs"),
        (request(("a", "FP32", [1], "fp32_contents", [1.0]), raw=[b"1234"]), "contents field must not be specified"),
        (
            request(("a", "FP32", [1], "int_contents", [1])),
            "FP32 elements must be in fp32_contents, not in int_contents",
        ),
        (request(("a", "FP16", [1], "fp32_contents", [1.0])), "FP16 elements must be in raw_input_contents"),
    ],
)
def test_elements_in_the_wrong_place_are_refused(made, words):
    """Where elements do not stand where their datatype has them, the message names the input and both places."""
    with pytest.raises(InvalidInput, match=words):
        body_of(made, MAX)


def test_a_parameter_without_a_value_is_refused():
    """A parameter of no kind is named."""
    made = request(("x", "FP32", [1]), raw=[b"1234"])
    made.parameters["empty"].SetInParent()
    with pytest.raises(InvalidInput, match="'empty' has no value"):
        body_of(made, MAX)


def test_shared_memory_is_refused():
    """A tensor that lies elsewhere is refused by its name."""
    made = request(("x", "FP32", [1]))
    made.inputs[0].parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(InvalidInput, match="'x': this server has no shared memory"):
        body_of(made, MAX)


def test_few_bytes_that_would_be_many_are_refused():
    """Elements that are small in a message have the limit of a body: at it they pass, beyond it they do not."""
    fits = request(("x", "INT64", [8], "int64_contents", [0] * 8))
    assert len(split(fits, 64)[1]) == 64
    more = request(("x", "INT64", [9], "int64_contents", [0] * 9))
    with pytest.raises(TooLarge, match="9 elements are 72 bytes"):
        body_of(more, 64)
    many = request(("x", "INT64", [8], "int64_contents", [0] * 8), ("y", "BYTES", [1], "bytes_contents", [b""]))
    with pytest.raises(TooLarge, match="'y'"):
        body_of(many, 64)


def test_a_tensor_of_many_elements_comes_as_bytes(monkeypatch):
    """A list of elements has a length of its own, at which it passes; beyond it the message says what to send."""
    monkeypatch.setattr(bodies, "ELEMENTS_MAX", 2)
    assert len(split(request(("x", "INT64", [2], "int64_contents", [0] * 2)), MAX)[1]) == 16
    with pytest.raises(TooLarge, match="3 elements in int64_contents, more than 2: send"):
        body_of(request(("x", "INT64", [3], "int64_contents", [0] * 3)), MAX)


def test_a_reply_in_json_becomes_bytes_or_elements():
    """Where a reply has its elements in JSON, null is NaN, texts are bytes, and each datatype has its own width."""
    outputs = [
        output("f", "FP32", [2], data=[1, None]),
        output("s", "BYTES", [1], data=["é"]),
        output("i", "INT64", [1], data=[2**63 - 1]),
    ]
    body, _ = reply(outputs, id="7")
    raw = InferResponse.FromString(response_of(body, b"", raw=True))
    assert struct.unpack("<2f", raw.raw_output_contents[0])[0] == 1.0
    assert raw.raw_output_contents[0][4:] == struct.pack("<f", float("nan"))
    assert raw.raw_output_contents[1:] == [b"\2\0\0\0\xc3\xa9", struct.pack("<q", 2**63 - 1)]
    typed = InferResponse.FromString(response_of(body, b"", raw=False))
    assert typed.outputs[1].contents.bytes_contents == ["é".encode()]
    assert (typed.id, typed.model_name, typed.model_version) == ("7", "m", "3")


def test_half_floats_are_always_raw():
    """What has no place in typed elements makes the whole reply raw: it is all of them or none."""
    outputs = [
        output("h", "FP16", [1], data=[1.5]),
        output("b", "BF16", [1], data=[1.5]),
        output("i", "INT8", [1], data=[1]),
    ]
    answer = InferResponse.FromString(response_of(*reply(outputs)[:1], b"", raw=False))
    assert list(answer.raw_output_contents) == [struct.pack("<e", 1.5), struct.pack("<f", 1.5)[2:], b"\1"]


def test_a_streams_answer_says_whether_it_is_the_last():
    """In a stream each answer carries triton_final_response; elsewhere none does."""
    body, _ = reply([], parameters={"n": 2**63, "f": 0.5, "t": True, "s": "x"})
    answer = InferResponse.FromString(response_of(body, b"", raw=True, is_last=False))
    assert answer.parameters["triton_final_response"].WhichOneof("parameter_choice") == "bool_param"
    assert answer.parameters["n"].uint64_param == 2**63
    alone = InferResponse.FromString(response_of(body, b"", raw=True))
    assert sorted(alone.parameters) == ["f", "n", "s", "t"]


def test_bytes_that_belong_to_no_output_are_our_fault():
    """A reply that is longer than its outputs is not passed on as if it were whole."""
    with pytest.raises(LedgerBroken, match="belong to its outputs"):
        read_reply(*reply([output("y", "INT8", [1], parameters={"binary_data_size": 1})], [b"12"]))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 2**21])
def test_raw_outputs_of_every_length_are_read_by_protobuf(size):
    """The lengths that are written by hand are protobuf's own."""
    sent = reply([output("y", "UINT8", [size], parameters={"binary_data_size": size})], [b"x" * size])
    answer = InferResponse.FromString(response_of(*sent, raw=True))
    assert [len(each) for each in answer.raw_output_contents] == [size]
    assert answer.outputs[0].shape == [size]
