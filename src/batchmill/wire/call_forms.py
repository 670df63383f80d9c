"""The forms in which a call of a deployed function may come, by name. A new one is one file and one row here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Protocol

from batchmill.types import Interface
from batchmill.wire import forms
from batchmill.wire.calls import Asked, Results

ARGUMENTS, ROWS, TENSORS, INFERLESS_TENSORS = "arguments", "rows", "tensors", "inferless_tensors"
FORMS = {
    ARGUMENTS: "batchmill.wire.modelbit_rows:ArgumentsForm",
    ROWS: "batchmill.wire.modelbit_rows:RowsForm",
    TENSORS: "batchmill.wire.tensors:TensorsForm",
    INFERLESS_TENSORS: "batchmill.wire.tensors:InferlessTensorsForm",
}

ADDRESSES = frozenset(["model", "stream"])
ROWS_FIELDS = frozenset(["data", "timeout_seconds", "row_errors"])
DELIVERY_FIELDS = frozenset(["response_format", "response_webhook", "response_webhook_ignore_timeout"])
TENSORS_FIELDS = frozenset(["id", "inputs", "outputs", "parameters"])
_is_tensors_url = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/infer").fullmatch
_is_rows_url = re.compile(r"(/:5000)?/v1/[a-zA-Z0-9_]+(/[^/]+){1,2}").fullmatch


class CallForm(Protocol):
    """Reads a body as calls and writes their results as the reply's body. Has no state."""

    def read(self, body: bytes, head: bytes, interface: Interface, *, received_shapes: bool = False) -> Asked:
        """`head` is what came beside the body. Raises: InvalidInput, and nothing else, for what cannot be read."""

    def write(self, asked: Asked, results: Results, spec_name: str, version: str) -> tuple[bytes, bytes]:
        """The reply's body, and what is to be said beside it.

        Raises: ModelFailed, InvalidInput where an error of a row fails the request, or a result has no place in the
        reply.
        """

    def event(self, asked: Asked, values: bytes, buffers: list[bytes | memoryview]) -> bytes:
        """The JSON of one event of a stream; `values` is the JSON of one result. Raises: ModelFailed."""


@lru_cache(maxsize=len(FORMS))
def load_form(name: str) -> CallForm:
    """The form of this name; its module is imported now, as one of them needs numpy. Raises: KeyError."""
    module, _, attribute = FORMS[name].partition(":")
    return getattr(import_module(module), attribute)()


class _CallForms(Mapping[str, CallForm]):
    """The table as a mapping: a form is loaded when it is asked for."""

    def __getitem__(self, name: str) -> CallForm:
        return load_form(name)

    def __contains__(self, name: object) -> bool:
        return name in FORMS

    def __iter__(self) -> Iterator[str]:
        return iter(FORMS)

    def __len__(self) -> int:
        return len(FORMS)


CALL_FORMS: Mapping[str, CallForm] = _CallForms()


def form_of_body(url: str, fields: Collection[str], interface: Interface | None = None) -> str:
    """The form of a job's row: by its `url` where that is one of a dialect's calls, otherwise by the body's fields.

    By fields, a name that the function itself takes is an argument: `{"data": …}` is Modelbit's form, and
    `{"inputs": …}` that of tensors, only for a function that has no parameter `data` (`inputs`) and takes no
    arguments of any name.
    """
    if _is_tensors_url(url):
        return TENSORS
    names = frozenset(fields) - ADDRESSES
    has_address = _is_rows_url(url) and url not in forms.URLS
    if "data" in names and names <= ROWS_FIELDS | DELIVERY_FIELDS and (has_address or not _takes(interface, "data")):
        return ROWS
    if "inputs" in names and names <= TENSORS_FIELDS and not _takes(interface, "inputs"):
        return TENSORS
    return ARGUMENTS


def _takes(interface: Interface | None, name: str) -> bool:
    if interface is None:
        return False
    return interface.takes_more or any(each.name == name for each in interface.inputs)
