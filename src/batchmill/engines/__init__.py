"""The engines by name. A new engine is one file and one row here; only the one that is asked for is imported."""

from __future__ import annotations

import difflib
from importlib import import_module
from pathlib import Path

from batchmill.errors import UnknownName
from batchmill.ports import Engine
from batchmill.types import ModelSpec

ENGINES = {
    "connector": "batchmill.engines.remote.connector:ConnectorEngine",
    "function": "batchmill.engines.function.in_worker:FunctionEngine",
    "function_process": "batchmill.engines.function.engine:FunctionProcessEngine",
    "http": "batchmill.engines.remote.http:HttpEngine",
    "llm": "batchmill.engines.llm.engine:LlmEngine",
    "provider_batch": "batchmill.engines.provider_batch.engine:ProviderBatchEngine",
}


def load_engine(model: ModelSpec, home: Path) -> Engine:
    """The engine of a model, not started yet. `home` is a folder for its logs. Raises: UnknownName."""
    if model.engine not in ENGINES:
        near = difflib.get_close_matches(model.engine, ENGINES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(ENGINES)}"
        raise UnknownName(f"no engine is called {model.engine!r}{hint}", code="unknown_engine")
    module, _, name = ENGINES[model.engine].partition(":")
    return getattr(import_module(module), name)(model, home)
