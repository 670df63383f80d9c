"""Loads the modules of this package with heavy imports only when a dataset needs them."""

from __future__ import annotations

from typing import Any

from batchmill.errors import InvalidDataset
from batchmill.optional import require

MODULES = {
    "csv": "batchmill.datasets.csv_rows",
    "parquet": "batchmill.datasets.parquet_rows",
    "zstd": "batchmill.datasets.zstd_frames",
    "duplicates": "batchmill.datasets.duplicates",
}


def load(name: str) -> Any:
    """Load a module of MODULES. Raises: InvalidDataset (`missing_dependency`)."""
    return require(MODULES[name], f"reading {name.capitalize()}", InvalidDataset)
