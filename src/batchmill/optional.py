"""Import optional modules on first use, because they are heavy or need the package of an extra."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from batchmill.errors import BatchmillError, InvalidConfig

# Package -> the extra that installs it.
EXTRAS = {
    "alembic": "upgrade", "botocore": "aws", "duckdb": "sql", "fastavro": "cohere", "google": "grpc", "grpc": "grpc",
    "cloudpickle": "cloudpickle", "huggingface_hub": "hub", "jinja2": "templates", "obstore": "objects",
    "opentelemetry": "otel", "pandas": "pandas", "polars": "polars", "psycopg": "postgres", "pyarrow": "parquet",
}  # fmt: skip
SHARED = ("google", "opentelemetry")  # names that several distributions share: parts of them may be missing


def require(name: str, purpose: str, error: type[BatchmillError] = InvalidConfig) -> Any:
    """Import `MODULE` or `MODULE:NAME`. The error message begins with `purpose`.

    Raises: `error` (`missing_dependency`) if the package of an extra is missing.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        is_imported = sys.modules.get(package) is not None  # then it lacks one of its own modules
        if package not in EXTRAS or (is_imported and package not in SHARED):
            raise
        raise error(
            f"{purpose} needs {package}: pip install 'batchmill[{EXTRAS[package]}]'", code="missing_dependency"
        ) from missing
    return getattr(module, attribute) if attribute else module
