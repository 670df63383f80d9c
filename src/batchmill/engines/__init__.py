"""Engines run rows. `types/engine_traits.py` lists them; only the engine of the model is imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from batchmill.ports.engines import Engine
from batchmill.types import ModelSpec
from batchmill.types.engine_traits import traits_of


def import_engine(engine: str) -> Callable[[ModelSpec, Path], Engine]:
    """Import an engine, and return what creates it. `engine`: its name in `ENGINES`. Raises: UnknownName."""
    path = traits_of(engine).class_path
    assert path, "a job chooses a route before a worker starts"
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def load_engine(model: ModelSpec, home: Path) -> Engine:
    """Create the engine of a model without starting it. `home`: a directory for its logs. Raises: UnknownName."""
    return import_engine(model.engine)(model, home)
