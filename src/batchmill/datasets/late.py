"""The modules of this package that need something heavy, imported when a dataset needs them."""

from __future__ import annotations

import importlib
from typing import Any

from batchmill.errors import InvalidDataset

MODULES = {
    "csv": "batchmill.datasets.csv_rows",
    "parquet": "batchmill.datasets.parquet_rows",
    "zstd": "batchmill.datasets.zstd_frames",
    "duplicates": "batchmill.datasets.duplicates",
}
# Packages that only an extra brings, and how it is installed.
EXTRAS = {"pyarrow": ("reading Parquet", "pip install 'batchmill[parquet]'")}


def load(name: str) -> Any:
    """A module of the table. Raises: InvalidDataset (`missing_dependency`) where it needs what is not installed."""
    try:
        return importlib.import_module(MODULES[name])
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        purpose, remedy = EXTRAS[package]
        raise InvalidDataset(f"{purpose} needs {package}: {remedy}", code="missing_dependency") from None
