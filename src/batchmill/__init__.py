"""batchmill: batch inference with every row accounted for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> its module, which is imported when the name is first used.
_MODULES = {
    "AsyncClient": "batchmill.client.asynchronous",
    "Client": "batchmill.client.sync",
    "batched": "batchmill.function_runtime.marks",
    "tensor": "batchmill.function_runtime.marks",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'batchmill' has no attribute {name!r}")
