"""Binary tensors behind a request's JSON, raw requests, and what any bytes at all come to."""

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_requests_kit import LENIENT, NUMPY, SEED, STRICT, UNTYPED, asked, column_of, schema, tensor, value_of

from batchmill.errors import BatchmillError, InvalidInput
from batchmill.types import Interface, Tensor
from batchmill.wire.calls import FunctionResults, ParsedCalls
from batchmill.wire.tensors.binary import join_texts, split_texts

IDENTITY = Interface([Tensor("x", "FP32", [-1, 1024], is_array=True)])


def binary(datatype: str, shape: list[int], size: int, name: str = "x") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}


def test_json_and_binary_inputs_mix():
    """Inputs as JSON and as binary are read in their order (P7)."""
    interface = Interface([Tensor("a"), Tensor("b"), Tensor("c")])
    inputs = [
        binary("INT32", [2], 8, "a"),
        {"name": "b", "datatype": "INT32", "shape": [1], "data": [7]},
        binary("BYTES", [1], 6, "c"),
    ]
    found = asked({"inputs": inputs}, interface, struct.pack("<2i", 1, 2), join_texts([b"hi"]))
    assert json.loads(found.calls) == {"a": [[1, 2]], "b": [7], "c": ["hi"]}


@pytest.mark.parametrize(
    ("datatype", "data", "expected"),
    [
        ("BOOL", b"\x01\x00", [True, False]),
        ("INT8", b"\xff\x01", [-1, 1]),
        ("UINT64", struct.pack("<2Q", 2**64 - 1, 0), [2**64 - 1, 0]),
        ("INT64", struct.pack("<2q", 2**63 - 1, -(2**63)), [2**63 - 1, -(2**63)]),
        ("FP16", np.array([0.5, -2], "<f2").tobytes(), [0.5, -2.0]),
        ("BF16", b"\x80\x3f\x00\xc0", [1.0, -2.0]),
        ("FP64", struct.pack("<2d", 0.1, 1e300), [0.1, 1e300]),
        ("BYTES", join_texts([b"", "ü".encode()]), ["", "ü"]),
    ],
)
def test_binary_data_become_values(datatype: str, data: bytes, expected: list[Any]):
    """A function that takes no arrays gets the values, exactly."""
    assert value_of(binary(datatype, [2], len(data)), schema(datatype, [2]), data) == expected


@pytest.mark.parametrize("form", [STRICT, LENIENT])
def test_numbers_that_json_lacks_come_as_they_are(form: Any):
    """NaN and infinities of binary data are not lost on the way to a function."""
    data = np.array([np.nan, np.inf], "<f4").tobytes()
    found = asked({"inputs": [binary("FP32", [2], 8)]}, schema("FP32", [2]), data, form=form)
    assert json.loads(found.calls) == {"x": {"$array": [0, "FP32", [1, 2]]}}
    assert bytes(found.buffers[0]) == data


def test_bytes_that_are_no_text():
    """Bytes that are not UTF-8 are bytes to a BYTES input, and refused where it is STRING (T25)."""
    data = join_texts([b"\xff\x00"])
    found = asked({"inputs": [binary("BYTES", [1], len(data))]}, schema("BYTES", [1]), data)
    assert json.loads(found.calls) == {"x": {"$array": [0, "BYTES", [1]]}}
    assert bytes(found.buffers[0]) == data
    for is_array in (False, True):
        with pytest.raises(InvalidInput, match="not UTF-8") as caught:
            asked({"inputs": [binary("BYTES", [1], len(data))]}, schema("STRING", [1], is_array=is_array), data)
        assert caught.value.code == "invalid_encoding"


