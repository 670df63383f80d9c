"""The tables of the gRPC call_gate: its messages, its statuses, and how much of an error travels."""

import sys
from pathlib import Path

import pytest
from contract.dialect_suite import failing, known_errors
from grpc import StatusCode

from batchmill import errors
from batchmill.dialects.open_inference.grpc.bodies import CONTENTS, METHODS, InferResponse, message
from batchmill.dialects.open_inference.grpc.call_gate import (
    BY_CODE,
    BY_HTTP_STATUS,
    DETAILS_BYTES_MAX,
    HTTP_STATUS,
    address_of,
    details_of,
    grpc_status_of,
)
from batchmill.wire.error_statuses import STATUSES


def test_the_descriptor_is_that_of_the_proto_file(monkeypatch):
    """Whoever changes the .proto file makes its descriptor anew."""
    pytest.importorskip("grpc_tools")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tools"))
    import grpc_descriptor

    monkeypatch.delitem(sys.modules, "grpc_descriptor")
    assert grpc_descriptor.compiled() == (grpc_descriptor.FOLDER / grpc_descriptor.DESCRIPTOR).read_bytes()


def test_every_error_has_a_status():
    """No error of ours falls through the tables, and each of their statuses has one for logs and metrics."""
    assert failing(known_errors(), lambda error: "" if grpc_status_of(error) in HTTP_STATUS else "no status") == {}
    assert set(STATUSES.values()) == set(BY_HTTP_STATUS)
    assert {*BY_HTTP_STATUS.values(), *BY_CODE.values()} <= set(HTTP_STATUS) - {StatusCode.OK}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidRow("x", code="invalid_shape"), StatusCode.INVALID_ARGUMENT),
        (errors.UnknownName("x", code="model_not_found"), StatusCode.NOT_FOUND),
        (errors.Unauthenticated("x"), StatusCode.UNAUTHENTICATED),
        (errors.Forbidden("x"), StatusCode.PERMISSION_DENIED),
        (errors.RateLimited("x", retry_after_s=1), StatusCode.RESOURCE_EXHAUSTED),
        (errors.TooLarge("x"), StatusCode.RESOURCE_EXHAUSTED),
        (errors.Unavailable("x"), StatusCode.UNAVAILABLE),
        (errors.ModelFailed("x", code="timeout"), StatusCode.DEADLINE_EXCEEDED),
        (errors.ModelFailed("x", code="function_error"), StatusCode.INTERNAL),
        (errors.ModelFailed("x", code="worker_crashed"), StatusCode.INTERNAL),
        (errors.InvalidInput("x", code="streams_only"), StatusCode.UNIMPLEMENTED),
    ],
)
def test_statuses_are_those_that_clients_know(error, status):
    """Each family of errors has the status that gRPC's own documentation gives it."""
    assert grpc_status_of(error) is status


@pytest.mark.parametrize("char", ["x", "\n", "é", "%", "😀", "\udc80"])
def test_details_fit_into_a_header(char):
    """However long a traceback is, both of its ends arrive, within what clients take."""
    message = "first " + char * 10_000 + "\nValueError: the last line"
    text = details_of(message)
    assert text.startswith("first ")
    assert text.endswith("\nValueError: the last line")
    assert (
        sum(1 if " " <= c <= "~" and c != "%" else 3 * len(c.encode("utf-8", "replace")) for c in text)
        <= DETAILS_BYTES_MAX
    )
    assert details_of("short\nand whole") == "short\nand whole"


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:5000", "10.0.0.1"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("ipv6:[fe80::1]:5000", "fe80::1"),
        ("unix:", "unix:"),
    ],
)
def test_a_peer_has_an_address(peer, address):
    """Wrong keys are counted by address, not by connection."""
    assert address_of(peer) == address


def test_methods_are_those_of_the_public_service():
    """Every method that the published clients call is there, and one of them streams both ways."""
    assert len(METHODS) == 20
    assert [each.name for each in METHODS.values() if each.streams] == ["ModelStreamInfer"]


def test_numbers_on_the_wire_are_the_protocols():
    """A few messages as bytes, by hand: a number that moved would be read by no client."""
    request = message("ModelInferRequest")(model_name="m", model_version="2", id="i", raw_input_contents=[b"r"])
    request.inputs.add(name="x", datatype="FP32", shape=[-1, 2]).parameters["p"].int64_param = 1
    request.outputs.add(name="y")
    written = request.SerializeToString(deterministic=True)
    minus_one = b"\xff" * 9 + b"\x01"
    tensor = b"\x0a\x01x\x12\x04FP32\x1a\x0b" + minus_one + b"\x02" + b"\x22\x07\x0a\x01p\x12\x02\x10\x01"
    assert written == (
        b"\x0a\x01m\x12\x012\x1a\x01i\x2a" + bytes([len(tensor)]) + tensor + b"\x32\x03\x0a\x01y" + b"\x3a\x01r"
    )
    response = InferResponse(raw_output_contents=[b"r"])
    assert response.SerializeToString() == b"\x32\x01r"
    numbers = {field.name: field.number for field in message("InferTensorContents").DESCRIPTOR.fields}
    in_order = ["bool", "int", "int64", "uint", "uint64", "fp32", "fp64", "bytes"]
    assert numbers == {f"{name}_contents": at for at, name in enumerate(in_order, 1)}
    assert {field for field, _ in CONTENTS.values()} == set(numbers)
