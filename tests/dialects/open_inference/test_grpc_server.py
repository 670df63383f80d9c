"""The gRPC server beside HTTP: when it listens, and what it says when it cannot."""

import socket
import sys

import grpc
import pytest
from msgspec.structs import replace

from batchmill.config import load
from batchmill.dialects.open_inference.grpc.bodies import METHODS, SERVICE
from batchmill.errors import InvalidConfig
from batchmill.serving import serve


def config_of(folder, grpc_port):
    result = load(environ={}, cwd=folder, data_dir=str(folder / "data"))
    return replace(result, server=replace(result.server, port=0, grpc_port=grpc_port))


async def test_it_listens_where_it_says_and_stops_with_the_server(tmp_path):
    """Its address is told, it is ready when the server is, and nothing answers there once the server has stopped."""
    ready = METHODS["ServerReady"]
    async with serve(config_of(tmp_path, 0)) as running:
        async with grpc.aio.insecure_channel(running.grpc) as channel:
            data = await channel.unary_unary(f"/{SERVICE}/{ready.name}")(ready.request().SerializeToString())
        assert ready.response.FromString(data).ready
        host, _, port = running.grpc.rpartition(":")
    with socket.socket() as sock:
        assert host == "127.0.0.1" and sock.connect_ex((host, int(port))) != 0


async def test_nothing_listens_unless_it_is_asked_for(tmp_path):
    """Without a port there is no gRPC."""
    async with serve(config_of(tmp_path, None)) as running:
        assert running.grpc is None


async def test_a_port_that_is_taken_is_named(tmp_path):
    """A port of somebody else's ends the start with a sentence that names it, and the way out."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=f":{port} for gRPC.*--grpc-port"):
            async with serve(config_of(tmp_path, port)):
                raise AssertionError("it has begun")


async def test_missing_packages_are_named(tmp_path, monkeypatch):
    """Where grpcio is not installed the start ends with the command that installs it."""
    monkeypatch.setitem(sys.modules, "grpc", None)
    for name in [name for name in sys.modules if name.startswith("batchmill.dialects.open_inference.grpc.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(InvalidConfig, match=r"server\.grpc_port needs grpc: pip install 'batchmill\[grpc\]'"):
        async with serve(config_of(tmp_path, 0)):
            raise AssertionError("it has begun")