@pytest.mark.parametrize(
    ("inputs", "rest", "words"),
    [
        ([binary("INT32", [2], 8)], b"1234567", "unexpected size for input 'x'"),
        ([binary("INT32", [2], 8)], b"123456789", "unexpected additional input data"),
        ([binary("INT32", [3], 8)], b"12345678", "expecting 12 bytes"),
        ([binary("BYTES", [2], 6)], join_texts([b"ab"]), "expecting 2 elements and got 1"),
        ([binary("BYTES", [1], 6)], b"\xff\xff\xff\xffab", "do not match"),
        ([binary("BYTES", [1], 3)], b"\x00\x00\x00", "do not match"),
        ([binary("BOOL", [1], 1)], b"\x02", "0 or 1"),
        ([binary("INT8", [1], -1)], b"1", "binary_data_size"),
        ([{**binary("INT8", [1], 1), "data": [1]}], b"1", "both were set"),
    ],
)
def test_binary_data_of_another_size_are_refused(inputs: Any, rest: bytes, words: str):
    """Bytes that are too few, too many, or not what the tensor says are the caller's error."""
    with pytest.raises(InvalidInput, match=words):
        asked({"inputs": inputs}, UNTYPED, rest)


@pytest.mark.parametrize(
    "head", [b"99999999999", b"4294967296", b"-1", b"abc", b"1.0", b"\xff", b"\xb2", b"60", b"9" * 99]
)
def test_a_length_that_is_none_is_refused(head: bytes):
    """Whatever the header says beside a length within the body is the caller's error (P11)."""
    with pytest.raises(InvalidInput) as caught:
        STRICT.read(b'{"inputs":[]}', head, Interface())
    assert caught.value.code == "invalid_header"


@pytest.mark.parametrize(
    ("tensor_of", "body", "expected"),
    [
        (Tensor("x", "FP32", [-1]), struct.pack("<3f", 1, 2, 3), [1.0, 2.0, 3.0]),
        (Tensor("x", "INT32", [-1, 2]), struct.pack("<4i", 1, 2, 3, 4), [[1, 2], [3, 4]]),
        (Tensor("x", "INT8", [1]), b"\x05", 5),
        (Tensor("x", "STRING", [1]), b"no length before it", "no length before it"),
    ],
)
def test_a_raw_request_is_the_one_input(tensor_of: Tensor, body: bytes, expected: Any):
    """With a length of 0 the whole body is the only input, and every output is binary."""
    found = STRICT.read(body, b"0", Interface([tensor_of], has_schema=True))
    assert column_of(found) == [expected]
    written, head = STRICT.write(found, FunctionResults(b"[7]"), "m", "1")
    assert written[int(head) :] == struct.pack("<q", 7)


@pytest.mark.parametrize(
    ("interface", "words"),
    [
        (SEED, "must only have 1 input"),  # P9
        (Interface(), "must only have 1 input"),
        (UNTYPED, "datatype"),
        (schema("FP32", [-1, -1]), "1 variable dimension"),
        (schema("FP32", [3]), "do not fill FP32"),
        (schema("FP32", [-1, 0]), "do not fill FP32"),
        (schema("STRING", [2]), "one element"),
    ],
)
def test_a_raw_request_needs_one_input_that_it_fits(interface: Interface, words: str):
    """A function whose input cannot be made out of the body alone refuses it."""
    with pytest.raises(InvalidInput, match=words):
        STRICT.read(b"12345678", b"0", interface)


def test_large_tensors_are_not_copied():
    """The bytes of a binary tensor are handed to the function as a part of the body they came in."""
    data = np.arange(64 * 1024, dtype="<f4").tobytes()
    text = json.dumps({"inputs": [binary("FP32", [64, 1024], len(data))]}).encode()
    body = text + data
    found = STRICT.read(body, str(len(text)).encode(), IDENTITY)
    assert isinstance(found.buffers[0], memoryview)
    assert found.buffers[0].obj is body
    assert json.loads(found.calls) == {"x": {"$array": [0, "FP32", [1, 64, 1024]]}}


ELEMENTS = {
    "BOOL": st.booleans(),
    "FP32": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "FP16": st.floats(width=16, allow_nan=False, allow_infinity=False),
    "FP64": st.floats(allow_nan=False, allow_infinity=False),
    "BYTES": st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
}
for _bits in (8, 16, 32, 64):
    ELEMENTS[f"INT{_bits}"] = st.integers(-(2 ** (_bits - 1)), 2 ** (_bits - 1) - 1)
    ELEMENTS[f"UINT{_bits}"] = st.integers(0, 2**_bits - 1)


