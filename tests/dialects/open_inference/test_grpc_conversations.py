"""Streams of calls over gRPC, at a whole server: what ends them, and what does not."""

import grpc
import pytest
from dialects.open_inference.tensor_kit import deploy
from msgspec.structs import replace

from batchmill.config import load
from batchmill.dialects.open_inference.grpc.bodies import METHODS, SERVICE
from batchmill.serving import serve

STREAM = METHODS["ModelStreamInfer"]
NO_MESSAGE = b"\xff"
LEAVERS = 8


@pytest.fixture
async def channel(tmp_path):
    result = load(environ={}, cwd=tmp_path, data_dir=str(tmp_path / "data"))
    async with serve(replace(result, server=replace(result.server, port=0, grpc_port=0))) as running:
        await deploy(running, "count")
        async with grpc.aio.insecure_channel(running.grpc) as channel:
            yield channel


def asked(to):
    request = STREAM.request(model_name="count")
    request.inputs.add(name="to", datatype="INT64", shape=[1]).contents.int64_contents.append(to)
    return request.SerializeToString()


def talk_on(channel):
    return channel.stream_stream(f"/{SERVICE}/{STREAM.name}")()


async def test_what_is_no_request_ends_its_stream(channel):
    """Bytes that are not a request are the caller's fault, and end only the stream that they came on."""
    talk = talk_on(channel)
    await talk.write(NO_MESSAGE)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await talk.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the message is not a ModelInferRequest"
    talk = talk_on(channel)
    await talk.write(asked(2))
    await talk.done_writing()
    assert len([STREAM.response.FromString(data) async for data in talk]) == 2


async def test_who_leaves_in_the_middle_is_no_fault_of_ours(channel, caplog):
    """A client that leaves while it is answered is nothing that the log tells of as an error."""
    for _ in range(LEAVERS):
        talk = talk_on(channel)
        for _ in range(LEAVERS):
            await talk.write(asked(10_000))
        await talk.read()
        talk.cancel()
    talk = talk_on(channel)
    await talk.write(asked(1))
    await talk.done_writing()
    assert len([data async for data in talk]) == 1
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
