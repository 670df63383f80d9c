"""Make the descriptor that the gRPC call_gate loads of its .proto file. Needs the package grpcio-tools."""

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

FOLDER = Path(__file__).parent.parent / "src/batchmill/dialects/open_inference/grpc"
PROTO, DESCRIPTOR = "open_inference.proto", "open_inference.binpb"


def compiled() -> bytes:
    """The descriptor set of the file as it is now."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / DESCRIPTOR
        well_known = files("grpc_tools") / "_proto"
        flags = [f"-I{FOLDER}", f"-I{well_known}", f"--descriptor_set_out={made}"]
        if protoc.main(["protoc", *flags, PROTO]):
            sys.exit(f"{PROTO} does not compile")
        return made.read_bytes()


if __name__ == "__main__":
    (FOLDER / DESCRIPTOR).write_bytes(compiled())
