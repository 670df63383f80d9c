"""batchmill: batch inference with every row accounted for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchmill.client.asynchronous import AsyncClient as AsyncClient
    from batchmill.client.sync import Client as Client
    from batchmill.function_runtime.marks import batched as batched
    from batchmill.function_runtime.marks import tensor as tensor
    from batchmill.inprocess.job import Job as Job
    from batchmill.inprocess.running import arun as arun
    from batchmill.inprocess.running import run as run

__version__ = "0.1.0"

# Public name -> its module, which is imported when the name is first used.
_MODULES = {
    "AsyncClient": "batchmill.client.asynchronous",
    "Client": "batchmill.client.sync",
    "Job": "batchmill.inprocess.job",
    "arun": "batchmill.inprocess.running",
    "batched": "batchmill.function_runtime.marks",
    "run": "batchmill.inprocess.running",
    "tensor": "batchmill.function_runtime.marks",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'batchmill' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What a notebook completes: the public names, imported or not."""
    return sorted({*globals(), *_MODULES})
