"""Engines run rows. `types/engine_traits.py` lists them; only the engine of the model is imported."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from batchmill.ports import Engine
from batchmill.types import ModelSpec


def load_engine(model: ModelSpec, home: Path) -> Engine:
    """Create the engine of a model without starting it. `home`: a directory for its logs. Raises: UnknownName."""
    assert model.traits.class_path, "a job chooses a route before a worker starts"
    module, _, name = model.traits.class_path.partition(":")
    return getattr(import_module(module), name)(model, home)
