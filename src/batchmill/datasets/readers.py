"""Loads modules of this package with heavy imports when a dataset needs them; opens the rows of any dataset."""

from __future__ import annotations

from typing import Any

from batchmill.datasets.folders import Home, folder_of
from batchmill.datasets.sealed import DatasetRows, SealedRows, load_seal
from batchmill.datasets.sources import Access
from batchmill.errors import InvalidDataset
from batchmill.optional import require
from batchmill.types import Seal

MODULES = {
    "csv": "batchmill.datasets.csv_rows",
    "parquet": "batchmill.datasets.parquet_rows",
    "column_rows": "batchmill.datasets.column_rows",
    "column_sealing": "batchmill.datasets.column_sealing",
    "zstd": "batchmill.datasets.zstd_frames",
    "duplicates": "batchmill.datasets.duplicates",
    "additions": "batchmill.datasets.additions",
}


def load(name: str) -> Any:
    """Load a module of MODULES. Raises: InvalidDataset (`missing_dependency`)."""
    what = "Parquet" if "column" in name else name.capitalize()
    return require(MODULES[name], f"reading {what}", InvalidDataset)


def open_rows(home: Home, seal: Seal | None = None, access: Access | None = None) -> DatasetRows:
    """Open the rows of the dataset in `home`. Raises: InvalidDataset, DatasetDamaged.

    Args: access: as in `sources.open_source`.
    """
    seal = load_seal(home) if seal is None else seal
    if seal.is_columnar:
        return load("column_rows").ColumnRows(folder_of(home).path, seal, access)
    return SealedRows(home, seal, access)
