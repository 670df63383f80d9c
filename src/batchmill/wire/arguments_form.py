"""The form "arguments": the body is a JSON object of arguments by name, the answer the result as JSON."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from batchmill.errors import ModelFailed
from batchmill.types import Interface
from batchmill.wire.call_errors import check_text, failure, parse
from batchmill.wire.calls import NAMED, Asked, Results
from batchmill.wire.json_bytes import join_object

ADDRESSES = ("model", "stream")  # fields that say where a body goes and how, unless the function takes them itself

_members = msgspec.json.Decoder(dict[str, Raw])


class ArgumentsForm:
    """One row a body. Values are not looked at: they go through as they were written."""

    def read(self, body: bytes, head: bytes, interface: Interface, *, received_shapes: bool = False) -> Asked:
        """Raises: InvalidInput for what is no JSON object."""
        check_text(body)
        members = parse(_members, body)
        taken = {each.name for each in interface.inputs}
        strange = [name for name in ADDRESSES if name in members and name not in taken]
        if strange:
            body = join_object({name: value for name, value in members.items() if name not in strange})
        return Asked(1, NAMED, b"[" + body + b"]")

    def write(self, asked: Asked, results: Results, spec_name: str, version: str) -> tuple[bytes, bytes]:
        """Raises: ModelFailed, InvalidInput where the row failed."""
        if results.errors:
            raise failure(results.errors[0])
        return only_value(results.values), b""

    def event(self, asked: Asked, values: bytes, buffers: list[bytes | memoryview]) -> bytes:
        return values


def only_value(values: bytes) -> bytes:
    """The item of a JSON array that has one, with its own bytes."""
    data = values.strip()
    if data[:1] != b"[" or data[-1:] != b"]":
        raise ModelFailed("the results are no list", code="bad_return")
    return bytes(data[1:-1].strip())
