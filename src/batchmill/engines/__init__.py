"""What runs rows. `types/engine_traits.py` is the table of engines; only the one that is asked for is imported."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from batchmill.ports import Engine
from batchmill.types import ModelSpec


def load_engine(model: ModelSpec, home: Path) -> Engine:
    """Construct the engine of a model, not started. `home` is a folder for its logs. Raises: UnknownName."""
    assert model.traits.class_path, "a job chooses a route before a worker starts"
    module, _, name = model.traits.class_path.partition(":")
    return getattr(import_module(module), name)(model, home)