@st.composite
def tensors(draw: Any) -> tuple[str, list[int], list[Any]]:
    """A datatype, a shape and its elements."""
    datatype = draw(st.sampled_from(sorted(ELEMENTS)))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    size = int(np.prod(shape))
    return datatype, shape, draw(st.lists(ELEMENTS[datatype], min_size=size, max_size=size))


def _returned(found: ParsedCalls, datatype: str, shape: list[int], *, as_array: bool) -> FunctionResults:
    """What a function that returns its input answers: an array, or the values themselves."""
    if not as_array:
        return FunctionResults(json.dumps([{"y": json.loads(found.calls)["x"][0]}]).encode())
    return FunctionResults(json.dumps([{"y": {"$array": [0, datatype, shape]}}]).encode(), buffers=found.buffers)


@given(tensors(), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_what_goes_in_comes_out(sent: Any, binary_in: bool, binary_out: bool, as_array: bool):
    """A function that returns its input gives back every element, whichever way it came and goes."""
    datatype, shape, flat = sent
    data = (
        join_texts(each.encode() for each in flat) if datatype == "BYTES" else np.array(flat, NUMPY[datatype]).tobytes()
    )
    one = binary(datatype, shape, len(data)) if binary_in else tensor(datatype, shape, flat)
    interface = schema(datatype, [-1] * len(shape), is_array=as_array)
    request = {"inputs": [one], "parameters": {"binary_data_output": binary_out}}
    found = asked(request, interface, *([data] if binary_in else []))
    body, head = STRICT.write(found, _returned(found, datatype, shape, as_array=as_array), "m", "1")
    output = json.loads(body[: int(head)] if head else body)["outputs"][0]
    assert output["shape"] == shape
    if as_array:
        assert output["datatype"] == datatype
    if binary_out:
        kind = output["datatype"]
        received = (
            split_texts(body[int(head) :])
            if kind == "BYTES"
            else np.frombuffer(body[int(head) :], NUMPY[kind]).tolist()
        )
        assert received == ([each.encode() for each in flat] if kind == "BYTES" else flat)
    else:
        assert output["data"] == flat


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
SHAPES = st.lists(st.integers(-2, 5), max_size=3) | JSON_VALUES
DATATYPES = st.sampled_from([*ELEMENTS, "BF16", "STRING", "", "INT4"]) | JSON_VALUES
INPUTS = st.fixed_dictionaries(
    {"name": st.sampled_from(["x", "prompt", "shape"]), "shape": SHAPES, "datatype": DATATYPES, "data": JSON_VALUES},
    optional={"parameters": st.dictionaries(st.sampled_from(["binary_data_size", "triton_a"]), JSON_VALUES)},
)
REQUESTS = st.fixed_dictionaries(
    {"inputs": st.lists(INPUTS, max_size=3)},
    optional={"outputs": JSON_VALUES, "parameters": JSON_VALUES, "id": JSON_VALUES},
)
INTERFACES = [SEED, UNTYPED, Interface(), schema("INT64", [-1]), schema("BYTES", [1], is_array=True), IDENTITY]


@given(
    st.binary(max_size=60) | REQUESTS.map(lambda each: json.dumps(each).encode()), st.binary(max_size=4), st.booleans()
)
@settings(max_examples=500, deadline=None)
def test_any_body_is_read_or_refused(body: bytes, tail: bytes, has_length: bool):
    """Whatever comes, a form raises nothing but an error of ours."""
    for interface in INTERFACES:
        for form in (STRICT, LENIENT):
            for head in (str(len(body)).encode(),) if has_length else (b"", b"0", tail):
                try:
                    found = form.read(body + tail, head, interface)
                except BatchmillError:
                    continue
                json.loads(found.calls)


@given(JSON_VALUES, st.sampled_from(INTERFACES), st.booleans())
@settings(max_examples=500, deadline=None)
def test_any_result_is_written_or_refused(value: Any, interface: Interface, is_binary: bool):
    """Whatever a function returns, the reply is valid or there is an error of ours."""
    found = asked({"inputs": []}, Interface(takes=interface.takes), form=STRICT)
    found.state.binary = is_binary
    try:
        body, head = STRICT.write(found, FunctionResults(json.dumps([value]).encode()), "m", "1")
    except BatchmillError:
        return
    json.loads(body[: int(head)] if head else body)
